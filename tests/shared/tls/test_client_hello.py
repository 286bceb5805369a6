from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ALERT_DECODE_ERROR, ClientHelloError, NotTlsError
from shared.tls.client_hello import MAX_HELLO_BYTES, MAX_PEEK_BYTES, MAX_RECORDS, ClientHello, parse

RECORDED = {path.stem: path.read_bytes() for path in Path(__file__).with_name("hellos").glob("*.bin")}
ISTIO_NAME = "outbound_.8080_._.hello.demo.svc.cluster.local"


# Hellos made by hand.


def vector(data: bytes, length_bytes: int = 2) -> bytes:
    return len(data).to_bytes(length_bytes, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + vector(data)


def server_name(name: bytes) -> bytes:
    return extension(0, vector(b"\x00" + vector(name)))


def alpn(*names: bytes) -> bytes:
    return extension(16, vector(b"".join(vector(name, 1) for name in names)))


def message(
    *extensions: bytes,
    session_id: bytes = b"",
    suites: bytes = b"\x13\x01",
    methods: bytes = b"\x00",
    block: bytes | None = None,
) -> bytes:
    """A handshake message; `block` replaces the extensions and their length."""
    body = b"\x03\x03" + bytes(32) + vector(session_id, 1) + vector(suites) + vector(methods, 1)
    return b"\x01" + vector(body + (vector(b"".join(extensions)) if block is None else block), 3)


def record(fragment: bytes, version: bytes = b"\x03\x01") -> bytes:
    return b"\x16" + version + vector(fragment)


def fragmented(handshake: bytes, cuts: Iterable[int]) -> bytes:
    """The message in several records, cut at these offsets."""
    edges = [0, *sorted(set(cuts)), len(handshake)]
    return b"".join(record(handshake[a:b]) for a, b in pairwise(edges))


def hello(*extensions: bytes) -> bytes:
    return record(message(*extensions))


def outcome(data: bytes) -> ClientHello | type[ClientHelloError] | None:
    try:
        return parse(data)
    except ClientHelloError as refused:
        assert str(refused).isprintable()
        return type(refused)


# Recorded hellos (hellos/record.py).


@pytest.mark.parametrize(
    ("recorded", "name", "protocols"),
    [
        ("openssl_tls13", ISTIO_NAME, ("istio", "h2")),
        ("openssl_tls12", ISTIO_NAME, ("istio",)),
        ("openssl_no_name", None, ()),
        ("curl", "hello.example.com", ("h2", "http/1.1")),
        ("envoy", ISTIO_NAME, ("istio",)),
        ("post_quantum", ISTIO_NAME, ("istio-peer-exchange", "istio")),
    ],
)
def test_recorded_hellos(recorded: str, name: str | None, protocols: tuple[str, ...]) -> None:
    data = RECORDED[recorded]
    expected = ClientHello(name, protocols, len(data))
    assert parse(data) == expected
    assert parse(bytearray(data)) == expected
    assert parse(memoryview(data)) == expected


def test_post_quantum_hello_is_larger_than_a_segment() -> None:
    assert len(RECORDED["post_quantum"]) > 1420
    assert bytes.fromhex("11ec04c0") in RECORDED["post_quantum"]  # a key share for X25519MLKEM768


@pytest.mark.parametrize("recorded", RECORDED)
def test_every_prefix_is_incomplete(recorded: str) -> None:
    data = RECORDED[recorded]
    assert {parse(data[:end]) for end in range(len(data))} == {None}


# Legal, if unusual.


@pytest.mark.parametrize("version", [b"\x03\x01", b"\x03\x02", b"\x03\x03"])
def test_record_versions(version: bytes) -> None:
    assert parse(record(message(server_name(b"a.b")), version)) == ClientHello("a.b", (), 64)


@pytest.mark.parametrize(
    ("handshake", "name", "protocols"),
    [
        (message(), None, ()),
        (message(block=b""), None, ()),  # TLS 1.2: no block of extensions at all
        (message(server_name(b"a.b"), session_id=bytes(32)), "a.b", ()),
        (message(server_name(b"a.b"), suites=b"\x0a\x0a\x13\x01", methods=b"\x00\x01"), "a.b", ()),
        (message(alpn(b"h2"), server_name(b"a.b")), "a.b", ("h2",)),
        (message(server_name(b"A.Example.COM.")), "a.example.com", ()),
        (message(server_name(b"_under_.a")), "_under_.a", ()),
        (message(server_name(b"n" * 255)), "n" * 255, ()),
        # GREASE: extensions, empty and with data, and a protocol name.
        (
            message(
                extension(0x0A0A, b""), server_name(b"a"), extension(0xFAFA, b"\0"), alpn(b"\xda\xda", b"h2")
            ),
            "a",
            ("\xda\xda", "h2"),
        ),
        # Encrypted ClientHello, or its GREASE: the outer name is the one to see.
        (message(extension(0xFE0D, bytes(200)), server_name(b"public.example")), "public.example", ()),
    ],
)
def test_legal_hellos(handshake: bytes, name: str | None, protocols: tuple[str, ...]) -> None:
    assert parse(record(handshake)) == ClientHello(name, protocols, len(handshake) + 5)


def test_bytes_after_the_hello_are_not_looked_at() -> None:
    data = hello(server_name(b"a.b"))
    for more in (b"\x14\x03\x03\x00\x01\x01", b"\x17\x03\x03", b"GET / HTTP/1.1\r\n"):
        assert parse(data + more) == ClientHello("a.b", (), len(data))


def test_the_owner_of_the_bytes_may_go_on_writing_while_an_error_is_held() -> None:
    buffer = bytearray(hello(server_name(b"")))
    with pytest.raises(ClientHelloError) as refused:
        parse(buffer)
    buffer += b"more"
    assert refused.value.alert == ALERT_DECODE_ERROR


# Refused: no TLS.


@pytest.mark.parametrize(
    "data",
    [
        b"G",  # HTTP; one byte is enough
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n",
        b"\x80\x2e\x01\x03\x01",  # the hello of SSL 2
        b"\x15\x03\x03\x00\x02\x02\x28",  # TLS, but an alert
        b"\x17\x03\x03\x00\x01\x00",
        b"\x16\x02",
        b"\x16\xfe\xfd",  # DTLS
        b"\x16\x00\x03\x00\x05",
    ],
)
def test_no_tls(data: bytes) -> None:
    with pytest.raises(NotTlsError, match="not tls: connection starts with 0x") as refused:
        parse(data)
    assert (refused.value.flag, refused.value.alert) == ("NOT_TLS", None)


# Refused: framing. Each is told by the bytes that show it, without waiting for the rest.


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes.fromhex("16 0300 0005"), "malformed client hello: record version 0x0300"),
        (bytes.fromhex("16 0304 0005"), "malformed client hello: record version 0x0304"),
        (bytes.fromhex("16 0301 0000"), "malformed client hello: empty tls record"),
        (bytes.fromhex("16 0301 4001"), "client hello too large: tls record of 16385 bytes"),
        (bytes.fromhex("16 0301 0005 02"), "malformed client hello: handshake message of type 2"),
        (bytes.fromhex("16 0301 0040 01 004001"), "client hello too large: 16385 bytes, more than 16384"),
        (bytes.fromhex("16 0301 0040 01 ffffff"), "client hello too large: 16777215 bytes"),
        (bytes.fromhex("16 0301 0001 01 16 0303 0003 ffffff"), "client hello too large: 16777215 bytes"),
        (bytes.fromhex("16 0301 0005 01 000000"), "more handshake data in its last record"),
        (bytes.fromhex("16 0301 0001 01 17"), "broken off by a record that is no handshake"),
        (bytes.fromhex("16 0301 0001 01 16 02"), "broken off by a record that is no handshake"),
        (bytes.fromhex("16 0301 0001 01 16 0303 0000"), "empty tls record"),
        (
            record(b"\x01") + record(b"\x00\x01\x00") + record(b"\x00") * (MAX_RECORDS - 2),
            "more than 64 tls records",
        ),
    ],
)
def test_framing(data: bytes, reason: str) -> None:
    assert parse(data[:-1]) is None
    with pytest.raises(ClientHelloError, match=re.escape(reason)) as refused:
        parse(data)
    assert (refused.value.flag, refused.value.alert) == ("BAD_HELLO", ALERT_DECODE_ERROR)


