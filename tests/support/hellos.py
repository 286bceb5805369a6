"""First bytes for connections to the gateway: good ones from OpenSSL, bad ones by hand; and their answers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

NAME = "outbound_.8080_._.hello.demo.svc.cluster.local"
"""The server name that an Istio client asks for."""

RECORD_HEADER_BYTES = 5


def hello(name: str | None = NAME, alpn: tuple[str, ...] = ("istio",)) -> bytes:
    """The record in which OpenSSL says hello; no server name in it for None."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(list(alpn))
    written = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), written, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return written.read()
    raise AssertionError("a handshake without a server")


def in_records(record: bytes, *sizes: int) -> bytes:
    """The hello in `record` split over several records: of `sizes` bytes each, the last with the rest."""
    message = record[RECORD_HEADER_BYTES:]
    parts = []
    for size in sizes:
        parts.append(message[:size])
        message = message[size:]
    return b"".join(record[:3] + len(part).to_bytes(2, "big") + part for part in [*parts, message])


def alert(description: int) -> bytes:
    """The record of a fatal alert (RFC 8446 section 6), written out here once more on purpose."""
    return bytes((21, 3, 3, 0, 2, 2, description))


ACCESS_DENIED = alert(49)
DECODE_ERROR = alert(50)
INTERNAL_ERROR = alert(80)
UNRECOGNIZED_NAME = alert(112)


@dataclass(frozen=True, slots=True)
class Bad:
    """First bytes that lead nowhere, and how the connection then ends."""

    data: bytes
    flag: str
    answer: bytes = b""
    """What the client gets before the end."""
    reason: str = ""
    """A part of the reason in the log."""
    ends: bool = False
    """The client sends FIN after its bytes."""


def bad_hellos() -> dict[str, Bad]:
    """What a port is sent by mistake or malice, each by what is wrong with it."""
    good = hello()
    foreign = bytes((22, 3, 1, 0, 4, 2, 0, 0, 0))  # a ServerHello
    return {
        "plain HTTP": Bad(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "NOT_TLS", reason="not tls"),
        "one foreign byte": Bad(b"\x00", "NOT_TLS", reason="not tls"),
        "ssh": Bad(b"SSH-2.0-OpenSSH_9.9\r\n", "NOT_TLS", reason="not tls"),
        "SSL 2": Bad(b"\x80\x2e\x01\x03\x01" + bytes(41), "NOT_TLS", reason="not tls"),
        "another handshake message": Bad(foreign, "BAD_HELLO", DECODE_ERROR, "handshake message of type 2"),
        "an empty record": Bad(b"\x16\x03\x01\x00\x00", "BAD_HELLO", DECODE_ERROR, "empty tls record"),
        "an alert inside": Bad(
            in_records(good, 40)[:45] + alert(0), "BAD_HELLO", DECODE_ERROR, "no handshake"
        ),
        "a giant hello": Bad(
            b"\x16\x03\x01\x40\x00\x01\x00\x40\x01" + bytes(20), "BAD_HELLO", DECODE_ERROR, "too large"
        ),
        "a giant record": Bad(b"\x16\x03\x01\x40\x01", "BAD_HELLO", DECODE_ERROR, "too large"),
        "a megabyte of nothing": Bad(
            b"\x16\x03\x01\x40\x00\x01\x00\x40\x00" + bytes(1 << 20), "BAD_HELLO", DECODE_ERROR
        ),
        "a byte a record": Bad(
            in_records(good, *[1] * 100), "BAD_HELLO", DECODE_ERROR, "more than 64 tls records"
        ),
        "lengths that lie": Bad(lying(good), "BAD_HELLO", DECODE_ERROR, "malformed"),
        "truncated": Bad(good[:100], "BAD_HELLO", DECODE_ERROR, "closed after 100 bytes", ends=True),
        "truncated in its header": Bad(good[:3], "BAD_HELLO", DECODE_ERROR, "closed after 3", ends=True),
        "no name": Bad(hello(None), "NO_SNI", UNRECOGNIZED_NAME, "no server name"),
    }


def lying(record: bytes) -> bytes:
    """A hello whose session id says that it is longer than everything: the original crashed."""
    session_id_at = RECORD_HEADER_BYTES + 4 + 34
    return record[:session_id_at] + b"\xff" + record[session_id_at + 1 :]
