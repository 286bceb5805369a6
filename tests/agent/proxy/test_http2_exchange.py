"""Requests to an app that speaks HTTP/2: client and app are both played by the h2 library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent.config.settings import Settings
from agent.proxy.fields import RequestHead
from agent.proxy.http2_exchange import request_headers
from shared.address import Address
from shared.http2.frames import CANCEL, ENHANCE_YOUR_CALM, INTERNAL_ERROR, REFUSED_STREAM
from tests.support.http2_peer import Fields, Http2Peer, PeerStream, Service
from tests.support.krun_port import KrunPort, answered_and_ended

BIG = bytes(range(256)) * 4096
"""1 MiB: a stream's whole window."""


@pytest.fixture
async def app(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    """One that takes extended CONNECT where a test is `with_websockets`."""
    async with Service.listening(extended_connect=hasattr(request, "param")) as app:
        yield app


with_websockets = pytest.mark.parametrize("app", ["WebSockets"], indirect=True)


@pytest.fixture
def settings(app: Service) -> Settings:
    return Settings(app=Address("127.0.0.1", app.port), app_protocol="h2c")


async def asked(
    peer: Http2Peer, app: Service, fields: Fields = (), *, method: bytes = b"POST", end: bool = False
) -> tuple[PeerStream, PeerStream]:
    """A request that has reached the app: both ends of it."""
    stream = peer.request(method, b"/package.Service/Method", fields, end=end)
    return stream, await app.request()


# Heads, bodies, trailers.


async def test_a_request_stays_what_it_is(peer: Http2Peer, app: Service) -> None:
    _, there = await asked(
        peer,
        app,
        [
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"x-forwarded-client-cert", b"forged"),
            (b"x_forwarded_client_cert", b"forged"),
            (b"x-serverless-authorization", b"Bearer x"),
            (b"x_y", b"1"),
        ],
    )
    assert there.fields == [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", b"/package.Service/Method"),
        (b":authority", b"app"),
        (b"content-type", b"application/grpc"),
        (b"x_y", b"1"),
        (b"te", b"trailers"),
    ]


