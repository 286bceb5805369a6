"""One end of an HTTP/2 connection spoken to in frames, so that tests read as dialogues.

`received` gives a session frames built by hyperframe and returns what the session tells its owner; `sent`
reads what the session has to say, with hyperframe and HPACK and none of our own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hpack
import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from shared.http2 import events
from shared.http2.session import (
    Session,
    SessionError,
    SessionLimits,
    SessionStream,
)
from shared.http2.window_growth import WindowGrowth

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
LAST_OF_ALL = 2**31 - 1
"""The stream that the first of two GOAWAYs names: none is beyond it (RFC 9113 section 6.8)."""

WINDOW = 65535
"""The smallest windows that a session may have, and those that a peer starts with."""

SMALL = SessionLimits(
    stream_window_bytes=WINDOW, most_stream_window_bytes=WINDOW, connection_window_bytes=WINDOW
)

POST = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/_hbone/15003")]
GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/")]
HEAD = [(b":method", b"HEAD"), *GET[1:]]
CONNECT = [(b":method", b"CONNECT"), (b":authority", b"10.1.2.3:80")]
OK = [(b":status", b"200")]
TRAILERS = [(b"grpc-status", b"0")]

INITIAL_WINDOW = SettingsFrame.INITIAL_WINDOW_SIZE
MAX_STREAMS = SettingsFrame.MAX_CONCURRENT_STREAMS


Fields = Iterable[tuple[bytes, bytes]]
Told = tuple[object, ...]


# Frames.


def length(count: int) -> tuple[bytes, bytes]:
    """A content-length field."""
    return (b"content-length", str(count).encode())


def block(fields: Fields) -> bytes:
    """A header block that leans on nothing said before."""
    return bytes(hpack.Encoder().encode(list(fields)))


def headers(stream: int, fields: Fields, *, end: bool = False, whole: bool = True) -> bytes:
    frame = HeadersFrame(stream, block(fields))
    if end:
        frame.flags.add("END_STREAM")
    if whole:
        frame.flags.add("END_HEADERS")
    return frame.serialize()


def continuation(stream: int, data: bytes = b"", *, whole: bool = True) -> bytes:
    frame = ContinuationFrame(stream, data)
    if whole:
        frame.flags.add("END_HEADERS")
    return frame.serialize()


def data(stream: int, payload: bytes = b"", *, end: bool = False, pad: int | None = None) -> bytes:
    frame = DataFrame(stream, payload)
    if end:
        frame.flags.add("END_STREAM")
    if pad is not None:
        frame.flags.add("PADDED")
        frame.pad_length = pad
    return frame.serialize()


def settings(values: dict[int, int] | None = None) -> bytes:
    return SettingsFrame(0, values or {}).serialize()


def settings_ack() -> bytes:
    return SettingsFrame(0, flags=["ACK"]).serialize()


def window(stream: int, increment: int) -> bytes:
    return WindowUpdateFrame(stream, increment).serialize()


def reset(stream: int, code: int) -> bytes:
    return RstStreamFrame(stream, code).serialize()


def goaway(last_stream: int, code: int = 0) -> bytes:
    return GoAwayFrame(0, last_stream, code).serialize()


def ping(payload: bytes, *, ack: bool = False) -> bytes:
    return PingFrame(0, payload, flags=["ACK"] if ack else []).serialize()


def goaway_seen() -> bytes:
    """What a peer says that has seen the first of two GOAWAYs."""
    return ping(b"goaway\0\0", ack=True)


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Any frame, right or wrong."""
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


# What is said.


def code_name(code: int) -> str:
    try:
        return ErrorCodes(code).name
    except ValueError:
        return hex(code)


def parsed_frames(wire: bytes) -> list[Frame]:
    """The frames in `wire`, by hyperframe."""
    found = []
    while wire:
        parsed, size = Frame.parse_frame_header(memoryview(wire[:FRAME_HEADER_BYTES]))
        parsed.parse_body(memoryview(wire[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + size]))
        wire = wire[FRAME_HEADER_BYTES + size :]
        found.append(parsed)
    return found


def read(wire: bytes, decoder: hpack.Decoder | None = None) -> list[str]:
    """The frames in `wire`, one line each."""
    decoder = decoder or hpack.Decoder()
    return [_line(parsed, decoder) for parsed in parsed_frames(wire)]


