"""What the mTLS ends offer by ALPN, so that a client speaks to the app what the app understands.

Each list is in the order in which a client's names are looked for.

Where bytes are passed on as they are (`alpn_offer`), whatever a client has agreed to is what the app gets:

- `istio` comes first: it promises nothing but bytes, and Istio's clients offer it beside each of their other
  names.
- An app that speaks HTTP/1.1 has promised no HTTP/2, and the other way round.
- Where nobody has said what the app speaks (`auto`), HTTP/1.1 comes first, for a client that offers both,
  such as curl, gets on with any app that speaks HTTP/1.1; h2 is agreed with clients that offer nothing else,
  such as gRPC's, which would break off without an answer, and could not speak to an HTTP/1.1 app in any case.
- An app that speaks no HTTP (`tcp`) has clients that speak what it speaks, whatever they call it.
- Never `istio-peer-exchange`: whoever agrees to it is sent a binary header before the data (Istio's
  metadata_exchange filter).

Where HTTP is served (`http_offer`), both versions are offered, the app's first: they are translated. Istio's
clients offer the plain names, too.

A client with no name in common gets no ALPN, and may go on: what it speaks may be neither.
"""

from __future__ import annotations

from agent.config.settings import AppProtocol

_BYTES = ("istio",)
_HTTP1 = ("istio-http/1.1", "istio-http/1.0", "http/1.1", "http/1.0")
_HTTP2 = ("istio-h2", "h2")

_OFFERS: dict[AppProtocol, tuple[str, ...]] = {
    "http1": _BYTES + _HTTP1,
    "h2c": _BYTES + _HTTP2,
    "auto": _BYTES + _HTTP1 + _HTTP2,
    "tcp": _BYTES + _HTTP1 + _HTTP2,
}

HTTP_NAMES = _HTTP1 + _HTTP2
"""Whoever offers one of them speaks HTTP."""


def alpn_offer(protocol: AppProtocol) -> tuple[str, ...]:
    """The names that a client may be told it speaks to an app of `protocol`, the preferred one first."""
    return _OFFERS[protocol]


def http_offer(protocol: AppProtocol) -> tuple[str, ...]:
    """Likewise, where HTTP is served."""
    return ("h2", "http/1.1") if protocol == "h2c" else ("http/1.1", "h2")


def builtin_offer(protocol: AppProtocol) -> tuple[str, ...]:
    """Likewise, by the built-in end. With `auto` it serves HTTP to clients that offer it, and passes on the
    bytes of others."""
    if protocol == "tcp":
        return alpn_offer(protocol)
    return http_offer(protocol) + (_BYTES if protocol == "auto" else ())
