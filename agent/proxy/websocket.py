"""How HTTP/1.1 agrees to a WebSocket (RFC 6455 section 4)."""

from __future__ import annotations

import base64
import hashlib

NAME = b"websocket"
"""Of the protocol, in `upgrade` and in `:protocol`."""

_SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455 section 1.3."""


def accept(key: bytes) -> bytes:
    """The server's `sec-websocket-accept` to the client's `sec-websocket-key`."""
    return base64.b64encode(hashlib.sha1(key + _SALT, usedforsecurity=False).digest())
