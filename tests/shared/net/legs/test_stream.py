"""One stream as a leg: what it pushes, holds and sends, on a connection in memory."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import StreamResetError, UpstreamError
from shared.http2 import frames
from shared.net.legs.stream import (
    LINGER_S,
    Stream,
    header_value,
    status_of,
)
from shared.net.legs.tcp_end import LAST_BYTES_TIMEOUT_S
from shared.tasks import spawn
from tests.shared.http2.dialogue import (
    OK,
    POST,
    SMALL,
    TRAILERS,
    WINDOW,
    data,
    goaway,
    goaway_seen,
    headers,
    reset,
    settings,
    window,
)
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.in_memory import Line, Seen, joined


def client() -> tuple[Line, Stream]:
    """A client's stream whose request has been sent."""
    line = Line(client=True)
    stream = line.connection.open(POST)
    line.connection._flush()
    line.wire.take()
    return line, stream


def server() -> tuple[Line, Stream]:
    """A server's stream that has been answered with 200."""
    line = Line(client=False, limits=SMALL)
    stream = line.request(1)
    stream.respond(OK)
    line.connection._flush()
    line.wire.take()
    return line, stream


# The response.


async def test_response() -> None:
    line, stream = client()
    waiting = spawn(stream.response(5), name="response")
    await asyncio.sleep(0)
    line.get(headers(1, [(b":status", b"404"), (b"x", b"y")]))
    assert await waiting == 404
    assert header_value(stream.headers, b"x") == b"y"
    assert await stream.response(5) == 404, "asked again"


async def test_a_whole_response_and_a_reset_before_it_was_asked_for() -> None:
    line, stream = client()
    line.get(headers(1, [(b":status", b"503")]), data(1, b"why", end=True), reset(1, frames.NO_ERROR))
    assert await stream.response(5) == 503
    assert joined(stream).story == [b"why", "ended", "failed: stream reset by the peer: NO_ERROR"]


@pytest.mark.parametrize("asked_first", [True, False])
@pytest.mark.parametrize(
    ("wire", "text", "code"),
    [
        (reset(1, frames.REFUSED_STREAM), "stream reset by the peer: REFUSED_STREAM", frames.REFUSED_STREAM),
        (goaway(0, 11), "stream not taken, GOAWAY: ENHANCE_YOUR_CALM", frames.REFUSED_STREAM),
    ],
)
async def test_no_response_but_a_reset(asked_first: bool, wire: bytes, text: str, code: int) -> None:
    line, stream = client()
    if asked_first:
        waiting = spawn(stream.response(5), name="response")
        await asyncio.sleep(0)
        line.get(wire)
    else:
        line.get(wire)
        waiting = spawn(stream.response(5), name="response")
    with pytest.raises(StreamResetError) as caught:
        await waiting
    assert (str(caught.value), caught.value.code) == (text, code)


@hasty
async def test_no_response_in_time() -> None:
    line, stream = client()
    with pytest.raises(UpstreamError, match=r"^no response headers within 2.5 s$"):
        await stream.response(2.5)
    line.get(headers(1, OK))
    assert await stream.response(1) == 200, "the stream is still there"


async def test_a_waiter_that_is_cancelled() -> None:
    line, stream = client()
    waiting = spawn(stream.response(5), name="response")
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    line.get(headers(1, OK))
    assert await stream.response(5) == 200


async def test_on_response_comes_before_the_body() -> None:
    line, stream = client()
    seen = joined(stream)
    stream.on_response = lambda fields: seen.story.append(status_of(fields))
    line.get(headers(1, OK), data(1, b"body"))
    assert seen.story == [200, b"body"]


async def test_interim_responses_come_before_the_response() -> None:
    line, stream = client()
    line.get(headers(1, [(b":status", b"100")]))  # nobody listens
    seen = joined(stream)
    stream.on_interim = lambda fields: seen.story.append(status_of(fields))
    line.get(headers(1, [(b":status", b"103")]), headers(1, OK), data(1, b"body"))
    assert seen.story == [103, b"body"]
    assert stream.headers == OK


@pytest.mark.parametrize("end", [True, False])
async def test_a_response_without_a_body_says_so(end: bool) -> None:
    line, stream = client()
    line.get(headers(1, OK, end=end))
    assert stream.bodiless is end


async def test_a_server_informs_before_it_responds() -> None:
    line = Line(client=False, limits=SMALL)
    stream = line.request(1)
    stream.inform([(b":status", b"103")])
    stream.respond(OK)
    assert (await line.sent())[-2:] == ["HEADERS 1 :status=103", "HEADERS 1 :status=200"]


