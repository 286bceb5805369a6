"""A tunnel that is asked for with a token: which token each request has, and when it is fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from shared.address import Address
from shared.errors import DialError, StatusError
from shared.http2.events import Headers
from shared.net.dial import Origin
from shared.net.pool.pool import Pool
from shared.net.pool.pool_limits import PoolLimits
from shared.tasks import spawn
from shared.tunnel import tunnel_request
from shared.tunnel.opening import Opening
from shared.tunnel.pooled_upstream import PooledUpstream
from shared.tunnel.retry import RetryRules
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port

PATIENCE_S = 20.0
RULES = RetryRules(3)


class Tokens:
    """A source of these tokens: the first until it is rejected, and so on; the last one stays."""

    is_new = False

    def __init__(self, *tokens: str) -> None:
        self.left = list(tokens)
        self.asked = 0
        self.taken = 0
        self.rejected: list[str | None] = []

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        self.asked += 1
        return self.left[0]

    def token_now(self) -> str | None:
        return None

    def accepted(self) -> None:
        self.taken += 1

    def invalidate(self, rejected: str | None = None) -> None:
        self.rejected.append(rejected)
        if len(self.left) > 1:
            del self.left[0]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with Service.listening() as service:
        yield service


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool(limits=PoolLimits(connect_timeout_s=PATIENCE_S))
    try:
        yield pool
    finally:
        await pool.close(PATIENCE_S)


def opening(pool: Pool, port: int, tokens: Tokens) -> Opening:
    origin = Origin("http", "hello", Address("127.0.0.1", port))

    def headers(token: str | None) -> Headers:
        return tunnel_request.post("http", "hello", "/_hbone/22", token)

    upstream = PooledUpstream(pool, origin, tokens, headers, name="hello")
    return Opening(upstream, PATIENCE_S, RULES)


async def test_a_token_that_is_taken(service: Service, pool: Pool) -> None:
    tokens = Tokens("one")
    asking = spawn(opening(pool, service.port, tokens).run(), name="ask")
    stream = await service.request()
    assert stream[b"authorization"] == b"Bearer one"
    stream.respond(200)
    (await asking).abort()
    assert (tokens.taken, tokens.rejected) == (1, [])


async def test_one_other_after_a_rejected_one(service: Service, pool: Pool) -> None:
    tokens = Tokens("one", "two", "three")
    asking = spawn(opening(pool, service.port, tokens).run(), name="ask")
    for sent in (b"Bearer one", b"Bearer two"):
        stream = await service.request()
        assert stream[b"authorization"] == sent
        stream.respond(401, end=True)
    with pytest.raises(StatusError, match="answered 401: the token is invalid"):
        await asking
    assert (tokens.taken, tokens.rejected) == (0, ["one"])


async def test_the_same_one_is_not_sent_again(service: Service, pool: Pool) -> None:
    tokens = Tokens("one")
    asking = spawn(opening(pool, service.port, tokens).run(), name="ask")
    (await service.request()).respond(401, end=True)
    with pytest.raises(StatusError, match="answered 401"):
        await asking
    assert not service.asked


async def test_nobody_to_send_one_to(pool: Pool) -> None:
    tokens = Tokens("one")
    with pytest.raises(DialError, match="refused"):
        await opening(pool, closed_port(), tokens).run()
    assert tokens.asked == 0
