"""A connection on a transport in memory: reading, writing, congestion, turns, ends."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shared.errors import RevokedError, StreamResetError
from shared.http2 import frames
from shared.http2.flood_guard import FloodLimits
from shared.http2.session import SessionLimits
from shared.net.http2.connection import (
    CONGESTED_BYTES,
    FAULT_LINGER_S,
    FRAME_TIMEOUT_S,
    GOAWAY_SEEN_S,
    PREFACE_TIMEOUT_S,
    Connection,
)
from shared.net.http2.liveness import WHEN_STALLED
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.read_buffer import BULK_READ_BYTES, LARGE_READ_BYTES, READ_BYTES
from shared.net.legs.small_writes import UNSENT_BYTES
from shared.net.legs.stream import Stream
from shared.net.legs.tcp import CLOSE_TIMEOUT_S
from shared.tasks import spawn
from tests.shared.http2.dialogue import (
    GET,
    INITIAL_WINDOW,
    LAST_OF_ALL,
    MAX_STREAMS,
    OK,
    POST,
    PREFACE,
    SMALL,
    WINDOW,
    data,
    frame,
    goaway,
    goaway_seen,
    headers,
    ping,
    read,
    reset,
    settings,
    window,
)
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.in_memory import Line, Seen, Wire, feed, joined
from tests.shared.net.loopback import PATIENCE_S, until

PEER_NAME = "192.0.2.7:4431"


ANNOUNCED = [f"GOAWAY {LAST_OF_ALL} NO_ERROR", "PING b'goaway\\x00\\x00'"]


def drained(line: Line) -> Line:
    """A server's line that has been drained, and whose peer knows."""
    line.connection.drain()
    line.get(goaway_seen())
    return line


# Start.


async def test_both_ends_speak_at_once() -> None:
    for client in (True, False):
        connection = Connection(client=client)
        wire = Wire()
        connection.connection_made(wire)
        wire_bytes = wire.take()
        assert wire_bytes.startswith(PREFACE) is client
        assert read(wire_bytes.removeprefix(PREFACE))[0].startswith("SETTINGS {")
        assert wire.marks == (CONGESTED_BYTES, None)
        connection.connection_lost(None)


@hasty
async def test_a_peer_that_never_says_settings() -> None:
    lost: list[Connection] = []
    connection = Connection(client=True, on_lost=lost.append)
    wire = Wire()
    connection.connection_made(wire)
    stream = connection.open(POST)
    started = asyncio.get_running_loop().time()
    with pytest.raises(StreamResetError, match=f"no SETTINGS from {PEER_NAME} within 10 s"):
        await stream.response(3600)
    assert asyncio.get_running_loop().time() - started == pytest.approx(PREFACE_TIMEOUT_S, abs=0.5)
    assert wire.aborted
    assert lost == []
    connection.connection_lost(None)
    assert lost == [connection]


# Streams.


async def test_a_request_comes_with_its_headers() -> None:
    line = Line(client=False)
    stream = line.request(1)
    assert (stream.id, list(stream.headers), stream.bodiless) == (1, POST, False)
    stream = line.request(3, GET, end=True)
    assert (stream.id, stream.bodiless, stream.connection) == (3, True, line.connection)
    assert joined(stream).story == ["ended"]
    assert line.connection.open_streams == 2


async def test_opening_a_stream() -> None:
    line = Line(client=True)
    stream = line.connection.open(POST)
    assert (stream.id, stream.over, line.connection.open_streams) == (1, False, 1)
    assert await line.sent() == ["HEADERS 1 :method=POST :scheme=http :authority=a :path=/_hbone/15003"]
    assert line.connection.open(GET, end_stream=True).id == 3
    assert (await line.sent())[0].endswith(" END")


async def test_what_comes_in_one_read_with_the_answer_arrives_though_we_have_ended() -> None:
    """As when a client has said FIN before its tunnel stands: the stream is over before all is handed on."""
    line = Line(client=True)
    stream = line.connection.open(POST)
    seen = Seen()

    def answered(_: object) -> None:
        stream.join(seen)
        stream.write_eof()

    stream.on_response = answered
    line.get(headers(1, OK), data(1, b"all of it", end=True))
    assert seen.story == [b"all of it", "ended"]
    assert line.connection.open_streams == 0


async def test_room() -> None:
    line = Line(client=True, peer_settings={MAX_STREAMS: 2})
    assert line.connection.room == 2
    line.connection.open(POST)
    line.connection.open(POST)
    assert line.connection.room == 0
    with pytest.raises(
        StreamResetError, match=f"^connection to {PEER_NAME} accepts no new stream$"
    ) as caught:
        line.connection.open(POST)
    assert caught.value.code == frames.REFUSED_STREAM
    line.get(reset(1, frames.CANCEL))
    assert line.connection.room == 1


