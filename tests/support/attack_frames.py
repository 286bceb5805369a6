"""The frames of attacks on an HTTP/2 server, written with hyperframe and hpack, so that no mistake of our own
codec hides in them. What the attacks are is in `floods.py` and `stalls.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hpack
from h2.errors import ErrorCodes
from hpack.struct import NeverIndexedHeaderTuple
from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame, SettingsFrame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

MAX_WINDOW = 2**31 - 1
INITIAL_WINDOW = SettingsFrame.INITIAL_WINDOW_SIZE
FRAME_BYTES = 16384

# Error codes (RFC 9113 section 7).
PROTOCOL_ERROR = int(ErrorCodes.PROTOCOL_ERROR)
FLOW_CONTROL_ERROR = int(ErrorCodes.FLOW_CONTROL_ERROR)
STREAM_CLOSED = int(ErrorCodes.STREAM_CLOSED)
FRAME_SIZE_ERROR = int(ErrorCodes.FRAME_SIZE_ERROR)
COMPRESSION_ERROR = int(ErrorCodes.COMPRESSION_ERROR)
ENHANCE_YOUR_CALM = int(ErrorCodes.ENHANCE_YOUR_CALM)
CANCEL = int(ErrorCodes.CANCEL)

Fields = Iterable[tuple[bytes, bytes]]
Settings = dict[int, int]


class Requests:
    """Header blocks of one request on a connection: the first fills the dynamic table, the others are a byte
    for each field, as an attacker would have it."""

    def __init__(self, path: bytes, *more: tuple[bytes, bytes]) -> None:
        fields = [*pseudo(path), *more]
        encoder = hpack.Encoder()
        self._first = encoder.encode(fields)
        self._again = encoder.encode(fields)

    def __call__(self, number: int, *flags: str) -> bytes:
        """The `number`th request of its connection, counted from 0, on the stream that it has."""
        block = self._again if number else self._first
        return HeadersFrame(stream(number), block, flags=["END_HEADERS", *flags]).serialize()


def code_name(code: int) -> str:
    """An error code's name, or its number."""
    try:
        return ErrorCodes(code).name
    except ValueError:
        return f"{code:#x}"


def stream(number: int) -> int:
    """The identifier of the client's `number`th stream, counted from 0."""
    return 2 * number + 1


def settings(values: Settings) -> bytes:
    """A SETTINGS frame."""
    return SettingsFrame(0, settings=values).serialize()


def joined(*frames: Frame) -> bytes:
    """The frames one after the other."""
    return b"".join(frame.serialize() for frame in frames)


def always(*frames: Frame) -> Callable[[int], bytes]:
    """The same every time."""
    data = joined(*frames)
    return lambda number: data


def pseudo(path: bytes) -> list[tuple[bytes, bytes]]:
    """A POST request's first fields."""
    return [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"app"), (b":path", path)]


def literal(fields: Fields) -> list[NeverIndexedHeaderTuple]:
    """Fields that leave the dynamic table alone, so that every block can be sent at any time."""
    return [NeverIndexedHeaderTuple(name, value) for name, value in fields]


def literal_request(number: int, path: bytes, more: Fields) -> bytes:
    """The `number`th request of its connection with further fields, whatever came before it."""
    block = hpack.Encoder().encode(literal([*pseudo(path), *more]), huffman=False)
    return in_frames(stream(number), block)


def in_frames(stream_id: int, block: bytes) -> bytes:
    """A header block as HEADERS and as many CONTINUATION as it takes."""
    parts = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    frames: list[Frame] = [HeadersFrame(stream_id, parts[0])]
    frames += [ContinuationFrame(stream_id, part) for part in parts[1:]]
    frames[-1].flags.add("END_HEADERS")
    return joined(*frames)


def open_block(fragment: bytes) -> bytes:
    """A header block that has begun and not ended."""
    return HeadersFrame(1, fragment).serialize()
