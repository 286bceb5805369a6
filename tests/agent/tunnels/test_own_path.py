"""krun's own path: what it says of itself, and the far ends of probes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from agent.config.settings import Settings, from_env
from agent.tunnels import own_path
from shared.address import Address
from shared.http2 import frames
from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import KrunPort

ABOUT = b"/_hbone/"


def probe(kind: str) -> bytes:
    return f"/_hbone/?probe={kind}".encode()


@pytest.fixture
def settings() -> Settings:
    return Settings(targets={"DB": Address("127.0.0.1", 5432)}, probes=True)


@pytest.fixture
async def closed() -> AsyncIterator[Http2Peer]:
    """A client of a krun without probes."""
    async with KrunPort.serving(Settings()) as krun, Http2Peer.connected(krun.port) as peer:
        yield peer


@pytest.mark.parametrize("method", [b"GET", b"POST"])
async def test_it_tells_its_version_and_the_names_of_its_targets(peer: Http2Peer, method: bytes) -> None:
    stream = peer.request(method, ABOUT)
    assert await stream.status() == 200
    assert stream[b"content-type"] == b"application/json"
    told = json.loads(await stream.rest())
    assert told.pop("krun")
    assert told == {"targets": ["15003", "15008", "22", "DB"], "probes": True}


async def test_head_has_no_content(peer: Http2Peer) -> None:
    stream = peer.request(b"HEAD", ABOUT, end=True)
    assert await stream.status() == 200
    assert await stream.rest() == b""


async def test_other_methods_are_refused(peer: Http2Peer) -> None:
    stream = peer.request(b"DELETE", ABOUT, end=True)
    assert await stream.status() == 405
    assert stream[b"allow"] == b"GET, HEAD, POST"


async def test_no_probes_by_default(closed: Http2Peer) -> None:
    assert not from_env({}).probes
    assert from_env({"HBONE_PROBES": "1"}).probes
    stream = closed.request(b"POST", probe("echo"))
    assert await stream.status() == 403
    assert await stream.rest() == b"no probes here: HBONE_PROBES=1 allows them\n"


async def test_an_unknown_probe(peer: Http2Peer) -> None:
    stream = peer.request(b"POST", probe("reboot"), end=True)
    assert await stream.status() == 404
    assert await stream.rest() == b"no such probe; known are echo, wait, end\n"


async def test_echo_gives_back_and_says_that_the_request_has_ended(peer: Http2Peer) -> None:
    stream = peer.request(b"POST", probe("echo"))
    assert await stream.status() == 200
    for word in (b"one", b"two"):
        await stream.send(word)
        assert await stream.read(3) == word
    stream.end()
    assert await stream.rest() == b"ended\n"


async def test_wait_answers_what_comes_first(peer: Http2Peer) -> None:
    stream = peer.request(b"POST", probe("wait"))
    await peer.answered()
    assert not stream.fields, "it waits"
    await stream.send(b"hello")
    assert await stream.status() == 200
    assert await stream.rest() == b"hello"


async def test_wait_says_that_nothing_came(peer: Http2Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_path, "FIRST_BYTES_S", 0.01)
    stream = peer.request(b"POST", probe("wait"))
    assert await stream.status() == 200
    assert await stream.rest() == b"nothing\n"


async def test_wait_is_over_with_the_request(peer: Http2Peer) -> None:
    stream = peer.request(b"POST", probe("wait"), end=True)
    assert await stream.rest() == b"nothing\n"


async def test_end_ends_first_and_reads_on(peer: Http2Peer) -> None:
    stream = peer.request(b"POST", probe("end"))
    assert await stream.rest() == b"bye\n"
    await stream.send(b"still here")
    stream.end()
    await peer.answered()
    assert stream.reset_code is None


async def test_a_probe_moves_so_much_at_most(peer: Http2Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_path, "MAX_PROBE_BYTES", 1000)
    stream = peer.request(b"POST", probe("echo"))
    await stream.send(bytes(1000))
    assert await stream.read(1000) == bytes(1000)
    await stream.send(b"!")
    assert await stream.broken() == frames.CONNECT_ERROR


async def test_a_probe_lives_so_long_at_most(peer: Http2Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_path, "MAX_PROBE_S", 0.01)
    stream = peer.request(b"POST", probe("echo"))
    assert await stream.broken() == frames.CONNECT_ERROR


async def test_so_many_probes_at_most_and_a_place_becomes_free(peer: Http2Peer) -> None:
    streams = [peer.request(b"POST", probe("echo")) for _ in range(own_path.MAX_PROBES)]
    assert [await stream.status() for stream in streams] == [200] * own_path.MAX_PROBES
    more = peer.request(b"POST", probe("echo"))
    assert await more.status() == 503
    assert await more.rest() == b"32 probes are open\n"
    streams[0].reset(frames.CANCEL)
    streams[1].end()
    again = [peer.request(b"POST", probe("echo")) for _ in range(2)]
    assert [await stream.status() for stream in again] == [200, 200]


async def test_a_client_that_does_not_read_is_not_read_either(peer: Http2Peer) -> None:
    stream = peer.request(b"POST", probe("echo"))
    assert await stream.status() == 200
    stream.window_held = True
    assert 0 < await stream.fill() < 3 << 20


async def test_it_is_no_tunnel(krun: KrunPort, peer: Http2Peer) -> None:
    stream = peer.request(b"POST", probe("echo"))
    assert await stream.status() == 200
    assert krun.requests.open_tunnels == 0
    assert krun.records.empty()
