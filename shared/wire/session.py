"""One HTTP/2 connection as bytes in, events and bytes out.

h2 keeps everything that is no payload: settings, headers, stream states, their errors. DATA and
WINDOW_UPDATE are framed, counted and relayed here beside it, because h2's own DATA path costs 9 to 34 µs
per 16 KiB frame (ARCHITECTURE.md, decisions).

The rules:

1. The owner calls `receive_data`, then takes `events()`, then writes `data_to_send()` to the network. Every
   method that sends only appends to what `data_to_send` returns next, in the order of the calls.
2. DATA never reaches h2, except as an empty frame with END_STREAM, which keeps h2's stream states true, or
   as an empty frame on a stream that may not receive, whose verdict we want.
3. GOAWAY never reaches h2 in either direction: h2 refuses to go on after one, and open streams must.
4. Flow control is ours alone, both ways. Bytes received count as held until the owner calls `consumed`.
5. A peer that opens too many streams in vain is first given notice, if it may be a front end that passes on
   what others do (`FloodLimits.front_end`): GOAWAY, after which open streams go on and new ones are refused.
6. A connection error raises `SessionError` from `receive_data` once; the events up to it can still be taken,
   GOAWAY is in `data_to_send`, and all that is left to do is to write that and close. Whatever is sent
   afterwards is dropped.

What is not here: sockets, deadlines, which stream gets what (`shared/net/connection.py`).
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import h2.stream
import hpack
from h2.settings import SettingCodes

from shared.wire import frames
from shared.wire.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    Headers,
    NoticeGiven,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from shared.wire.flood_guard import FloodError, FloodGuard, FloodLimits
from shared.wire.header_rules import BoundedDecoder, content_length, well_formed

DATA_BYTES = 16384 - frames.HEADER_BYTES
"""Payload of the DATA frames that we write: with its header a frame fills one TLS record (16 KiB)."""

FIRST_WINDOW = 65535
"""Both windows before any SETTINGS or WINDOW_UPDATE (RFC 9113 section 6.9.2)."""

STREAMS_BEFORE_SETTINGS = 100
"""Streams that a client opens before it knows the peer's limit: the least that RFC 9113 recommends to
allow, and what Google's front ends do allow."""

SMALL_BYTES = 1024
"""DATA frames up to this size that follow each other on a stream become one event: copying them together
costs less than the relay's write for each (0.4 µs a frame against 7)."""

REMEMBERED_RESETS = 4096
"""Streams reset by us whose late DATA is dropped without a word; a forgotten one is reset once more, which
counts as a fault of the peer. More than a peer can have had open while our RST_STREAM was on its way, twelve
times over; 0.7 MiB a connection at most with what else is remembered of as many that are over."""

ENCODER_TABLE_BYTES = 4096
"""Of our own headers that HPACK keeps for reuse: the default, whatever more a peer offers (RFC 7541 section
4.2), because it is our memory."""

READABLE_LISTS = 2
"""Times the announced header list that is decoded: HPACK's state is lost with a list that is not, and with it
the connection and all its tunnels."""

FREE_FIELDS = 100
"""Fields that a request may have for nothing; Envoy takes no more at all."""

FIELDS_PER_STREAM = 20
"""Fields beyond those that cost us as much as a stream opened in vain: 8 µs each to decode."""

UNCOUNTED = -1
"""`body_left` of a body without content-length."""

NO_HEADERS_YET = -2
"""`body_left` of a response before its final headers: DATA is an error (RFC 9113 section 8.1)."""

STATUS_WITHOUT_BODY = (b"204", b"304")
"""Their content-length tells of another response's body (RFC 9110 section 8.6)."""


SHOWN_CHARS = 200
"""Of h2's text; it repeats numbers of any length."""

_QUOTED = re.compile(r"""b?['"].*""", re.DOTALL)  # h2 puts what it quotes last