async def test_changes_are_told() -> None:
    line = Line(client=True)
    line.get(settings({MAX_STREAMS: 5}))
    assert line.changes == 1
    line.connection.open(POST)
    line.get(headers(1, OK), data(1, b"x"))
    assert line.changes == 1
    line.get(reset(1, frames.CANCEL))
    assert line.changes == 2
    line.get(goaway(0))
    assert line.changes >= 3
    assert not line.connection.usable


async def test_what_a_turn_of_the_loop_sends_is_one_write() -> None:
    line = Line(client=True)
    streams = [line.connection.open(POST) for _ in range(5)]
    for stream in streams:
        stream.write(b"x")
    assert line.wire.writes == []
    await asyncio.sleep(0)
    assert len(line.wire.writes) == 1
    assert len(await line.sent()) == 10


async def test_a_lot_is_written_at_once() -> None:
    line = Line(client=True, peer_settings={INITIAL_WINDOW: 1 << 20})
    line.get(window(0, 1 << 20))
    line.connection.open(POST).write(bytes(READ_BYTES))
    assert len(line.wire.writes) == 1
    assert len(line.wire.writes[0]) > READ_BYTES


class Writes(Seen):
    """A relay's end that counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes: list[bytes] = []

    def received(self, leg: Leg, data: Buffer) -> None:
        self.pushes.append(bytes(data))


async def test_what_a_read_brings_for_a_stream_goes_on_as_one() -> None:
    line = Line(client=False)
    first, second = Writes(), Writes()
    line.request(1).join(first)
    line.request(3).join(second)
    long = b"a" * 5000
    line.get(data(1, long), data(3, b"c" * 2000), data(1, b"b" * 3000), data(1, b"d"))
    assert (first.pushes, second.pushes) == ([long + b"b" * 3000 + b"d"], [b"c" * 2000])
    line.get(data(1, long), frame(frames.DATA, frames.FLAG_END_STREAM, 3), data(1, b"b" * 3000))
    assert first.pushes[1:] == [long, b"b" * 3000], "before whatever else came in between"
    assert second.story == ["ended"]
    line.lose()


async def test_a_stream_that_ends_in_the_read_has_its_bytes_before() -> None:
    line = Line(client=False)
    seen = joined(line.request(1))
    line.get(data(1, b"a" * 5000), data(1, b"b" * 5000), reset(1, frames.CANCEL))
    assert seen.story[0] == b"a" * 5000 + b"b" * 5000
    assert str(seen.story[1]).startswith("failed")
    line.lose()


async def test_large_reads_are_for_those_whose_full_reads_are_little_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line(client=False)
    joined(line.request(1))
    full = data(1, b"x" * (16384 - 9)) * 3 + data(1, b"x" * (READ_BYTES - 3 * 16384 - 9))
    assert len(line.connection.get_buffer(0)) == READ_BYTES
    monkeypatch.setattr("shared.net.http2.connection.FAIR_S", 10.0)
    line.get(full)
    assert len(line.connection.get_buffer(0)) == LARGE_READ_BYTES
    line.get(data(1, b"x"))
    assert len(line.connection.get_buffer(0)) == LARGE_READ_BYTES
    monkeypatch.setattr("shared.net.http2.connection.FAIR_S", 0.0)
    line.get(full)
    assert len(line.connection.get_buffer(0)) == READ_BYTES
    line.lose()


async def test_events_of_one_read_reach_their_streams_in_order() -> None:
    line = Line(client=False)
    first, second = joined(line.request(1)), joined(line.request(3))
    line.get(data(1, b"a"), data(3, b"b"), data(1, b"c", end=True), reset(3, frames.CANCEL))
    assert first.story == [b"ac", "ended"]
    assert second.story == [b"b", "failed: stream reset by the peer: CANCEL"]


async def test_an_end_and_a_reset_in_one_read() -> None:
    """The usual way for a server to say that it wants no more: both have to be told."""
    line = Line(client=True)
    seen = joined(line.connection.open(POST))
    line.get(headers(1, OK), data(1, b"all", end=True), reset(1, frames.NO_ERROR))
    assert seen.story == [b"all", "ended", "failed: stream reset by the peer: NO_ERROR"]


async def test_an_end_and_an_end_of_ours_meanwhile() -> None:
    line = Line(client=True)
    stream = line.connection.open(POST)
    seen = Seen()
    stream.on_response = lambda _: stream.write_eof()
    stream.join(seen)
    line.get(headers(1, OK), data(1, b"all", end=True), reset(1, frames.NO_ERROR))
    assert seen.story == [b"all", "ended", "failed: stream reset by the peer: NO_ERROR"]


async def test_a_reset_of_ours_ends_the_story() -> None:
    line = Line(client=False)
    seen = joined(line.request(1))
    stream = line.requests[0]
    line.get(data(1, b"a"))
    stream.abort()
    line.get(data(1, b"b"), reset(1, frames.CANCEL))
    assert seen.story == [b"a"]
    assert await line.sent() == ["RST_STREAM 1 CONNECT_ERROR"]


async def test_a_protocol_error_on_one_stream_breaks_only_that() -> None:
    line = Line(client=False)
    first, second = joined(line.request(1)), joined(line.request(3))
    line.get(data(1, b"all", end=True), data(1, b"more"), data(3, b"fine"))
    assert first.story == [b"all", "ended", "failed: stream reset by us, for a protocol error: STREAM_CLOSED"]
    assert second.story == [b"fine"]
    assert await line.sent() == ["RST_STREAM 1 STREAM_CLOSED"]
    line.requests[0].write(b"late")
    line.requests[0].write_eof()
    line.requests[0].close()
    assert await line.sent() == []


async def test_a_malformed_request_costs_its_stream_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hbone")
    line = Line(client=False)
    seen = joined(line.request(1))
    line.get(headers(3, [*POST[:3], (b":path", b"/a b")]), data(1, b"fine"))
    assert (len(line.requests), seen.story) == (1, [b"fine"])
    assert await line.sent() == ["RST_STREAM 3 PROTOCOL_ERROR"]
    assert caplog.messages == [f"refused a request of {PEER_NAME}: malformed: :path is not a path"]


async def test_a_malformed_answer_costs_its_stream_and_says_why() -> None:
    line = Line(client=True)
    wrong, right = line.connection.open(POST), line.connection.open(POST)
    line.get(headers(1, [(b":status", b"20")]), headers(3, OK))
    with pytest.raises(StreamResetError, match="by us, for :status is not a number of three digits: PROTO"):
        await wrong.response(PATIENCE_S)
    assert await right.response(PATIENCE_S) == 200


async def test_a_stream_that_is_reset_before_its_request_was_looked_at() -> None:
    line = Line(client=False)
    line.get(headers(1, POST), data(1, b"x"), reset(1, frames.CANCEL))
    (stream,) = line.requests
    assert stream.over
    stream.respond(OK)
    stream.write(b"x")
    assert joined(stream).story == [b"x", "failed: stream reset by the peer: CANCEL"]
    assert await line.sent() == []


# Errors of the whole connection.


async def test_a_connection_error() -> None:
    line = Line(client=False)
    seen = joined(line.request(1))
    line.get(data(1, b"before"), frame(frames.DATA, 0, 0))
    text = "connection ended, protocol error: DATA on stream 0"
    assert seen.story == [b"before", f"failed: {text}"]
    assert await line.sent() == ["GOAWAY 1 PROTOCOL_ERROR"]
    assert line.wire.ended
    assert (line.connection.lost, line.connection.room, line.connection.open_streams) == (True, 0, 0)
    line.get(ping(b"12345678"), headers(3, POST))
    assert len(line.requests) == 1
    assert await line.sent() == []
    line.lose()
    assert line.lost == 1


async def test_an_error_without_streams_is_a_change() -> None:
    """Who keeps the connection for later must learn that there is no later."""
    line = Line(client=True)
    line.get(frame(frames.DATA, 0, 0))
    assert (line.connection.usable, line.changes, line.lost) == (False, 1, 0)
    line.lose()
    assert (line.changes, line.lost) == (1, 1)


async def test_what_is_not_http2() -> None:
    connection = Connection(client=False)
    wire = Wire()
    connection.connection_made(wire)
    wire.take()
    feed(connection, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert read(wire.take()) == ["GOAWAY 0 PROTOCOL_ERROR"]
    assert wire.ended
    connection.connection_lost(None)


async def test_a_lost_connection_breaks_its_streams() -> None:
    line = Line(client=True)
    seen = joined(line.connection.open(POST))
    unanswered = line.connection.open(POST)
    response = spawn(unanswered.response(5), name="response")
    await asyncio.sleep(0)
    line.lose(ConnectionResetError(104, "Connection reset by peer"))
    text = f"connection to {PEER_NAME} lost: [Errno 104] Connection reset by peer"
    assert seen.story == [f"failed: {text}"]
    with pytest.raises(StreamResetError) as caught:
        await response
    assert str(caught.value) == text
    assert (line.lost, line.changes) == (1, 1)
    assert not line.connection.usable
    with pytest.raises(StreamResetError):
        line.connection.open(POST)


async def test_a_peer_that_ends_the_connection() -> None:
    line = Line(client=True)
    seen = joined(line.connection.open(POST))
    assert line.connection.eof_received() is False, "the transport closes"
    line.lose()
    assert seen.story == [f"failed: connection to {PEER_NAME} lost: closed by the peer"]


async def test_abort() -> None:
    line = Line(client=False)
    seen = joined(line.request(1))
    line.connection.abort("krun stops")
    assert seen.story == ["failed: krun stops"]
    assert line.wire.aborted
    line.lose()
    assert line.lost == 1


# GOAWAY.


async def test_streams_that_a_goaway_leaves_out() -> None:
    line = Line(client=True)
    kept, left_out = joined(line.connection.open(POST)), joined(line.connection.open(POST))
    await line.sent()
    line.get(goaway(1, frames.NO_ERROR))
    assert left_out.story == ["failed: stream not taken, GOAWAY: NO_ERROR"]
    assert await line.sent() == ["RST_STREAM 3 CANCEL"]
    assert (line.connection.room, line.connection.usable) == (0, False)
    line.get(headers(1, OK), data(1, b"goes on"))
    assert kept.story == [b"goes on"]
    assert not line.wire.ended


async def test_a_goaway_that_leaves_out_nothing_and_then_one_that_does() -> None:
    line = Line(client=True)
    first, second = joined(line.connection.open(POST)), joined(line.connection.open(POST))
    line.get(goaway(frames.MAX_STREAM_ID))
    assert (first.story, second.story) == ([], [])
    line.get(goaway(1))
    assert (first.story, second.story) == ([], ["failed: stream not taken, GOAWAY: NO_ERROR"])


async def test_a_client_closes_after_goaway_with_its_last_stream() -> None:
    line = Line(client=True)
    stream = line.connection.open(POST)
    line.get(goaway(1), headers(1, OK), data(1, b"x", end=True))
    assert not line.wire.ended
    stream.write(b"last words")
    stream.write_eof()
    assert line.wire.ended
    assert (await line.sent())[1:] == ["DATA 1 b'last words'", "DATA 1 b'' END"]


async def test_a_client_without_streams_closes_on_goaway() -> None:
    line = Line(client=True)
    line.get(goaway(0))
    assert line.wire.ended


async def test_a_server_goes_on_after_a_clients_goaway() -> None:
    line = Line(client=False)
    line.get(goaway(0))
    line.request(1)
    assert not line.wire.ended


# Closing.


async def test_drain() -> None:
    line = Line(client=False)
    stream = line.request(1)
    line.connection.drain()
    assert await line.sent() == ANNOUNCED
    line.get(goaway_seen())
    assert await line.sent() == ["GOAWAY 1 NO_ERROR"]
    line.get(headers(3, POST), data(3, b"x"), data(1, b"y", end=True))
    assert len(line.requests) == 1
    assert await line.sent() == ["RST_STREAM 3 REFUSED_STREAM"]
    stream.respond(OK)
    stream.write(b"z")
    assert not line.wire.ended
    stream.write_eof()
    assert line.wire.ended
    assert await line.sent() == ["HEADERS 1 :status=200", "DATA 1 b'z'", "DATA 1 b'' END"]


async def test_a_stream_that_is_on_its_way_when_a_drain_begins_is_served() -> None:
    """RFC 9113 section 6.8. Nothing is open meanwhile, and yet the connection is."""
    line = Line(client=False)
    line.connection.drain()
    line.connection.drain()
    assert await line.sent() == ANNOUNCED
    assert not line.wire.ended
    stream = line.request(1, end=True)
    line.get(headers(3, POST, end=True), goaway_seen(), headers(5, POST))
    late = line.requests[-1]
    assert [request.id for request in line.requests] == [1, 3, 5], "before the second GOAWAY none is refused"
    assert await line.sent() == ["GOAWAY 5 NO_ERROR"]
    for request in line.requests[1:]:
        line.connection.reset(request._state, frames.CANCEL)
    assert late.over
    stream.respond(OK)
    assert not line.wire.ended
    stream.write_eof()
    assert line.wire.ended


@hasty
async def test_a_peer_that_does_not_say_that_it_has_seen_the_goaway() -> None:
    line = Line(client=False)
    started = asyncio.get_running_loop().time()
    line.connection.drain()
    await asyncio.sleep(GOAWAY_SEEN_S - 0.1)
    assert not line.wire.ended
    line.wire.take()
    line.request(1)
    await asyncio.sleep(0.2)
    assert await line.sent() == ["GOAWAY 1 NO_ERROR"]
    line.get(goaway_seen(), headers(3, POST))
    assert await line.sent() == ["RST_STREAM 3 REFUSED_STREAM"]
    assert asyncio.get_running_loop().time() - started == pytest.approx(GOAWAY_SEEN_S, abs=0.5)
    line.lose()


async def test_drain_without_streams_closes_once_the_peer_knows() -> None:
    line = Line(client=False)
    line.connection.drain()
    assert await line.sent() == ANNOUNCED
    assert not line.wire.ended
    line.get(goaway_seen())
    assert line.wire.ended
    assert await line.sent() == ["GOAWAY 0 NO_ERROR"]


async def test_a_client_opens_all_streams_itself_and_drains_at_once() -> None:
    line = Line(client=True)
    line.connection.drain()
    assert await line.sent() == ["GOAWAY 0 NO_ERROR"]
    assert line.wire.ended


@hasty
async def test_drain_before_there_is_a_transport() -> None:
    connection = Connection(client=False)
    connection.drain()
    await asyncio.sleep(10 * GOAWAY_SEEN_S)
    wire = Wire()
    connection.connection_made(wire)
    assert read(wire.take())[-2:] == ANNOUNCED
    feed(connection, PREFACE + settings() + headers(1, POST) + goaway_seen())
    assert not wire.ended
    feed(connection, reset(1, frames.CANCEL))
    assert wire.ended
    connection.connection_lost(None)


async def test_a_client_leaves_at_the_first_of_two_goaways() -> None:
    """It has nothing on its way, so no more is to be waited for."""
    line = Line(client=True)
    stream = line.connection.open(POST)
    await line.sent()
    line.get(goaway(LAST_OF_ALL), ping(b"goaway\0\0"))
    assert not (line.connection.usable or stream.over)
    assert await line.sent() == ["PING ACK b'goaway\\x00\\x00'"]
    line.get(goaway(1), headers(1, OK), data(1, b"x", end=True))
    stream.write_eof()
    assert line.wire.ended


async def test_what_a_peer_still_sends_to_a_drained_connection() -> None:
    """The transport has ended: nothing may be written, and nothing pile up."""
    line = drained(Line(client=False))
    await line.sent()
    line.get(*[headers(number, POST) for number in range(1, 2001, 2)], *[ping(b"12345678")] * 1000)
    assert await line.sent() == []
    assert line.connection.session.pending_bytes == 0
    assert line.connection.eof_received() is False


async def test_waiting_for_the_end() -> None:
    line = Line(client=True)
    line.connection.close()
    assert not await line.connection.wait_closed(0.001)
    waiting = spawn(line.connection.wait_closed(PATIENCE_S), name="wait")
    await asyncio.sleep(0)
    line.lose()
    assert await waiting
    assert await line.connection.wait_closed(0)


async def test_a_ping_and_what_comes_back() -> None:
    line = Line(client=True)
    before = line.connection.heard_at
    line.connection.ping()
    assert (await line.sent())[0].startswith("PING")
    await until(lambda: asyncio.get_running_loop().time() > before)
    assert line.connection.heard_at == before
    line.get(ping(bytes(8), ack=True))
    assert line.connection.heard_at > before


async def test_stream_numbers_that_are_used_up() -> None:
    line = Line(client=True)
    line.connection.session._streams.newest = frames.MAX_STREAM_ID - 2
    assert (line.connection.usable, line.connection.room) == (False, 0)


async def test_close_breaks_what_is_open() -> None:
    line = Line(client=True)
    seen = joined(line.connection.open(POST))
    await line.sent()
    line.connection.close()
    assert seen.story == [f"failed: connection to {PEER_NAME} closed by us"]
    assert await line.sent() == ["GOAWAY 0 NO_ERROR"]
    assert line.wire.ended
    assert (line.connection.usable, line.connection.room) == (False, 0)
    line.connection.close()
    line.get(frame(frames.DATA, 0, 0))
    assert not line.connection.session.broken, "what still comes is not even looked at"
    line.lose()
    line.connection.close()
    assert line.lost == 1


async def test_tls_ends_with_its_own_farewell() -> None:
    line = drained(Line(client=False, half_close=False))
    assert (line.wire.closed, line.wire.ended) == (True, False)


@hasty
async def test_a_peer_that_never_closes_is_reset() -> None:
    line = drained(Line(client=False))
    assert await gone_after(line) == pytest.approx(CLOSE_TIMEOUT_S, abs=0.5)


@hasty
async def test_a_peer_that_takes_its_time_is_waited_for() -> None:
    line = Line(client=False)
    line.wire.unsent = 3000
    drained(line)
    for seconds in (20, 40, 70):
        asyncio.get_running_loop().call_later(
            seconds, setattr, line.wire, "unsent", line.wire.unsent - seconds
        )
    assert await gone_after(line) == pytest.approx(4 * CLOSE_TIMEOUT_S, abs=1)


async def gone_after(line: Line) -> float:
    """Seconds until the transport is aborted."""
    started = asyncio.get_running_loop().time()
    await line.wire.gone.wait()
    return asyncio.get_running_loop().time() - started


@hasty
@pytest.mark.parametrize("drained_before", [False, True])
async def test_a_peer_at_fault_has_its_place_for_a_moment_only(drained_before: bool) -> None:
    """However much it sends, and however little it takes."""
    line = Line(client=False)
    if drained_before:
        drained(line)
        line.wire.ended = False  # so that more can be seen to be written
    line.wire.unsent = 3000
    asyncio.get_running_loop().call_later(FAULT_LINGER_S / 2, setattr, line.wire, "unsent", 2000)
    line.get(*[ping(b"12345678")] * 1500)
    assert line.connection.lost
    line.get(*[ping(b"12345678")] * 1500)
    assert await gone_after(line) == pytest.approx(FAULT_LINGER_S, abs=0.5)


@hasty
async def test_so_has_a_peer_that_is_expelled() -> None:
    line = Line(client=False)
    line.connection.expel(RevokedError("revoked"))
    assert await line.sent() == ["GOAWAY 0 INADEQUATE_SECURITY"]
    assert await gone_after(line) == pytest.approx(FAULT_LINGER_S, abs=0.5)


@hasty
async def test_a_peer_that_closes_is_not_reset() -> None:
    line = drained(Line(client=False))
    line.lose()
    line.wire.closed = False
    await asyncio.sleep(2 * CLOSE_TIMEOUT_S)
    assert not line.wire.aborted


async def test_the_last_bytes_arrive_while_the_peer_goes_on_sending() -> None:
    """A closed socket answers with RST, which destroys what is on its way: so ours stays open for reading."""
    body = bytes(range(256)) * 20_000
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []

    def take(stream: Stream) -> None:
        stream.respond(OK)
        stream.write(body)
        stream.write_eof()
        connections[0].drain()

    def accept() -> Connection:
        connections.append(Connection(client=False, on_request=take, on_lost=connections.remove))
        return connections[0]

    server = await loop.create_server(accept, "127.0.0.1", 0)
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, server.sockets[0].getsockname())
        start = PREFACE + settings({INITIAL_WINDOW: 1 << 30}) + window(0, 1 << 30) + headers(1, GET, end=True)
        await loop.sock_sendall(sock, start + goaway_seen())
        await until(lambda: bool(connections) and connections[0]._ended)
        received = bytearray()
        async with asyncio.timeout(20):
            while piece := await loop.sock_recv(sock, 1 << 16):
                received += piece
                await loop.sock_sendall(sock, window(0, 1))
    assert body_of(bytes(received)) == body
    await until(lambda: not connections)
    server.close()


def body_of(wire: bytes) -> bytes:
    """The payload of all DATA frames."""
    body = b""
    while wire:
        size, kind, _, _ = frames.read_header(wire, 0)
        if kind == frames.DATA:
            body += wire[9 : 9 + size]
        wire = wire[9 + size :]
    return body


# Congestion, and whose turn it is.


async def test_a_congested_transport_stops_the_streams() -> None:
    line = Line(client=False, peer_settings={INITIAL_WINDOW: 1 << 20})
    line.get(window(0, 1 << 20))
    seen = [joined(line.request(number)) for number in (1, 3)]
    first, second = line.requests
    line.connection.pause_writing()
    first.write(b"a" * 100)
    assert seen[0].story == ["full"], "its source is to pause"
    first.write(b"b" * 100)
    assert len(first.waiting) == 100, "one write goes into the transport, what was under way waits here"
    await line.sent()
    line.connection.resume_writing()
    assert seen[0].story == ["full", "drained"]
    assert await line.sent() == [f"DATA 1 {b'b' * 100!r}"]
    second.write(b"c")
    assert seen[1].story == []
    assert await line.sent() == ["DATA 3 b'c'"]


async def test_a_large_read_waits_while_the_transport_is_congested() -> None:
    line = Line(client=False, peer_settings={INITIAL_WINDOW: 1 << 20})
    line.get(window(0, 1 << 20))
    seen = joined(line.request())
    stream = line.requests[0]
    line.connection.pause_writing()
    stream.write(bytes(BULK_READ_BYTES))
    assert seen.story == ["full"]
    assert len(stream.waiting) == BULK_READ_BYTES
    assert await line.sent() == []
    line.connection.resume_writing()
    assert not stream.waiting
    assert len(await line.sent()) == 16
    assert seen.story == ["full", "drained"]


async def test_what_nobody_will_read_does_not_wait_for_room() -> None:
    line = Line(client=False)
    stream = line.request(1)
    line.connection.pause_writing()
    line.get(reset(1, frames.CANCEL))
    stream.write(bytes(BULK_READ_BYTES))
    assert not stream.waiting


async def test_streams_take_turns_at_a_window() -> None:
    line = Line(client=True, peer_settings={INITIAL_WINDOW: 1 << 20})
    streams = [line.connection.open(POST) for _ in range(3)]
    streams[0].write(bytes(WINDOW))
    for stream in streams:
        stream.write(bytes((stream.id,)) * 4)
    await line.sent()
    order = []
    for _ in range(6):
        line.get(window(0, 2))
        order += [sent.split()[1] for sent in await line.sent()]
    assert order == ["1", "3", "5", "1", "3", "5"]


class Source(Seen):
    """A relay's end whose other leg always has more for `stream`."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def drained(self, leg: Leg) -> None:
        self._stream.write(bytes(READ_BYTES))


