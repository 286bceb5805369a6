"""What a session tells its owner. `stream` is always the session's own record of the stream, so that an owner
never looks anything up by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.http2.session_stream import SessionStream

Headers = Sequence[tuple[bytes, bytes]]


class Event:
    """Any of those below. Events without fields are no dataclasses: making one costs 0.3 ms of each start."""

    __slots__ = ()


@dataclass
class RequestReceived(Event):
    """Server: the peer opened a stream; `ended`: its headers say that no body follows."""

    stream: SessionStream
    headers: Headers
    ended: bool


@dataclass
class RequestMalformed(Event):
    """Server: the peer's request was refused with PROTOCOL_ERROR, for what `fault` says."""

    stream_id: int
    fault: str


@dataclass
class InterimReceived(Event):
    """Client: the peer sent an interim response (1xx); the final one is still to come."""

    stream: SessionStream
    headers: Headers


@dataclass
class ResponseReceived(Event):
    """Client: the peer answered with its final (not 1xx) response headers; `ended`: no body follows."""

    stream: SessionStream
    headers: Headers
    ended: bool = False


@dataclass
class TrailersReceived(Event):
    """The peer sent trailers; `StreamEnded` follows."""

    stream: SessionStream
    headers: Headers


class DataReceived(Event):
    """Payload; `data` is a view that lives as long as the buffer given to `receive_data`. It is the
    commonest, and no dataclass: mypyc compiles no __init__ of one."""

    __slots__ = ("data", "stream")

    def __init__(self, stream: SessionStream, data: memoryview) -> None:
        self.stream = stream
        self.data = data


@dataclass
class StreamEnded(Event):
    """The peer has finished sending on the stream."""

    stream: SessionStream


@dataclass
class StreamReset(Event):
    """The stream is over: the peer sent RST_STREAM, or we did because of what it sent (`by_peer`); `fault`
    says more of that, if there is more to say than the code does. `local_ended`: we had sent END_STREAM."""

    stream: SessionStream
    code: int
    by_peer: bool
    local_ended: bool = False
    fault: str = ""


@dataclass
class WindowOpened(Event):
    """There is room again for DATA on `stream`, or on the connection or all its streams (None)."""

    stream: SessionStream | None


class NoticeGiven(Event):
    """We have said GOAWAY to a peer that opened too many streams in vain: only open streams go on."""

    __slots__ = ()


class GoAwaySeen(Event):
    """The peer has seen the GOAWAY of `announce_goaway`: all streams that it opened before have come."""

    __slots__ = ()


class SettingsReceived(Event):
    """The peer's SETTINGS are in force."""

    __slots__ = ()


@dataclass
class GoAwayReceived(Event):
    """The peer accepts no new streams; those above `last_stream_id` were not processed (RFC 9113 6.8)."""

    last_stream_id: int
    code: int