async def test_a_response_that_is_all_ends_the_stream() -> None:
    line = Line(client=False, limits=SMALL)
    stream = line.request(1)
    line.get(data(1, end=True))
    line.connection.drain()
    line.get(goaway_seen())
    stream.respond(OK, end_stream=True)
    assert (await line.sent())[-1] == "HEADERS 1 :status=200 END"
    assert line.wire.ended, "nothing keeps the connection"
    stream.close()
    assert await line.sent() == []


@pytest.mark.parametrize(("value", "status"), [(b"200", 200), (b"abc", 0), (b"", 0), (b"-1", 0)])
def test_status_of(value: bytes, status: int) -> None:
    assert status_of([(b":status", value)]) == status
    assert status_of([]) == 0


def test_header_value() -> None:
    fields = [(b"a", b"1"), (b"b", b""), (b"a", b"2")]
    assert [header_value(fields, name) for name in (b"a", b"b", b"c")] == [b"1", b"", b""]


# What it pushes.


async def test_what_comes_before_join_is_kept() -> None:
    line, stream = client()
    line.get(headers(1, OK), data(1, b"early"), data(1, b" bird"))
    seen = joined(stream)
    assert seen.story == [b"early bird"]
    line.get(data(1, b" and more", end=True))
    assert seen.story == [b"early bird and more", "ended"]


@pytest.mark.parametrize(
    ("wire", "story"),
    [
        (data(1, b"x", end=True), [b"x", "ended"]),
        (data(1, b"x") + reset(1, 8), [b"x", "failed: stream reset by the peer: CANCEL"]),
        (
            data(1, b"x", end=True) + reset(1, 0),
            [b"x", "ended", "failed: stream reset by the peer: NO_ERROR"],
        ),
        (data(1, end=True), ["ended"]),
    ],
)
async def test_ends_before_join(wire: bytes, story: list[object]) -> None:
    line, stream = client()
    line.get(headers(1, OK), wire)
    assert joined(stream).story == story


async def test_join_in_the_middle_of_a_read() -> None:
    """The session has seen the end already; the bytes before it have not been pushed yet."""
    seen = Seen()
    line = Line(client=False, on_request=lambda stream: stream.join(seen))
    line.get(headers(1, POST), data(1, b"all of it", end=True))
    assert seen.story == [b"all of it", "ended"]


async def test_trailers_are_there_at_the_end() -> None:
    line, stream = client()
    seen = joined(stream)
    line.get(headers(1, OK), data(1, b"x"), headers(1, TRAILERS, end=True))
    assert seen.story == [b"x", "ended"]
    assert stream.trailers == TRAILERS


async def test_one_relay_after_the_other() -> None:
    line, stream = server()
    first = joined(stream)
    line.get(data(1, b"one"))
    stream.leave()
    line.get(data(1, b"two"))
    gone: list[str] = []
    stream.on_gone = lambda error: gone.append(str(error))
    second = joined(stream)
    line.get(data(1, b"six", end=True))
    assert (first.story, second.story) == ([b"one"], [b"twosix", "ended"])
    stream.leave()
    line.get(reset(1, frames.CANCEL))
    assert gone == ["stream reset by the peer: CANCEL"]


async def test_a_reset_with_a_code_of_its_own() -> None:
    line, stream = server()
    seen = joined(stream)
    stream.reset(frames.INTERNAL_ERROR)
    assert await line.sent() == ["RST_STREAM 1 INTERNAL_ERROR"]
    line.get(data(1, b"too late"))
    assert seen.story == []


async def test_early_bytes_are_credited_when_they_are_passed_on() -> None:
    line, stream = server()
    line.get(data(1, bytes(16384)), data(1, bytes(16384)))
    assert await line.sent() == []
    joined(stream)
    assert await line.sent() == ["WINDOW_UPDATE 1 +32768", "WINDOW_UPDATE 0 +32768"]


async def test_paused_bytes_are_credited_when_it_resumes() -> None:
    line, stream = server()
    seen = joined(stream)
    stream.pause_reading()
    line.get(data(1, bytes(16384)), data(1, bytes(16384)))
    assert seen.story == [bytes(32768)], "pushed all the same: the peer was allowed to send it"
    assert await line.sent() == []
    stream.resume_reading()
    assert await line.sent() == ["WINDOW_UPDATE 1 +32768", "WINDOW_UPDATE 0 +32768"]
    stream.resume_reading()
    assert await line.sent() == []


async def test_a_relay_that_pauses_while_it_takes() -> None:
    line, stream = server()

    class Pausing(Seen):
        def received(self, leg: object, piece: object) -> None:
            stream.pause_reading()

    line.get(data(1, bytes(16384)))
    stream.join(Pausing())
    line.get(data(1, bytes(16384)))
    assert await line.sent() == []
    stream.resume_reading()
    assert await line.sent() == ["WINDOW_UPDATE 1 +32768", "WINDOW_UPDATE 0 +32768"]