async def test_streams_take_turns_at_a_transport() -> None:
    line = Line(client=True, peer_settings={INITIAL_WINDOW: 1 << 30})
    line.get(window(0, 1 << 30))
    streams = [line.connection.open(POST) for _ in range(3)]
    line.wire.full = line.connection.pause_writing
    for stream in streams:
        stream.join(Source(stream))
        stream.write(bytes(READ_BYTES))
    await line.sent()
    order = []
    for _ in range(6):
        line.connection.resume_writing()
        order += sorted({sent.split()[1] for sent in await line.sent()})
    assert order == ["1", "3", "5", "1", "3", "5"]


async def test_a_stream_waits_for_its_own_window_without_holding_up_others() -> None:
    line = Line(client=True)
    line.get(window(0, 1 << 20))
    stuck, free = line.connection.open(POST), line.connection.open(POST)
    stuck.write(bytes(WINDOW + 1))
    await line.sent()
    free.write(b"x")
    assert await line.sent() == ["DATA 3 b'x'"]
    line.get(window(0, 5))
    assert await line.sent() == []
    line.get(window(1, 1))
    assert await line.sent() == ["DATA 1 b'\\x00'"]


async def test_credit_is_given_for_what_is_passed_on() -> None:
    line = Line(client=False, limits=SMALL)
    joined(line.request(1))
    line.get(data(1, bytes(16384)))
    assert await line.sent() == ["WINDOW_UPDATE 1 +16384"]
    line.get(data(1, bytes(16384)))
    assert await line.sent() == ["WINDOW_UPDATE 1 +16384", "WINDOW_UPDATE 0 +32768"]


