"""The asyncio protocol that runs an HTTP/2 session on a transport, TCP or TLS, at either end: it reads and
writes the transport, gives the session's events to the streams, and knows which streams wait for room.

What the streams of one turn of the event loop send goes out in one write: fewer TLS records and system calls
under load, at the price of one callback. A stream's bytes wait in the stream itself while the transport is
congested or a window is closed; so a connection holds at most `CONGESTED_BYTES`, and each stream one read. A
peer that makes us hold more is dropped.

A peer has deadlines for what it may keep us waiting for: its first SETTINGS, the rest of a frame or of a
header block, and an answer to our PING (`Liveness`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from shared.errors import (
    ExpelledError,
    RefusedError,
    StreamDoneError,
    StreamLeftError,
    StreamResetError,
)
from shared.http2 import frames
from shared.http2.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    GoAwaySeen,
    Headers,
    InterimReceived,
    NoticeGiven,
    RequestMalformed,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from shared.http2.header_rules import list_bytes
from shared.http2.session import (
    GoAwayState,
    Session,
    SessionError,
    SessionLimits,
    SessionStream,
)
from shared.http2.session_stream import StreamState
from shared.net.http2.answers import answer
from shared.net.http2.liveness import WHEN_STALLED, Keepalive, Liveness, Verdict, When
from shared.net.legs.contract import Buffer
from shared.net.legs.read_buffer import (
    BULK_READ_BYTES,
    LARGE_READ_BUFFER,
    LARGE_READ_BYTES,
    READ_BUFFER,
    READ_BYTES,
)
from shared.net.legs.small_writes import SMALL_BYTES, UNSENT_BYTES
from shared.net.legs.stream import Stream
from shared.net.legs.tcp import CloseWatch, peer_of
from shared.net.legs.tcp_end import read_after_reset, reset

if TYPE_CHECKING:
    from shared.trust.revocations import Proof

log = logging.getLogger("hbone.connection")

CONGESTED_BYTES = 256 << 10
"""Unsent bytes in the transport beyond which streams stop reading their sources, and send no large read:
enough to keep a fast path full between two turns of the loop."""

PREFACE_TIMEOUT_S = 10.0
"""How long a peer may take to its first SETTINGS; Go's servers wait as long."""

PING_DATA = bytes(8)
"""The same in every PING of ours: whatever the peer sends shows that it lives."""

FRAME_TIMEOUT_S = 20.0
"""How long the rest of a frame other than DATA, or of a header block, may take: they are small and written at
once, and a network that delivers nothing for so long has lost most of its connections anyway."""

GOAWAY_SEEN_S = 1.0
"""How long a peer may take to show that it has seen our first GOAWAY: several round trips to the other side
of the world. Streams that it opens later are refused."""

FAULT_LINGER_S = 1.0
"""How long a connection that we have ended for its peer's fault stays open, for GOAWAY to arrive: closed at
once over what the peer still sends, it would destroy GOAWAY on its way (RST). It counts as a connection until
then."""

FAIR_S = 0.001
"""Work on one full read beyond which the others get their turn before the next: uvloop reads up to 32 times
while reads are full. 64 KiB of large frames are a tenth of it; of one-byte frames three times as much. So a
read may be a large one where the last full one shows that this will take less."""


_CLOSED = StreamState.CLOSED


