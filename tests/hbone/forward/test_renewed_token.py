from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hbone.forward.renewed_token import OPAQUE_LIFE_S, RenewedToken, renewed
from shared.credentials.tokens.tokens import FileToken, NoToken
from shared.errors import TokenError
from shared.tasks import spawn
from tests.support.metadata_server import unsigned_token
from tests.support.wall_clock import Clock


class Source:
    """Gives a new token each time, or an error."""

    is_new = False

    def __init__(self, clock: Clock) -> None:
        self.asked = 0
        self.error: TokenError | None = None
        self.opaque = False
        self.rejected: list[str | None] = []
        self._clock = clock

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        self.asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if self.opaque:
            return f"opaque-{self.asked}"
        return unsigned_token(aud="https://a", exp=self._clock() + 3600, serial=self.asked)

    def token_now(self) -> None:
        return None

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        self.rejected.append(rejected)


@pytest.fixture
def source(clock: Clock) -> Source:
    return Source(clock)


@pytest.fixture
def kept(source: Source, clock: Clock) -> RenewedToken:
    return RenewedToken(source, now=clock, chance=lambda: 0.0)


async def test_many_tunnels_ask_once(kept: RenewedToken, source: Source) -> None:
    assert kept.token_now() is None
    tokens = await asyncio.gather(*(kept.token() for _ in range(200)))
    assert (len(set(tokens)), source.asked) == (1, 1)
    assert kept.token_now() == tokens[0]


async def test_near_its_end_a_new_one_is_asked_for_behind_it(
    kept: RenewedToken, source: Source, clock: Clock
) -> None:
    first = await kept.token()
    clock.turn(3600 - 200)
    assert await kept.token() == first
    assert kept._asking is not None
    await kept._asking
    assert source.asked == 2
    assert await kept.token() != first


async def test_after_its_end_it_is_not_sent(kept: RenewedToken, source: Source, clock: Clock) -> None:
    first = await kept.token()
    clock.turn(3600)
    assert kept.token_now() is None
    assert await kept.token() != first


async def test_one_that_does_not_say_when_it_ends(kept: RenewedToken, source: Source, clock: Clock) -> None:
    source.opaque = True
    assert await kept.token() == await kept.token() == "opaque-1"
    clock.turn(OPAQUE_LIFE_S)
    assert await kept.token() == "opaque-2"


async def test_one_that_was_rejected(kept: RenewedToken, source: Source) -> None:
    first = await kept.token()
    kept.invalidate(first)
    assert source.rejected == [first]
    assert await kept.token() != first
    kept.invalidate(first)  # of another tunnel, late
    assert source.rejected == [first]


async def test_a_failure_answers_for_a_while(kept: RenewedToken, source: Source, clock: Clock) -> None:
    source.error = TokenError("nobody there", "unreachable")
    for _ in range(2):
        with pytest.raises(TokenError, match=r"^nobody there$") as raised:
            await kept.token()
        assert raised.value.reason == "unreachable"
    assert source.asked == 1
    source.error = None
    clock.turn(5)
    assert await kept.token()


async def test_a_caller_that_gives_up_leaves_it_to_the_others(kept: RenewedToken, source: Source) -> None:
    one, other = (spawn(kept.token(), name="a tunnel") for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    assert await other
    assert source.asked == 1


def test_what_costs_nothing_is_not_remembered(source: Source) -> None:
    nothing, file = NoToken(), FileToken("token")
    assert renewed(nothing) is nothing
    assert renewed(file) is file
    assert isinstance(renewed(source), RenewedToken)