class SessionError(Exception):
    """The connection is beyond repair; `code` is the GOAWAY error code (RFC 9113 section 7)."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What we announce and enforce. No window may be below 65,535 bytes: a peer sends as many before it has
    seen our SETTINGS."""

    max_streams: int = 250
    """Streams that the peer may have open at once; one more is refused with REFUSED_STREAM."""

    stream_window_bytes: int = 1 << 20
    """What a peer may send on a stream before we have passed it on: 1 MiB moves 100 MB/s at 10 ms."""

    connection_window_bytes: int = 16 << 20
    """The same for all streams of the connection. Sixteen stalled streams fill it; equal windows let one
    stalled stream stop all others (ztunnel#1538)."""

    max_frame_bytes: int = 16384
    """Largest frame that we take; DATA is passed on as it arrives, so nothing is gained by more."""

    max_header_list_bytes: int = 64 << 10
    """Decoded header list that we announce, as RFC 9113 section 6.5.2 counts it. Cloud Run's own limit is
    about 60 KiB. Up to `READABLE_LISTS` times as much is still decoded, so that it can be answered with 431;
    beyond, the connection ends, and not a byte more is decoded."""

    floods: FloodLimits = field(default_factory=FloodLimits)
    """What costs the peer little and us much."""

    def __post_init__(self) -> None:
        if min(self.stream_window_bytes, self.connection_window_bytes) < FIRST_WINDOW:
            raise ValueError(f"windows below {FIRST_WINDOW} bytes")


def _error_code(error: h2.exceptions.ProtocolError) -> int:
    """h2's, but for a header block that HPACK cannot read (RFC 9113 section 4.3): h2 says PROTOCOL_ERROR.
    A list that is only too long is another subclass, and has its own code."""
    unreadable = type(error) is h2.exceptions.ProtocolError and isinstance(error.__cause__, hpack.HPACKError)
    return frames.COMPRESSION_ERROR if unreadable else int(error.error_code)


def _reason(error: h2.exceptions.ProtocolError) -> str:
    """What h2 says, without what it quotes of a header, which may be a token. Of its errors about a stream
    it says no more than the stream's number."""
    text, name = _QUOTED.sub("...", str(error))[:SHOWN_CHARS], type(error).__name__
    return f"{name}, stream {text}" if text.isdigit() else text or name


class _H2(h2.connection.H2Connection):
    """h2's, with a shorter memory of streams that are over (65,536 records are 10 MiB a connection), and
    without its look at content-length: it never sees a body."""

    MAX_CLOSED_STREAMS = REMEMBERED_RESETS

    def _begin_new_stream(self, stream_id: int, allowed_ids: Any) -> h2.stream.H2Stream:
        stream = super()._begin_new_stream(stream_id, allowed_ids)
        stream._initialize_content_length = _nothing  # type: ignore[method-assign, assignment]
        return stream


def _nothing(_headers: object) -> None:
    """Instead of h2's, which ends the connection for a wrong one."""


