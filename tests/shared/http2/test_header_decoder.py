"""HPACK read: as hpack's own decoder does, from any encoder, with bounds and memories that nobody notices."""

from __future__ import annotations

import time

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import frames
from shared.http2.frame_rules import SessionError
from shared.http2.header_decoder import (
    KNOWN_BLOCKS,
    KNOWN_TEXTS,
    TABLE_UPDATES,
    HeaderDecoder,
)
from tests.shared.http2.dialogue import (
    GET,
    OK,
    POST,
    TRAILERS,
)

Fields = list[tuple[bytes, bytes]]

BLOCK_BYTES = 64 << 10
"""The largest block that the flood guard lets through to the decoder."""

TOKEN = (b"authorization", b"Bearer " + b"eyJhbGciOiJSUzI1NiJ9." * 50)


def read(decoder: HeaderDecoder, block: bytes) -> Fields:
    return list(decoder.decode(block).fields)


def broken(block: bytes, max_bytes: int = BLOCK_BYTES) -> str:
    with pytest.raises(SessionError) as caught:
        HeaderDecoder(max_bytes).decode(block)
    return f"{frames.error_name(caught.value.code)}: {caught.value}"


# RFC 7541 appendix C: one connection's blocks after each other.


@pytest.mark.parametrize(
    "blocks",
    [
        ["828684410f7777772e6578616d706c652e636f6d", "828684be58086e6f2d6361636865"],
        ["828684418cf1e3c2e5f23a6ba0ab90f4ff", "828684be5886a8eb10649cbf"],
    ],
    ids=["plain (C.3)", "Huffman (C.4)"],
)
def test_the_requests_of_the_rfc(blocks: list[str]) -> None:
    decoder = HeaderDecoder(BLOCK_BYTES)
    fields = [*GET[:2], (b":path", b"/"), (b":authority", b"www.example.com")]
    assert read(decoder, bytes.fromhex(blocks[0])) == fields
    assert read(decoder, bytes.fromhex(blocks[1])) == [*fields, (b"cache-control", b"no-cache")]


# What cannot be read.


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",
        b"\xbe",
        b"\xff",
        b"\xff\xff\xff\xff\xff",
        b"\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x00",
        b"\x00\x01",
        b"\x00\x01a",
        b"\x00\x01a\x02b",
        b"\x7e\x01b",
        b"\x00\x81\x00\x00",
        b"\x00\x01a\x82\xff\xff",
        b"\x82\x20",
        b"\x3f\xe2\x1f",
    ],
)
def test_what_cannot_be_read(block: bytes) -> None:
    assert broken(block).startswith("COMPRESSION_ERROR: unreadable header block: ")
    with pytest.raises(hpack.HPACKError):
        hpack.Decoder().decode(block)


def test_an_error_quotes_nothing() -> None:
    secret = hpack.Encoder().encode([TOKEN], huffman=False)
    assert "eyJ" not in broken(secret + b"\xff\xff")
    assert "eyJ" not in broken(secret[:-1])


def bomb() -> bytes:
    """A field of 4,000 bytes in the table, then named as often as a block can hold."""
    encoder = hpack.Encoder()
    filling = encoder.encode([(b"x-bomb", b"b" * 3800)], huffman=False)
    return filling + encoder.encode([(b"x-bomb", b"b" * 3800)]) * (BLOCK_BYTES - len(filling))


def test_a_bomb_is_not_decoded_to_its_end() -> None:
    assert broken(bomb()) == f"ENHANCE_YOUR_CALM: header list of more than {BLOCK_BYTES} bytes"


def test_a_list_may_have_its_size_and_not_a_byte_more() -> None:
    block = hpack.Encoder().encode([(b"a", b"b" * 67)])
    assert read(HeaderDecoder(100), block) == [(b"a", b"b" * 67)]
    assert broken(block, 99).startswith("ENHANCE_YOUR_CALM")


