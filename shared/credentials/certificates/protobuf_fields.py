"""Fields of Protocol Buffers messages, written and read (protobuf.dev, "Encoding").

For the few messages that we send and receive: callers know the fields by number. No descriptors, no names, no
groups. Bytes in, bytes out.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_VARINT_BYTES = 10
"""64 bits, 7 of them a byte."""

MAX_FIELD_NUMBER = (1 << 29) - 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def integer_field(number: int, value: int) -> bytes:
    """An int64, uint64, int32 or uint32. Raises ValueError unless `value` has at most 64 bits."""
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{value} has more than 64 bits")
    return _varint(number << 3 | _VARINT) + _varint(value % (1 << 64))


def bytes_field(number: int, value: bytes) -> bytes:
    """A string (in UTF-8), bytes, or a message."""
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field in order: of strings, bytes and messages the bytes, of all others the
    unsigned integer that is on the wire. Raises ValueError where it is no message."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if not 1 <= number <= MAX_FIELD_NUMBER:
            raise ValueError("no protobuf message: a field with an impossible number")
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(message, at)
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise ValueError("no protobuf message: a field of an unknown kind")
        if length > len(message) - at:
            raise ValueError("no protobuf message: a field is longer than all of it")
        piece = message[at : at + length]
        at += length
        yield number, piece if kind == _BYTES else int.from_bytes(piece, "little")


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value % (1 << 64), at + index + 1
    raise ValueError("no protobuf message: a number without an end")
