"""HPACK, the writing half (RFC 7541): our header lists into header blocks.

A field that stays the same for many requests (scheme, authority, path, what an application adds to each) goes
into the dynamic table: it is sent once and is one byte from then on. A field that changes with each request
(traceparent) is sent as it is and pushes nothing out. Credentials are sent as they are too, and marked never
to be indexed: not by us and not by what passes them on (section 7.1.3). For a token of 1 KB that costs 0.6
µs, where its index would cost 0.2, and 1 KB of a first flight that has a TLS handshake of 3 KB in it; and the
table, which is 4 KB, keeps its room.

Nothing is Huffman-coded: it would cost 150 µs for such a token, to save a quarter of its bytes.
"""

from __future__ import annotations

from shared.http2.events import Headers
from shared.http2.static_table import (
    ENTRY_OVERHEAD_BYTES,
    FIELDS,
    INDEX_OF_FIELD,
    INDEX_OF_NAME,
)

ENCODER_TABLE_BYTES = 4096
"""Of our own headers that HPACK keeps for reuse: the default, whatever more a peer offers (RFC 7541 section
4.2), because it is our memory."""

LARGEST_ENTRY_BYTES = ENCODER_TABLE_BYTES // 4
"""A larger field would push out too many others."""

SECRET_NAMES = frozenset((b"authorization", b"proxy-authorization", b"cookie", b"set-cookie"))
"""Never indexed, by anyone."""

CHANGING_NAMES = frozenset(
    (
        b"age",
        b"content-length",
        b"content-range",
        b"date",
        b"etag",
        b"forwarded",
        b"if-modified-since",
        b"if-none-match",
        b"last-modified",
        b"location",
        b"traceparent",
        b"tracestate",
        b"x-forwarded-for",
        b"x-request-id",
    )
)
"""Hardly ever the same twice."""

_INDEXED = 0x80
_INTO_THE_TABLE, _INTO_THE_TABLE_PREFIX = 0x40, 0x3F
_NOT_INDEXED = 0x00
_NEVER_INDEXED = 0x10
_NOT_INDEXED_PREFIX = 0x0F
_TABLE_SIZE, _TABLE_SIZE_PREFIX = 0x20, 0x1F

_STATIC_COUNT = len(FIELDS)
_STATIC_BYTES = {field: _INDEXED | index for field, index in INDEX_OF_FIELD.items()}


class HeaderEncoder:
    """The blocks of one direction of a connection, in order."""

    __slots__ = ("_added", "_entries", "_size", "_smallest", "_table_bytes")

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, bytes], int] = {}  # the oldest first, with its number
        self._added = 0
        self._size = 0  # as RFC 7541 section 4.1 counts
        self._table_bytes = ENCODER_TABLE_BYTES
        self._smallest: int | None = None  # the table's size since the last block, if it has changed

    def limit_table(self, max_bytes: int) -> None:
        """The peer's SETTINGS_HEADER_TABLE_SIZE: the next block says what we make of it."""
        chosen = min(max_bytes, ENCODER_TABLE_BYTES)
        if chosen != self._table_bytes:
            self._smallest = chosen if self._smallest is None else min(chosen, self._smallest)
            self._table_bytes = chosen
            self._evict(chosen)

    def encode(self, headers: Headers) -> bytearray:
        """The header block of a list: pseudo-header fields first, names in lower case, as its writer has
        it."""
        block = bytearray()
        if self._smallest is not None:
            self._say_table_size(block)
        entries = self._entries
        for field in headers:
            known = _STATIC_BYTES.get(field)
            if known is not None:
                block.append(known)
                continue
            number = entries.get(field)
            if number is not None:
                index = _STATIC_COUNT + 1 + self._added - number
                if index < 0x7F:
                    block.append(_INDEXED | index)
                else:
                    _put_integer(block, _INDEXED, 0x7F, index)
            else:
                self._literal(block, field)
        return block

    def _literal(self, block: bytearray, field: tuple[bytes, bytes]) -> None:
        name, value = field
        size = len(name) + len(value) + ENTRY_OVERHEAD_BYTES
        index = INDEX_OF_NAME.get(name, 0)
        if name in SECRET_NAMES:
            _put_integer(block, _NEVER_INDEXED, _NOT_INDEXED_PREFIX, index)
        elif name in CHANGING_NAMES or size > min(LARGEST_ENTRY_BYTES, self._table_bytes):
            _put_integer(block, _NOT_INDEXED, _NOT_INDEXED_PREFIX, index)
        else:
            _put_integer(block, _INTO_THE_TABLE, _INTO_THE_TABLE_PREFIX, index)
            self._add(field, size)
        if not index:
            _put_integer(block, 0, 0x7F, len(name))
            block += name
        _put_integer(block, 0, 0x7F, len(value))
        block += value

    def _say_table_size(self, block: bytearray) -> None:
        """First the smallest that it was since the last block, if it has grown again (section 4.2)."""
        if self._smallest is not None and self._smallest < self._table_bytes:
            _put_integer(block, _TABLE_SIZE, _TABLE_SIZE_PREFIX, self._smallest)
        _put_integer(block, _TABLE_SIZE, _TABLE_SIZE_PREFIX, self._table_bytes)
        self._smallest = None

    def _add(self, field: tuple[bytes, bytes], size: int) -> None:
        self._evict(self._table_bytes - size)
        self._added += 1
        self._entries[field] = self._added
        self._size += size

    def _evict(self, room: int) -> None:
        while self._size > room:
            field = next(iter(self._entries))
            del self._entries[field]
            self._size -= len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES


def _put_integer(block: bytearray, kind: int, prefix: int, number: int) -> None:
    """Appends an integer whose first byte has `kind` in front of it (section 5.1)."""
    if number < prefix:
        block.append(kind | number)
        return
    block.append(kind | prefix)
    number -= prefix
    while number > 0x7F:
        block.append(number & 0x7F | 0x80)
        number >>= 7
    block.append(number)