async def test_a_peer_that_asks_and_does_not_read() -> None:
    line = Line(client=False, limits=SessionLimits(max_streams=1))
    seen = joined(line.request(1))
    line.connection.pause_writing()
    limit = CONGESTED_BYTES + BULK_READ_BYTES + READ_BYTES
    answer_bytes = len(ping(b"12345678"))
    line.wire.unsent = limit - answer_bytes
    line.get(ping(b"12345678"))
    assert not line.wire.aborted
    assert await line.sent() == [], "a small answer waits in the session, in one piece with others"
    line.get(data(1, b"no answer to this"))
    assert not line.wire.aborted
    line.get(ping(b"12345678"))
    assert line.wire.aborted
    assert seen.story[-1] == f"failed: {PEER_NAME} does not read: {limit + answer_bytes} bytes unsent"
    line.lose()


async def test_what_is_small_waits_in_one_piece_until_the_transport_has_sent_what_it_has() -> None:
    line = Line(client=False)
    line.wire.unsent = UNSENT_BYTES + 1
    for number in range(100):
        line.get(ping(number.to_bytes(8, "big")))
        assert await line.sent() == []
    assert line.wire.marks == (0, None)
    line.connection.pause_writing()  # as a transport says when its mark is lowered
    assert not line.connection.congested
    line.wire.unsent = 0
    line.connection.resume_writing()
    assert len(line.wire.writes) == 1
    assert line.wire.marks == (CONGESTED_BYTES, None)
    assert len(await line.sent()) == 100
    line.get(ping(b"12345678"))
    assert len(await line.sent()) == 1, "from then on as ever"


