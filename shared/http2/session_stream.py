"""One stream as a session keeps it: its state, what the peer may still send, its flow-control counters."""

from __future__ import annotations

from typing import Any, ClassVar

# Both of these have a few members and no others, which are compared by identity. They are no enums, whose
# members have no attributes where they are compiled: those are read for each frame.


class StreamState:
    """RFC 9113 section 5.1. There is no record of an idle stream, and none is reserved, as nobody pushes.

    =====================  ===================  ====================  ================
    state                  our END_STREAM       the peer's            any RST_STREAM
    =====================  ===================  ====================  ================
    OPEN                   HALF_CLOSED_LOCAL    HALF_CLOSED_REMOTE    RESET
    HALF_CLOSED_LOCAL      dropped              CLOSED                RESET
    HALF_CLOSED_REMOTE     CLOSED               error STREAM_CLOSED   RESET
    CLOSED, RESET          dropped              see `PastStreams`     see `PastStreams`
    =====================  ===================  ====================  ================
    """

    __slots__ = ("over", "receives", "sends", "text")

    OPEN: ClassVar[StreamState]
    HALF_CLOSED_LOCAL: ClassVar[StreamState]
    HALF_CLOSED_REMOTE: ClassVar[StreamState]

    CLOSED: ClassVar[StreamState]
    """Both sides have sent END_STREAM."""

    RESET: ClassVar[StreamState]
    """One side has sent RST_STREAM, or the connection is lost."""

    def __init__(self, text: str, *, sends: bool = False, receives: bool = False) -> None:
        self.text = text
        self.sends = sends
        """We may send."""
        self.receives = receives
        """The peer may send."""
        self.over = not (sends or receives)

    def __repr__(self) -> str:
        return f"<{self.text}>"


StreamState.OPEN = StreamState("open", sends=True, receives=True)
StreamState.HALF_CLOSED_LOCAL = StreamState("half-closed (local)", receives=True)
StreamState.HALF_CLOSED_REMOTE = StreamState("half-closed (remote)", sends=True)
StreamState.CLOSED = StreamState("closed")
StreamState.RESET = StreamState("closed (reset)")


class Awaited:
    """What the peer may send next on a stream."""

    __slots__ = ("is_response", "text")

    RESPONSE: ClassVar[Awaited]
    """The headers of the final response: DATA before them is an error (RFC 9113 section 8.1)."""

    RESPONSE_TO_HEAD: ClassVar[Awaited]
    """The same; its content-length tells of a body that does not follow."""

    RESPONSE_TO_CONNECT: ClassVar[Awaited]
    """The same; its content-length is ignored (RFC 9110 section 9.3.6)."""

    BODY: ClassVar[Awaited]
    """Any number of bytes, or trailers."""

    COUNTED_BODY: ClassVar[Awaited]
    """`SessionStream.body_left` bytes, or trailers."""

    NOTHING: ClassVar[Awaited]
    """The peer has ended, or the stream is over."""

    def __init__(self, text: str, *, is_response: bool = False) -> None:
        self.text = text
        self.is_response = is_response
        """The final response headers have not come."""

    def __repr__(self) -> str:
        return f"<{self.text}>"


Awaited.RESPONSE = Awaited("response", is_response=True)
Awaited.RESPONSE_TO_HEAD = Awaited("response to HEAD", is_response=True)
Awaited.RESPONSE_TO_CONNECT = Awaited("response to CONNECT", is_response=True)
Awaited.BODY = Awaited("body")
Awaited.COUNTED_BODY = Awaited("counted body")
Awaited.NOTHING = Awaited("nothing")


# Each look-up of a member in its class would cost 60 ns (Python 3.11), and a stream needs a dozen.
_RESPONSE, _TO_HEAD = Awaited.RESPONSE, Awaited.RESPONSE_TO_HEAD
_TO_CONNECT = Awaited.RESPONSE_TO_CONNECT
_BODY, _COUNTED_BODY = Awaited.BODY, Awaited.COUNTED_BODY
_RESPONSES = {b"HEAD": _TO_HEAD, b"CONNECT": _TO_CONNECT}
_OPEN = StreamState.OPEN

_STATUS_WITHOUT_BODY = (b"204", b"304")
"""Their content-length tells of another response's body (RFC 9110 section 8.6)."""


class SessionStream:
    """The session's record of one stream. `state` is changed by `Streams` only; `send_window`,
    `receive_window`, `window`, `part`, `credit`, `used`, `since` and `held` are counted by `Windows`; `owner`
    belongs to the session's owner."""

    __slots__ = (
        "answered",
        "awaited",
        "body_left",
        "credit",
        "held",
        "id",
        "owner",
        "part",
        "receive_window",
        "send_window",
        "since",
        "state",
        "used",
        "window",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int, part: int) -> None:
        self.id = stream_id
        self.state = _OPEN
        self.awaited = _BODY
        self.body_left = 0
        """Bytes that content-length still promises, while `awaited` is COUNTED_BODY."""
        self.answered = False
        """We have sent response headers."""
        self.send_window = send_window
        """Bytes that we may send; SETTINGS may make it negative."""
        self.receive_window = receive_window
        """Bytes that the peer may send."""
        self.window = receive_window
        """Bytes that the peer may send ahead: what it may send now, what is held, and the credit."""
        self.part = part
        """The credit at which the peer is told of it."""
        self.credit = 0
        """Bytes consumed, of which the peer has not been told yet; below 0 if the window has shrunk."""
        self.used = 0
        """With the credit: bytes consumed since `since`, which is in seconds of a steady clock."""
        self.since = 0.0
        self.held = 0
        """Bytes received that the owner has not consumed."""
        self.owner: Any = None

    @property
    def over(self) -> bool:
        """Nothing more goes in or out."""
        return self.state.over

    def await_response(self, method: bytes) -> None:
        """A request with this method has been sent."""
        self.awaited = _RESPONSES.get(method, _RESPONSE)

    def await_body(self, content_length: int) -> None:
        """Headers have come that promise so many bytes."""
        self.awaited = _COUNTED_BODY
        self.body_left = content_length

    def response_came(self, status: bytes, content_length: int | None) -> None:
        """The headers of the final response have come."""
        if self.awaited is _TO_CONNECT or status in _STATUS_WITHOUT_BODY:
            content_length = None
        elif self.awaited is _TO_HEAD:
            content_length = 0
        if content_length is None:
            self.awaited = _BODY
        else:
            self.await_body(content_length)

    def count_body(self, payload: int, *, ends: bool) -> bool:
        """Counts so many bytes of DATA, the last ones if `ends`. False: there may be none, or their number is
        not what content-length says (RFC 9113 section 8.1.1)."""
        if self.awaited is not _COUNTED_BODY:
            return self.awaited is _BODY
        left = self.body_left - payload
        self.body_left = max(left, 0)
        return left >= 0 and not (ends and left)
