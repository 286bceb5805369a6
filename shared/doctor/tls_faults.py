"""Which failure a TLS handshake that broke off is, by OpenSSL's error.

The numbers are those of X509_STORE_CTX_get_error(3), the names those of OpenSSL's reasons
(ssl/sslerr.h), of which those with ALERT came from the server (RFC 8446 section 6).
"""

from __future__ import annotations

import re
import ssl

from shared.doctor.failures import Failed, Failure
from shared.net.dial import reason

_BY_VERIFY_CODE = {
    9: Failure.CERTIFICATE_TOO_NEW,
    10: Failure.CERTIFICATE_EXPIRED,
    18: Failure.CERTIFICATE_UNTRUSTED,
    19: Failure.CERTIFICATE_UNTRUSTED,
    20: Failure.CERTIFICATE_UNTRUSTED,
    21: Failure.CERTIFICATE_UNTRUSTED,
    62: Failure.CERTIFICATE_NAME,
    64: Failure.CERTIFICATE_NAME,
}

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_OLD = ("UNSUPPORTED_PROTOCOL", "ALERT_PROTOCOL_VERSION", "VERSION_TOO_LOW")
_TEXT = re.compile(r"\] (.+?) \(_ssl")
NO_ALPN = "ALERT_NO_APPLICATION_PROTOCOL"


def of_server(error: OSError) -> Failed:
    """What `error`, of a handshake with a server that has a host name, means."""
    text = reason(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        code = getattr(error, "verify_code", 0)
        return Failed(_BY_VERIFY_CODE.get(code, Failure.CERTIFICATE_BAD), text)
    if not isinstance(error, ssl.SSLError):
        return Failed(Failure.TLS_CLOSED, text)
    return Failed(_of_reason(reason_of(error)), text)


def reason_of(error: OSError) -> str:
    """OpenSSL's name of what was wrong; empty if it is no error of OpenSSL's. Python knows the names of its
    own time only, and has the others in the text alone."""
    if not isinstance(error, ssl.SSLError):
        return ""
    told = _TEXT.search(str(error))
    return error.reason or (told[1].upper().replace(" ", "_") if told else "UNKNOWN")


def _of_reason(name: str) -> Failure:
    if name.endswith(NO_ALPN):
        return Failure.NO_HTTP2
    if name.endswith(_NO_TLS):
        return Failure.NOT_TLS
    if name.endswith(_OLD):
        return Failure.TLS_VERSION
    if "EOF" in name:
        return Failure.TLS_CLOSED
    return Failure.TLS_ALERT
