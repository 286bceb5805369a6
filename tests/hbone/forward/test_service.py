"""Tunnels of a forward to a service that the h2 library plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from hbone.destination import Destination
from hbone.forward import reports, service
from hbone.forward.service import Service
from hbone.target import TunnelTarget
from shared.address import Address
from shared.errors import DialError, StatusError
from shared.net.dial import Origin
from shared.tasks import spawn
from tests.shared.net.loopback import until
from tests.support.http2_peer import Service as Played
from tests.support.metadata_server import closed_port


class Tokens:
    """A source with a new token each time."""

    is_new = False

    def __init__(self) -> None:
        self.minted = 0

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        self.minted += 1
        return f"token-{self.minted}"

    def token_now(self) -> None:
        return None

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        return None


class Said(reports.Troubles):
    """Lines as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def failed(self, way: str, text: str) -> None:
        super().failed(way, text)
        self.lines.append(f"{way}: {text}")

    def works(self, way: str) -> None:
        if self.is_failing(way):
            self.lines.append(f"{way} works again")
        super().works(way)


@pytest.fixture
async def played() -> AsyncIterator[Played]:
    async with Played.listening() as played:
        yield played


@pytest.fixture
def tokens() -> Tokens:
    return Tokens()


@pytest.fixture
def said() -> Said:
    return Said()


def made(port: int, tokens: Tokens, said: Said) -> Service:
    target = TunnelTarget("http", Address("127.0.0.1", port), "/_hbone/22")
    origin = Origin("http", "127.0.0.1", target.address)
    return Service(Destination(target, origin, tokens), service.pool_of(0.0), said)


@pytest.fixture
async def ours(played: Played, tokens: Tokens, said: Said) -> AsyncIterator[Service]:
    ours = made(played.port, tokens, said)
    yield ours
    ours.close()
    await ours.pool.close(0.1)


async def test_tunnels_share_a_connection_and_a_token(ours: Service, played: Played, tokens: Tokens) -> None:
    opening = [spawn(ours.target(name).open(), name=name) for name in ("22", "DB", "DB")]
    asked = [await played.request() for _ in opening]
    for stream in asked:
        stream.respond(200)
    await asyncio.gather(*opening)
    assert sorted(stream[b":path"] for stream in asked) == [b"/_hbone/22", b"/_hbone/DB", b"/_hbone/DB"]
    assert {stream[b"authorization"] for stream in asked} == {b"Bearer token-1"}
    assert len({stream.peer for stream in asked}) == 1
    assert tokens.minted == 1


async def test_a_token_that_is_refused_is_replaced_once(ours: Service, played: Played) -> None:
    opening = spawn(ours.target("22").open(), name="open")
    first = await played.request()
    first.respond(401, end=True)
    second = await played.request()
    assert second[b"authorization"] == b"Bearer token-2"
    second.respond(401, end=True)
    with pytest.raises(StatusError, match=r"^answered 401: the token is invalid"):
        await opening


async def test_a_check_connects_no_target(ours: Service, played: Played) -> None:
    checking = spawn(ours.target("DB").check(), name="check")
    stream = await played.request()
    assert (stream[b":method"], stream[b":path"]) == (b"GET", b"/_hbone/DB")
    stream.respond(405, end=True)
    await checking


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (404, "answered 404: no such service, its ingress setting keeps this caller out, or krun knows no"),
        (403, "answered 403: the caller lacks roles/run.invoker"),
        (200, "answered 200 to a GET, which krun does not: is krun there?"),
    ],
)
async def test_a_check_that_fails(ours: Service, played: Played, status: int, text: str) -> None:
    checking = spawn(ours.target("DB").check(), name="check")
    (await played.request()).respond(status, end=True)
    with pytest.raises(StatusError) as raised:
        await checking
    assert str(raised.value).startswith(f"DB of http://127.0.0.1:{played.port}: {text}")


async def test_a_service_that_is_not_there_is_tried_until_it_is(
    tokens: Tokens, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(service, "LONGEST_PAUSE_S", 0.05)
    port = closed_port()
    ours = made(port, tokens, said)
    with pytest.raises(DialError, match="connection refused"):
        await ours.target("22").open()
    await until(lambda: len(said.lines) > 1)
    assert f"http://127.0.0.1:{port}: connect to " in said.lines[0]
    assert tokens.minted == 0  # nobody was there to send one to
    async with Played.listening(port=port) as played:
        await until(lambda: said.lines[-1] == f"http://127.0.0.1:{port} works again")
        assert not played.asked
    ours.close()
    await ours.pool.close(0.1)


async def test_why_a_tunnel_ended(ours: Service, played: Played) -> None:
    opening = spawn(ours.target("22").open(), name="open")
    asked = await played.request()
    asked.respond(200)
    stream = await opening
    broken: list[str] = []
    stream.on_gone = lambda error: broken.append(ours.cause(error, stream, 12.0))
    asked.peer.drop()
    await until(lambda: bool(broken))
    assert broken[0].startswith("ended after 12 s: the connection broke; has the container, or the network")