class Connection(asyncio.BufferedProtocol):
    """An HTTP/2 connection.

    `on_request(stream)` is called for each stream that a peer opens on a server. `on_change()` is called when
    the number of streams, the peer's limit or `usable` changes; `on_lost()` once, at the end. A server's
    connection that has had no stream for `idle_timeout_s` seconds says GOAWAY and closes; None: never.
    """

    proof: Proof = ()
    """What is remembered of the peer's certificate chain, where it may be revoked."""

    certificate_ends = math.inf
    """When the peer's certificate ends, in seconds since the epoch; without TLS it never does."""

    has_answered = False
    """A client's owner has had an answer here: if it breaks, it was a good one once."""

    has_carried = False
    """A client's owner has had what it wanted here: the peer is worth a connection."""

    cause = ""
    """Why the connection was lost; empty as long as nobody knows better than "it ended"."""

    unanswered_s = 0.0
    """Seconds for which the peer was silent, if it was given up for that."""

    goaway_code: int | None = None
    """The error code of the peer's last GOAWAY; None: there was none."""

    # The defaults are here, for an object with more than 30 attributes costs 4 % of each stream: from there
    # on Python 3.11 looks them up by name.

    def __init__(
        self,
        *,
        client: bool,
        limits: SessionLimits | None = None,
        on_request: Callable[[Stream], None] | None = None,
        on_change: Callable[[], None] | None = None,
        on_lost: Callable[[Connection], None] | None = None,
        idle_timeout_s: float | None = None,
        keepalive: Keepalive | None = None,
    ) -> None:
        """`keepalive` is how the peer is watched. Without it, or without its interval, a client of ours is
        watched while something waits for it, and a server is not."""
        self.client = client
        self.session = Session(client=client, limits=limits, clock=time.monotonic)
        self.congested = False
        self.lost = False
        self.flush_planned = False
        """What the session has to send goes out at the end of this turn."""
        self._held_back = False  # small output waits in the session until the transport has sent what it has
        self.peer_name = "unknown"
        """The peer's address as host:port; still there when the connection is gone."""
        self._transport: asyncio.Transport | None = None
        self._buffer = READ_BUFFER  # what the next read may fill
        self._on_request = on_request
        self._on_change = on_change
        self._on_lost = on_lost
        self._waiting: dict[Stream, None] = {}  # in the order in which they began to wait
        self._closing = False
        self._ended = False  # nothing more can be written
        self._close_watch: CloseWatch | asyncio.TimerHandle | None = None
        self._preface_timer: asyncio.TimerHandle | None = None
        self._frame_timer: asyncio.TimerHandle | None = None
        self._peer_timer: asyncio.TimerHandle | None = None
        self._idle_timeout_s = idle_timeout_s
        self._idle_timer: asyncio.TimerHandle | None = None
        self._goaway_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._idle_since = now = self._loop.time()
        if not client and (keepalive is None or not keepalive.interval_s):
            keepalive = WHEN_STALLED
        self._liveness = None if keepalive is None else Liveness(keepalive, now)

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
    def speaks_http2(self) -> bool:
        """Whether the peer has said its SETTINGS."""
        return self.session.peer_settings_seen

    @property
    def usable(self) -> bool:
        """Whether new streams may ever be opened here again."""
        session = self.session
        return not (self.lost or self._closing or session.goaway_received or session.exhausted)

    @property
    def ended_in_order(self) -> bool:
        """Whether one of the ends has said that it would end."""
        return not self.cause and (self._closing or self.session.goaway_received)

    @property
    def idle_since(self) -> float | None:
        """Since when it has no stream (the loop's clock, seconds); None if it has one."""
        return None if self.session.streams else self._idle_since

    @property
    def heard_at(self) -> float:
        """When something last came from the peer (the loop's clock, seconds); 0 before the first."""
        return self.session.heard_at

    def ping(self) -> None:
        """Asks the peer for a sign of life; `heard_at` tells when it came."""
        self.session.ping(PING_DATA)
        self._flush()

    def watch(self, keepalive: Keepalive) -> None:
        """Changes how the peer is watched, where it is."""
        assert self._liveness is not None
        if self._liveness.keepalive.interval_s != keepalive.interval_s:
            self._liveness.keepalive = keepalive
            if self._peer_timer is not None:
                self._peer_timer.cancel()
                self._peer_timer = None
            self._watch_peer()

    def open(self, headers: Headers, *, end_stream: bool = False) -> Stream:
        """Client: opens a stream with these request headers.

        Raises:
            StreamResetError: there is no `room`, as on a connection that has been lost meanwhile.
        """
        if self.room <= 0:
            text = f"connection to {self.peer_name} accepts no new stream"
            raise StreamResetError(text, frames.REFUSED_STREAM)
        state = self.session.open_stream(headers, end_stream=end_stream)
        stream = Stream(self, state)
        state.owner = stream
        self.flush_soon()
        if self._peer_timer is None:
            self._watch_peer()
        return stream

    def say_goaway(self) -> None:
        """Sends GOAWAY and goes on: streams of ours may still be opened, and nothing is closed."""
        self.session.goaway()
        self.flush_soon()

    def drain(self) -> None:
        """Has the peer open no new stream, and closes when the last one is over.

        A server says GOAWAY twice (RFC 9113 section 6.8). Streams that the peer opened before it saw the
        first are served, however long their path is. Only then the peer learns the last one, and only after
        that the connection may close.
        """
        self._closing = True
        self.session.announce_goaway()
        self._watch_goaway()
        self._flush()
        self._close_if_done()

    def close(self) -> None:
        """Closes in good order: GOAWAY, then the transport. Streams still open are broken off."""
        self.session.goaway()
        self._closing = True
        self._flush()
        self._break_streams(f"connection to {self.peer_name} closed by us", frames.CANCEL)
        self._end()

    def expel(self, error: RefusedError) -> None:
        """Closes for a peer that is not to be here, or not any more: GOAWAY says it, and what is open is
        broken off."""
        self.cause = self.cause or str(error)
        self.session.goaway(frames.INADEQUATE_SECURITY)
        self._closing = True
        self._flush()
        self._break_streams(str(error), frames.CANCEL, ExpelledError)
        self._end_soon()

    async def wait_closed(self, timeout_s: float) -> bool:
        """Waits until the connection is gone, with all that was written to it, for `timeout_s` seconds at
        most; whether it is. `close` or `drain` come before."""
        done, _ = await asyncio.wait((self._gone,), timeout=timeout_s)
        return bool(done)

    def abort(self, text: str) -> None:
        """Drops the connection at once; its streams break with `text` as the reason."""
        self.cause = self.cause or text
        self._closing = True
        self._break_streams(text, frames.CANCEL)
        if self._transport is not None:
            self._transport.abort()

    # What the streams do.

    def flush_soon(self) -> None:
        """What the session has to send goes out at the end of this turn, or now if it is a lot."""
        if self.session.pending_bytes >= READ_BYTES:
            self._flush()
        elif not self.flush_planned:
            self.flush_planned = True
            self._loop.call_soon(self._flush_in_turn)

    def consumed(self, state: SessionStream, count: int) -> None:
        """`count` bytes of the stream have been passed on."""
        session = self.session
        session.consumed(state, count)
        if session.pending_bytes:
            self.flush_soon()

    def reset(self, state: SessionStream, code: int) -> None:
        """Sends RST_STREAM."""
        self.session.reset(state, code)
        self.flush_soon()
        if state.over:
            self._stream_over(state)

    def stream_changed(self, state: SessionStream) -> None:
        """The stream ended its sending side."""
        self.flush_soon()
        # Over with that, if its peer has ended, too; but what came last may be in this very read, and not be
        # handed on yet: then the end that is among it is the stream's last event.
        if state.over and (state.owner is None or state.owner.peer_has_ended):
            self._stream_over(state)

    def wait_for_room(self, stream: Stream) -> None:
        """`stream.on_room` is called when there may be room again."""
        self._waiting[stream] = None
        if self._peer_timer is None:
            self._watch_peer()

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        self._transport.set_write_buffer_limits(high=CONGESTED_BYTES)
        self.peer_name = peer_of(self._transport)
        self._preface_timer = self._loop.call_later(PREFACE_TIMEOUT_S, self._preface_overdue)
        if self._idle_timeout_s is not None:
            self._idle_timer = self._loop.call_later(self._idle_timeout_s, self._check_idle)
        self._watch_peer()
        self._watch_goaway()  # drained already, maybe
        self.session.announced()
        self._flush()
        self._close_if_done()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def feed(self, data: Buffer) -> None:
        """Receives `data`, which somebody else has read."""
        view = memoryview(data)
        while view and not self.lost:
            buffer = self.get_buffer(-1)
            size = min(len(view), len(buffer))
            buffer[:size] = view[:size]
            view = view[size:]
            self.buffer_updated(size)

    def buffer_updated(self, nbytes: int) -> None:
        if self.lost:
            return  # ended by us; the peer may not have seen it yet
        session = self.session
        started = time.monotonic() if nbytes >= READ_BYTES else 0.0
        try:
            session.receive_data(self._buffer[:nbytes], self._loop.time())
        except SessionError as error:
            # Nobody is left to answer requests of this read: not a task, a dial or a line is spent on them.
            self._handle([event for event in session.events() if type(event) is not RequestReceived])
            self._fail(error)
            return
        self._handle(session.events())
        if session.pending_bytes:
            self.flush_soon()
            if self.congested:
                self._check_unsent()
        if session.unfinished_since is not None and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(FRAME_TIMEOUT_S, self._check_frame)
        if started:
            took = time.monotonic() - started
            cheap = took * LARGE_READ_BYTES < FAIR_S * nbytes
            self._buffer = LARGE_READ_BUFFER if cheap else READ_BUFFER
            if took > FAIR_S:
                self._let_others()

    def eof_received(self) -> bool:
        return False  # a connection that cannot send cannot carry tunnels: close

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (
            self._preface_timer,
            self._frame_timer,
            self._peer_timer,
            self._idle_timer,
            self._goaway_timer,
        ):
            if timer is not None:
                timer.cancel()
        if self._close_watch is not None:
            self._close_watch.cancel()
        if exc is not None:
            self.cause = self.cause or str(exc)
        self._read_unread(exc)
        cause = exc or "closed by the peer"
        self._break_streams(f"connection to {self.peer_name} lost: {cause}", frames.CANCEL)
        self._gone.set_result(None)
        if self._on_lost is not None:
            self._on_lost(self)

    def _read_unread(self, cause: Exception | None) -> None:
        """Of a peer that answered in full, said GOAWAY and closed while we were writing: it counts."""
        if self.lost or self._transport is None or self._transport.get_extra_info("sslcontext") is not None:
            return
        rest = read_after_reset(self._transport, cause) or b""
        for at in range(0, len(rest), READ_BYTES):
            piece = rest[at : at + READ_BYTES]
            self._buffer[: len(piece)] = piece
            self.buffer_updated(len(piece))

    def pause_writing(self) -> None:
        if not self._held_back:
            self._become_congested()

    def resume_writing(self) -> None:
        self.congested = False
        if self._held_back:
            self._held_back = False
            assert self._transport is not None
            self._transport.set_write_buffer_limits(high=CONGESTED_BYTES)
            self._flush()
        self._serve_waiting()

    # Events.

    def _handle(self, events: list[Event]) -> None:
        received: dict[SessionStream, Buffer] = {}
        pieces: dict[SessionStream, list[Buffer]] = {}
        for event in events:
            # Most events by far come first. What a read brings for a stream goes on as one, however many
            # frames of other streams are between: a write of the other leg costs as much as copying 16 KiB.
            if type(event) is DataReceived:
                state = event.stream
                if state not in received:
                    received[state] = event.data
                elif state in pieces:
                    pieces[state].append(event.data)
                else:
                    pieces[state] = [received[state], event.data]
                continue
            if received:
                self._hand_on(received, pieces)
            if type(event) is WindowOpened:
                if event.stream is None:
                    self._serve_waiting()
                elif event.stream.owner in self._waiting:
                    self._serve(event.stream.owner)
            else:
                self._handle_rare(event)
        if received:
            self._hand_on(received, pieces)

    def _hand_on(
        self, received: dict[SessionStream, Buffer], pieces: dict[SessionStream, list[Buffer]]
    ) -> None:
        """Gives the streams what has been received for them; `pieces` has all of it where there are several.
        Both are empty afterwards."""
        for state, data in received.items():
            owner = state.owner
            if owner is not None:  # else it was reset by what came before in this very read
                owner.on_data(b"".join(pieces[state]) if pieces and state in pieces else data)
        received.clear()
        pieces.clear()

    def _handle_rare(self, event: Event) -> None:
        match event:
            case RequestReceived(state, headers, ended):
                stream = Stream(self, state)
                stream.headers = headers
                stream.bodiless = ended
                state.owner = stream
                size = list_bytes(headers)
                limit = self.session.limits.max_header_list_bytes
                if size > limit:
                    text = f"headers of {size} bytes, the limit is {limit}"
                    log.info("refused a request of %s: %s", self.peer_name, text)
                    answer(stream, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
                elif self._on_request is not None:
                    self._on_request(stream)
            case ResponseReceived(SessionStream(owner=Stream() as stream), headers, ended):
                stream.bodiless = ended
                stream.on_headers(headers)
            case InterimReceived(SessionStream(owner=Stream(on_interim=tell)), headers) if tell is not None:
                tell(headers)
            case TrailersReceived(SessionStream(owner=Stream() as stream), headers):
                stream.trailers = headers
            case StreamEnded(SessionStream(owner=Stream() as stream) as state):
                stream.on_ended()
                if state.state is _CLOSED:  # else StreamReset says that it is over
                    self._stream_over(state)
            case RequestMalformed(_, fault):
                log.info("refused a request of %s: malformed: %s", self.peer_name, fault)
            case StreamReset(
                SessionStream(owner=Stream() as stream) as state, code, by_peer, local_ended, fault
            ):
                self._waiting.pop(stream, None)
                who = "the peer" if by_peer else f"us, for {fault or 'a protocol error'}"
                kind = StreamResetError
                if by_peer and code in (frames.NO_ERROR, frames.CANCEL):
                    kind = StreamDoneError if local_ended else StreamLeftError
                error = kind(f"stream reset by {who}: {frames.error_name(code)}", code)
                error.sent_all = by_peer and local_ended
                stream.on_broken(error)
                self._stream_over(state)
            case SettingsReceived():
                if self._preface_timer is not None:
                    self._preface_timer.cancel()
                    self._preface_timer = None
                self._changed()
            case NoticeGiven():
                log.warning("%s opened too many streams in vain: it is to open none here", self.peer_name)
                self.drain()
            case GoAwayReceived(last_stream_id, code):
                self._goaway(last_stream_id, code)
            case GoAwaySeen():
                self._say_last_stream()

    def _goaway(self, last_stream_id: int, code: int) -> None:
        log.debug("GOAWAY from %s: %s", self.peer_name, frames.error_name(code))
        self.goaway_code = code
        if self.client:
            text = f"stream not taken, GOAWAY: {frames.error_name(code)}"
            for state in self.session.refused(last_stream_id):
                state.owner.on_broken(StreamResetError(text, frames.REFUSED_STREAM))
                self.reset(state, frames.CANCEL)
        self._changed()
        self._close_if_done()

    def _stream_over(self, state: SessionStream) -> None:
        if state.owner is not None:
            self._waiting.pop(state.owner, None)
            # The record and the stream name each other; cut here, reference counting frees both at once.
            state.owner = None
        if not self.session.streams:
            self._idle_since = self._loop.time()
        self._changed()
        self._close_if_done()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _close_if_done(self) -> None:
        session = self.session
        announced = self._closing and session.goaway_state is GoAwayState.FINAL
        if (announced or (self.client and session.goaway_received)) and not session.streams:
            session.explain_notice()
            self._flush()
            self._end()

    def _watch_goaway(self) -> None:
        announced = self.session.goaway_state is GoAwayState.ANNOUNCED
        if announced and self._goaway_timer is None and self._transport is not None:
            self._goaway_timer = self._loop.call_later(GOAWAY_SEEN_S, self._say_last_stream)

    def _say_last_stream(self) -> None:
        """The second GOAWAY."""
        self.session.goaway()
        self._flush()
        self._close_if_done()

    # Writing.

    def _flush_in_turn(self) -> None:
        """What little a turn has brought waits in the session while the transport has unsent bytes: there it
        is one piece, and each write that waits by itself costs the event loop 0.7 KiB (`SmallWrites`)."""
        transport = self._transport
        self.flush_planned = False
        if transport is None or (
            (self._held_back or transport.get_write_buffer_size() > UNSENT_BYTES) and self._holds_back()
        ):
            return
        # `_flush`, but for the call: this is done for each turn of each connection.
        data = self.session.data_to_send()
        if data and not (self.lost or self._ended):
            transport.write(data)

    def _holds_back(self) -> bool:
        """Whether what there is to send waits on."""
        assert self._transport is not None
        if self.lost or self._ended or self._transport.is_closing():
            return False
        if not self._held_back:
            if self.session.pending_bytes >= SMALL_BYTES:
                return False
            self._held_back = True
            self._transport.set_write_buffer_limits(high=0)  # says when nothing of it is left
        self._check_held()
        return True

    def _flush(self) -> None:
        self.flush_planned = False
        if self._transport is not None:
            data = self.session.data_to_send()
            if data and not (self.lost or self._ended):
                self._transport.write(data)
                if self._held_back:
                    self._check_held()

    def _check_held(self) -> None:
        """The transport has said that it is paused, so it says no more of how much it has."""
        if self.buffered_bytes > CONGESTED_BYTES and not self.congested:
            self._become_congested()

    def _become_congested(self) -> None:
        self.congested = True
        if self._peer_timer is None:
            self._watch_peer()

    def _check_unsent(self) -> None:
        """Drops a peer that does not read and goes on asking: streams leave a read each in the transport, of
        which one is large, the rest is answers to its PINGs, SETTINGS or requests (CVE-2019-9512,
        CVE-2019-9515)."""
        unsent = self.buffered_bytes
        streams = max(self.session.limits.max_streams, self.open_streams)
        if unsent > CONGESTED_BYTES + BULK_READ_BYTES + READ_BYTES * streams:
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

    # Deadlines and fairness.

    def _let_others(self) -> None:
        """The read loop goes on in the next turn of the event loop."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _check_frame(self) -> None:
        """One timer at a time: most unfinished frames are whole a moment later."""
        self._frame_timer = None
        since = self.session.unfinished_since
        if since is None or self.lost:
            return
        left = since + FRAME_TIMEOUT_S - self._loop.time()
        if left > 0:
            self._frame_timer = self._loop.call_later(left, self._check_frame)
        else:
            self.abort(f"no rest of a frame from {self.peer_name} within {FRAME_TIMEOUT_S:g} s")

    def _needs_peer(self) -> bool:
        """Whether the peer has to be there."""
        assert self._liveness is not None
        when = self._liveness.keepalive.when
        if when is When.STALLED:
            return bool(self._waiting) or self.congested
        return when is When.ALWAYS or bool(self.session.streams)

    def _watch_peer(self) -> None:
        """Starts the timer for a peer that has to be there; no byte and no stream moves it."""
        liveness = self._liveness
        if liveness is not None and self._needs_peer() and liveness.begin(self._loop.time(), self.heard_at):
            self._peer_timer = self._loop.call_at(liveness.due, self._check_peer)

    def _check_peer(self) -> None:
        self._peer_timer = None
        liveness, transport = self._liveness, self._transport
        assert liveness is not None
        if self.lost or transport is None or not self._needs_peer():
            return
        verdict = liveness.check(self._loop.time(), self.heard_at, transport)
        if verdict is Verdict.GIVE_UP:
            timeout_s = liveness.keepalive.timeout_s
            self.unanswered_s = liveness.keepalive.interval_s + timeout_s
            reset(transport)  # else the kernel goes on sending again what is not acknowledged
            self.abort(f"{self.peer_name} has not answered PING within {timeout_s:g} s")
            return
        if verdict is Verdict.ASK:
            self.ping()
        self._peer_timer = self._loop.call_at(liveness.due, self._check_peer)

    def _check_idle(self) -> None:
        assert self._idle_timeout_s is not None
        now = self._loop.time()
        idle_s = 0.0 if self.session.streams else now - self._idle_since
        if idle_s < self._idle_timeout_s:
            self._idle_timer = self._loop.call_later(self._idle_timeout_s - idle_s, self._check_idle)
        elif not self._closing:
            log.debug("no stream from %s for %g s: closed", self.peer_name, self._idle_timeout_s)
            self.drain()

    # Ends.

    def _preface_overdue(self) -> None:
        self._preface_timer = None
        self.abort(f"no SETTINGS from {self.peer_name} within {PREFACE_TIMEOUT_S:g} s")

    def _fail(self, error: SessionError) -> None:
        log.info("protocol error of %s: %s", self.peer_name, error)
        self._flush()
        self._break_streams(f"connection ended, protocol error: {error}", error.code)
        self._end_soon()

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

    def _end_soon(self) -> None:
        """The same for a peer at fault, whatever it reads or sends: its place is for others."""
        self._end()
        if self._close_watch is not None and self._transport is not None:
            self._close_watch.cancel()
            self._close_watch = self._loop.call_later(FAULT_LINGER_S, reset, self._transport)

    def _break_streams(self, text: str, code: int, how: type[StreamResetError] = StreamResetError) -> None:
        was_lost, self.lost = self.lost, True
        self._waiting.clear()
        for state in self.session.break_off():
            owner, state.owner = state.owner, None
            if owner is not None:
                owner.on_broken(how(text, code))
        if not was_lost:
            self._changed()
