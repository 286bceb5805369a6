"""The HTTP/2 leg: one stream of a connection as one end of a tunnel (rules in `contract`). It keeps what
waits for a window to open, and what arrived before the relay was joined.

Flow control towards the peer is the relay's back pressure: bytes given to the relay are credited at once,
unless it has paused us; then they are held until it resumes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shared.errors import StreamResetError, UpstreamError
from shared.http2 import frames
from shared.http2.events import Headers
from shared.net.legs.contract import Buffer, RelayEnd
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.legs.tcp_end import LAST_BYTES_TIMEOUT_S

if TYPE_CHECKING:
    from shared.http2.session import Session, SessionStream

SMALL_BYTES = 1024
"""What is sent up to this size goes out with everything else at the end of the turn, however much that is."""

LINGER_S = 1.0
"""How long after our end the peer may take to its own before we tell it to stop. RFC 9113 section 8.1 has it
keep a response in any case, but curl loses it to a RST_STREAM while it is still sending; and a proxy that
gets one drops what it has not passed on, whichever direction that was."""


class Carrier(Protocol):
    """What a stream needs of its connection, and what the owner of a stream may ask of that."""

    session: Session
    congested: bool
    """So much waits in the transport that streams should stop reading their sources."""
    flush_planned: bool
    """What the session has to send goes out at the end of this turn of the event loop."""
    peer_name: str
    """The peer's address as host:port."""
    lost: bool
    has_answered: bool
    """A peer has answered a request of ours here: if the connection breaks, it was a good one once."""
    has_carried: bool
    """What its owner wanted came about here: the peer is worth a connection."""

    @property
    def open_streams(self) -> int: ...
    @property
    def speaks_http2(self) -> bool: ...
    def flush_soon(self) -> None:
        """Sends what the session has to send, at the end of this turn at the latest."""

    def consumed(self, state: SessionStream, count: int) -> None:
        """Credits `count` bytes of the stream, which have been passed on."""

    def reset(self, state: SessionStream, code: int) -> None:
        """Sends RST_STREAM."""

    def stream_changed(self, state: SessionStream) -> None:
        """The stream has ended its sending side."""

    def wait_for_room(self, stream: Stream) -> None:
        """Calls `stream.on_room` when there may be room again."""


