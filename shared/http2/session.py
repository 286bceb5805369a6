"""One HTTP/2 connection as bytes in, events and bytes out (RFC 9113).

The rules:

1. The owner calls `receive_data`, then takes `events()`, then writes `data_to_send()` to the network. Every
   method that sends only appends to what `data_to_send` returns next, in the order of the calls.
2. Flow control is ours alone, both ways. Bytes received count as held until the owner calls `consumed`.
3. After GOAWAY, in either direction, open streams go on. A server says it in two steps (`announce_goaway`),
   so that no stream is lost that was on its way; in one (`goaway`) only to a peer that is at fault.
4. What a stream does wrong costs the stream, as far as RFC 9113 allows; what the connection does wrong costs
   it with all its tunnels. What is too much is an error of the connection (`flood_guard.py`).
5. A peer that opens too many streams in vain is first given notice, if it may be a front end that passes on
   what others do (`FloodLimits.front_end`): GOAWAY, after which open streams go on and new ones are refused.
6. A connection error raises `SessionError` from `receive_data` once; the events up to it can still be taken,
   GOAWAY is in `data_to_send`, and all that is left to do is to write that and close. Whatever is sent
   afterwards is dropped.

A session is made of layers, each of which knows only those below it:

    Session          frames of the connection: SETTINGS, PING, GOAWAY, WINDOW_UPDATE; and RST_STREAM
    HeaderReceiver   requests, answers, trailers
    DataReceiver     DATA
    StreamSender     what we send
    StreamTable      the streams, how they end, what they share

What is not here: sockets, deadlines, which stream gets what (`shared/net/http2/connection.py`).
"""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import (
    GoAwayReceived,
    GoAwaySeen,
    SettingsReceived,
    StreamReset,
    WindowOpened,
)
from shared.http2.flood_guard import FloodError
from shared.http2.frame_rules import SessionError, check, depends_on
from shared.http2.frame_scanner import FrameScanner
from shared.http2.header_receiver import HeaderReceiver
from shared.http2.session_limits import SessionLimits
from shared.http2.stream_state import End, StreamState
from shared.http2.stream_table import GOAWAY_PING, GoAway

__all__ = ["GoAway", "Session", "SessionError", "SessionLimits", "StreamState"]