def test_a_table_may_be_resized_as_often_as_it_need_be() -> None:
    fields = [(b"a", b"b")]
    block = b"\x20\x3f\xe1\x1f" + hpack.Encoder().encode(fields)
    assert TABLE_UPDATES == 2
    for _ in range(3):
        assert read(HeaderDecoder(BLOCK_BYTES), block) == fields
    assert broken(b"\x20" + block).endswith("too many changes of the table's size")


@pytest.mark.parametrize(
    "block",
    [bomb(), b"\x20" * BLOCK_BYTES, b"\x90" * BLOCK_BYTES, b"\x00\x01a\x00" * (BLOCK_BYTES // 4)],
    ids=["bomb", "table updates", "static fields", "tiny fields"],
)
def test_no_block_takes_long_to_decode(block: bytes) -> None:
    """Ten times what they take on an idle machine: one that took seconds would stop every tunnel."""
    started = time.process_time()
    with pytest.raises(SessionError):
        HeaderDecoder(2 * BLOCK_BYTES).decode(block)
    assert time.process_time() - started < 1


# The memories.


def test_a_block_means_something_else_once_the_table_has_changed() -> None:
    decoder = HeaderDecoder(BLOCK_BYTES)
    newest = b"\xbe"
    for value in (b"1", b"2", b"3"):
        assert read(decoder, b"\x40\x01a\x01" + value) == [(b"a", value)]
        for _ in range(2):
            assert read(decoder, newest) == [(b"a", value)]
    assert read(decoder, b"\x20\x3f\xe1\x1f\x88") == OK
    with pytest.raises(SessionError):
        decoder.decode(newest)


def test_what_is_remembered_is_bounded() -> None:
    decoder = HeaderDecoder(BLOCK_BYTES)
    for number in range(100):
        field = (b"x", b"%d" % number * 100)
        encoder = hpack.Encoder()
        block = encoder.encode([(*field, True)])
        assert read(decoder, bytes(block)) == [field]
        assert len(decoder._blocks) <= KNOWN_BLOCKS
        assert len(decoder._texts) <= KNOWN_TEXTS


# hpack as the encoder, and as the judge.

text = st.sampled_from([b"", b"a", b"x-y", b":path", b"cookie", TOKEN[1]]) | st.binary(max_size=20)
lists = st.sampled_from([POST, GET, OK, TRAILERS, [TOKEN], [*POST, TOKEN]]) | st.lists(
    st.tuples(text, text), max_size=8
)


@given(st.lists(st.tuples(lists, st.booleans(), st.none() | st.integers(0, 4096)), max_size=12))
def test_whatever_hpack_encodes(script: list[tuple[Fields, bool, int | None]]) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(1 << 20)
    for fields, huffman, table_bytes in script:
        if table_bytes is not None:
            encoder.header_table_size = table_bytes
        marked = [(name, value, name == b"authorization") for name, value in fields]
        block = bytes(encoder.encode(marked, huffman=huffman))
        cookies = [field for field in fields if field[0] == b"cookie"]
        if len(cookies) < 2:
            assert read(decoder, block) == fields
        else:
            decoder.decode(block)


pieces = st.sampled_from(
    [
        b"\x82",
        b"\x88",
        b"\xbe",
        b"\xbf",
        b"\x40\x01a\x01b",
        b"\x41\x81\x1f",
        b"\x0f\x08\x01z",
        b"\x20",
        b"\x3f\x01",
    ]
) | st.binary(max_size=6)
blocks = st.lists(pieces, max_size=10).map(b"".join)


@given(st.lists(blocks, max_size=8))
def test_the_same_verdict_as_hpack(script: list[bytes]) -> None:
    theirs, ours = hpack.Decoder(1 << 20), HeaderDecoder(1 << 20)
    for block in script:
        try:
            expected = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
        except hpack.HPACKError:
            with pytest.raises(SessionError):
                ours.decode(block)
            return
        try:
            got = read(ours, block)
        except SessionError as error:
            assert "too many changes" in str(error)
            return
        assert got == expected or sum(name == b"cookie" for name, _ in expected) > 1
        assert [*reversed(ours._table)] == [*theirs.header_table.dynamic_entries]