# What it sends.


async def test_write_and_end() -> None:
    line, stream = server()
    stream.write(b"a")
    stream.write(bytearray(b"b"))
    stream.write(memoryview(b"c"))
    stream.write(b"")
    stream.write_eof()
    stream.write_eof()
    assert await line.sent() == ["DATA 1 b'a'", "DATA 1 b'b'", "DATA 1 b'c'", "DATA 1 b'' END"]


async def test_no_reference_to_a_view_is_kept() -> None:
    line, stream = server()
    buffer = bytearray(b"x" * (WINDOW + 4))
    stream.write(memoryview(buffer))
    buffer[:] = b"y" * len(buffer)
    line.get(window(1, 100), window(0, 100))
    assert b"y" not in b"".join(line.wire.writes)
    assert (await line.sent())[-1] == "DATA 1 b'xxxx'"


async def test_a_stream_at_rest_holds_no_buffer() -> None:
    line, stream = server()
    line.get(data(1, b"early"))
    assert stream.buffered_bytes == 5
    joined(stream)
    stream.write(bytes(WINDOW) + b"waits")
    assert stream.buffered_bytes == 5
    line.get(window(1, 100), window(0, 100))
    assert stream._early is None and stream._waiting is None


async def test_a_closed_window() -> None:
    line, stream = server()
    seen = joined(stream)
    stream.write(bytes(WINDOW))
    assert seen.story == [], "all of it could go"
    stream.write(b"abc")
    stream.write(b"def")
    assert seen.story == ["full"]
    assert bytes(stream.waiting) == b"abcdef"
    await line.sent()
    line.get(window(1, 100), window(0, 4))
    assert await line.sent() == ["DATA 1 b'abcd'"]
    assert seen.story == ["full"]
    line.get(window(0, 4))
    assert await line.sent() == ["DATA 1 b'ef'"]
    assert seen.story == ["full", "drained"]
    stream.write(b"ghij")
    assert await line.sent() == ["DATA 1 b'gh'"]
    assert seen.story == ["full", "drained", "full"]


async def test_join_of_a_stream_that_is_full() -> None:
    _, stream = server()
    stream.write(bytes(WINDOW + 1))
    assert joined(stream).story == ["full"]


async def test_the_end_comes_after_what_waits() -> None:
    line, stream = server()
    stream.write(bytes(WINDOW) + b"abc")
    stream.write_eof()
    await line.sent()
    line.get(window(0, 100), window(1, 2))
    assert await line.sent() == ["DATA 1 b'ab'"]
    line.get(window(1, 2))
    assert await line.sent() == ["DATA 1 b'c'", "DATA 1 b'' END"]


async def test_trailers_come_after_what_waits() -> None:
    line, stream = server()
    stream.write(bytes(WINDOW) + b"abc")
    stream.end_with_trailers(TRAILERS)
    stream.write_eof()
    await line.sent()
    line.get(window(0, 100), window(1, 100))
    assert await line.sent() == ["DATA 1 b'abc'", "HEADERS 1 grpc-status=0 END"]


async def test_trailers_without_a_field() -> None:
    line, stream = server()
    stream.end_with_trailers([])
    assert await line.sent() == ["DATA 1 b'' END"]


async def test_a_smaller_window_in_mid_stream() -> None:
    line, stream = server()
    stream.write(bytes(1000))
    line.get(settings({4: 500}))
    stream.write(b"abc")
    assert (await line.sent())[1:] == ["SETTINGS ACK"]
    line.get(window(1, 502))
    assert await line.sent() == ["DATA 1 b'ab'"]


# Letting go.


async def test_close_of_what_both_have_ended() -> None:
    line, stream = server()
    line.get(data(1, end=True))
    stream.write(b"x")
    stream.close()
    stream.close()
    assert stream.over
    assert await line.sent() == ["DATA 1 b'x'", "DATA 1 b'' END"]


@hasty
async def test_a_server_lets_the_client_end_its_request() -> None:
    """curl drops a complete response when RST_STREAM comes while it is still sending."""
    line, stream = server()
    stream.write(b"all")
    stream.close()
    assert await line.sent() == ["DATA 1 b'all'", "DATA 1 b'' END"]
    line.get(data(1, b"still sending"), data(1, end=True))
    assert stream.over
    await asyncio.sleep(2 * LINGER_S)
    assert await line.sent() == []