class Session(HeaderReceiver):
    """One end of an HTTP/2 connection; see the module's rules."""

    __slots__ = ("_scanner",)

    def __init__(self, *, client: bool, limits: SessionLimits | None = None) -> None:
        super().__init__(client=client, limits=limits)
        self._scanner = FrameScanner(preface=not client, max_frame_bytes=self.limits.max_frame_bytes)

    @property
    def heard_at(self) -> float:
        """The `now` of the last `receive_data`; 0 before the first."""
        return self._now

    @property
    def unfinished_since(self) -> float | None:
        """When what has come of a frame or a header block should have been followed by the rest; None if
        nothing is unfinished, or only DATA, which may stop in the middle for as long as the network does."""
        return self._scanner.since

    def receive_data(self, data: bytes | bytearray | memoryview, now: float = 0.0) -> None:
        """Takes what the network delivered; `now` is the time in seconds of a steady clock, by which floods
        are told from honest use.

        Raises:
            SessionError: the connection is over (rule 6).
        """
        if self.broken:
            return
        self._now = now
        try:
            self._scanner.scan(memoryview(data), self, now)
        except SessionError as error:
            self._break(error)
            raise
        except FloodError as flood:
            too_much = SessionError(str(flood), frames.ENHANCE_YOUR_CALM)
            self._break(too_much)
            raise too_much from flood

    def take_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> bool:
        """What the scanner tells of frames other than DATA."""
        if not self.peer_settings_seen and (kind != frames.SETTINGS or flags & frames.FLAG_ACK):
            raise SessionError("the first frame is not SETTINGS", frames.PROTOCOL_ERROR)
        self._guard.control_frame(kind, flags, len(payload), self._now)
        if self._in_headers and kind != frames.CONTINUATION:
            raise SessionError("another frame within a header block", frames.PROTOCOL_ERROR)
        if kind > frames.CONTINUATION:
            return False  # an extension's frame: ignored (RFC 9113 section 5.5)
        check(kind, flags, stream_id, len(payload))
        if kind == frames.HEADERS:
            self._headers_frame(flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, int.from_bytes(payload, "big") & frames.MAX_WINDOW)
        elif kind == frames.RST_STREAM:
            self._rst_stream(stream_id, int.from_bytes(payload, "big"))
        elif kind == frames.PING:
            if not flags & frames.FLAG_ACK:
                self._out += frames.ping(payload, ack=True)
            elif payload == GOAWAY_PING and self.goaway_said is GoAway.ANNOUNCED:
                self._events.append(GoAwaySeen())
        elif kind == frames.CONTINUATION:
            if not self._in_headers:
                raise SessionError("CONTINUATION of nothing", frames.PROTOCOL_ERROR)
            self._continuation(flags, stream_id, payload)
        elif kind == frames.SETTINGS:
            if not flags & frames.FLAG_ACK:
                self._settings(payload)
        elif kind == frames.GOAWAY:
            self._goaway(payload)
        elif kind == frames.PRIORITY:
            depends_on(stream_id, payload)
        else:
            raise SessionError("PUSH_PROMISE, which nobody has allowed", frames.PROTOCOL_ERROR)
        return self._in_headers

    def _rst_stream(self, stream_id: int, code: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            self._late_reset(stream_id)
            return
        self._past.reset_by_peer(stream_id)
        self._finish(stream)
        self._events.append(StreamReset(stream, code, by_peer=True))
        if not self.client and not stream.answered:
            self._stream_wasted()

    def _late_reset(self, stream_id: int) -> None:
        """RST_STREAM on no open stream: counted if it is for one that is over, but for the one that may have
        crossed the end of it, as happens whenever a client leaves as its answer ends."""
        if self._is_idle(stream_id):
            raise SessionError("RST_STREAM on an idle stream", frames.PROTOCOL_ERROR)
        end = self._past.end_of(stream_id)
        if End.CROSSED in end:
            self._past.crossing_has_come(stream_id)
        elif not (self.client and End.RESET_HERE in end):
            self._guard.stale(self._now)

    def _window_update(self, stream_id: int, increment: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.send_window += increment
            if stream.send_window > frames.MAX_WINDOW:
                self._stream_error(stream, frames.FLOW_CONTROL_ERROR)
            elif not increment:  # an error of the stream only (RFC 9113 section 6.9)
                self._stream_error(stream, frames.PROTOCOL_ERROR)
            else:
                self._events.append(WindowOpened(stream))
        elif not increment:
            raise SessionError("WINDOW_UPDATE of 0 bytes", frames.PROTOCOL_ERROR)
        elif not stream_id:
            self.send_window += increment
            if self.send_window > frames.MAX_WINDOW:
                text = "the peer opened the connection's window too far"
                raise SessionError(text, frames.FLOW_CONTROL_ERROR)
            self._events.append(WindowOpened(None))
        elif self._is_idle(stream_id):
            raise SessionError("WINDOW_UPDATE on an idle stream", frames.PROTOCOL_ERROR)

    def _settings(self, payload: memoryview) -> None:
        before = self._peer.initial_window_bytes
        if self._peer.take(payload, of_server=self.client):
            self._guard.stream_windows(len(self.streams), self._now)
            delta = self._peer.initial_window_bytes - before
            for stream in self.streams.values():
                stream.send_window += delta
                if stream.send_window > frames.MAX_WINDOW:
                    raise SessionError("SETTINGS opened a window too far", frames.FLOW_CONTROL_ERROR)
            if delta > 0 and self.streams:
                self._events.append(WindowOpened(None))
        self._encoder.limit_table(self._peer.header_table_bytes)
        self.peer_settings_seen = True
        self._out += frames.SETTINGS_ACK
        self._events.append(SettingsReceived())

    def _goaway(self, payload: memoryview) -> None:
        self.goaway_received = True
        last = int.from_bytes(payload[:4], "big") & frames.MAX_STREAM_ID
        self._events.append(GoAwayReceived(last, int.from_bytes(payload[4:8], "big")))
