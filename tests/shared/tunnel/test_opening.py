"""The driver, with an upstream whose connection accepts no new stream. What else it does is tested through
its users: hgate, `hbone URL` and the reverse port."""

from __future__ import annotations

from typing import NoReturn

import pytest

from shared import version
from shared.address import Address
from shared.errors import StreamResetError
from shared.http2.frames import CANCEL, REFUSED_STREAM
from shared.net.dial import Origin
from shared.net.http2.answers import AskedOf
from shared.net.legs.stream import Stream
from shared.net.pool.pool import Pool
from shared.tasks import spawn
from shared.tunnel import tunnel_request
from shared.tunnel.opening import Opening, Upstream
from shared.tunnel.retry import RetryBudget, RetryRules
from tests.support.http2_peer import Service
from tests.support.tcp_peer import PATIENCE_S


class Closed(Upstream):
    """An upstream of whose connections none takes a stream."""

    asked_of = AskedOf(token_sent=False)

    def __init__(self, code: int) -> None:
        self.code = code
        self.prepared = 0
        self.retried: list[str] = []

    async def prepare(self, deadline: float) -> float:
        self.prepared += 1
        return 0.0

    async def request(self, deadline: float) -> NoReturn:
        raise StreamResetError("accepts no new stream", self.code)

    def retrying(self, reason: str, *, over_budget: bool = False) -> None:
        self.retried.append(reason)


@pytest.mark.skipif(version.is_compiled(), reason="nothing can be derived from a compiled class")
@pytest.mark.parametrize(("code", "retried"), [(REFUSED_STREAM, ["refused"] * 2), (CANCEL, [])])
async def test_a_request_that_cannot_be_sent_is_an_attempt(code: int, retried: list[str]) -> None:
    upstream, budget = Closed(code), RetryBudget()
    opening = Opening(upstream, 10.0, RetryRules(max_retries=2), budget=budget)
    assert budget.requests == 1
    with pytest.raises(StreamResetError):
        await opening.run()
    assert upstream.retried == retried
    assert opening.attempts == upstream.prepared == 1 + len(retried)
    assert (budget.requests, budget.retries) == (0, 0)


class Held(Upstream):
    """A service that is asked over a pool's connections."""

    asked_of = AskedOf(token_sent=False)

    def __init__(self, port: int) -> None:
        address = Address("127.0.0.1", port)
        self.pool = Pool()
        self.origin = Origin("http", "hello.example", address)
        self.waits: list[bool] = []
        self.retried: list[str] = []

    async def prepare(self, deadline: float) -> float:
        return 0.0

    async def request(self, deadline: float) -> Stream:
        headers = tunnel_request.post("http", "hello.example", "/", None)
        return await self.pool.of(self.origin).open(headers, PATIENCE_S)

    def retrying(self, reason: str, *, over_budget: bool = False) -> None:
        self.retried.append(reason)

    def starting(self, waits: bool) -> None:
        self.waits.append(waits)


@pytest.mark.skipif(version.is_compiled(), reason="nothing can be derived from a compiled class")
async def test_a_request_that_is_held_for_long_is_sent_again_while_the_service_starts() -> None:
    async with Service.listening() as service:
        upstream, budget = Held(service.port), RetryBudget()
        rules = RetryRules(max_retries=0, unanswered_s=0.05)
        opening = Opening(upstream, 0.05, rules, budget=budget, cold_start_s=PATIENCE_S)
        asked = spawn(opening.run(), name="the opening")
        first = await service.request()
        assert await first.broken() == CANCEL
        assert budget.starting == 1
        (await service.request()).respond(200)
        stream = await asked
        assert upstream.retried == ["no_answer"]
        assert (upstream.waits, budget.starting) == ([True, False], 0)
        assert opening.attempts == 2
        stream.abort()
        await upstream.pool.close(PATIENCE_S)
