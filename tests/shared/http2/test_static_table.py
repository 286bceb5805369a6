"""The static table against hpack's."""

from __future__ import annotations

from hpack.table import HeaderTable

from shared.http2.static_table import FIELDS, INDEX_OF_FIELD, INDEX_OF_NAME


def test_the_fields_are_hpacks() -> None:
    assert FIELDS == HeaderTable.STATIC_TABLE


def test_indexes_begin_with_one_and_names_have_their_first() -> None:
    assert INDEX_OF_FIELD[b":authority", b""] == 1
    assert INDEX_OF_FIELD[b":status", b"200"] == INDEX_OF_NAME[b":status"] == 8
    assert INDEX_OF_FIELD[b":status", b"404"] == 13
    assert INDEX_OF_NAME[b"www-authenticate"] == 61
