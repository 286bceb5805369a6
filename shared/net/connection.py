"""The protocol that runs an HTTP/2 session on a transport, TCP or TLS, either end.

Owned here: reading and writing the transport, handing the session's events to the streams, and which
streams wait for room. Frames and windows are `shared/wire/session.py`'s, a stream's bytes `stream.py`'s.

What the streams of one turn of the event loop send goes out in one write: fewer TLS records and system calls
under load, at the price of one callback. A stream's bytes wait in the stream itself once the transport is
congested or a window closed; so a connection holds at most `CONGESTED_BYTES`, and each stream one read. A
peer that makes us hold more is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from shared.errors import StreamResetError
from shared.net.read_buffer import READ_BUFFER, READ_BYTES
from shared.net.stream import Stream
from shared.net.tcp import CloseWatch, address_text
from shared.wire import frames
from shared.wire.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    Headers,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from shared.wire.session import Session, SessionError, SessionLimits, StreamState

log = logging.getLogger("hbone.connection")

CONGESTED_BYTES = 256 << 10
"""Unsent bytes in the transport beyond which streams stop reading their sources: four reads, enough to keep
a fast path full between two turns of the loop."""

PREFACE_TIMEOUT_S = 10.0
"""How long a peer may take to its first SETTINGS; Go's servers wait as long."""

PING_DATA = bytes(8)
"""The same in every PING of ours: whatever the peer sends shows that it lives."""


