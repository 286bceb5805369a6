"""The session against a plain h2 connection, as its client and as its server, which checks every frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import frames
from shared.http2.events import DataReceived, Event
from shared.http2.session import (
    GoAwayState,
    Session,
    SessionLimits,
    SessionStream,
)
from tests.shared.http2.dialogue import (
    CONNECT,
    OK,
    POST,
    SMALL,
    TRAILERS,
    Told,
    told,
)


class Pair:
    """A session and h2 as each other's peer. `exchange` carries bytes to and fro until both are silent."""

    def __init__(self, *, client: bool, limits: SessionLimits | None = None) -> None:
        self.session = Session(client=client, limits=limits)
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=not client, header_encoding=None)
        )
        self.h2.initiate_connection()
        self.told: list[Told] = []
        self.h2_told: list[h2.events.Event] = []
        self.received: dict[int, bytearray] = {}
        self.h2_received: dict[int, bytearray] = {}
        self.exchange()

    def exchange(self) -> None:
        while True:
            ours, theirs = bytes(self.session.data_to_send()), self.h2.data_to_send()
            if not ours and not theirs:
                return
            for event in self.h2.receive_data(ours):
                self._h2_takes(event)
            self.session.receive_data(theirs)
            self._session_takes(self.session.events())

    def _h2_takes(self, event: h2.events.Event) -> None:
        self.h2_told.append(event)
        if isinstance(event, h2.events.DataReceived):
            self.h2_received.setdefault(event.stream_id, bytearray()).extend(event.data or b"")
            if event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    def _session_takes(self, events: list[Event]) -> None:
        self.told = told([*events])
        for event in events:
            if isinstance(event, DataReceived):
                self.received.setdefault(event.stream.id, bytearray()).extend(event.data)
                self.session.consumed(event.stream, len(event.data))

    def saw(self, kind: type) -> bool:
        """Whether h2 has told of such an event since the last question."""
        seen = any(isinstance(event, kind) for event in self.h2_told)
        self.h2_told.clear()
        return seen

    # Whole bodies, as the windows allow.

    def send(self, stream: SessionStream, body: bytes) -> None:
        """From the session to h2."""
        view = memoryview(body)
        while view:
            sent = self.session.send_data(stream, view)
            assert sent, "the window never opens"
            view = view[sent:]
            self.exchange()

    def h2_send(self, number: int, body: bytes, *, frame_bytes: int = 16384, pad: int | None = None) -> None:
        """From h2 to the session."""
        overhead = 0 if pad is None else pad + 1
        view = memoryview(body)
        while view:
            room = min(self.h2.local_flow_control_window(number), frame_bytes) - overhead
            assert room > 0, "the window never opens"
            self.h2.send_data(number, bytes(view[:room]), pad_length=pad)
            view = view[room:]
            self.exchange()


def client(limits: SessionLimits | None = None) -> tuple[Pair, SessionStream]:
    """A client whose tunnel h2 has accepted."""
    pair = Pair(client=True, limits=limits)
    stream = pair.session.open_stream(POST)
    pair.exchange()
    assert pair.saw(h2.events.RequestReceived)
    pair.h2.send_headers(stream.id, OK)
    pair.exchange()
    assert pair.told == [("response", stream.id, b"200")]
    return pair, stream


def server(limits: SessionLimits | None = None) -> tuple[Pair, SessionStream]:
    """A server that has accepted h2's tunnel."""
    pair = Pair(client=False, limits=limits)
    pair.h2.send_headers(1, POST)
    pair.exchange()
    assert pair.told == [("request", 1, b"POST", False)]
    stream = pair.session.streams[1]
    pair.session.send_headers(stream, OK)
    pair.exchange()
    assert pair.saw(h2.events.ResponseReceived)
    return pair, stream


Tunnel = Callable[..., tuple[Pair, SessionStream]]

either_end = pytest.mark.parametrize("tunnel", [client, server])


def test_settings_both_ways() -> None:
    for pair in (Pair(client=True), Pair(client=False)):
        assert pair.session.peer_settings_seen
        assert pair.saw(h2.events.RemoteSettingsChanged)
        remote = pair.h2.remote_settings
        assert (remote.initial_window_size, remote.max_frame_size) == (1 << 20, 16384)
        assert (remote.max_concurrent_streams, remote.max_header_list_size) == (250, 65536)
        assert pair.h2.outbound_flow_control_window == 16 << 20
        assert remote.enable_push == 0, "said by a client, the default of a server's peer"


@either_end
def test_both_directions_carry_more_than_their_windows(tunnel: Tunnel) -> None:
    pair, stream = tunnel(SMALL)
    up, down = bytes(range(256)) * 1500, bytes(reversed(range(256))) * 1500
    pair.send(stream, up)
    pair.h2_send(stream.id, down)
    assert pair.h2_received[stream.id] == up
    assert pair.received[stream.id] == down


