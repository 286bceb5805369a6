"""The driver, with an upstream whose connection accepts no new stream. What else it does is tested through
its users: hgate, `hbone URL` and the reverse port."""

from __future__ import annotations

from typing import NoReturn

import pytest

from shared import version
from shared.errors import StreamResetError
from shared.http2.frames import CANCEL, REFUSED_STREAM
from shared.net.http2.answers import AskedOf
from shared.tunnel.opening import Opening, Upstream
from shared.tunnel.retry import RetryBudget, RetryRules


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
