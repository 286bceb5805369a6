"""TLS alerts that we send ourselves, before any TLS end of ours or of the service has spoken.

Owns the bytes of one plaintext fatal alert. Which description fits which refusal is the error's matter
(`alert` in shared/errors.py); `sealed_alert.py` has the alert for a client that has keys already. Alerts
inside an established TLS connection belong to its TLS library.
"""

from __future__ import annotations

import struct

CONTENT_ALERT = 21
"""The record's type (RFC 8446 section 5.1, ContentType); of a sealed record its inner one."""

LEGACY_VERSION = 0x0303
"""What every record after the first hello carries (RFC 8446 section 5.1)."""

_LEVEL_FATAL = 2  # RFC 8446 section 6, AlertLevel

_HEADER = struct.Struct("!BHH")


def fatal(description: int) -> bytes:
    """The 7 bytes of a plaintext fatal alert with `description` (RFC 8446 section 6), ready to send.

    A client that has sent only its hello has no keys yet, so it takes the alert unencrypted. Close the
    connection after it. Raises ValueError if `description` is not in 0..255.
    """
    alert = message(description)
    return _HEADER.pack(CONTENT_ALERT, LEGACY_VERSION, len(alert)) + alert


def message(description: int) -> bytes:
    """The fatal alert itself, level and description, without a record around it.

    Raises ValueError if `description` is not in 0..255.
    """
    if not 0 <= description <= 255:
        raise ValueError(f"alert description {description}: not in 0..255")
    return bytes((_LEVEL_FATAL, description))
