"""Header lists: what is well formed, and how large one is."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import pytest
from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers
from hypothesis import given
from hypothesis import strategies as st

from shared.http2.header_rules import (
    LENGTH_DIGITS,
    Shape,
    examine,
    list_bytes,
)
from tests.shared.http2.dialogue import (
    CONNECT,
    GET,
    OK,
    POST,
    TRAILERS,
    length,
)

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
        [*CONNECT, (b"host", b"10.1.2.3:80")],
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
        CONNECT[:1],
        [CONNECT[0], HOST],
        [*CONNECT, HOST],
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


# What stands in pseudo-header fields (RFC 9113 section 8.3, RFC 9110, RFC 3986).


def changed_to(fields: Fields, name: bytes, value: bytes) -> Fields:
    return [(known, value if known == name else old) for known, old in fields]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            b":method",
            [b"get", b"M-SEARCH", b"!#$%&'*+-.^_`|~09", b"PURGE"],
            [b"", b"GE T", b"GET/1", b"GET:", b"G(T)", b"G\x01", b"G\x7f", "GÉT".encode(), b"GET\t/"],
        ),
        (
            b":scheme",
            [b"https", b"HTTPS", b"ftp", b"a+b-c.1"],
            [b"", b"1a", b"a:b", b"ht tp", b"http:", b"a\x01"],
        ),
        (
            b":path",
            [b"/", b"/a/b;c?d=e&f", b"//a", b"/%zz", "/é".encode(), b'/"<>\\^`{|}[]', b"/?", b"/*"],
            [b"", b"a", b"*", b"?a", b"http://a/", b"/a b", b"/a\tb", b"/\x01", b"/\x7f", b"/a#b", b"#"],
        ),
        (
            b":authority",
            [
                *(b"a:", b"a:1", b"a_b.c", b"A.b", b"%41", b"a,b!$&'()*+;=~-.", b"1.2.3.4:5", b"a:99999"),
                *(b"[::1]", b"[::1]:80", b"[::ffff:1.2.3.4]:", b"[fe80::1%25eth0]:80", b"[v1.x:y]"),
            ],
            [
                *(
                    b"",
                    b":80",
                    b"u@a",
                    b"u:p@a",
                    b"@a",
                    b"a b",
                    b"a/",
                    b"a?",
                    b"a#",
                    b"a\\b",
                    b"a:x",
                    b"a:1:2",
                ),
                *(
                    b"::1",
                    b"[::1",
                    b"::1]",
                    b"[]",
                    b"[zz]",
                    b"[1.2.3.4]",
                    b"[::1]a",
                    b"[::1%eth0]",
                    b"[::1]:x",
                ),
                *(b"%", b"%4", b"%zz", b"{a}", b"a|b", b'"a"', b"<a>", b"a\x01", b"a\x7f", "é.c".encode()),
            ],
        ),
    ],
)
def test_values_of_requests(name: bytes, good: list[bytes], bad: list[bytes]) -> None:
    for value in good:
        assert shape(changed_to(POST, name, value)) is Shape.REQUEST, value
    for value in bad:
        block = examine(changed_to(POST, name, value))
        assert block.shape is Shape.MALFORMED, value
        assert block.fault.startswith(name.decode()), value


def test_the_server_as_a_whole_is_asked_for_with_options_only() -> None:
    """RFC 9113 section 8.3.1."""
    asked = changed_to(GET, b":path", b"*")
    assert shape(changed_to(asked, b":method", b"OPTIONS")) is Shape.REQUEST
    assert shape(asked) is Shape.MALFORMED


@pytest.mark.parametrize("target", [b"a", b"a:x", b"::1", b"[::1]:80", b"127.1:80", b"a:99999", b"%41:1"])
def test_whom_a_connect_names_is_its_server_s_to_judge(target: bytes) -> None:
    """It can say what is wrong, and answers 400."""
    assert shape(changed_to(CONNECT, b":authority", target)) is Shape.REQUEST


@pytest.mark.parametrize(
    "target", [b"", b"u@a:1", b"a:1/", b"a:1?", b"a:1#", b"a b:1", b"a\\:1", b"a:1\x01", "é:1".encode()]
)
def test_a_connect_that_others_could_read_otherwise(target: bytes) -> None:
    assert shape(changed_to(CONNECT, b":authority", target)) is Shape.MALFORMED


@pytest.mark.parametrize("protocol", [b"", b"web socket", b"a,b", b"a\x01"])
def test_a_protocol_that_is_none(protocol: bytes) -> None:
    assert shape(changed_to(EXTENDED, b":protocol", protocol)) is Shape.MALFORMED


@pytest.mark.parametrize(
    ("scheme", "authority", "host", "same"),
    [
        (b"http", b"a", b"A", True),
        (b"http", b"a", b"a:80", True),
        (b"http", b"a:80", b"a:", True),
        (b"https", b"A:443", b"a", True),
        (b"HTTPS", b"a:443", b"a", True),
        (b"ftp", b"a:", b"a", True),
        (b"http", b"a", b"b", False),
        (b"http", b"a", b"", False),
        (b"http", b"a", b"a:443", False),
        (b"https", b"a", b"a:80", False),
        (b"http", b"a:8080", b"a:80", False),
        (b"ftp", b"a", b"a:80", False),
        (b"http", b"a", b"a.", False),
        (b"http", b"a", b"u@a", False),
    ],
)
def test_a_host_beside_the_authority(scheme: bytes, authority: bytes, host: bytes, same: bool) -> None:
    """RFC 9113 section 8.3.1, by RFC 3986 section 6.2.3."""
    fields = [(b":method", b"GET"), (b":scheme", scheme), (b":authority", authority), (b":path", b"/")]
    block = examine([*fields, (b"host", host)])
    assert (block.shape, block.fault) == (
        (Shape.REQUEST, "") if same else (Shape.MALFORMED, "host is not :authority")
    )


@pytest.mark.parametrize("host", [b"", b"u@a", b"a b", b"a/b"])
def test_a_host_in_place_of_the_authority(host: bytes) -> None:
    assert shape([GET[0], GET[1], GET[3], (b"host", host)]) is Shape.MALFORMED


@pytest.mark.parametrize(
    "status", [b"", b"20", b"2000", b"099", b"2o0", b"+20", b"2 0", "\uff12\uff10\uff10".encode(), b"101"]
)
def test_a_status_that_is_none(status: bytes) -> None:
    assert shape([(b":status", status)]) is Shape.MALFORMED


@pytest.mark.parametrize("status", [b"100", b"103", b"200", b"418", b"599", b"999"])
def test_a_status(status: bytes) -> None:
    assert examine([(b":status", status)]).status == status


visible = st.text(st.characters(min_codepoint=1, max_codepoint=0x17F), max_size=12).map(str.encode)
signs = [*":@/?#[]14%.|-a\\", "::", "v1."]
pieces = st.lists(st.sampled_from(signs), max_size=8).map("".join)


@given(visible | pieces.map(str.encode))
def test_another_reader_finds_the_same_in_it(value: bytes) -> None:
    """What is taken as host and port, or as a path, is that to Python's urllib, too, and nothing else."""
    text = value.decode("latin-1")
    if shape(changed_to(GET, b":authority", value)) is Shape.REQUEST:
        split = urlsplit(f"http://{text}/p?q#f")
        assert (split.netloc, split.path, split.query, split.fragment) == (text, "/p", "q", "f")
        assert split.username is None and split.hostname
    if shape(changed_to(GET, b":path", value)) is Shape.REQUEST:
        split = urlsplit(f"http://a{text}")
        assert (split.netloc, split.fragment) == ("a", "")
        assert f"{split.path}?{split.query}".rstrip("?") == text.rstrip("?")