def test_limits_are_reached_but_not_passed() -> None:
    padding = MAX_HELLO_BYTES - len(message(extension(21, b""))) + 4
    handshake = message(extension(21, bytes(padding)))
    assert len(handshake) == MAX_HELLO_BYTES + 4
    # As many records as allowed, cut so that the first bytes are the most awkward ones.
    data = fragmented(handshake, range(1, MAX_RECORDS))
    assert len(data) == MAX_PEEK_BYTES
    assert parse(data) == ClientHello(None, (), MAX_PEEK_BYTES)
    assert parse(data[:-1]) is None
    with pytest.raises(ClientHelloError, match="more than 64 tls records"):
        parse(fragmented(handshake, range(1, MAX_RECORDS + 1)))
    with pytest.raises(ClientHelloError, match="too large"):
        parse(hello(extension(21, bytes(padding + 1))))


# Refused: the hello itself, once it is complete.

FIXED = b"\x03\x03" + bytes(32)


@pytest.mark.parametrize(
    ("handshake", "reason"),
    [
        (b"\x01\x00\x00\x00", "cut off before the session id"),
        (b"\x01" + vector(FIXED, 3), "cut off before the session id"),
        (message(session_id=bytes(33)), "session id of 33 bytes"),
        (b"\x01" + vector(FIXED + b"\x20" + bytes(20), 3), "cut off before the cipher suites"),
        (b"\x01" + vector(FIXED + b"\x00\x00", 3), "cut off before the cipher suites"),
        (message(suites=b""), "cipher suites of 0 bytes"),
        (message(suites=b"\x13\x01\x00"), "cipher suites of 3 bytes"),
        (b"\x01" + vector(FIXED + b"\x00\xff\xfe\x13\x01\x01\x00", 3), "cut off before the compression"),
        (b"\x01" + vector(FIXED + b"\x00\x00\x02\x13\x01", 3), "cut off before the compression"),
        (message(methods=b""), "no compression method"),
        (b"\x01" + vector(FIXED + b"\x00\x00\x02\x13\x01\x05\x00", 3), "cut off before the extensions"),
        (message(block=b"\x00"), "cut off before the extensions"),
        (message(block=b"\x00\x04\x00"), "extensions do not end where the hello ends"),
        (message(block=b"\x00\x00\x00"), "extensions do not end where the hello ends"),
        (message(b"\x00\x17\x00"), "extension cut off"),
        (message(b"\x00\x17\x00\x01"), "extension cut off"),
        (message(b"\x00\x10\xff\xff\x00\x00"), "extension cut off"),
        (message(server_name(b"a"), server_name(b"a")), "two server_name extensions"),
        (message(alpn(b"h2"), alpn(b"h2")), "two alpn extensions"),
        (message(extension(0, b"")), "server name cut off"),
        (message(extension(0, b"\x00\x02\x00\x00")), "server name cut off"),
        (message(extension(0, vector(b"\x00" + vector(b"a")) + b"\x00")), "no list of one name"),
        (message(extension(0, b"\x00\x09\x00\x00\x01a")), "no list of one name"),
        (message(extension(0, b"\x00\x04\x00\x00\x09a")), "no list of one name"),
        (message(extension(0, vector(b"\x00\x00\x01a\x00\x00\x01b"))), "no list of one name"),
        (message(extension(0, vector(b"\x01" + vector(b"a")))), "server name of type 1"),
        (message(server_name(b"n" * 256)), "server name of 256 bytes"),
        (message(server_name(b"")), "empty server name"),
        (message(server_name(b".")), "empty server name"),
        (message(server_name(b"a b")), "not printable ASCII"),
        (message(server_name(b"a\x00.example")), "not printable ASCII"),
        (message(server_name(b"a\r\nb")), "not printable ASCII"),
        (message(server_name(b"a\x7f")), "not printable ASCII"),
        (message(server_name("bücher.example".encode())), "not printable ASCII"),
        (message(extension(16, b"")), "alpn is no list of names"),
        (message(extension(16, b"\x00\x00")), "alpn is no list of names"),
        (message(extension(16, b"\x00\x09\x02h2")), "alpn is no list of names"),
        (message(alpn(b"")), "alpn name empty or cut off"),
        (message(extension(16, vector(b"\x03h2"))), "alpn name empty or cut off"),
    ],
)
def test_malformed(handshake: bytes, reason: str) -> None:
    for data in record(handshake), fragmented(handshake, [1, 3]):
        assert parse(data[:-1]) is None
        with pytest.raises(ClientHelloError, match=f"^malformed client hello: .*{reason}") as refused:
            parse(data)
        assert (refused.value.flag, refused.value.alert) == ("BAD_HELLO", ALERT_DECODE_ERROR)


