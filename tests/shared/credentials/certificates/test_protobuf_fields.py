"""Protobuf fields against the real library: what we write it reads, and what it writes we read."""

from __future__ import annotations

import pytest
from google.protobuf import wrappers_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.certificates.protobuf_fields import bytes_field, fields, integer_field
from tests.support.istiod import Request, Response


@given(st.text(), st.integers(-(2**63), 2**63 - 1))
def test_what_we_write_protobuf_reads(csr: str, duration: int) -> None:
    message = Request.FromString(bytes_field(1, csr.encode()) + integer_field(3, duration))
    assert (message.csr, message.validity_duration) == (csr, duration)


@given(st.lists(st.text()))
def test_what_protobuf_writes_we_read(chain: list[str]) -> None:
    written = Response(cert_chain=chain).SerializeToString()
    assert list(fields(written)) == [(1, text.encode()) for text in chain]


@given(st.integers(0, 2**64 - 1), st.floats(allow_nan=False), st.integers(1, 2**29 - 1))
def test_fields_of_all_kinds(number: int, real: float, field: int) -> None:
    integer = wrappers_pb2.UInt64Value(value=number or 1).SerializeToString()
    double = wrappers_pb2.DoubleValue(value=real or 1.0).SerializeToString()
    (first,) = fields(integer)
    (second,) = fields(double)
    assert first == (1, number or 1)
    assert second == (1, int.from_bytes(double[1:], "little"))
    assert list(fields(integer_field(field, 7) + b"\x0d\1\0\0\0")) == [(field, 7), (1, 1)]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_none(data: bytes) -> None:
    """Where protobuf reads a message so do we; groups, which we do not know, it may skip."""
    try:
        found = list(fields(data))
    except ValueError as error:
        assert str(error).startswith("no protobuf message")
        if "unknown kind" not in str(error):
            with pytest.raises(DecodeError):
                wrappers_pb2.BytesValue.FromString(data)
    else:
        assert all(number >= 1 for number, _ in found)


def test_every_prefix_of_a_message() -> None:
    whole = Response(cert_chain=["one", "two"]).SerializeToString()
    for size in range(len(whole)):
        if size in (0, 5):
            assert len(list(fields(whole[:size]))) == size // 5
        else:
            with pytest.raises(ValueError, match="no protobuf message"):
                list(fields(whole[:size]))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x00\x01", "impossible number"),
        (b"\x0b", "unknown kind"),
        (b"\x0a\x05abc", "longer than all of it"),
        (b"\x09abc", "longer than all of it"),
        (b"\x08" + b"\xff" * 10, "number without an end"),
    ],
)
def test_no_message(data: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        list(fields(data))


def test_numbers_have_64_bits() -> None:
    assert integer_field(1, -1) == b"\x08" + b"\xff" * 9 + b"\x01"
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="64 bits"):
            integer_field(1, number)
