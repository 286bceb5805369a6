"""HPACK, the reading half (RFC 7541): one peer's header blocks into header lists, at a bounded cost.

Beside the dynamic table it has two caches. A block that did not change the table gives the same list again
until the table does change; so the answer 200, or a request that a peer has in its table, costs one look-up.
And the text behind a Huffman code of some length is kept: a token of 1 KB costs 80 µs to decode, and a
gateway sends the same one for an hour. hpack has the Huffman codes; its decoder needs three times as long for
the rest, and bounds no table updates.

Bounds: the list, as RFC 9113 section 6.5.2 counts it, is one while it is decoded; the table is HPACK's 4,096
bytes, for we announce nothing else.
"""

from __future__ import annotations

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman

from shared.http2 import frames
from shared.http2.frame_rules import SessionError
from shared.http2.header_rules import HeaderBlock, examine
from shared.http2.static_table import ENTRY_OVERHEAD_BYTES, FIELDS

TABLE_BYTES = 4096
"""SETTINGS_HEADER_TABLE_SIZE where it is not announced (RFC 9113 section 6.5.2)."""

TABLE_UPDATES = 2
"""Changes of the dynamic table's size in one block: more are never needed (RFC 7541 section 4.2), and cost us
a microsecond for each byte of a block that has nothing else."""

KNOWN_BLOCKS = 8
"""Blocks remembered: a peer of tunnels sends one or two kinds of request, or of answer."""

KNOWN_BLOCK_BYTES = 512
"""The longest block remembered: with the fields that they name, 60 KiB a connection at the very most."""

KNOWN_TEXTS = 16
"""Huffman codes remembered: tokens of as many origins or audiences."""

KNOWN_TEXT_BYTES = range(64, 2048)
"""How long they are: a token has 600 to 1,500 bytes; below, decoding costs less than 8 µs."""

_STATIC_COUNT = len(FIELDS)
_LAST_STATIC = 0x80 | _STATIC_COUNT
_INTEGER_BYTES = 5
"""Of an integer beyond its prefix: more than any length or index needs, and 35 bits."""

_Field = tuple[bytes, bytes]


class HeaderDecoder:
    """The blocks of one direction of a connection, in order."""

    __slots__ = ("_blocks", "_max_list_bytes", "_size", "_table", "_table_bytes", "_texts")

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self._table: list[_Field] = []  # the newest last
        self._size = 0  # as RFC 7541 section 4.1 counts
        self._table_bytes = TABLE_BYTES  # what the peer's encoder has chosen
        self._blocks: dict[bytes, HeaderBlock] = {}
        self._texts: dict[bytes, bytes] = {}

    def decode(self, block: bytes) -> HeaderBlock:
        """The list in a whole header block, and what it is.

        Raises:
            SessionError: the block cannot be read, or the list is too long. HPACK's state is lost with it.
        """
        known = self._blocks.get(block)
        if known is not None:
            return known
        try:
            fields, table_changed = self._read(block)
        except IndexError as error:
            raise _unreadable("it ends too early, or names no entry of the tables") from error
        headers = examine(fields)
        if table_changed:
            self._blocks.clear()
        elif len(block) <= KNOWN_BLOCK_BYTES:
            if len(self._blocks) >= KNOWN_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = headers
        return headers

    def _read(self, block: bytes) -> tuple[list[_Field], bool]:
        at, table_changed = self._table_updates(block)
        fields: list[_Field] = []
        left = self._max_list_bytes
        size = len(block)
        while at < size:
            byte = block[at]
            if 0x80 < byte <= _LAST_STATIC:
                field = FIELDS[byte - 0x81]
                at += 1
            elif byte & 0x80:  # an entry of the tables (section 6.1)
                index, at = (byte & 0x7F, at + 1) if byte < 0xFF else _integer(block, at, 0x7F)
                field = self._entry(index)
            elif byte & 0x40:  # a field that goes into the table (section 6.2.1)
                field, at = self._literal(block, at, 0x3F)
                self._add(field)
                table_changed = True
            elif byte & 0x20:
                raise _unreadable("the table's size changes after the first field")
            else:  # one that does not (sections 6.2.2 and 6.2.3)
                field, at = self._literal(block, at, 0x0F)
            left -= len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES
            if left < 0:
                text = f"header list of more than {self._max_list_bytes} bytes"
                raise SessionError(text, frames.ENHANCE_YOUR_CALM)
            fields.append(field)
        return fields, table_changed

    def _table_updates(self, block: bytes) -> tuple[int, bool]:
        """Changes of the table's size, which stand in front (section 4.2): where they end, and whether there
        are any."""
        at = updates = 0
        while at < len(block) and block[at] & 0xE0 == 0x20:
            updates += 1
            if updates > TABLE_UPDATES:
                raise _unreadable("too many changes of the table's size")
            chosen, at = _integer(block, at, 0x1F)
            if chosen > TABLE_BYTES:
                raise _unreadable("the table is larger than it may be")
            self._table_bytes = chosen
            self._evict()
        return at, updates > 0

    def _entry(self, index: int) -> _Field:
        if 0 < index <= _STATIC_COUNT:
            return FIELDS[index - 1]
        if not index or index - _STATIC_COUNT > len(self._table):
            raise IndexError
        return self._table[_STATIC_COUNT - index]

    def _literal(self, block: bytes, at: int, prefix: int) -> tuple[_Field, int]:
        index = block[at] & prefix
        if index:
            if index == prefix:
                index, at = _integer(block, at, prefix)
            else:
                at += 1
            name = self._entry(index)[0]
        else:
            name, at = self._string(block, at + 1)
        value, at = self._string(block, at)
        return (name, value), at

    def _string(self, block: bytes, at: int) -> tuple[bytes, int]:
        first = block[at]
        length = first & 0x7F
        if length == 0x7F:
            length, at = _integer(block, at, 0x7F)
        else:
            at += 1
        end = at + length
        if end > len(block):
            raise IndexError
        text = block[at:end]
        return (self._plain(text) if first & 0x80 else text), end

    def _plain(self, code: bytes) -> bytes:
        """The text behind a Huffman code (section 5.2)."""
        known = self._texts.get(code)
        if known is not None:
            return known
        try:
            text = decode_huffman(code)
        except HPACKDecodingError as error:
            raise _unreadable("a Huffman code that is none") from error
        if len(code) in KNOWN_TEXT_BYTES:
            if len(self._texts) >= KNOWN_TEXTS:
                self._texts.clear()
            self._texts[code] = text
        return text

    # The dynamic table (RFC 7541 sections 2.3.2 and 4).

    def _add(self, field: _Field) -> None:
        self._table.append(field)
        self._size += len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES
        if self._size > self._table_bytes:
            self._evict()

    def _evict(self) -> None:
        """Lets go of the oldest until the rest fits; a field larger than the table empties it."""
        count = 0
        while self._size > self._table_bytes:
            name, value = self._table[count]
            self._size -= len(name) + len(value) + ENTRY_OVERHEAD_BYTES
            count += 1
        del self._table[:count]


def _integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """The integer whose first byte is at `at`, and where it ends (section 5.1)."""
    number = block[at] & prefix
    at += 1
    if number < prefix:
        return number, at
    for shift in range(0, 7 * _INTEGER_BYTES, 7):
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise _unreadable("an integer of too many bytes")


def _unreadable(reason: str) -> SessionError:
    """`reason` quotes nothing of the block: it may be a token."""
    return SessionError(f"unreadable header block: {reason}", frames.COMPRESSION_ERROR)