# Whatever the bytes.

HELLOS = st.sampled_from(list(RECORDED.values()))
EDITS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=4)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A recorded hello with some bytes changed, mostly where its lengths are, cut off or continued."""
    data = bytearray(draw(HELLOS))
    for at, value in draw(EDITS):
        data[at % len(data)] = value
    return bytes(data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=20)))


@st.composite
def split(draw: st.DrawFn, handshakes: st.SearchStrategy[bytes]) -> bytes:
    handshake = draw(handshakes)
    return fragmented(handshake, draw(st.lists(st.integers(1, len(handshake) - 1), max_size=MAX_RECORDS - 1)))


BODIES = st.binary(min_size=1, max_size=200).map(lambda body: b"\x01" + vector(body, 3))
EXTENSIONS = st.lists(st.binary(max_size=30) | st.just(server_name(b"a")) | st.just(alpn(b"h2")), max_size=5)
MADE = EXTENSIONS.map(lambda extensions: message(*extensions))
ANYTHING = st.one_of(st.binary(max_size=600), mutated(), split(BODIES), split(MADE))


@given(ANYTHING)
def test_any_bytes_are_a_hello_incomplete_or_refused(data: bytes) -> None:
    found = outcome(data)
    if isinstance(found, ClientHello):
        assert found.size <= len(data)
        assert found.server_name is None or found.server_name.isascii()


@given(mutated() | split(BODIES) | split(MADE))
def test_an_answer_stays_the_same_with_more_bytes(data: bytes) -> None:
    answers = [outcome(data[:end]) for end in range(len(data) + 1)]
    decided = [answer for answer in answers if answer is not None]
    assert len(set(decided)) <= 1
    assert answers == [None] * (len(answers) - len(decided)) + decided


@given(HELLOS, st.data())
def test_records_may_be_cut_anywhere(whole: bytes, data: st.DataObject) -> None:
    pieces = data.draw(split(st.just(whole[5:])))
    expected = parse(whole)
    assert expected is not None
    assert parse(pieces) == ClientHello(expected.server_name, expected.alpn, len(pieces))
    assert parse(pieces[: data.draw(st.integers(0, len(pieces) - 1))]) is None
