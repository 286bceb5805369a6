"""SOCKS 5, 4 and 4a, as bytes. Real clients are in tests/path."""

from __future__ import annotations

import ipaddress
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import Address
from shared.net.socks import MAX_BYTES, Negotiation, Reply, Request, SocksError

GREETING = bytes((5, 1, 0))
GREETED = bytes((5, 0))

LABEL = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
IPV4 = st.ip_addresses(v=4).filter(lambda one: int(one) > 255)
HOSTS = st.one_of(NAMES, IPV4.map(str), st.ip_addresses(v=6).map(str))
PORTS = st.integers(1, 65535)


def request_5(host: str, port: int, command: int = 1) -> bytes:
    try:
        packed = ipaddress.ip_address(host).packed
        address = bytes((1 if len(packed) == 4 else 4,)) + packed
    except ValueError:
        address = bytes((3, len(host))) + host.encode()
    return bytes((5, command, 0)) + address + struct.pack("!H", port)


def request_4(host: str, port: int, user: bytes = b"me", command: int = 1) -> bytes:
    try:
        packed, name = ipaddress.IPv4Address(host).packed, b""
    except ValueError:
        packed, name = bytes((0, 0, 0, 1)), host.encode() + b"\0"
    return bytes((4, command)) + struct.pack("!H", port) + packed + user + b"\0" + name


def received(pieces: list[bytes]) -> tuple[bytes, Request | None, bytes]:
    """What is answered to these bytes, the request, and what is left behind it."""
    negotiation, data, answers, request = Negotiation(), b"", b"", None
    for piece in pieces:
        data += piece
        used = 1
        while used and request is None:
            used, answer, request = negotiation.receive(data[:MAX_BYTES])
            data, answers = data[used:], answers + answer
    return answers, request, data


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 1000), max_size=6)


@given(HOSTS, PORTS, CUTS, st.binary(max_size=50))
def test_version_5_in_any_pieces(host: str, port: int, cuts: list[int], first: bytes) -> None:
    answers, request, rest = received(pieces_of(GREETING + request_5(host, port) + first, cuts))
    assert answers == GREETED
    assert request == Request(Address(str(host), port), 5)
    assert rest == first


@given(st.one_of(NAMES, IPV4.map(str)), PORTS, CUTS, st.binary(max_size=50))
def test_version_4_in_any_pieces(host: str, port: int, cuts: list[int], first: bytes) -> None:
    answers, request, rest = received(pieces_of(request_4(host, port) + first, cuts))
    assert (answers, rest) == (b"", first)
    assert request == Request(Address(host, port), 4)


@given(st.binary(max_size=2 * MAX_BYTES), st.booleans())
def test_any_bytes_are_a_request_or_refused(data: bytes, greeted: bool) -> None:
    try:
        answers, request, rest = received([GREETING + data if greeted else data])
    except SocksError as error:
        assert str(error)
        assert len(error.answer) in (0, 2, 8, 10)
    else:
        assert request is not None or len(rest) < MAX_BYTES
        assert answers in (b"", GREETED)


def test_a_name_that_is_an_address() -> None:
    _, request, _ = received([GREETING, bytes((5, 1, 0, 3, 9)) + b"127.0.0.1" + bytes((0, 80))])
    assert request == Request(Address("127.0.0.1", 80), 5)


def test_a_dot_at_the_end_of_a_name() -> None:
    _, request, _ = received([GREETING, request_5("Hello.Demo.", 80)])
    assert request is not None
    assert request.target == Address("hello.demo", 80)


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"GET / HTTP/1.1\r\n", b""),
        (bytes((5, 2, 1, 2)), bytes((5, 0xFF))),
        (GREETING + request_5("a.b", 80, command=2), bytes((5, 7, 0, 1)) + bytes(6)),
        (GREETING + request_5("a.b", 80, command=3), bytes((5, 7, 0, 1)) + bytes(6)),
        (GREETING + bytes((5, 1, 0, 9, 1)), bytes((5, 8, 0, 1)) + bytes(6)),
        (GREETING + request_5("a_b..c", 80), bytes((5, 8, 0, 1)) + bytes(6)),
        (GREETING + b"\5\1\0\3\x0cfe80::1%eth0\0\x50", bytes((5, 8, 0, 1)) + bytes(6)),
        (GREETING + b"\5\1\0\3\x0bfe80::1%\r\nx\0\x50", bytes((5, 8, 0, 1)) + bytes(6)),
        (request_4("fe80::1%\r\nx: y", 80), bytes((0, 0x5B)) + bytes(6)),
        (GREETING + request_5("a.b", 0), bytes((5, 5, 0, 1)) + bytes(6)),
        (GREETING + b"\x04\x01\0\0\0", b""),
        (request_4("a.b", 80, command=2), bytes((0, 0x5B)) + bytes(6)),
        (bytes((4, 1, 0, 80, 1, 2, 3, 4)) + b"u" * 300, bytes((0, 0x5B)) + bytes(6)),
    ],
)
def test_what_is_refused(data: bytes, answer: bytes) -> None:
    with pytest.raises(SocksError) as raised:
        received([data])
    assert raised.value.answer == answer


def test_answers() -> None:
    assert Request(Address("a", 1), 5).answer(Reply.GRANTED) == bytes((5, 0, 0, 1)) + bytes(6)
    assert Request(Address("a", 1), 5).answer(Reply.HOST_UNREACHABLE) == bytes((5, 4, 0, 1)) + bytes(6)
    assert Request(Address("a", 1), 4).answer(Reply.GRANTED) == bytes((0, 0x5A)) + bytes(6)
    assert Request(Address("a", 1), 4).answer(Reply.REFUSED) == bytes((0, 0x5B)) + bytes(6)