async def test_what_waits_in_the_session_counts_towards_congestion() -> None:
    line = Line(client=False)
    stream = line.request(1)
    line.wire.unsent = CONGESTED_BYTES - 100
    for _ in range(10):
        stream.write(b"0123456789")
        await line.sent()
    assert line.connection.congested
    assert line.connection.buffered_bytes > CONGESTED_BYTES
    line.wire.unsent = 0
    line.connection.resume_writing()
    assert not line.connection.congested
    sent = await line.sent()
    assert sum(frame.count("0123456789") for frame in sent) == 10
    assert {frame[:6] for frame in sent} == {"DATA 1"}


# Deadlines, and turns between connections.


@hasty
@pytest.mark.parametrize("begun", [headers(3, POST)[:15], headers(3, POST, whole=False)])
async def test_a_rest_that_does_not_come(begun: bytes) -> None:
    line = Line(client=False)
    seen = joined(line.request(1))
    line.get(ping(b"12345678"), begun)
    assert await gone_after(line) == pytest.approx(FRAME_TIMEOUT_S, abs=0.5)
    assert seen.story == [f"failed: no rest of a frame from {PEER_NAME} within 20 s"]
    line.lose()


@hasty
async def test_a_rest_that_comes_in_time_and_another_one() -> None:
    line = Line(client=False)
    line.request(1)
    wire = headers(3, POST)
    line.get(wire[:15])
    await asyncio.sleep(FRAME_TIMEOUT_S * 0.9)
    line.get(wire[15:], ping(b"12345678")[:5])
    await asyncio.sleep(FRAME_TIMEOUT_S * 0.9)
    assert not line.wire.aborted
    line.get(ping(b"12345678")[5:])
    line.get(data(1, b"x" * 100)[:50])
    await asyncio.sleep(FRAME_TIMEOUT_S * 5)
    assert not line.wire.aborted, "DATA may stop in the middle for as long as the network does"
    line.lose()