def _line(parsed: Frame, decoder: hpack.Decoder) -> str:
    end = " END" if "END_STREAM" in parsed.flags else ""
    match parsed:
        case DataFrame():
            return f"DATA {parsed.stream_id} {parsed.data!r}{end}"
        case HeadersFrame():
            fields = b" ".join(b"%b=%b" % field for field in decoder.decode(bytes(parsed.data), raw=True))
            return f"HEADERS {parsed.stream_id} {fields.decode()}{end}"
        case SettingsFrame():
            return "SETTINGS ACK" if "ACK" in parsed.flags else f"SETTINGS {parsed.settings}"
        case WindowUpdateFrame():
            return f"WINDOW_UPDATE {parsed.stream_id} +{parsed.window_increment}"
        case RstStreamFrame():
            return f"RST_STREAM {parsed.stream_id} {code_name(parsed.error_code)}"
        case GoAwayFrame():
            return f"GOAWAY {parsed.last_stream_id} {code_name(parsed.error_code)}"
        case PingFrame():
            return f"PING{' ACK' if 'ACK' in parsed.flags else ''} {parsed.opaque_data!r}"
    raise AssertionError(parsed)


# What is told.


def told(happened: Iterable[events.Event]) -> list[Told]:
    """Events as tuples: a name, the stream's number, what else there is. Pieces of one body are joined."""
    lines: list[Told] = []
    for event in happened:
        line = _tuple(event)
        if line[0] == "data" and lines and lines[-1][:2] == line[:2]:
            line = ("data", line[1], lines.pop()[2] + line[2])  # type: ignore[operator]  # bytes both
        lines.append(line)
    return lines


def _tuple(event: events.Event) -> Told:
    match event:
        case events.RequestReceived(stream, fields, ended):
            return ("request", stream.id, dict(fields)[b":method"], ended)
        case events.InterimReceived(stream, fields):
            return ("interim", stream.id, dict(fields)[b":status"])
        case events.ResponseReceived(stream, fields):
            return ("response", stream.id, dict(fields)[b":status"])
        case events.TrailersReceived(stream, fields):
            return ("trailers", stream.id, list(fields))
        case events.DataReceived(stream=stream, data=view):
            return ("data", stream.id, bytes(view))
        case events.StreamEnded(stream):
            return ("ended", stream.id)
        case events.RequestMalformed(number, fault):
            return ("malformed", number, fault)
        case events.StreamReset(stream, code, by_peer):
            return ("reset", stream.id, code_name(code), "by the peer" if by_peer else "by us")
        case events.WindowOpened(stream):
            return ("window", stream.id if stream else 0)
        case events.GoAwayReceived(last, code):
            return ("goaway", last, code_name(code))
        case events.GoAwaySeen():
            return ("goaway seen",)
        case events.NoticeGiven():
            return ("notice",)
        case events.SettingsReceived():
            return ("settings",)
    raise AssertionError(event)


class Dialogue:
    """A session with its peer played by the test. What was said up to the first request is taken."""

    def __init__(
        self,
        *,
        client: bool,
        limits: SessionLimits | None = None,
        growth_bytes: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        growth = WindowGrowth(lambda: growth_bytes)
        self.session = Session(client=client, limits=limits, growth=growth, clock=clock)
        self._decoder = hpack.Decoder()
        if not client:
            self.session.receive_data(PREFACE)
        assert self.received(settings()) == [("settings",)]
        self.session.data_to_send()

    @classmethod
    def server(cls, limits: SessionLimits | None = None) -> Dialogue:
        """A server that has got the client's preface."""
        return cls(client=False, limits=limits)

    @classmethod
    def client(cls, limits: SessionLimits | None = None) -> Dialogue:
        """A client that has got the server's SETTINGS."""
        return cls(client=True, limits=limits)

    def received(self, *wire: bytes) -> list[Told]:
        """Gives the session these frames in one piece and returns what it tells."""
        self.session.receive_data(b"".join(wire))
        return told(self.session.events())

    def sent(self) -> list[str]:
        """What the session has said since the last call."""
        return read(bytes(self.session.data_to_send()), self._decoder)

    def stream(self, number: int = 1) -> SessionStream:
        """The session's record of an open stream."""
        return self.session.streams[number]

    def opened(self, fields: Fields = POST, *, end: bool = False) -> SessionStream:
        """Client: a new stream whose request has been sent."""
        stream = self.session.open_stream(list(fields), end_stream=end)
        self.sent()
        return stream

    def asked(self, number: int = 1, fields: Fields = POST, *, end: bool = False) -> SessionStream:
        """Server: a new stream that the peer has opened."""
        assert self.received(headers(number, fields, end=end))[0][:2] == ("request", number)
        return self.stream(number)

    def broke(self, *wire: bytes) -> str:
        """These frames end the connection: returns how, after checking that the peer is told and that what
        the owner does from then on is without effect."""
        with pytest.raises(SessionError) as caught:
            self.session.receive_data(b"".join(wire))
        code = code_name(caught.value.code)
        *_, last = self.sent()
        assert last.startswith("GOAWAY ")
        assert last.endswith(code)
        for stream in list(self.session.streams.values()):
            self.session.send_headers(stream, OK)
            assert self.session.send_data(stream, b"late") == 4
            self.session.end_stream(stream)
            self.session.reset(stream, 8)
        self.session.goaway()
        self.session.receive_data(ping(b"12345678"))
        assert self.sent() == []
        return f"{code}: {caught.value}"