@hasty
async def test_a_server_stops_a_client_that_goes_on() -> None:
    line, stream = server()
    seen = joined(stream)
    stream.close()
    assert await line.sent() == ["DATA 1 b'' END"]
    line.get(data(1, bytes(16384)), data(1, bytes(16384)))
    assert await line.sent() == ["WINDOW_UPDATE 1 +32768", "WINDOW_UPDATE 0 +32768"]
    assert seen.story == [], "nobody is there any more"
    await asyncio.sleep(1.5 * LINGER_S)
    assert await line.sent() == ["RST_STREAM 1 NO_ERROR"]
    assert line.connection.open_streams == 0


async def test_what_came_before_close_is_credited() -> None:
    line, stream = server()
    line.get(data(1, bytes(16384)), data(1, bytes(16384)))
    stream.close()
    assert await line.sent() == ["WINDOW_UPDATE 1 +32768", "WINDOW_UPDATE 0 +32768", "DATA 1 b'' END"]


async def test_a_client_just_lets_go() -> None:
    line, stream = client()
    stream.write(b"x")
    stream.close()
    assert await line.sent() == ["DATA 1 b'x'", "DATA 1 b'' END", "RST_STREAM 1 CANCEL"]


async def test_a_client_whose_peer_has_ended_ends_likewise() -> None:
    line, stream = client()
    joined(stream)
    line.get(headers(1, OK), data(1, b"", end=True))
    stream.write(b"x")
    stream.close()
    assert await line.sent() == ["DATA 1 b'x'", "DATA 1 b'' END"], "no RST_STREAM, nothing is unwanted"
    assert stream.over


@hasty
async def test_a_client_that_has_ended_lets_the_end_arrive() -> None:
    """A proxy that gets RST_STREAM right behind it drops what it has not passed on."""
    line, stream = client()
    stream.write(b"x")
    stream.write_eof()
    stream.close()
    await asyncio.sleep(LINGER_S / 2)
    line.get(headers(1, OK), data(1, b"nobody reads this"))
    assert await line.sent() == ["DATA 1 b'x'", "DATA 1 b'' END"]
    await asyncio.sleep(LINGER_S)
    assert await line.sent() == ["RST_STREAM 1 CANCEL"]


@hasty
async def test_close_waits_for_a_window() -> None:
    line, stream = client()
    stream.write(bytes(WINDOW) + b"abc")
    stream.close()
    await line.sent()
    line.get(window(0, 9), window(1, 9))
    assert await line.sent() == ["DATA 1 b'abc'", "DATA 1 b'' END"]
    await asyncio.sleep(2 * LINGER_S)
    assert await line.sent() == ["RST_STREAM 1 CANCEL"]


@hasty
async def test_close_does_not_wait_for_ever() -> None:
    line, stream = client()
    stream.write(bytes(WINDOW) + b"abc")
    stream.close()
    await line.sent()
    await asyncio.sleep(LAST_BYTES_TIMEOUT_S - 1)
    line.get(window(0, 1), window(1, 1))
    assert await line.sent() == ["DATA 1 b'a'"], "it reads, if slowly"
    await asyncio.sleep(LAST_BYTES_TIMEOUT_S)
    assert await line.sent() == []
    assert not stream.over
    await asyncio.sleep(LAST_BYTES_TIMEOUT_S)
    assert await line.sent() == ["RST_STREAM 1 CANCEL"]
    assert stream.over


async def test_abort_says_who_broke_off() -> None:
    line, stream = client()
    stream.abort()
    stream.abort()
    assert await line.sent() == ["RST_STREAM 1 CANCEL"]
    line, stream = server()
    stream.write(bytes(WINDOW) + b"never sent")
    await line.sent()
    stream.abort()
    assert await line.sent() == ["RST_STREAM 1 CONNECT_ERROR"]
    line.get(window(0, 100))
    assert await line.sent() == []


@pytest.mark.parametrize("how", ["reset", "ended", "connection lost", "aborted", "goaway"])
async def test_nothing_raises_on_a_stream_that_is_gone(how: str) -> None:
    line, stream = client()
    seen = joined(stream)
    stream.write(bytes(WINDOW) + b"waits")
    if how == "reset":
        line.get(reset(1, frames.CANCEL))
    elif how == "ended":
        stream._waiting = None
        stream.write_eof()
        line.get(headers(1, OK, end=True))
    elif how == "connection lost":
        line.lose()
    elif how == "goaway":
        line.get(goaway(0))
    else:
        stream.abort()
    assert stream.over
    told = list(seen.story)
    await line.sent()
    stream.write(b"x")
    stream.respond(OK)
    stream.pause_reading()
    stream.resume_reading()
    stream.end_with_trailers(TRAILERS)
    stream.write_eof()
    stream.close()
    stream.abort()
    assert await line.sent() == []
    assert [event for event in seen.story if event not in ("full", "drained")] == [
        event for event in told if event not in ("full", "drained")
    ]
    assert line.connection.open_streams == 0
