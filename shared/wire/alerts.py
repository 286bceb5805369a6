"""TLS alerts that we send ourselves, before any TLS end of ours or of the service has spoken.

Owns the bytes of one plaintext fatal alert. Which description fits which refusal is the error's matter
(`alert` in shared/errors.py); alerts inside an established TLS connection belong to its TLS library.
"""

from __future__ import annotations

import struct

_CONTENT_ALERT = 21  # RFC 8446 section 5.1, ContentType
_LEGACY_VERSION = 0x0303  # what every record after the first hello carries, RFC 8446 section 5.1
_LEVEL_FATAL = 2  # RFC 8446 section 6, AlertLevel
_ALERT_BYTES = 2  # level and description

_RECORD = struct.Struct("!BHHBB")


def fatal(description: int) -> bytes:
    """The 7 bytes of a plaintext fatal alert with `description` (RFC 8446 section 6), ready to send.

    A client that has sent only its hello has no keys yet, so it takes the alert unencrypted. Close the
    connection after it. Raises ValueError if `description` is not in 0..255.
    """
    if not 0 <= description <= 255:
        raise ValueError(f"alert description {description}: not in 0..255")
    return _RECORD.pack(_CONTENT_ALERT, _LEGACY_VERSION, _ALERT_BYTES, _LEVEL_FATAL, description)