@hasty
async def test_a_peer_that_takes_nothing_and_says_nothing() -> None:
    line = Line(client=False, peer_settings={INITIAL_WINDOW: 0})
    stream = line.request(1)
    seen = joined(stream)
    stream.write(b"x")
    stalled_s = WHEN_STALLED.interval_s + WHEN_STALLED.timeout_s
    assert await gone_after(line) == pytest.approx(stalled_s, abs=0.5)
    assert (await line.sent())[-1].startswith("PING ")
    assert seen.story[-1] == f"failed: {PEER_NAME} has not answered PING within 20 s"
    line.lose()


@hasty
async def test_a_transport_that_takes_nothing() -> None:
    line = Line(client=False)
    line.connection.pause_writing()
    await line.wire.gone.wait()
    line.lose()


@hasty
async def test_a_reader_that_pauses_and_is_there() -> None:
    """Ctrl-S in a terminal, a full player: it takes nothing for an hour and answers every PING."""
    line = Line(client=False, peer_settings={INITIAL_WINDOW: 0})
    stream = line.request(1)
    stream.write(b"x")
    loop = asyncio.get_running_loop()
    started = loop.time()
    pings = 0
    while loop.time() - started < 3600:
        await asyncio.sleep(10)
        asked = sum(said.startswith("PING b") for said in await line.sent())
        pings += asked
        line.get(ping(b"there\0\0\0", ack=True) * asked)
    assert not line.wire.aborted
    assert pings <= 3600 / WHEN_STALLED.interval_s + 1
    line.get(window(1, 1))
    assert await line.sent() == ["DATA 1 b'x'"]
    line.lose()