def test_an_authority_may_be_missing() -> None:
    head = RequestHead(method=b"GET", scheme=b"http", path=b"/")
    assert request_headers(head) == [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")]


async def test_a_request_without_a_body_ends_with_its_headers(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app, method=b"GET", end=True)
    assert there.ended
    there.respond(204, end=True)
    assert await stream.rest() == b""
    assert stream.fields == [(b":status", b"204")]


async def test_messages_both_ways_at_once(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    there.respond(200, [(b"content-type", b"application/grpc")])
    for word in (b"one", b"two", b"six"):
        await stream.send(word)
        assert await there.read(3) == word
        await there.send(word.upper())
        assert await stream.read(3) == word.upper()
    stream.end()
    assert await there.rest() == b""
    there.end([(b"grpc-status", b"0")])
    assert await stream.rest() == b""
    assert stream.trailers == [(b"grpc-status", b"0")]


async def test_an_answer_of_trailers_only(peer: Http2Peer, app: Service) -> None:
    """gRPC's clients want them in one HEADERS with END_STREAM."""
    stream, there = await asked(peer, app)
    stream.end()
    there.respond(200, [(b"grpc-status", b"5")], end=True)
    assert await stream.rest() == b""
    assert (stream.fields[1:], stream.trailers) == ([(b"grpc-status", b"5")], None)
    assert stream.frames == ["HEADERS END"]


async def test_trailers_of_a_request(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    await stream.send(b"body")
    stream.end([(b"x-sum", b"1"), (b"x_forwarded_client_cert", b"forged"), (b"content-length", b"4")])
    assert await there.rest() == b"body"
    assert there.trailers == [(b"x-sum", b"1")]


async def test_interim_answers(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app, [(b"expect", b"100-continue")])
    assert (b"expect", b"100-continue") in there.fields
    there.respond(100)
    there.respond(103, [(b"link", b"</a>")])
    await peer.until(lambda: len(stream.interim) == 2)
    assert stream.interim == [[(b":status", b"100")], [(b":status", b"103"), (b"link", b"</a>")]]
    there.respond(200, end=True)
    assert await stream.status() == 200


async def test_large_bodies(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    there.respond(200)
    async with asyncio.TaskGroup() as all_four:
        all_four.create_task(stream.send(BIG * 8))
        all_four.create_task(there.send(BIG * 8))
        up = all_four.create_task(there.read(8 * len(BIG)))
        down = all_four.create_task(stream.read(8 * len(BIG)))
    assert up.result() == BIG * 8
    assert down.result() == BIG * 8


async def test_an_app_that_does_not_read_stops_its_client_only(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    there.window_held = True
    sent = await stream.fill()
    assert sent < 2 * len(BIG)
    other, elsewhere = await asked(peer, app)
    await other.send(b"through")
    assert await elsewhere.read(7) == b"through"
    there.release_window()
    stream.end()
    assert len(await there.rest()) == sent


async def test_a_client_that_does_not_read_stops_its_app_only(
    krun: KrunPort, peer: Http2Peer, app: Service
) -> None:
    stream, there = await asked(peer, app)
    stream.window_held = True
    there.respond(200)
    sent = await there.fill()
    assert sent < len(BIG)
    assert krun.requests.app.buffered_bytes < 2 * len(BIG)
    other, elsewhere = await asked(peer, app)
    elsewhere.respond(200)
    await elsewhere.send(b"through")
    assert await other.read(7) == b"through"
    stream.release_window()
    there.end()
    assert len(await stream.rest()) == sent


async def test_requests_share_a_connection(peer: Http2Peer, app: Service) -> None:
    streams = [peer.request(b"GET", b"/", end=True) for _ in range(20)]
    for _ in streams:
        (await app.request()).respond(200, end=True)
    for stream in streams:
        assert await stream.status() == 200
    assert len(app.connections) == 2, "one was to find out what the app speaks"


# Ends that are none.


async def test_a_client_that_gives_up(krun: KrunPort, peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    stream.reset(CANCEL)
    assert await there.broken() == CANCEL
    assert krun.requests.app.open_requests == 0


async def test_a_client_that_is_gone(krun: KrunPort, app: Service) -> None:
    async with Http2Peer.connected(krun.port) as peer:
        _, there = await asked(peer, app)
        peer.drop()
        assert await there.broken() == CANCEL


@pytest.mark.parametrize("code", [INTERNAL_ERROR, ENHANCE_YOUR_CALM, CANCEL, REFUSED_STREAM])
async def test_an_app_that_resets_its_answer(peer: Http2Peer, app: Service, code: int) -> None:
    stream, there = await asked(peer, app)
    there.respond(200)
    await there.send(b"half")
    assert await stream.read(4) == b"half"
    there.reset(code)
    assert await stream.broken() == code


async def test_an_app_that_resets_instead_of_an_answer(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    there.reset(INTERNAL_ERROR)
    assert await stream.status() == 502
    assert await stream.rest() == b"the app broke off: stream reset by the peer: INTERNAL_ERROR\n"


async def test_an_answer_before_the_request_has_ended(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    await stream.send(b"half")
    assert await there.read(4) == b"half"
    there.respond(413, end=True)
    assert await stream.status() == 413
    assert await there.broken() == CANCEL, "half a request must not look like a whole one"


async def test_what_the_app_refuses_is_sent_again(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    await stream.send(b"message")
    stream.end()
    assert await there.rest() == b"message"
    there.reset(REFUSED_STREAM)
    again = await app.request()
    assert again.fields == there.fields
    assert await again.rest() == b"message"
    again.reset(REFUSED_STREAM)
    assert await stream.status() == 502, "once"


async def test_what_goaway_leaves_out_is_sent_again(peer: Http2Peer, app: Service) -> None:
    """As gRPC's servers do with connections of a certain age."""
    first, there = await asked(peer, app)
    second, other = await asked(peer, app)
    await second.send(b"message")
    assert await other.read(7) == b"message"
    there.peer.say_goaway(there.number)
    again = await app.request()
    assert again.peer is not there.peer
    assert await again.read(7) == b"message"
    again.respond(200, end=True)
    assert await second.status() == 200
    there.respond(200, end=True)
    assert await first.status() == 200


async def test_a_large_body_is_not_kept_to_be_sent_again(peer: Http2Peer, app: Service) -> None:
    stream, there = await asked(peer, app)
    await stream.send(bytes(100_000))
    assert await there.read(100_000)
    there.reset(REFUSED_STREAM)
    assert await stream.status() == 502


@pytest.mark.parametrize(("method", "again"), [(b"GET", True), (b"POST", False)])
async def test_a_connection_that_dies(peer: Http2Peer, app: Service, method: bytes, again: bool) -> None:
    stream, there = await asked(peer, app, method=method, end=True)
    there.peer.drop()
    if again:
        (await app.request()).respond(200, end=True)
    assert await stream.status() == (200 if again else 502)


# WebSockets.


@with_websockets
async def test_a_websocket_stays_an_extended_connect(peer: Http2Peer, app: Service) -> None:
    stream = peer.websocket(b"/chat", [(b"sec-websocket-protocol", b"chat")])
    await stream.send(b"early")
    there = await app.request()
    assert there.fields == [
        (b":method", b"CONNECT"),
        (b":scheme", b"https"),
        (b":path", b"/chat"),
        (b":authority", b"app"),
        (b":protocol", b"websocket"),
        (b"sec-websocket-protocol", b"chat"),
    ]
    there.respond(200, [(b"sec-websocket-protocol", b"chat")])
    assert await stream.status() == 200
    assert await there.read(5) == b"early"
    await answered_and_ended(stream, there)


@with_websockets
async def test_an_app_that_refuses_a_websocket(peer: Http2Peer, app: Service) -> None:
    stream = peer.websocket(b"/chat")
    there = await app.request()
    there.respond(403)
    await there.send(b"no")
    there.end()
    assert await stream.status() == 403
    assert await stream.rest() == b"no"


async def test_an_app_that_takes_no_extended_connect(peer: Http2Peer, app: Service) -> None:
    stream = peer.websocket(b"/chat")
    assert await stream.status() == 501
    assert b"ENABLE_CONNECT_PROTOCOL" in await stream.rest()
