"""TLS alerts that we send ourselves, before any TLS end of ours or of the service has spoken."""

from __future__ import annotations

import struct

CONTENT_ALERT = 21
"""The record's type (RFC 8446 section 5.1, ContentType)."""

_LEGACY_VERSION = 0x0303  # what every record after the first hello carries (RFC 8446 section 5.1)
_LEVEL_FATAL = 2  # RFC 8446 section 6, AlertLevel
_RECORD = struct.Struct("!BHHBB")


def fatal(description: int) -> bytes:
    """The 7 bytes of a plaintext fatal alert with `description` (RFC 8446 section 6), ready to send.

    A client that has sent only its hello has no keys yet, so it reads the alert unencrypted. Close the
    connection after it. Raises ValueError if `description` is not in 0..255.
    """
    if not 0 <= description <= 255:
        raise ValueError(f"alert description {description}: not in 0..255")
    return _RECORD.pack(CONTENT_ALERT, _LEGACY_VERSION, 2, _LEVEL_FATAL, description)