@hasty
async def test_an_idle_connection_is_closed_gently() -> None:
    connection = Connection(client=False, idle_timeout_s=100)
    wire = Wire()
    connection.connection_made(wire)
    feed(connection, PREFACE + settings() + headers(1, POST))
    await asyncio.sleep(1000)
    assert not wire.ended
    wire.take()
    feed(connection, reset(1, frames.CANCEL))
    await asyncio.sleep(99)
    assert not wire.ended
    await asyncio.sleep(GOAWAY_SEEN_S + 1)
    feed(connection, goaway_seen())
    assert wire.ended
    assert read(wire.take()) == [*ANNOUNCED, "GOAWAY 1 NO_ERROR"]
    connection.connection_lost(None)


async def test_a_front_end_is_given_notice_and_told_why_at_the_end() -> None:
    floods = FloodLimits(resets=2, resets_per_s=0, front_end=True)
    line = Line(client=False, limits=SessionLimits(floods=floods))
    innocent = line.request(1)
    for number in (3, 5, 7):
        line.get(headers(number, POST), reset(number, frames.CANCEL))
    assert await line.sent() == ["GOAWAY 7 NO_ERROR"]
    assert not line.connection.usable
    assert not line.wire.ended
    innocent.respond(OK)
    innocent.write(b"fine")
    line.get(data(1, end=True))
    innocent.write_eof()
    assert await line.sent() == [
        "HEADERS 1 :status=200",
        "DATA 1 b'fine'",
        "DATA 1 b'' END",
        "GOAWAY 7 ENHANCE_YOUR_CALM",
    ]
    assert line.wire.ended


