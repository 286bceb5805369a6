"""Header lists: what is well formed, and how large one is."""

from __future__ import annotations

import pytest
from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers
from hypothesis import given
from hypothesis import strategies as st

from shared.wire.header_rules import LENGTH_DIGITS, NO_LENGTH, Shape, examine, list_bytes
from tests.shared.wire.dialogue import CONNECT, GET, OK, POST, TRAILERS, length

Fields = list[tuple[bytes, bytes]]


def shape(fields: Fields) -> Shape:
    return examine(fields).shape


def test_a_list_is_as_large_as_the_rfc_counts() -> None:
    assert list_bytes([]) == 0
    assert list_bytes([(b"a", b"bcd"), (b"", b"")]) == 4 + 2 * 32


HOST = (b"host", b"a")
EXTENDED = [(b":method", b"CONNECT"), (b":protocol", b"websocket"), *GET[1:]]


@pytest.mark.parametrize(
    "fields",
    [
        GET,
        POST,
        CONNECT,
        EXTENDED,
        [*POST, (b"te", b"trailers")],
        [*GET, HOST],
        [GET[0], GET[1], GET[3], HOST],
        [CONNECT[0], HOST],
        [*GET, (b"x-!#$%&'*+-.^_`|~09", bytes(range(0x21, 0x7F)) + b" \t\x80\xff~")],
    ],
)
def test_requests(fields: Fields) -> None:
    assert shape(fields) is Shape.REQUEST


def test_responses_and_trailers() -> None:
    assert shape(OK) is Shape.RESPONSE
    assert examine([*OK, length(7)]).status == b"200"
    assert shape(TRAILERS) is shape([]) is Shape.TRAILERS


@pytest.mark.parametrize(
    "field",
    [
        (b"", b""),
        (b"A", b""),
        (b"a b", b""),
        (b"a:b", b""),
        (b"a\x7f", b""),
        (b"a\x80", b""),
        (b"a", b"\r"),
        (b"a", b"b\nc"),
        (b"a", b"\0"),
        (b"a", b" b"),
        (b"a", b"b\t"),
        (b"connection", b"x"),
        (b"proxy-connection", b"x"),
        (b"keep-alive", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"x"),
        (b":new", b"x"),
        (b":path", b"/again"),
        (b":status", b"200"),
        (b":protocol", b"x"),
        (b"te", b"x"),
        (b"host", b"another"),
    ],
)
def test_a_field_that_spoils_it(field: tuple[bytes, bytes]) -> None:
    assert shape([*GET, field]) is Shape.MALFORMED


@pytest.mark.parametrize(
    "fields",
    [
        GET[1:],
        [*GET[:1], *GET[2:]],
        GET[:3],
        [*GET[:3], (b":path", b"")],
        [field for field in GET if field[0] != b":authority"],
        [*CONNECT, (b":path", b"/")],
        [*CONNECT, (b":scheme", b"http")],
        [field for field in EXTENDED if field[0] != b":path"],
        [*GET, HOST, HOST],
        [(b"x", b"y"), *GET],
        [*OK, (b":path", b"/")],
        [*OK, *OK],
        [*TRAILERS, *OK],
    ],
)
def test_what_is_none_of_these(fields: Fields) -> None:
    assert shape(fields) is Shape.MALFORMED


def test_content_length() -> None:
    assert examine(POST).content_length == NO_LENGTH
    assert examine([*POST, length(5), length(5)]).content_length == 5
    assert examine([*POST, (b"content-length", b"9" * LENGTH_DIGITS)]).content_length == 10**LENGTH_DIGITS - 1


@pytest.mark.parametrize("values", [[b"5", b"6"], [b"x"], [b""], [b"+1"], [b"9" * 5000]])
def test_a_content_length_that_is_none(values: list[bytes]) -> None:
    assert shape([*POST, *((b"content-length", value) for value in values)]) is Shape.MALFORMED


def test_cookies_become_one() -> None:
    """RFC 9113 section 8.2.3: what reads the list need not know how it was sent."""
    crumbs = [(b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2")]
    assert examine([*GET, *crumbs]).fields == [*GET, (b"x", b"y"), (b"cookie", b"a=1; b=2")]
    assert examine([*GET, *crumbs[:2]]).fields == [*GET, *crumbs[:2]]


names = st.sampled_from(
    [
        b":method",
        b":scheme",
        b":authority",
        b":path",
        b":status",
        b":protocol",
        b":x",
        b"host",
        b"te",
        b"a",
        b"A",
        b"",
    ]
)
values = st.sampled_from([b"", b"a", b"CONNECT", b"GET", b"trailers", b"200", b" a", b"a\n"]) | st.binary(
    max_size=3
)
lists = st.lists(st.tuples(names | st.binary(max_size=3), values), max_size=7)
changed = st.builds(
    lambda fields, at, extra: [*fields[:at], *extra, *fields[at + 1 :]],
    st.sampled_from([GET, POST, CONNECT, EXTENDED, OK, TRAILERS]),
    st.integers(0, 5),
    lists,
)


@given(lists | changed)
def test_the_same_verdict_as_h2(fields: Fields) -> None:
    for kind, is_client, is_trailer in (
        (Shape.REQUEST, False, False),
        (Shape.RESPONSE, True, False),
        (Shape.TRAILERS, False, True),
    ):
        flags = HeaderValidationFlags(is_client, is_trailer, kind is Shape.RESPONSE, False)
        try:
            list(validate_headers(fields, flags))
        except ProtocolError:
            assert shape(fields) is not kind
        else:
            assert shape(fields) is kind
