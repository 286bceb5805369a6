"""One access token: kept, asked for once at a time, replaced before its end, its failures remembered."""

from __future__ import annotations

import asyncio

import pytest

from shared.credentials.token_sources.access_tokens import FAILURE_MEMORY_S, KeptAccessToken
from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.token_life import UNUSABLE_AHEAD_S
from shared.errors import TokenError
from shared.tasks import spawn


class Service:
    """Gives numbered tokens of an hour, by a clock that tests turn."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.asked = 0
        self.fails = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.kept = KeptAccessToken("someone", self.fetch, now=lambda: self.now_s)

    async def fetch(self) -> Minted:
        self.asked += 1
        number = self.asked
        await self.answers.wait()
        if self.fails:
            raise TokenError("away", "unreachable")
        return Minted(f"token {number}", self.now_s + 3600)

    async def token(self) -> str:
        return (await self.kept.access_token()).token


async def test_a_token_is_kept_until_a_minute_before_its_end() -> None:
    service = Service()
    assert await service.token() == "token 1"
    service.now_s += 3600 - UNUSABLE_AHEAD_S - 1
    assert await service.token() == "token 1"
    service.now_s += 1
    assert await service.token() == "token 2"


async def test_one_request_for_all_who_wait() -> None:
    service = Service()
    service.answers.clear()
    waiting = [spawn(service.token(), name="waits") for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    service.answers.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == ["token 1"] * 4


async def test_a_failure_answers_for_a_moment() -> None:
    service = Service()
    service.fails = True
    for _ in range(3):
        with pytest.raises(TokenError, match="away") as caught:
            await service.token()
        assert caught.value.reason == "unreachable"
    assert service.asked == 1
    service.fails = False
    service.now_s += FAILURE_MEMORY_S
    assert await service.token() == "token 2"


async def test_a_clock_that_was_set_back_forgets_the_failure() -> None:
    service = Service()
    service.fails = True
    with pytest.raises(TokenError):
        await service.token()
    service.fails = False
    service.now_s -= 500
    assert await service.token() == "token 2"


async def test_only_the_token_that_was_rejected_is_dropped() -> None:
    service = Service()
    assert await service.token() == "token 1"
    service.kept.drop("token 0")
    assert await service.token() == "token 1"
    service.kept.drop("token 1")
    assert await service.token() == "token 2"