@either_end
def test_padded_bodies(tunnel: Tunnel) -> None:
    pair, stream = tunnel(SMALL)
    body = bytes(200_000)
    pair.h2_send(stream.id, body, pad=255, frame_bytes=3000)
    assert pair.received[stream.id] == body


@either_end
@pytest.mark.parametrize("ours_first", [True, False])
def test_ends_in_either_order(tunnel: Tunnel, ours_first: bool) -> None:
    pair, stream = tunnel()
    if ours_first:
        pair.session.end_stream(stream)
        pair.exchange()
        assert pair.saw(h2.events.StreamEnded)
        pair.h2_send(stream.id, b"and still")
        assert pair.told == [("data", stream.id, b"and still")]
        pair.h2.end_stream(stream.id)
        pair.exchange()
    else:
        pair.h2.end_stream(stream.id)
        pair.exchange()
        assert pair.told == [("ended", stream.id)]
        pair.send(stream, b"and still")
        assert pair.h2_received[stream.id] == b"and still"
        pair.session.end_stream(stream)
        pair.exchange()
        assert pair.saw(h2.events.StreamEnded)
    assert stream.over
    assert pair.session.streams == {}
    assert (pair.h2.open_inbound_streams, pair.h2.open_outbound_streams) == (0, 0)


def test_trailers() -> None:
    pair, stream = client()
    pair.h2.send_headers(stream.id, TRAILERS, end_stream=True)
    pair.exchange()
    assert pair.told == [("trailers", stream.id, TRAILERS), ("ended", stream.id)]
    pair, stream = server()
    pair.session.send_headers(stream, TRAILERS, end_stream=True)
    pair.exchange()
    assert pair.saw(h2.events.TrailersReceived)


def test_connect() -> None:
    pair = Pair(client=True)
    stream = pair.session.open_stream(CONNECT)
    pair.exchange()
    pair.h2.send_headers(stream.id, OK)
    pair.exchange()
    pair.send(stream, b"up")
    pair.h2_send(stream.id, b"down")
    assert pair.h2_received[1] == b"up"
    assert pair.received[1] == b"down"


@either_end
def test_resets_both_ways(tunnel: Tunnel) -> None:
    pair, stream = tunnel()
    pair.session.reset(stream, frames.CANCEL)
    pair.exchange()
    assert pair.saw(h2.events.StreamReset)
    pair, stream = tunnel()
    pair.h2.reset_stream(stream.id, frames.CONNECT_ERROR)
    pair.session.receive_data(pair.h2.data_to_send())
    assert stream.over
    pair.exchange()


def test_the_first_of_two_goaways_leaves_no_stream_out() -> None:
    pair, _ = server()
    pair.session.announce_goaway()
    said = bytes(pair.session.data_to_send())
    first, second = said[:17], said[17:]
    (event,) = pair.h2.receive_data(first)
    assert isinstance(event, h2.events.ConnectionTerminated)
    assert (event.last_stream_id, event.error_code) == (2**31 - 1, 0)
    other = Pair(client=False)  # h2 takes no frame after a GOAWAY, RFC 9113 section 6.8 or not
    assert [type(event) for event in other.h2.receive_data(second)] == [h2.events.PingReceived]
    assert other.session.goaway_state is GoAwayState.UNSENT
    pair.session.receive_data(other.h2.data_to_send())
    assert told(pair.session.events()) == [("goaway seen",)]


lengths = st.integers(0, 100_000)
turns = st.lists(st.tuples(st.sampled_from(["ours", "theirs"]), st.integers(0, 2), lengths), max_size=12)


@given(turns, st.integers(1, 16384), st.none() | st.integers(0, 255))
def test_any_conversation_arrives(
    script: Iterable[tuple[str, int, int]], frame_bytes: int, pad: int | None
) -> None:
    pair = Pair(client=True, limits=SMALL)
    streams = [pair.session.open_stream(POST) for _ in range(3)]
    pair.exchange()
    for stream in streams:
        pair.h2.send_headers(stream.id, OK)
    pair.exchange()
    up: dict[int, bytes] = {stream.id: b"" for stream in streams}
    down = dict(up)
    for turn, (who, pick, size) in enumerate(script):
        body = bytes((turn,)) * size
        stream = streams[pick]
        if who == "ours":
            up[stream.id] += body
            pair.send(stream, body)
        else:
            down[stream.id] += body
            pair.h2_send(stream.id, body, frame_bytes=max(frame_bytes, 300), pad=pad)
    for stream in streams:
        pair.session.end_stream(stream)
        pair.h2.end_stream(stream.id)
    pair.exchange()
    assert {number: bytes(pair.h2_received.get(number, b"")) for number in up} == up
    assert {number: bytes(pair.received.get(number, b"")) for number in down} == down
    assert pair.session.streams == {}
