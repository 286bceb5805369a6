"""The request that opens a tunnel, in both dialects, and the paths under which krun accepts one.

POST is what Cloud Run lets through; CONNECT is HBONE's own (ztunnel, Envoy's `connect_config`). Both get
200 once the target is connected, and then carry the tunnel's bytes as the bodies of the two directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shared.address import MAX_PORT

TUNNEL_PREFIX = "/_hbone/"
"""Paths below it are tunnels, everything else is the app's (the original's rule)."""

LISTEN_PREFIX = f"{TUNNEL_PREFIX}listen/"
"""Behind it is a port that krun is to listen on, for whoever asks. No target has a slash in its name."""

NO_TARGET = "no such target; known are "
"""How krun's 404 to a tunnel begins whose target it does not know; the names of its targets follow."""

_TARGET = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


def post(
    scheme: str,
    authority: str,
    path: str,
    token: str | None = None,
    extra: Iterable[tuple[bytes, bytes]] = (),
) -> list[tuple[bytes, bytes]]:
    """Headers of `POST scheme://authority/path`; `token` goes into `authorization` as a bearer."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", scheme.encode()),
        (b":authority", authority.encode()),
        (b":path", path.encode()),
    ]
    return _finish(headers, token, extra)


def connect(
    authority: str, token: str | None = None, extra: Iterable[tuple[bytes, bytes]] = ()
) -> list[tuple[bytes, bytes]]:
    """Headers of `CONNECT authority`: no scheme, path or `:protocol` (RFC 9113 section 8.5)."""
    return _finish([(b":method", b"CONNECT"), (b":authority", authority.encode())], token, extra)


def target_name(path: bytes) -> str | None:
    """NAME of `/_hbone/NAME`, a query ignored; empty for a path below the prefix that names nothing valid;
    None for a path that is the app's."""
    text = path.split(b"?", 1)[0].decode("latin-1")
    if not text.startswith(TUNNEL_PREFIX):
        return "" if text == TUNNEL_PREFIX.rstrip("/") else None
    name = text.removeprefix(TUNNEL_PREFIX)
    return name if _TARGET.fullmatch(name) else ""


def listen_port(path: bytes) -> int | None:
    """PORT of `/_hbone/listen/PORT`, a query ignored; 0 if that is no port; None for any other path."""
    if not path.startswith(LISTEN_PREFIX.encode()):
        return None
    port = path.split(b"?", 1)[0].decode("latin-1").removeprefix(LISTEN_PREFIX)
    return int(port) if _PORT.fullmatch(port) and int(port) <= MAX_PORT else 0


def _finish(
    headers: list[tuple[bytes, bytes]], token: str | None, extra: Iterable[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    if token is not None:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    headers.extend(extra)
    return headers