class Stream:
    """One HTTP/2 stream; made by its `Connection`.

    `headers` are the peer's: the request's on a server, the response's on a client once they came; if they
    ended what the peer sends, it is `bodiless`. `trailers` are the peer's, or None: a tunnel has no use for
    them. On a client `on_response` is called with the response headers before any byte of the body is pushed,
    and `on_interim` with those of each interim response (1xx). `on_gone` is called when the stream breaks
    while it is joined to no relay and nobody waits in `response`.
    """

    __slots__ = (
        "_close_pending",
        "_closed",
        "_connection",
        "_early",
        "_end_pending",
        "_ended",
        "_error",
        "_full",
        "_held",
        "_paused",
        "_relay",
        "_response",
        "_session",
        "_state",
        "_trailers_pending",
        "_waiting",
        "bodiless",
        "headers",
        "on_gone",
        "on_interim",
        "on_response",
        "trailers",
    )

    def __init__(self, connection: Carrier, state: SessionStream) -> None:
        self._connection = connection
        self._session = connection.session
        self._state = state
        self._relay: RelayEnd | None = None
        self._early: bytearray | None = None  # received before join; the stream's window bounds it
        self._ended = False  # the peer has finished sending, and all it sent has been pushed or is in _early
        self._error: StreamResetError | None = None  # how it broke before join
        self._held = 0  # given to the relay while it had us paused; credited when it resumes
        self._paused = False
        self._full = False
        self._end_pending = False  # END_STREAM goes out after what waits
        self._close_pending = False  # and the stream is let go after that
        self._closed = False  # what still comes is dropped
        self._trailers_pending: Headers | None = None
        self._response: asyncio.Future[int] | None = None
        self._waiting: bytearray | None = None  # given to `write` while there was no room
        self.headers: Headers = ()
        self.bodiless = False
        self.trailers: Headers | None = None
        self.on_response: Callable[[Headers], None] | None = None
        self.on_interim: Callable[[Headers], None] | None = None
        self.on_gone: Callable[[StreamResetError], None] | None = None

    @property
    def id(self) -> int:
        """The stream's number on its connection."""
        return self._state.id

    @property
    def over(self) -> bool:
        """Ended both ways, or reset."""
        return self._state.over

    @property
    def peer_has_ended(self) -> bool:
        """All that the peer has sent was pushed, or is kept for the relay to come."""
        return self._ended

    @property
    def closed(self) -> bool:
        """We have let go of it in order: what its peer still sends is dropped."""
        return self._closed

    @property
    def answered(self) -> bool:
        """Server: response headers have been sent."""
        return self._state.answered

    @property
    def held_bytes(self) -> int:
        """What has come and has not been credited, wherever it is kept, and what waits to be sent."""
        return self._state.held + len(self.waiting)

    @property
    def unsent_bytes(self) -> int:
        """What waits to be sent, because there was no room."""
        return len(self.waiting)

    @property
    def connection(self) -> Carrier:
        """The connection that carries it."""
        return self._connection

    @property
    def waiting(self) -> bytes | bytearray:
        """What was given to `write` while there was no room."""
        return self._waiting or b""

    # The HTTP side: a client's response, a server's answer.

    async def response(self, timeout_s: float) -> int:
        """Client: waits for the response headers and returns the status; `headers` are set then.

        Raises:
            StreamResetError: the stream or its connection broke before.
            UpstreamError: none within `timeout_s` seconds.
        """
        if self.headers:
            return status_of(self.headers)
        if self._error is not None:
            raise self._error
        self._response = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._response
        except TimeoutError as error:
            raise UpstreamError(f"no response headers within {timeout_s:g} s") from error
        finally:
            self._response = None

    def respond(self, headers: Headers, *, end_stream: bool = False) -> None:
        """Server: sends response headers; with `end_stream` they are all of the answer."""
        self._session.send_headers(self._state, headers, end_stream=end_stream)
        if end_stream:
            self._end_pending = True
            self._connection.stream_changed(self._state)
        else:
            self._connection.flush_soon()

    def inform(self, headers: Headers) -> None:
        """Server: sends an interim response (1xx)."""
        self._session.send_interim(self._state, headers)
        self._connection.flush_soon()

    def refuse(self) -> None:
        """Server: says that nothing was done with the request, which may be sent again on another connection
        (RFC 9113 section 8.7)."""
        self._connection.reset(self._state, frames.REFUSED_STREAM)

    def end_with_trailers(self, trailers: Headers) -> None:
        """Ends the sending side with trailers, after all that was written."""
        self._trailers_pending = trailers
        self.write_eof()

    # Leg.

    @property
    def buffered_bytes(self) -> int:
        return len(self.waiting) + len(self._early or b"")  # `_held` was given away: the other leg counts it

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        if self._early:
            early, self._early = self._early, None
            relay.received(self, early)
            if self._paused:
                self._held += len(early)
            else:
                self._connection.consumed(self._state, len(early))
        if self._full:
            relay.full(self)
        if self._ended:
            relay.ended(self)
        if self._error is not None:
            relay.failed(self, self._error)

    def first(self, most: int) -> bytes:
        """Up to `most` bytes of what has come and waits for a relay; they go on waiting."""
        return bytes(self._early[:most]) if self._early else b""

    def drop_first(self, count: int) -> None:
        """So many bytes of what waits for a relay have been passed on."""
        assert self._early is not None
        del self._early[:count]
        self._connection.consumed(self._state, count)

    def leave(self) -> None:
        """Undoes `join`: what comes is kept again, within the window, for the next relay."""
        self._relay = None

    def write(self, data: Buffer) -> None:
        if self._waiting or self._full:
            self._keep(data)
            return
        connection = self._connection
        # A large read waits here where others have left enough unsent; what is small goes out at once.
        held_up = connection.congested and len(data) > READ_BYTES and not self._state.over
        sent = 0 if held_up else self._session.send_data(self._state, data)
        if sent > SMALL_BYTES or (sent and not connection.flush_planned):
            connection.flush_soon()
        if sent < len(data):
            self._keep(memoryview(data)[sent:])
            self._wait()
        elif connection.congested:
            self._wait()

    def _keep(self, data: Buffer) -> None:
        if self._waiting is None:
            self._waiting = bytearray(data)
        else:
            self._waiting += data

    def write_eof(self) -> None:
        self._end_pending = True
        if not self._waiting:
            self._send_end()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._held:
            held, self._held = self._held, 0
            self._connection.consumed(self._state, held)

    def close(self) -> None:
        self._closed = True
        self._relay = None
        self._held += len(self._early or b"")
        self._early = None
        self.resume_reading()
        unwanted = self._session.client and not (self._end_pending or self._ended)
        if not self._end_pending:
            self.write_eof()
        if self._waiting:
            self._close_pending = True
            self._watch_close()
        elif unwanted:  # a response that we do not want, and nothing of ours is on its way
            self._connection.reset(self._state, frames.CANCEL)
        elif not self._state.over:
            # What the peer still sends has nobody to read it (RFC 9113 section 8.1).
            code = frames.CANCEL if self._session.client else frames.NO_ERROR
            asyncio.get_running_loop().call_later(LINGER_S, self._connection.reset, self._state, code)

    def abort(self) -> None:
        # RFC 9113 section 8.5: a tunnel's TCP error is CONNECT_ERROR; a client just no longer wants it.
        self.reset(frames.CANCEL if self._session.client else frames.CONNECT_ERROR)

    def reset(self, code: int) -> None:
        """As `abort`, with an error code that says more (RFC 9113 section 7)."""
        self._relay = None  # which names us, and is over
        self._connection.reset(self._state, code)

    # What the connection tells.

    def on_headers(self, headers: Headers) -> None:
        """Client: the response headers came."""
        self.headers = headers
        if self.on_response is not None:
            self.on_response(headers)
        if self._response is not None and not self._response.done():
            self._response.set_result(status_of(headers))

    def on_data(self, data: Buffer) -> None:
        relay = self._relay
        if relay is not None:
            relay.received(self, data)
            if self._paused:
                self._held += len(data)
            else:
                # Not by way of the connection: it sends what there is when the read is done.
                self._session.consumed(self._state, len(data))
        elif self._closed:
            self._connection.consumed(self._state, len(data))
        elif self._early is None:
            self._early = bytearray(data)
        else:
            self._early += data

    def on_ended(self) -> None:
        self._ended = True
        if self._relay is not None:
            self._relay.ended(self)

    def on_broken(self, error: StreamResetError) -> None:
        """RST_STREAM came, or the connection is lost."""
        self._error = error
        self._waiting = None
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)
        if self._relay is not None:
            self._relay.failed(self, error)
            self._relay = None
        elif self.on_gone is not None:
            self.on_gone(error)

    def on_room(self) -> bool:
        """A window opened, or the connection has room again: sends what waits. True if nothing is left."""
        waiting = self._waiting
        if waiting:
            sent = self._session.send_data(self._state, waiting)
            del waiting[:sent]
            if waiting:
                return False
            self._waiting = None
            if self._end_pending:
                self._send_end()
            if self._close_pending:
                self.close()
        if self._full:
            self._full = False
            if self._relay is not None:
                self._relay.drained(self)
        return True

    def _wait(self) -> None:
        self._connection.wait_for_room(self)
        if not self._full:
            self._full = True
            if self._relay is not None:
                self._relay.full(self)

    def _watch_close(self) -> None:
        asyncio.get_running_loop().call_later(LAST_BYTES_TIMEOUT_S, self._check_close, len(self.waiting))

    def _check_close(self, unsent: int) -> None:
        if 0 < len(self.waiting) < unsent:
            self._watch_close()  # the peer reads, if slowly
        elif self.waiting:
            self.abort()

    def _send_end(self) -> None:
        if self._state.over:
            return  # why is on its way to on_broken, or was there
        if self._trailers_pending:  # an empty block would be none
            self._session.send_headers(self._state, self._trailers_pending, end_stream=True)
        else:
            self._session.end_stream(self._state)
        self._connection.stream_changed(self._state)


def status_of(headers: Headers) -> int:
    """`:status` of response headers; 0 when it is no number (the session has checked that it is there)."""
    for name, value in headers:
        if name == b":status":
            return int(value) if value.isdigit() else 0
    return 0


def header_value(headers: Headers, name: bytes) -> bytes:
    """The first value of `name` (lower case), or empty."""
    for key, value in headers:
        if key == name:
            return value
    return b""
