"""HPACK written: what hpack's decoder reads, what goes into the table, and what never does."""

from __future__ import annotations

import hpack
import pytest
from hpack.struct import NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from shared.http2.header_encoder import (
    CHANGING_NAMES,
    ENCODER_TABLE_BYTES,
    LARGEST_ENTRY_BYTES,
    SECRET_NAMES,
    HeaderEncoder,
)
from tests.shared.http2.dialogue import GET, OK, POST

Fields = list[tuple[bytes, bytes]]

TOKEN = (b"authorization", b"Bearer " + b"eyJhbGciOiJSUzI1NiJ9." * 50)
TRACE = (b"traceparent", b"00-0123456789abcdef0123456789abcdef-0123456789abcdef-00")


class Line:
    """An encoder, and hpack as the decoder of all it writes."""

    def __init__(self) -> None:
        self.encoder = HeaderEncoder()
        self.decoder = hpack.Decoder()

    def said(self, fields: Fields) -> bytes:
        """The block, which hpack has read as these fields."""
        block = bytes(self.encoder.encode(fields))
        assert [(bytes(name), bytes(value)) for name, value in self.decoder.decode(block, raw=True)] == fields
        return block


def test_an_answer_is_one_byte() -> None:
    assert Line().said(OK) == b"\x88"


def test_what_stays_the_same_is_a_byte_each_from_the_second_request_on() -> None:
    line = Line()
    assert len(line.said(POST)) > 15
    assert len(line.said(POST)) == len(POST)


def test_what_changes_pushes_nothing_out() -> None:
    line = Line()
    line.said(POST)
    for number in range(100):
        line.said([*POST, (TRACE[0], b"%055d" % number)])
    assert len(line.said(POST)) == len(POST)


@pytest.mark.parametrize("name", sorted(SECRET_NAMES))
def test_secrets_are_never_indexed(name: bytes) -> None:
    line = Line()
    for _ in range(2):
        block = bytes(line.encoder.encode([*POST, (name, TOKEN[1])]))
        *_, last = line.decoder.decode(block, raw=True)
        assert isinstance(last, NeverIndexedHeaderTuple)
        assert last == (name, TOKEN[1])
    assert all(field[0] != name for field in line.decoder.header_table.dynamic_entries)


def test_a_large_field_is_not_indexed() -> None:
    line = Line()
    line.said([(b"x", b"y" * (LARGEST_ENTRY_BYTES - 33))])
    assert len(line.decoder.header_table.dynamic_entries) == 1
    line.said([(b"x", b"y" * (LARGEST_ENTRY_BYTES - 32))])
    assert len(line.decoder.header_table.dynamic_entries) == 1


def test_the_oldest_go_first() -> None:
    line = Line()
    for number in range(200):
        line.said([(b"x", b"%050d" % number)])
    newest = [value for _, value in line.decoder.header_table.dynamic_entries]
    assert newest[0] == b"%050d" % 199
    assert len(line.encoder._entries) == len(newest) == ENCODER_TABLE_BYTES // (1 + 50 + 32)
    assert len(line.said([(b"x", b"%050d" % 199)])) == 1
    assert len(line.said([(b"x", b"%050d" % 0)])) > 50


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ([1 << 24], b""),
        ([4096], b""),
        ([0], b"\x20"),
        ([100], b"\x3f\x45"),
        ([0, 4096], b"\x20\x3f\xe1\x1f"),
        ([100, 0, 200], b"\x20\x3f\xa9\x01"),
        ([100, 50], b"\x3f\x13"),
    ],
)
def test_the_peers_table(sizes: list[int], first: bytes) -> None:
    """RFC 7541 section 4.2: the smallest size since the last block is told, then the one that holds."""
    line = Line()
    line.said(POST)
    for size in sizes:
        line.encoder.limit_table(size)
    block = line.said(GET)
    assert block.startswith(first + b"\x82")
    assert line.decoder.header_table_size == min(sizes[-1], ENCODER_TABLE_BYTES)
    assert line.said(GET).startswith(b"\x82"), "it is said once"


names = st.sampled_from(
    [b"a", b"b-c", b":path", b":status", b"cookie", b"server", *sorted(CHANGING_NAMES)[:3]]
)
values = st.sampled_from([b"", b"/", b"200", b"x" * 130, TOKEN[1]]) | st.binary(max_size=300)
lists = st.sampled_from([POST, GET, OK, [TOKEN], [*POST, TOKEN, TRACE]]) | st.lists(
    st.tuples(names, values), max_size=6
)


@given(st.lists(st.tuples(lists, st.lists(st.integers(0, 8192), max_size=2)), max_size=12))
def test_hpack_reads_whatever_is_written(script: list[tuple[Fields, list[int]]]) -> None:
    line = Line()
    for fields, sizes in script:
        for size in sizes:
            line.encoder.limit_table(size)
        line.said(fields)
        assert line.encoder._size <= min(line.encoder._table_bytes, ENCODER_TABLE_BYTES)
        assert [*reversed(line.encoder._entries)] == [*line.decoder.header_table.dynamic_entries]


def test_entries_beyond_what_fits_into_a_byte() -> None:
    line = Line()
    fields = [(b"%d" % number, b"") for number in range(100)]
    line.said(fields)
    assert len(line.said(fields)) == 65 + 2 * 35, "indexes 62 to 126, and 127 to 161"
