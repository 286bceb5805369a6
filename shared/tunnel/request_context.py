"""What a tunnel request says of where it comes from: `traceparent`, `baggage` and `forwarded`.

Owned here: writing the three headers as ztunnel does, and reading what of them belongs in a log. They come
from a peer, so what is read is held against its own syntax and cut; nothing here decides anything.
"""

from __future__ import annotations

import re

TRACEPARENT_BYTES = 24
"""Random bytes of a traceparent: 16 name the trace, 8 the span."""

SHOWN_CHARS = 100
"""Of a forwarded client: an IPv6 address with zone and port has half as many."""

_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[\x21-\x7e]*)?"
)
# The first `for` parameter of RFC 7239 section 4: a token, or text in quotes.
_FORWARDED_FOR = re.compile(
    rb'(?:^|[;,])[ \t]*for=(?:"([^"\\\x00-\x1f\x7f-\xff]*)"|([^\s;,"\x00-\x1f\x7f-\xff]+))', re.IGNORECASE
)


def traceparent(random: bytes) -> bytes:
    """The traceparent of a new trace (W3C Trace Context, section 3.2), not sampled: nobody records our span.

    `random` are TRACEPARENT_BYTES unpredictable bytes.
    """
    trace, span = random[:16], random[16:TRACEPARENT_BYTES]
    return b"00-%s-%s-00" % (trace.hex().encode(), span.hex().encode())


def baggage(namespace: str, service: str) -> bytes:
    """The baggage (W3C Baggage, section 3.2) that names a service and its namespace, each if it is known; DNS
    labels need no escapes."""
    members = (("k8s.namespace.name", namespace), ("service.name", service))
    return ",".join(f"{key}={value}" for key, value in members if value).encode()


def forwarded(client: str) -> bytes:
    """The forwarded header (RFC 7239) for a client HOST:PORT, an IPv6 host in brackets."""
    return f'for="{client}"'.encode()


def read_traceparent(value: bytes) -> str | None:
    """A traceparent as text, None if it is none."""
    return value[:55].decode("ascii") if _TRACEPARENT.fullmatch(value) else None


def forwarded_for(value: bytes) -> str | None:
    """The first client that a forwarded header names, cut to SHOWN_CHARS; None if it names none."""
    match = _FORWARDED_FOR.search(value)
    if match is None:
        return None
    found: bytes = match[1] if match[1] is not None else match[2]
    return found[:SHOWN_CHARS].decode("ascii") or None