class Connection(asyncio.BufferedProtocol):
    """An HTTP/2 connection.

    `on_request(stream)` is called for each stream that a peer opens on a server. `on_change()` is called when
    the number of streams, the peer's limit or `usable` changes; `on_lost()` once, at the end.
    """

    def __init__(
        self,
        *,
        client: bool,
        limits: SessionLimits | None = None,
        on_request: Callable[[Stream], None] | None = None,
        on_change: Callable[[], None] | None = None,
        on_lost: Callable[[Connection], None] | None = None,
    ) -> None:
        self.session = Session(client=client, limits=limits)
        self.congested = False
        self.lost = False
        self.peer_name = "unknown"
        """The peer's address as host:port; still there when the connection is gone."""
        self._transport: asyncio.Transport | None = None
        self._on_request = on_request
        self._on_change = on_change
        self._on_lost = on_lost
        self._waiting: dict[Stream, None] = {}  # in the order in which they began to wait
        self._flush_planned = False
        self._closing = False
        self._ended = False  # nothing more can be written
        self._close_watch: CloseWatch | None = None
        self._preface_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()

    # What the owner does.

    @property
    def room(self) -> int:
        """How many more streams can be opened now."""
        return 0 if self.lost or self._closing else self.session.room

    @property
    def open_streams(self) -> int:
        """How many streams are not over."""
        return len(self.session.streams)

    @property
    def buffered_bytes(self) -> int:
        """What waits to be sent, beside what the streams hold themselves."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return unsent + self.session.pending_bytes

    @property
    def usable(self) -> bool:
        """Whether new streams may ever be opened here again."""
        session = self.session
        return not (self.lost or self._closing or session.goaway_received or session.exhausted)

    @property
    def heard_at(self) -> float:
        """When something last came from the peer (the loop's clock, seconds); 0 before the first."""
        return self.session.heard_at

    def ping(self) -> None:
        """Asks the peer for a sign of life; `heard_at` tells when it came."""
        self.session.ping(PING_DATA)
        self.flush_soon()

    def open(self, headers: Headers, *, end_stream: bool = False) -> Stream:
        """Client: opens a stream with these request headers.

        Raises:
            StreamResetError: there is no `room`, as on a connection that has been lost meanwhile.
        """
        if self.room <= 0:
            text = f"connection to {self.peer_name} takes no new stream"
            raise StreamResetError(text, frames.REFUSED_STREAM)
        state = self.session.open_stream(headers, end_stream=end_stream)
        stream = Stream(self, state)
        state.owner = stream
        self.flush_soon()
        return stream

    def drain(self) -> None:
        """Takes no new stream; the connection closes when the last one is over."""
        self.session.goaway()
        self._closing = True
        self._flush()
        self._close_if_done()

    def close(self) -> None:
        """Closes in good order: GOAWAY, then the transport. Streams still open are broken off."""
        self.session.goaway()
        self._closing = True
        self._flush()
        self._break_streams(f"connection to {self.peer_name} closed by us", frames.CANCEL)
        self._end()

    async def wait_closed(self, timeout_s: float) -> bool:
        """Waits until the connection is gone, with all that was written to it, for `timeout_s` seconds at
        most; whether it is. `close` or `drain` come before."""
        done, _ = await asyncio.wait((self._gone,), timeout=timeout_s)
        return bool(done)

    def abort(self, text: str) -> None:
        """Drops the connection at once; its streams break with `text` as the reason."""
        self._closing = True
        self._break_streams(text, frames.CANCEL)
        if self._transport is not None:
            self._transport.abort()

    # What the streams do.

    def flush_soon(self) -> None:
        """What the session has to send goes out at the end of this turn, or now if it is a lot."""
        if self.session.pending_bytes >= READ_BYTES:
            self._flush()
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def consumed(self, state: StreamState, count: int) -> None:
        """`count` bytes of the stream have been passed on."""
        session = self.session
        session.consumed(state, count)
        if session.pending_bytes:
            self.flush_soon()

    def reset(self, state: StreamState, code: int) -> None:
        """Sends RST_STREAM."""
        self.session.reset(state, code)
        self.stream_changed(state)

    def stream_changed(self, state: StreamState) -> None:
        """The stream ended its sending side, or is over."""
        self.flush_soon()
        if state.over:
            self._stream_over(state)

    def wait_for_room(self, stream: Stream) -> None:
        """`stream.on_room` is called when there may be room again."""
        self._waiting[stream] = None

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        self._transport.set_write_buffer_limits(high=CONGESTED_BYTES)
        self.peer_name = address_text(self._transport.get_extra_info("peername"))
        self._preface_timer = self._loop.call_later(PREFACE_TIMEOUT_S, self._preface_overdue)
        self._flush()
        self._close_if_done()

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        if self.lost:
            return  # ended by us; the peer may not have seen it yet
        session = self.session
        try:
            session.receive_data(READ_BUFFER[:nbytes], self._loop.time())
        except SessionError as error:
            self._handle(session.events())
            self._fail(error)
            return
        self._handle(session.events())
        if session.pending_bytes:
            self.flush_soon()
            if self.congested:
                self._check_unsent()

    def eof_received(self) -> bool:
        return False  # a connection that cannot send cannot carry tunnels: close

    def connection_lost(self, exc: Exception | None) -> None:
        if self._preface_timer is not None:
            self._preface_timer.cancel()
        if self._close_watch is not None:
            self._close_watch.cancel()
        cause = exc or "closed by the peer"
        self._break_streams(f"connection to {self.peer_name} lost: {cause}", frames.CANCEL)
        self._gone.set_result(None)
        if self._on_lost is not None:
            self._on_lost(self)

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        self._serve_waiting()

    # Events.

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            # Most events by far come first.
            if type(event) is DataReceived:
                owner = event.stream.owner
                if owner is not None:  # else it was reset by what came before in this very read
                    owner.on_data(event.data)
            elif type(event) is WindowOpened:
                if event.stream is None:
                    self._serve_waiting()
                elif event.stream.owner in self._waiting:
                    self._serve(event.stream.owner)
            else:
                self._handle_rare(event)

    def _handle_rare(self, event: Event) -> None:
        match event:
            case RequestReceived(state, headers, ended):
                stream = Stream(self, state)
                stream.headers = headers
                stream.bodiless = ended
                state.owner = stream
                if self._on_request is not None:
                    self._on_request(stream)
            case ResponseReceived(StreamState(owner=Stream() as stream), headers):
                stream.on_headers(headers)
            case TrailersReceived(StreamState(owner=Stream() as stream), headers):
                stream.trailers = headers
            case StreamEnded(StreamState(owner=Stream() as stream) as state):
                stream.on_ended()
                if state.local_ended and state.over:  # over by a reset: that is still to be told
                    self._stream_over(state)
            case StreamReset(StreamState(owner=Stream() as stream) as state, code, by_peer):
                self._waiting.pop(stream, None)
                who = "the peer" if by_peer else "us, for a protocol error"
                stream.on_broken(StreamResetError(f"stream reset by {who}: {frames.error_name(code)}", code))
                self._stream_over(state)
            case SettingsReceived():
                if self._preface_timer is not None:
                    self._preface_timer.cancel()
                    self._preface_timer = None
                self._changed()
            case GoAwayReceived(last_stream_id, code):
                self._goaway(last_stream_id, code)

    def _goaway(self, last_stream_id: int, code: int) -> None:
        log.debug("GOAWAY from %s: %s", self.peer_name, frames.error_name(code))
        if self.session.client:
            for state in list(self.session.streams.values()):
                if state.id > last_stream_id:
                    # Not processed by the peer: safe to send again elsewhere (RFC 9113 section 6.8).
                    state.owner.on_broken(
                        StreamResetError(
                            f"stream not taken, GOAWAY: {frames.error_name(code)}", frames.REFUSED_STREAM
                        )
                    )
                    self.reset(state, frames.CANCEL)
        self._changed()
        self._close_if_done()

    def _stream_over(self, state: StreamState) -> None:
        if state.owner is not None:
            self._waiting.pop(state.owner, None)
            # The record and the stream name each other; cut here, reference counting frees both at once.
            state.owner = None
        self._changed()
        self._close_if_done()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _close_if_done(self) -> None:
        done = self._closing or (self.session.client and self.session.goaway_received)
        if done and not self.session.streams:
            self._flush()
            self._end()

    # Writing.

    def _flush(self) -> None:
        self._flush_planned = False
        if self._transport is not None:
            data = self.session.data_to_send()
            if data and not (self.lost or self._ended):
                self._transport.write(data)

    def _check_unsent(self) -> None:
        """Drops a peer that does not read and goes on asking: streams leave a read each in the transport, the
        rest is answers to its PINGs, SETTINGS or requests (CVE-2019-9512, CVE-2019-9515)."""
        assert self._transport is not None
        unsent = self._transport.get_write_buffer_size()
        if unsent > CONGESTED_BYTES + READ_BYTES * max(self.session.limits.max_streams, self.open_streams):
            self.abort(f"{self.peer_name} does not read: {unsent} bytes unsent")

    def _serve_waiting(self) -> None:
        for stream in list(self._waiting):
            if self.congested or self.session.send_window <= 0:
                break
            self._serve(stream)

    def _serve(self, stream: Stream) -> None:
        if self.congested:
            return
        del self._waiting[stream]
        if not stream.on_room() and not stream.over:
            self._waiting[stream] = None  # behind the others
        self.flush_soon()

    # Ends.

    def _preface_overdue(self) -> None:
        self._preface_timer = None
        self.abort(f"no SETTINGS from {self.peer_name} within {PREFACE_TIMEOUT_S:g} s")

    def _fail(self, error: SessionError) -> None:
        log.info("protocol error of %s: %s", self.peer_name, error)
        self._flush()
        self._break_streams(f"connection ended, protocol error: {error}", error.code)
        self._end()

    def _end(self) -> None:
        """Closes the transport after all that was written has arrived.

        Closing a TCP socket at once would make the kernel answer what the peer still sends, be it a
        WINDOW_UPDATE, with RST, which destroys what is on its way (RFC 9112 section 9.6 has the same for
        HTTP/1.1). So we send FIN and wait for the peer's. TLS does that with close_notify.
        """
        if self._ended or self._transport is None:
            return
        self._ended = True
        if self._transport.is_closing():
            return
        self._close_watch = CloseWatch(self._transport)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _break_streams(self, text: str, code: int) -> None:
        was_lost, self.lost = self.lost, True
        self._waiting.clear()
        states = list(self.session.streams.values())
        self.session.streams.clear()
        for state in states:
            state.over = True
            owner, state.owner = state.owner, None
            if owner is not None:
                owner.on_broken(StreamResetError(text, code))
        if not was_lost:
            self._changed()
