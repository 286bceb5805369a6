"""HTTP/2 frames (RFC 9113 section 4.1): the nine bytes in front of each, codes and names, and whole frames to
send."""

from __future__ import annotations

import struct

DATA = 0x0
HEADERS = 0x1
PRIORITY = 0x2
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

FLAG_END_STREAM = 0x1
FLAG_ACK = 0x1
FLAG_END_HEADERS = 0x4
FLAG_PADDED = 0x8
FLAG_PRIORITY = 0x20

# Settings (RFC 9113 section 6.5.2).
SETTING_HEADER_TABLE_SIZE = 0x1
SETTING_ENABLE_PUSH = 0x2
SETTING_MAX_CONCURRENT_STREAMS = 0x3
SETTING_INITIAL_WINDOW_SIZE = 0x4
SETTING_MAX_FRAME_SIZE = 0x5
SETTING_MAX_HEADER_LIST_SIZE = 0x6
SETTING_ENABLE_CONNECT_PROTOCOL = 0x8  # RFC 8441

# Error codes (RFC 9113 section 7), those that we send or check for.
NO_ERROR = 0x0
PROTOCOL_ERROR = 0x1
INTERNAL_ERROR = 0x2
FLOW_CONTROL_ERROR = 0x3
STREAM_CLOSED = 0x5
FRAME_SIZE_ERROR = 0x6
REFUSED_STREAM = 0x7
CANCEL = 0x8
COMPRESSION_ERROR = 0x9
CONNECT_ERROR = 0xA
ENHANCE_YOUR_CALM = 0xB
INADEQUATE_SECURITY = 0xC

ERROR_NAMES = {
    NO_ERROR: "NO_ERROR",
    PROTOCOL_ERROR: "PROTOCOL_ERROR",
    INTERNAL_ERROR: "INTERNAL_ERROR",
    FLOW_CONTROL_ERROR: "FLOW_CONTROL_ERROR",
    0x4: "SETTINGS_TIMEOUT",
    STREAM_CLOSED: "STREAM_CLOSED",
    FRAME_SIZE_ERROR: "FRAME_SIZE_ERROR",
    REFUSED_STREAM: "REFUSED_STREAM",
    CANCEL: "CANCEL",
    COMPRESSION_ERROR: "COMPRESSION_ERROR",
    CONNECT_ERROR: "CONNECT_ERROR",
    ENHANCE_YOUR_CALM: "ENHANCE_YOUR_CALM",
    INADEQUATE_SECURITY: "INADEQUATE_SECURITY",
    0xD: "HTTP_1_1_REQUIRED",
}

FRAME_NAMES = (
    "DATA",
    "HEADERS",
    "PRIORITY",
    "RST_STREAM",
    "SETTINGS",
    "PUSH_PROMISE",
    "PING",
    "GOAWAY",
    "WINDOW_UPDATE",
    "CONTINUATION",
)

HEADER_BYTES = 9
MAX_PAYLOAD_BYTES = 16384
"""The largest that every peer accepts (RFC 9113 section 4.2)."""

MAX_WINDOW = 2**31 - 1
MAX_STREAM_ID = 2**31 - 1

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first (RFC 9113 section 3.4)."""

PREFACE_WORD = PREFACE[:3]
"""How HTTP/2 begins, and no request of HTTP/1.1."""

HEADER = struct.Struct(">HBBBI")
"""A frame header: the 24-bit length as 16 + 8, type, flags, the reserved bit and the stream."""

SHORT_HEADER = struct.Struct(">HBHI")
"""The same with type and flags in one: 0 is DATA without flags, and the reserved bit makes another stream."""


def error_name(code: int) -> str:
    """The name of an error code, or its number where it has none."""
    return ERROR_NAMES.get(code) or f"error {code:#x}"


def header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """The nine bytes in front of a frame of `length` bytes."""
    return HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def read_header(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int, int, int]:
    """Length in bytes, type, flags and stream of the frame header at `at`; the reserved bit is dropped."""
    high, low, kind, flags, stream_id = HEADER.unpack_from(data, at)
    return high << 8 | low, kind, flags, stream_id & MAX_STREAM_ID


def window_update(stream_id: int, increment: int) -> bytes:
    """A whole WINDOW_UPDATE frame; stream 0 is the connection (RFC 9113 section 6.9)."""
    return header(4, WINDOW_UPDATE, 0, stream_id) + increment.to_bytes(4, "big")


def headers(stream_id: int, block: bytes | bytearray, *, end_stream: bool) -> bytes:
    """A header block as HEADERS, with as many CONTINUATIONs as it needs (RFC 9113 section 4.3)."""
    end = FLAG_END_STREAM if end_stream else 0
    if len(block) <= MAX_PAYLOAD_BYTES:
        length = len(block)
        # `header`, but for the call: this is done for every stream; likewise below.
        return HEADER.pack(length >> 8, length & 0xFF, HEADERS, FLAG_END_HEADERS | end, stream_id) + block
    pieces = [block[at : at + MAX_PAYLOAD_BYTES] for at in range(0, len(block), MAX_PAYLOAD_BYTES)]
    out = header(len(pieces[0]), HEADERS, end, stream_id) + pieces[0]
    for piece in pieces[1:-1]:
        out += header(len(piece), CONTINUATION, 0, stream_id) + piece
    return out + header(len(pieces[-1]), CONTINUATION, FLAG_END_HEADERS, stream_id) + pieces[-1]


def end_stream(stream_id: int) -> bytes:
    """An empty DATA frame with END_STREAM."""
    return HEADER.pack(0, 0, DATA, FLAG_END_STREAM, stream_id)


def rst_stream(stream_id: int, code: int) -> bytes:
    """A whole RST_STREAM frame (RFC 9113 section 6.4)."""
    return header(4, RST_STREAM, 0, stream_id) + code.to_bytes(4, "big")


def ping(data: bytes | memoryview, *, ack: bool = False) -> bytes:
    """A whole PING frame with these eight bytes (RFC 9113 section 6.7)."""
    return header(8, PING, FLAG_ACK if ack else 0, 0) + data


def goaway(last_stream_id: int, code: int) -> bytes:
    """A whole GOAWAY frame (RFC 9113 section 6.8)."""
    return header(8, GOAWAY, 0, 0) + last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")


def settings(values: dict[int, int]) -> bytes:
    """A whole SETTINGS frame (RFC 9113 section 6.5)."""
    body = b"".join(struct.pack(">HI", code, value) for code, value in values.items())
    return header(len(body), SETTINGS, 0, 0) + body


SETTINGS_ACK = header(0, SETTINGS, FLAG_ACK, 0)
"""Says that the peer's SETTINGS are in force."""
