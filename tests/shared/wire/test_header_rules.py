"""Header lists: what is well formed, how large one is, and what decoding one may cost."""

from __future__ import annotations

import time

import hpack
import pytest

from shared.wire.header_rules import (
    TABLE_UPDATES,
    BoundedDecoder,
    content_length,
    list_bytes,
    well_formed,
)
from tests.shared.wire.dialogue import CONNECT, GET, OK, POST, TRAILERS, length

Fields = list[tuple[bytes, bytes]]

BLOCK_BYTES = 64 << 10
"""The largest block that the flood guard lets through to the decoder."""


def test_a_list_is_as_large_as_the_rfc_counts() -> None:
    assert list_bytes([]) == 0
    assert list_bytes([(b"a", b"bcd"), (b"", b"")]) == 4 + 2 * 32


@pytest.mark.parametrize("fields", [GET, POST, CONNECT, [*POST, (b"te", b"trailers")]])
def test_requests(fields: Fields) -> None:
    assert well_formed(fields, of_request=True)
    assert not well_formed(fields, of_request=False)
    assert not well_formed(fields, of_request=True, trailers=True)


def test_responses_and_trailers() -> None:
    assert well_formed(OK, of_request=False)
    assert not well_formed(OK, of_request=True)
    assert not well_formed(TRAILERS, of_request=False)
    assert well_formed(TRAILERS, of_request=False, trailers=True)
    assert well_formed(TRAILERS, of_request=True, trailers=True)


@pytest.mark.parametrize(
    "field",
    [
        (b"", b""),
        (b"A", b""),
        (b"a b", b""),
        (b"a", b"\r"),
        (b"connection", b"x"),
        (b":new", b"x"),
        (b"te", b"x"),
    ],
)
def test_a_field_that_spoils_it(field: tuple[bytes, bytes]) -> None:
    assert not well_formed([*GET, field], of_request=True)


def test_content_length() -> None:
    assert content_length(POST) is None
    assert content_length([*POST, length(5), length(5)]) == 5
    with pytest.raises(ValueError, match="not one number"):
        content_length([*POST, length(5), length(6)])
    with pytest.raises(ValueError):
        content_length([*POST, (b"content-length", b"9" * 5000)])


def bomb() -> bytes:
    """A field of 4,000 bytes in the table, then named as often as a block can hold."""
    encoder = hpack.Encoder()
    filling = encoder.encode([(b"x-bomb", b"b" * 3800)], huffman=False)
    return filling + encoder.encode([(b"x-bomb", b"b" * 3800)]) * (BLOCK_BYTES - len(filling))


def test_a_bomb_is_not_decoded_to_its_end() -> None:
    decoder = BoundedDecoder(BLOCK_BYTES)
    with pytest.raises(hpack.OversizedHeaderListError):
        decoder.decode(bomb())


def test_a_table_may_be_resized_as_often_as_it_need_be() -> None:
    fields = [(b"a", b"b")]
    block = b"\x20\x3f\xe1\x1f" + hpack.Encoder().encode(fields)
    assert TABLE_UPDATES == 2
    for _ in range(3):
        assert list(BoundedDecoder(BLOCK_BYTES).decode(block, raw=True)) == fields
    with pytest.raises(hpack.HPACKDecodingError, match="too many table size updates"):
        BoundedDecoder(BLOCK_BYTES).decode(b"\x20" + block)


@pytest.mark.parametrize(
    "block",
    [bomb(), b"\x20" * BLOCK_BYTES, b"\x90" * BLOCK_BYTES, b"\x00\x01a\x00" * (BLOCK_BYTES // 4)],
    ids=["bomb", "table updates", "static fields", "tiny fields"],
)
def test_no_block_takes_long_to_decode(block: bytes) -> None:
    """Ten times what they take on an idle machine: one that took seconds would stop every tunnel."""
    started = time.process_time()
    with pytest.raises(hpack.HPACKError):
        BoundedDecoder(2 * BLOCK_BYTES).decode(block)
    assert time.process_time() - started < 1