class StreamState:
    """The session's record of one stream. `owner` is the net side's to use."""

    __slots__ = (
        "answered",
        "body_left",
        "credit",
        "held",
        "id",
        "local_ended",
        "over",
        "owner",
        "receive_window",
        "remote_ended",
        "send_window",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = receive_window
        self.credit = 0  # consumed bytes that we have not yet told the peer about
        self.held = 0  # received bytes that the owner has not consumed
        self.local_ended = False
        self.remote_ended = False
        self.answered = False  # we have sent response headers
        self.over = False  # ended both ways, or reset: nothing more goes in or out
        self.body_left = UNCOUNTED  # what content-length still promises
        self.owner: Any = None


class Session:
    """One end of an HTTP/2 connection; see the module's rules."""

    def __init__(self, *, client: bool, limits: SessionLimits | None = None) -> None:
        self.client = client
        self.limits = limits or SessionLimits()
        self.streams: dict[int, StreamState] = {}
        self.peer_settings_seen = False
        self.goaway_received = False
        self.goaway_sent = False
        self.broken = False  # a connection error: nothing can be sent any more
        self.send_window = FIRST_WINDOW
        self._receive_window = self.limits.connection_window_bytes
        self._credit = 0
        self._events: list[Event] = []
        self._out = bytearray()
        self._partial = bytearray()  # an unfinished frame header or control frame
        self._data_stream: StreamState | None = None  # whose DATA frame we are inside; None: discard it
        self._data_left = 0
        self._pad_left = 0
        self._data_ends = False
        self._reset_here: set[int] = set()
        self._may_be_reset: set[int] = set()  # over here; the peer's RST_STREAM may be on its way
        self._guard = FloodGuard(self.limits.floods)
        self._now = 0.0
        self.unfinished_since: float | None = None
        """When what has come of a frame or a header block should have been followed by the rest; None if
        nothing is unfinished, or only DATA, which may stop in the middle for as long as the network does."""
        self._last_taken: int | None = None  # what GOAWAY said: it may only fall (RFC 9113 section 6.8)
        self._notice_given = False
        self._in_headers = False  # between HEADERS or PUSH_PROMISE and its last CONTINUATION
        self._preface_left = 0 if client else len(frames.PREFACE)
        self._h2 = _H2(
            # Our own headers are written in lower case and in order; h2 need not look at them again.
            h2.config.H2Configuration(
                client_side=client,
                header_encoding=None,
                validate_inbound_headers=False,  # header_rules.well_formed: it costs the stream only
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._start()

    # What the owner does.

    def events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> bytearray:
        """What must be written to the network since the last call; the caller may keep it."""
        out, self._out = self._out, bytearray()
        return out

    @property
    def pending_bytes(self) -> int:
        """How many bytes `data_to_send` would return."""
        return len(self._out)

    @property
    def heard_at(self) -> float:
        """The `now` of the last `receive_data`; 0 before the first."""
        return self._now

    @property
    def exhausted(self) -> bool:
        """Whether a client has used up its stream numbers (RFC 9113 section 5.1.1)."""
        return self._h2.highest_outbound_stream_id >= frames.MAX_STREAM_ID - 2

    @property
    def room(self) -> int:
        """How many more streams a client may open now."""
        if self.exhausted or self.goaway_received or self.broken:
            return 0
        if not self.peer_settings_seen:
            return STREAMS_BEFORE_SETTINGS - len(self.streams)
        return self._h2.remote_settings.max_concurrent_streams - len(self.streams)

    def open_stream(self, headers: Headers, *, end_stream: bool = False) -> StreamState:
        """Client: sends a request's headers. The caller has looked at `room`."""
        stream_id = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream_id, headers, end_stream=end_stream)
        self._pull()
        stream = self._add_stream(stream_id)
        stream.local_ended = end_stream
        stream.body_left = NO_HEADERS_YET
        return stream

    def send_headers(self, stream: StreamState, headers: Headers, *, end_stream: bool = False) -> None:
        """Server: sends response headers; both: trailers, with `end_stream`."""
        if stream.over or stream.local_ended or self.broken:
            return
        stream.answered = True
        self._h2.send_headers(stream.id, headers, end_stream=end_stream)
        self._pull()
        if end_stream:
            self._local_end(stream)

    def send_data(self, stream: StreamState, data: bytes | bytearray | memoryview) -> int:
        """Frames as much of `data` as both windows allow and returns how many bytes that was."""
        if stream.over or stream.local_ended or self.broken:
            return len(data)  # nobody is left to read it
        allowed = min(len(data), stream.send_window, self.send_window)
        if allowed <= 0:
            return 0
        out = self._out
        stream_id = stream.id
        if allowed <= DATA_BYTES:
            out += frames.header(allowed, frames.DATA, 0, stream_id)
            out += data if allowed == len(data) else memoryview(data)[:allowed]
        else:
            view = memoryview(data)
            for at in range(0, allowed, DATA_BYTES):
                chunk = view[at : min(at + DATA_BYTES, allowed)]
                out += frames.header(len(chunk), frames.DATA, 0, stream_id)
                out += chunk
        stream.send_window -= allowed
        self.send_window -= allowed
        self._guard.data_sent(1 + allowed // DATA_BYTES)
        return allowed

    def end_stream(self, stream: StreamState) -> None:
        """Sends END_STREAM: nothing more will be sent on the stream."""
        if stream.over or stream.local_ended or self.broken:
            return
        self._h2.end_stream(stream.id)
        self._pull()
        self._local_end(stream)

    def reset(self, stream: StreamState, code: int) -> None:
        """Sends RST_STREAM; the stream is over."""
        if stream.over:
            return
        if not self.broken:
            # h2 has closed it already where END_STREAM came with headers that belie content-length.
            with contextlib.suppress(h2.exceptions.StreamClosedError):
                self._h2.reset_stream(stream.id, code)
            self._pull()
        self._remember_reset(stream.id)
        self._finish(stream)

    def consumed(self, stream: StreamState, count: int) -> None:
        """The owner has passed on `count` bytes of the stream, so the peer may send as many more."""
        if not stream.over:
            stream.held -= count
            if not stream.remote_ended:
                stream.credit += count
                # Half a window: often enough that a fast peer never waits, rare enough to cost nothing.
                if stream.credit * 2 >= self.limits.stream_window_bytes and not self.broken:
                    self._out += frames.window_update(stream.id, stream.credit)
                    stream.receive_window += stream.credit
                    stream.credit = 0
            self._return_credit(count)

    def ping(self, data: bytes) -> None:
        """Sends PING with these eight bytes; the peer answers at once (RFC 9113 section 6.7)."""
        if not self.broken:
            self._h2.ping(data)
            self._pull()

    def goaway(self, code: int = frames.NO_ERROR) -> None:
        """Tells the peer that no new stream is taken; open ones go on."""
        if not self.goaway_sent:
            self.goaway_sent = True
            self._say_goaway(code)

    def last_words(self) -> None:
        """Tells a peer that was given notice why, now that the last stream is over: some clients break open
        streams at a GOAWAY with an error."""
        if self._notice_given and not self.broken:
            self._notice_given = False
            self._say_goaway(frames.ENHANCE_YOUR_CALM)

    def receive_data(self, data: bytes | bytearray | memoryview, now: float = 0.0) -> None:
        """Takes what the network delivered; `now` is the time in seconds of a steady clock, by which floods
        are told from honest use.

        Raises:
            SessionError: the connection is over (rule 5).
        """
        if self.broken:
            return
        self._now = now
        try:
            self._scan(memoryview(data))
        except FloodError as error:
            raise self._fail(str(error), frames.ENHANCE_YOUR_CALM) from error
        except h2.exceptions.ProtocolError as error:
            self._h2.clear_outbound_data_buffer()  # its GOAWAY, which may have another code
            # Not chained: what it quotes of a header may be a token, and a traceback would show it.
            raise self._fail(_reason(error), _error_code(error)) from None

    # Receiving: frame by frame.

    def _scan(self, data: memoryview) -> None:
        if self._partial:
            self._partial += data
            data = memoryview(bytes(self._partial))
            self._partial.clear()
        at = 0
        size = len(data)
        if self._preface_left:
            at = min(self._preface_left, size)
            if data[:at] != frames.PREFACE[-self._preface_left :][:at]:
                raise self._fail("not HTTP/2: no connection preface", frames.PROTOCOL_ERROR)
            self._preface_left -= at
            self._h2.receive_data(data[:at])
        while at < size:
            if self._data_left:
                taken = min(self._data_left, size - at)
                self._data_left -= taken
                if self._data_stream is not None:
                    self._events.append(DataReceived(self._data_stream, data[at : at + taken]))
                else:
                    self._return_credit(taken)
                at += taken
                if not self._data_left and not self._pad_left:
                    self._data_frame_done()
                continue
            if self._pad_left:
                taken = min(self._pad_left, size - at)
                self._pad_left -= taken
                at += taken
                if not self._pad_left:
                    self._data_frame_done()
                continue
            if size - at < frames.HEADER_BYTES:
                break
            length, kind, flags, stream_id = frames.read_header(data, at)
            if length > self.limits.max_frame_bytes:
                raise self._fail("frame larger than we announced", frames.FRAME_SIZE_ERROR)
            if kind == frames.DATA:
                end = 0 if flags else self._plain_data(data, at, length, stream_id)
                if end:
                    at = end
                    continue
                pad_byte = flags & frames.FLAG_PADDED and length
                head = frames.HEADER_BYTES + (1 if pad_byte else 0)
                if size - at < head:
                    break
                padding = data[at + frames.HEADER_BYTES] if pad_byte else 0
                at += head
                self._data_frame(length, flags, stream_id, padding)
                continue
            end = at + frames.HEADER_BYTES + length
            if end > size:
                break
            self._control_frame(kind, flags, stream_id, data[at:end])
            at = end
        if at < size:
            self._partial += data[at:]
        if not (self._partial or self._in_headers):
            self.unfinished_since = None
        elif self.unfinished_since is None or (at and not self._in_headers):
            self.unfinished_since = self._now

    def _plain_data(self, data: memoryview, at: int, length: int, stream_id: int) -> int:
        """The way of most DATA frames: whole, without flags, on a stream that may receive it. Returns where
        it ends, or 0 if it is not such a frame. Small ones that follow on the same stream go with it."""
        stream = self.streams.get(stream_id)
        end = at + frames.HEADER_BYTES + length
        size = len(data)
        if stream is None or stream.remote_ended or stream.body_left != UNCOUNTED or self._in_headers:
            return 0
        allowed = min(stream.receive_window, self._receive_window)
        if not 0 < length <= allowed or end > size:
            return 0
        payload = data[at + frames.HEADER_BYTES : end]
        taken = length
        if length <= SMALL_BYTES:
            joined: bytearray | None = None
            last = size - frames.HEADER_BYTES
            while end < last:
                high, low, kind_and_flags, number = frames.SHORT_HEADER.unpack_from(data, end)
                more = high << 8 | low
                begin = end + frames.HEADER_BYTES
                if kind_and_flags or number != stream_id or not 0 < more <= SMALL_BYTES:
                    break
                if begin + more > size or taken + more > allowed:
                    break
                if joined is None:
                    joined = bytearray(payload)
                end = begin + more
                joined += data[begin:end]
                taken += more
            if joined is not None:
                payload = memoryview(joined)
        stream.receive_window -= taken
        self._receive_window -= taken
        stream.held += taken
        self._events.append(DataReceived(stream, payload))
        return end

    def _data_frame(self, length: int, flags: int, stream_id: int, padding: int) -> None:
        padded = bool(flags & frames.FLAG_PADDED)
        if not self.peer_settings_seen:
            raise self._fail("the first frame is not SETTINGS", frames.PROTOCOL_ERROR)
        if stream_id == 0:
            raise self._fail("DATA on stream 0", frames.PROTOCOL_ERROR)
        if padded and not length:
            raise self._fail("padded DATA without a pad length", frames.FRAME_SIZE_ERROR)
        overhead = padding + 1 if padded else 0
        if overhead > length:
            raise self._fail("more padding than DATA", frames.PROTOCOL_ERROR)
        self._receive_window -= length
        if self._receive_window < 0:
            raise self._fail("the peer sent beyond the connection's window", frames.FLOW_CONTROL_ERROR)
        payload = length - overhead
        stream = self.streams.get(stream_id)
        ends = bool(flags & frames.FLAG_END_STREAM)
        if stream is None or stream.remote_ended or self._in_headers:
            self._ask_h2_about_data(stream_id, ends)
            stream = None
            self._return_credit(overhead)
        else:
            stream.receive_window -= length
            if stream.receive_window < 0:
                self._stream_error(stream, frames.FLOW_CONTROL_ERROR)
                stream = None
                self._return_credit(overhead)
            elif not self._body_allows(stream, payload, ends):
                self._stream_error(stream, frames.PROTOCOL_ERROR)
                stream = None
                self._return_credit(overhead)
            else:
                stream.held += length
                if overhead:
                    self.consumed(stream, overhead)
        self._data_stream = stream
        self._data_left = payload
        self._pad_left = padding
        self._data_ends = ends and stream is not None
        if not payload and not ends:
            self._guard.empty_data(self._now)
        if not payload and not padding:
            self._data_frame_done()

    def _body_allows(self, stream: StreamState, payload: int, ends: bool) -> bool:
        """Whether there may be DATA, and content-length, if any, agrees (RFC 9113 section 8.1.1)."""
        if stream.body_left < 0:
            return stream.body_left == UNCOUNTED
        left = stream.body_left - payload
        stream.body_left = max(left, 0)
        return left >= 0 and not (ends and left)

    def _data_frame_done(self) -> None:
        stream = self._data_stream
        self._data_stream = None
        if self._data_ends and stream is not None and not stream.over:
            self._h2.receive_data(frames.header(0, frames.DATA, frames.FLAG_END_STREAM, stream.id))
            self._remote_end(stream)

    def _ask_h2_about_data(self, stream_id: int, ends: bool) -> None:
        """DATA on a stream that may not receive: h2 ignores it, resets the stream or raises (rule 2)."""
        if stream_id in self._reset_here and not self._in_headers:
            return  # it was on its way before the peer saw our RST_STREAM (RFC 9113 section 5.4.2)
        self._guard.stale(self._now)
        flags = frames.FLAG_END_STREAM if ends else 0
        for event in self._h2.receive_data(frames.header(0, frames.DATA, flags, stream_id)):
            self._translate(event)
        self._pull()

    def _control_frame(self, kind: int, flags: int, stream_id: int, frame: memoryview) -> None:
        if not self.peer_settings_seen and (kind != frames.SETTINGS or flags & frames.FLAG_ACK):
            raise self._fail("the first frame is not SETTINGS", frames.PROTOCOL_ERROR)
        self._guard.control_frame(kind, flags, len(frame) - frames.HEADER_BYTES, self._now)
        if kind in (frames.HEADERS, frames.RST_STREAM) and stream_id not in self.streams:
            self._late(kind, stream_id)
        if not self._in_headers:
            if kind == frames.WINDOW_UPDATE and len(frame) == frames.HEADER_BYTES + 4:
                increment = int.from_bytes(frame[frames.HEADER_BYTES :], "big") & frames.MAX_WINDOW
                if self._window_update(stream_id, increment):
                    return
            elif kind == frames.GOAWAY:
                self._goaway(stream_id, frame[frames.HEADER_BYTES :])
                return
            elif kind == frames.SETTINGS and flags & frames.FLAG_ACK and len(frame) > frames.HEADER_BYTES:
                # h2 would say PROTOCOL_ERROR (RFC 9113 section 6.5).
                raise self._fail("SETTINGS acknowledgement with a payload", frames.FRAME_SIZE_ERROR)
            elif kind > frames.CONTINUATION:
                return  # an extension's frame: ignored (RFC 9113 section 5.5)
        if kind in (frames.HEADERS, frames.PUSH_PROMISE) or self._in_headers:
            self._in_headers = not flags & frames.FLAG_END_HEADERS
            if kind != frames.CONTINUATION:
                self.unfinished_since = None  # the block begins now
        for event in self._h2.receive_data(frame):
            self._translate(event)
        self._pull()

    def _late(self, kind: int, stream_id: int) -> None:
        """HEADERS or RST_STREAM on no open stream: counted if it is for one that is over, unless it may have
        crossed the end of it. One RST_STREAM does whenever a client leaves as its answer ends, a server's
        answer whenever a tunnel's client leaves early."""
        if kind == frames.RST_STREAM and stream_id in self._may_be_reset:
            self._may_be_reset.discard(stream_id)
        elif self.client and stream_id in self._reset_here:
            return
        elif stream_id <= max(self._h2.highest_inbound_stream_id, self._h2.highest_outbound_stream_id):
            if kind == frames.HEADERS and not self.client:
                self._stream_wasted(refused=True)  # as much work as a request that has to be refused
            else:
                self._guard.stale(self._now)

    def _window_update(self, stream_id: int, increment: int) -> bool:
        """True if it was for the connection or a stream of ours; else h2 judges it."""
        if stream_id == 0 and not increment:
            return False
        if stream_id == 0:
            self.send_window += increment
            if self.send_window > frames.MAX_WINDOW:
                raise self._fail("the peer opened the connection's window too far", frames.FLOW_CONTROL_ERROR)
            self._events.append(WindowOpened(None))
            return True
        stream = self.streams.get(stream_id)
        if stream is None:
            return False
        stream.send_window += increment
        if stream.send_window > frames.MAX_WINDOW:
            self._stream_error(stream, frames.FLOW_CONTROL_ERROR)
        elif not increment:  # an error of the stream only (RFC 9113 section 6.9)
            self._stream_error(stream, frames.PROTOCOL_ERROR)
        else:
            self._events.append(WindowOpened(stream))
        return True

    def _goaway(self, stream_id: int, body: memoryview) -> None:
        if stream_id:
            raise self._fail("GOAWAY on a stream", frames.PROTOCOL_ERROR)
        if len(body) < 8:
            raise self._fail("GOAWAY too short", frames.FRAME_SIZE_ERROR)
        self.goaway_received = True
        last = int.from_bytes(body[:4], "big") & frames.MAX_STREAM_ID
        self._events.append(GoAwayReceived(last, int.from_bytes(body[4:8], "big")))

    def _translate(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._request(event)
            case h2.events.ResponseReceived():
                stream = self.streams.get(event.stream_id or 0)
                if stream is not None:
                    self._response(stream, event.headers or ())
            case h2.events.InformationalResponseReceived():
                self._guard.stale(self._now)  # nothing that we ask for is answered by one
            case h2.events.TrailersReceived():
                stream = self.streams.get(event.stream_id or 0)
                if stream is not None and self._well_formed(stream.id, event.headers or (), trailers=True):
                    self._events.append(TrailersReceived(stream, event.headers or ()))
            case h2.events.StreamEnded():
                stream = self.streams.get(event.stream_id or 0)
                if stream is not None:
                    if stream.body_left > 0:
                        self._stream_error(stream, frames.PROTOCOL_ERROR)
                    else:
                        self._remote_end(stream)
            case h2.events.StreamReset():
                stream = self.streams.get(event.stream_id or 0)
                if stream is not None:
                    if not event.remote_reset:
                        self._remember_reset(stream.id)
                    self._finish(stream)
                    if event.remote_reset:
                        self._may_be_reset.discard(stream.id)
                    code = int(event.error_code or 0)
                    self._events.append(StreamReset(stream, code, by_peer=event.remote_reset))
                    if not self.client and not stream.answered:
                        self._stream_wasted()
            case h2.events.RemoteSettingsChanged():
                self._settings_changed(event)

    def _request(self, event: h2.events.RequestReceived) -> None:
        stream_id = event.stream_id or 0
        if self.client:
            raise self._fail("the server opened a stream", frames.PROTOCOL_ERROR)
        headers = event.headers or ()
        self._outsized(headers)
        if len(self.streams) >= self.limits.max_streams or self.goaway_sent:
            self._h2.reset_stream(stream_id, frames.REFUSED_STREAM)
            self._remember_reset(stream_id)
            self._stream_wasted(refused=True)
            return
        if not self._well_formed(stream_id, headers):
            return
        stream = self._add_stream(stream_id)
        if self._take_content_length(stream, headers):
            self._events.append(RequestReceived(stream, headers, event.stream_ended is not None))

    def _response(self, stream: StreamState, headers: Headers) -> None:
        if not self._well_formed(stream.id, headers) or not self._take_content_length(stream, headers):
            return
        method = self._h2.streams[stream.id].request_method
        if method == b"CONNECT" or dict(headers)[b":status"] in STATUS_WITHOUT_BODY:
            stream.body_left = UNCOUNTED  # a tunnel's is to be ignored (RFC 9110 section 9.3.6)
        elif method == b"HEAD":
            stream.body_left = 0
        self._events.append(ResponseReceived(stream, headers))

    def _well_formed(self, stream_id: int, headers: Headers, *, trailers: bool = False) -> bool:
        """False where something is wrong: that costs the stream, and not the connection with all its tunnels
        (RFC 9113 section 8.1.1)."""
        if well_formed(headers, of_request=not self.client, trailers=trailers):
            return True
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._stream_error(stream, frames.PROTOCOL_ERROR)
        else:
            self._h2.reset_stream(stream_id, frames.PROTOCOL_ERROR)
            self._remember_reset(stream_id)
            self._stream_wasted()
        return False

    def _take_content_length(self, stream: StreamState, headers: Headers) -> bool:
        """Remembers what content-length promises; False if it is none, which costs the stream."""
        try:
            expected = content_length(headers)
        except ValueError:
            self._stream_error(stream, frames.PROTOCOL_ERROR)
            return False
        stream.body_left = UNCOUNTED if expected is None else expected
        return True

    def _settings_changed(self, event: h2.events.RemoteSettingsChanged) -> None:
        changed = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
        if changed is not None:
            self._guard.stream_windows(len(self.streams), self._now)
            delta = changed.new_value - (changed.original_value or 0)
            for stream in self.streams.values():
                stream.send_window += delta
                if stream.send_window > frames.MAX_WINDOW:
                    raise self._fail("SETTINGS opened a window too far", frames.FLOW_CONTROL_ERROR)
            if delta > 0 and self.streams:
                self._events.append(WindowOpened(None))
        if self._h2.encoder.header_table_size > ENCODER_TABLE_BYTES:
            self._h2.encoder.header_table_size = ENCODER_TABLE_BYTES
        self.peer_settings_seen = True
        self._events.append(SettingsReceived())

    # Stream ends.

    def _add_stream(self, stream_id: int) -> StreamState:
        stream = StreamState(
            stream_id, self._h2.remote_settings.initial_window_size, self.limits.stream_window_bytes
        )
        self.streams[stream_id] = stream
        return stream

    def _local_end(self, stream: StreamState) -> None:
        stream.local_ended = True
        if stream.remote_ended:
            self._finish(stream)

    def _remote_end(self, stream: StreamState) -> None:
        stream.remote_ended = True
        self._events.append(StreamEnded(stream))
        if stream.local_ended:
            self._finish(stream)

    def _remember_reset(self, stream_id: int) -> None:
        if len(self._reset_here) >= REMEMBERED_RESETS:
            self._reset_here.clear()
        self._reset_here.add(stream_id)
        self._remember_end(stream_id)

    def _remember_end(self, stream_id: int) -> None:
        if len(self._may_be_reset) >= REMEMBERED_RESETS:
            self._may_be_reset.clear()
        self._may_be_reset.add(stream_id)

    def _stream_error(self, stream: StreamState, code: int) -> None:
        self.reset(stream, code)
        self._events.append(StreamReset(stream, code, by_peer=False))
        if not self.client:
            self._stream_wasted()

    def _outsized(self, headers: Headers) -> None:
        """Many fields are a byte each on the wire and much work: as much as streams opened in vain."""
        if len(headers) > FREE_FIELDS:
            self._stream_wasted(refused=True, units=(len(headers) - FREE_FIELDS) / FIELDS_PER_STREAM)

    def _stream_wasted(self, *, refused: bool = False, units: float = 1.0) -> None:
        """A stream was opened in vain (rule 5). After notice only those count that were opened after it: the
        others are as many as were open."""
        spare = self.limits.floods.front_end
        if spare and self.goaway_sent and not refused:
            return
        try:
            self._guard.stream_wasted(self._now, units)
        except FloodError:
            if not spare or self.goaway_sent or not self.streams:
                raise
            self._guard.forgive_resets()
            self._notice_given = True
            self.goaway()
            self._events.append(NoticeGiven())

    def _finish(self, stream: StreamState) -> None:
        stream.over = True
        self.streams.pop(stream.id, None)
        self._remember_end(stream.id)
        if stream is self._data_stream:
            self._data_stream = None  # the rest of its frame is discarded, and credited as it comes
            stream.held -= self._data_left
        if stream.held:
            self._return_credit(stream.held)
            stream.held = 0

    def _return_credit(self, count: int) -> None:
        self._credit += count
        if self._credit * 2 >= self.limits.connection_window_bytes and not self.broken:
            self._out += frames.window_update(0, self._credit)
            self._receive_window += self._credit
            self._credit = 0

    # h2's side.

    def _start(self) -> None:
        """Writes the preface ourselves: h2 would enforce MAX_CONCURRENT_STREAMS by ending the connection
        with all its tunnels, where refusing the one stream is enough."""
        limits = self.limits
        announced = {
            int(SettingCodes.ENABLE_PUSH): 0,
            int(SettingCodes.MAX_CONCURRENT_STREAMS): limits.max_streams,
            int(SettingCodes.INITIAL_WINDOW_SIZE): limits.stream_window_bytes,
            int(SettingCodes.MAX_FRAME_SIZE): limits.max_frame_bytes,
            int(SettingCodes.MAX_HEADER_LIST_SIZE): limits.max_header_list_bytes,
        }
        if not self.client:
            del announced[int(SettingCodes.ENABLE_PUSH)]  # only a client may say it
        self._h2.local_settings = h2.settings.Settings(
            client=self.client,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.MAX_CONCURRENT_STREAMS: frames.MAX_STREAM_ID,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                SettingCodes.MAX_FRAME_SIZE: limits.max_frame_bytes,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
            },
        )
        self._h2.decoder = BoundedDecoder(limits.max_header_list_bytes * READABLE_LISTS)
        self._h2.max_inbound_frame_size = limits.max_frame_bytes
        if self.client:
            self._out += frames.PREFACE
        self._out += frames.settings(announced)
        if limits.connection_window_bytes > FIRST_WINDOW:
            self._out += frames.window_update(0, limits.connection_window_bytes - FIRST_WINDOW)

    def _pull(self) -> None:
        self._out += self._h2.data_to_send()

    def _fail(self, text: str, code: int) -> SessionError:
        self.broken = self.goaway_sent = True
        self._say_goaway(code)
        return SessionError(text, code)

    def _say_goaway(self, code: int) -> None:
        if self._last_taken is None:
            self._last_taken = self._h2.highest_inbound_stream_id
        self._out += frames.goaway(self._last_taken, code)
