"""What a tunnel request says of where it comes from: `traceparent`, `baggage`, `forwarded` and, where hgate
has ended a member's mTLS, `x-forwarded-client-cert`.

The first three are written as ztunnel does, the last one as Envoy does. What is read of them goes into a log:
it comes from a peer, so it is checked against its syntax and cut. No decision depends on it, but for
`forwarded_host`, which is judged as if the peer had asked for that name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from shared.address import check_host_name
from shared.trust.spiffe import SpiffeId

RANDOM_BYTES = 24
"""Of a traceparent: 16 name the trace, 8 the span."""

TRACES_AT_ONCE = 64
"""Traceparents whose random bytes are drawn together: drawing for each took 0.6 % of the samples
of a profile of new tunnels."""

SHOWN_CHARS = 100
"""Of a forwarded client: an IPv6 address with zone and port has half as many."""

_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[\x21-\x7e]*)?"
)
# The first `for` parameter of RFC 7239 section 4: a token, or text in quotes.
_FORWARDED_FOR = re.compile(
    rb'(?:^|[;,])[ \t]*for=(?:"([^"\\\x00-\x1f\x7f-\xff]*)"|([^\s;,"\x00-\x1f\x7f-\xff]+))', re.IGNORECASE
)


# Its first `host` parameter; a port may follow the name (RFC 7239 section 5.3).
_FORWARDED_HOST = re.compile(
    rb'(?:^|[;,])[ \t]*host=(?:"([A-Za-z0-9._-]{1,254})(?::[0-9]{1,5})?"|([A-Za-z0-9._-]{1,254}))'
    rb"[ \t]*(?:[;,]|$)",
    re.IGNORECASE,
)


# A pair of x-forwarded-client-cert (Envoy, "HTTP header manipulation"). Pairs of one certificate are divided
# by semicolons, certificates by commas.
_CERTIFICATE_PAIR = re.compile(rb'([A-Za-z]{1,16})=(?:"((?:[^"\\]|\\.)*)"|([^,;"]*))(;|,|\Z)', re.DOTALL)

CLIENT_CERTIFICATE = b"x-forwarded-client-cert"


def traceparents(is_sampled: Callable[[str], bool] | None = None) -> Iterator[bytes]:
    """Traceparents of new traces (W3C Trace Context, section 3.2), without end. `is_sampled` says by a
    trace's id, 32 hexadecimal digits, whether our span is recorded; None: of no trace."""
    while True:
        drawn = os.urandom(TRACES_AT_ONCE * RANDOM_BYTES).hex().encode()
        for at in range(0, len(drawn), 2 * RANDOM_BYTES):
            trace, span = drawn[at : at + 32], drawn[at + 32 : at + 48]
            flags = b"01" if is_sampled is not None and is_sampled(trace.decode()) else b"00"
            yield b"00-%b-%b-%b" % (trace, span, flags)


def baggage(namespace: str, service: str) -> bytes:
    """The baggage (W3C Baggage, section 3.2) that names a service and its namespace, each if it is known; DNS
    labels need no escapes."""
    members = (("k8s.namespace.name", namespace), ("service.name", service))
    return ",".join(f"{key}={value}" for key, value in members if value).encode()


def workload_baggage(cluster: str, namespace: str, workload: str, service: str, version: str) -> bytes:
    """The baggage by which a server of the mesh says who it is, as ztunnel does; what is empty is left out.
    What its syntax has no room for is escaped (W3C Baggage, section 3.3.1.3)."""
    from urllib.parse import quote  # 1 ms, for those who say it

    members = (
        ("k8s.cluster.name", cluster),
        ("k8s.namespace.name", namespace),
        ("k8s.deployment.name", workload),
        ("service.name", service),
        ("service.version", version),
    )
    return ",".join(f"{key}={quote(value, safe='/:@+')}" for key, value in members if value).encode()


def forwarded(client: str) -> bytes:
    """The forwarded header (RFC 7239) for a client HOST:PORT, an IPv6 host in brackets."""
    return f'for="{client}"'.encode()


def client_certificate(own: str, client: SpiffeId) -> bytes:
    """The x-forwarded-client-cert header of a proxy that is called `own`, empty if that is not known, for a
    `client` whose certificate it has verified. Neither name has a character that has to be quoted."""
    by = f"By={own};" if own else ""
    return f"{by}URI={client}".encode()


def read_traceparent(value: bytes) -> str | None:
    """A traceparent as text, None if it is none."""
    return value[:55].decode("ascii") if _TRACEPARENT.fullmatch(value) else None


def forwarded_host(value: bytes) -> str | None:
    """The first host name that a forwarded header says was asked for, in lower case and without a dot at its
    end; None if it says none that could be one."""
    match = _FORWARDED_HOST.search(value)
    if match is None:
        return None
    found: bytes = match[1] or match[2]
    host = found.decode("ascii").lower().removesuffix(".")
    try:
        check_host_name(host)
    except ValueError:
        return None
    return host


def forwarded_for(value: bytes) -> str | None:
    """The first client that a forwarded header names, cut to SHOWN_CHARS; None if it names none."""
    match = _FORWARDED_FOR.search(value)
    if match is None:
        return None
    found: bytes = match[1] if match[1] is not None else match[2]
    return found[:SHOWN_CHARS].decode("ascii") or None


def certified_client(value: bytes) -> str | None:
    """The SPIFFE ID of the first client that an x-forwarded-client-cert header names; None if it names none
    by one."""
    at = 0
    while (pair := _CERTIFICATE_PAIR.match(value, at)) is not None:
        key, quoted, plain, separator = pair.groups()
        if key.lower() == b"uri":
            found: bytes = plain if quoted is None else quoted
            try:
                return str(SpiffeId.parse(found.decode("ascii")))
            except ValueError:
                return None
        if separator != b";":
            return None
        at = pair.end()
    return None
