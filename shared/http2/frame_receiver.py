"""Frames other than DATA as a session receives them: those of the connection, RST_STREAM and WINDOW_UPDATE
here, header blocks by way of the `HeaderReceiver`."""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import GoAwayReceived, GoAwaySeen, SettingsReceived, StreamReset, WindowOpened
from shared.http2.faults import Faults
from shared.http2.flood_guard import FloodGuard
from shared.http2.frame_rules import SessionError, check, depends_on
from shared.http2.goaway import GOAWAY_PING, GoAway, GoAwayState
from shared.http2.header_encoder import HeaderEncoder
from shared.http2.header_receiver import HeaderReceiver
from shared.http2.output import Output
from shared.http2.past_streams import End
from shared.http2.peer_settings import PeerSettings
from shared.http2.session_stream import StreamState
from shared.http2.streams import Streams
from shared.http2.windows import Windows


class FrameReceiver:
    """Frames of a connection (`frame_scanner.FrameSink`)."""

    def __init__(
        self,
        output: Output,
        streams: Streams,
        windows: Windows,
        goaway: GoAway,
        faults: Faults,
        guard: FloodGuard,
        headers: HeaderReceiver,
        peer: PeerSettings,
        encoder: HeaderEncoder,
        *,
        client: bool,
    ) -> None:
        self._output = output
        self._streams = streams
        self._windows = windows
        self._goaway = goaway
        self._faults = faults
        self._guard = guard
        self._headers = headers
        self._peer = peer
        self._encoder = encoder
        self._client = client

    def receive_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        """A whole frame.

        Raises:
            SessionError, FloodError: the connection is over.
        """
        if not self._peer.seen and (kind != frames.SETTINGS or flags & frames.FLAG_ACK):
            raise SessionError("the first frame is not SETTINGS", frames.PROTOCOL_ERROR)
        self._guard.control_frame(kind, flags, len(payload))
        if self._headers.block_stream and kind != frames.CONTINUATION:
            raise SessionError("another frame within a header block", frames.PROTOCOL_ERROR)
        if kind > frames.CONTINUATION:
            return  # an extension's frame: ignored (RFC 9113 section 5.5)
        check(kind, flags, stream_id, len(payload))
        if kind == frames.HEADERS:
            self._headers.headers(flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, int.from_bytes(payload, "big") & frames.MAX_WINDOW)
        elif kind == frames.RST_STREAM:
            self._rst_stream(stream_id, int.from_bytes(payload, "big"))
        elif kind == frames.PING:
            if not flags & frames.FLAG_ACK:
                self._output.send(frames.ping(payload, ack=True))
            elif payload == GOAWAY_PING and self._goaway.state is GoAwayState.ANNOUNCED:
                self._output.events.append(GoAwaySeen())
        elif kind == frames.CONTINUATION:
            self._headers.continuation(flags, stream_id, payload)
        elif kind == frames.SETTINGS:
            if flags & frames.FLAG_ACK:
                self._windows.acknowledged()
            else:
                self._settings(payload)
        elif kind == frames.GOAWAY:
            self._goaway.received = True
            last = int.from_bytes(payload[:4], "big") & frames.MAX_STREAM_ID
            self._output.events.append(GoAwayReceived(last, int.from_bytes(payload[4:8], "big")))
        elif kind == frames.PRIORITY:
            depends_on(stream_id, payload)
        else:
            raise SessionError("PUSH_PROMISE, which nobody has allowed", frames.PROTOCOL_ERROR)

    def _rst_stream(self, stream_id: int, code: int) -> None:
        stream = self._streams.open.get(stream_id)
        if stream is None:
            self._late_reset(stream_id)
            return
        ended = stream.state is StreamState.HALF_CLOSED_LOCAL
        self._streams.reset_by_peer(stream)
        self._output.events.append(StreamReset(stream, code, by_peer=True, local_ended=ended))
        if not self._client and not stream.answered:
            self._faults.stream_wasted()

    def _late_reset(self, stream_id: int) -> None:
        """RST_STREAM on no open stream: counted if it is for one that is over, except the one that may have
        crossed the end of it, as happens whenever a client leaves as its answer ends."""
        if self._streams.is_idle(stream_id):
            raise SessionError("RST_STREAM on an idle stream", frames.PROTOCOL_ERROR)
        end = self._streams.past.end_of(stream_id)
        if End.CROSSED in end:
            self._streams.past.crossing_came(stream_id)
        elif not (self._client and End.RESET_HERE in end):
            self._guard.stale()

    def _window_update(self, stream_id: int, increment: int) -> None:
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            if not self._windows.opened(stream, increment):
                self._faults.stream_error(stream, frames.FLOW_CONTROL_ERROR)
            elif not increment:  # an error of the stream only (RFC 9113 section 6.9)
                self._faults.stream_error(stream, frames.PROTOCOL_ERROR)
            else:
                self._output.events.append(WindowOpened(stream))
        elif not increment:
            raise SessionError("WINDOW_UPDATE of 0 bytes", frames.PROTOCOL_ERROR)
        elif not stream_id:
            if not self._windows.opened(None, increment):
                text = "the peer opened the connection's window too far"
                raise SessionError(text, frames.FLOW_CONTROL_ERROR)
            self._output.events.append(WindowOpened(None))
        elif self._streams.is_idle(stream_id):
            raise SessionError("WINDOW_UPDATE on an idle stream", frames.PROTOCOL_ERROR)

    def _settings(self, payload: memoryview) -> None:
        before, streams = self._peer.initial_window_bytes, self._streams.open
        if self._peer.apply(payload, of_server=self._client):
            self._guard.stream_windows(len(streams))
            delta = self._peer.initial_window_bytes - before
            self._windows.resized(streams.values(), delta)
            if delta > 0 and streams:
                self._output.events.append(WindowOpened(None))
        self._encoder.limit_table(self._peer.header_table_bytes)
        self._peer.seen = True
        self._output.send(frames.SETTINGS_ACK)
        self._output.events.append(SettingsReceived())