async def test_a_header_list_that_is_too_large_is_answered() -> None:
    line = Line(client=False, limits=SessionLimits(max_header_list_bytes=1000))
    first = joined(line.request(1))
    line.get(headers(3, [*POST, (b"x", b"y" * 1000)], end=True), data(1, b"fine"))
    said = await line.sent()
    assert said[0].startswith("HEADERS 3 :status=431")
    assert "headers of 1212 bytes, the limit is 1000" in said[1]
    assert (len(line.requests), first.story) == (1, [b"fine"])
    line.lose()


async def test_nobody_is_asked_to_answer_on_a_connection_that_has_ended() -> None:
    line = Line(client=False)
    line.get(headers(1, POST), headers(3, POST), frame(frames.DATA, 0, 0))
    assert line.requests == []


async def test_a_read_that_took_long_lets_the_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(client=False)
    joined(line.request(1))
    full = data(1, b"x" * (16384 - 9)) * 3 + data(1, b"x" * (READ_BYTES - 3 * 16384 - 9))
    assert len(full) == READ_BYTES
    line.get(full)
    assert line.wire.reading == []
    monkeypatch.setattr("shared.net.http2.connection.FAIR_S", 0.0)
    line.get(full)
    assert line.wire.reading == ["paused"]
    await asyncio.sleep(0)
    assert line.wire.reading == ["paused", "resumed"]
    line.get(data(1, b"x"))
    assert len(line.wire.reading) == 2, "nothing more is waiting to be read"
    line.get(full)
    line.connection.abort("the test is over")
    await asyncio.sleep(0)
    assert line.wire.reading[2:] == ["paused"]
    line.lose()