@pytest.mark.parametrize("piece", [b":", b"a", b"%41", b"[", b"1.", b"/"])
def test_a_long_value_takes_no_longer_than_it_is(piece: bytes) -> None:
    """No pattern tries the same bytes again and again."""
    size = 1 << 16
    for value in (piece * (size // len(piece)), b"[" + piece * (size // len(piece))):
        for name in (b":authority", b":path", b":method", b":scheme"):
            began = time.process_time()
            examine(changed_to(POST, name, value + b"\x01"))
            assert time.process_time() - began < 0.5


def test_content_length() -> None:
    assert examine(POST).content_length is None
    assert examine([*POST, length(5), length(5)]).content_length == 5
    assert examine([*POST, (b"content-length", b"9" * LENGTH_DIGITS)]).content_length == 10**LENGTH_DIGITS - 1


@pytest.mark.parametrize("values", [[b"5", b"6"], [b"x"], [b""], [b"+1"], [b"-1"], [b"1 2"], [b"9" * 5000]])
def test_a_content_length_that_is_none(values: list[bytes]) -> None:
    block = examine([*POST, *((b"content-length", value) for value in values)])
    assert block.shape is Shape.MALFORMED
    assert block.fault == ("several content-lengths" if len(values) > 1 else "content-length is not a number")


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


SYNTAX = {
    ":method is not a token",
    ":scheme is not a scheme",
    ":path is not a path",
    ":authority is not a host and port",
    "CONNECT whose :authority is not a host and port",
    ":protocol without CONNECT, or not a token",
    "no :authority, and no host in its place",
    ":status is not a number of three digits",
}
"""Faults that h2 does not look for."""


def without_host(fields: Fields) -> Fields:
    """h2 compares host and :authority byte by byte."""
    return [field for field in fields if field[0] != b"host"]


@given(lists | changed)
def test_the_same_verdict_as_h2(fields: Fields) -> None:
    found = examine(fields)
    for kind, is_client, is_trailer in (
        (Shape.REQUEST, False, False),
        (Shape.RESPONSE, True, False),
        (Shape.TRAILERS, False, True),
    ):
        flags = HeaderValidationFlags(is_client, is_trailer, kind is Shape.RESPONSE, False)
        try:
            list(validate_headers(fields, flags))
        except ProtocolError:
            if found.shape is kind:
                assert kind is Shape.REQUEST
                list(validate_headers(without_host(fields), flags))
        else:
            assert found.shape is kind or found.fault in SYNTAX
