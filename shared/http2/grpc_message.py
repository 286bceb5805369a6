"""What gRPC adds to HTTP/2 for a call with one request and one answer (grpc.io, "gRPC over HTTP2"): the
headers, the five bytes before a message, and the status of an answer. We offer no compression, so an answer
may have none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from shared.http2.events import Headers

CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""Names of the status codes, which count from 0 (grpc.io, "Status codes")."""

PREFIX_BYTES = 5
"""A flag for compression and the message's length in 32 bits."""

MAX_STATUS_CHARS = 1000
"""How much of a `grpc-message` is kept: it is there to be read by people."""

_CODE_OF_HTTP = {
    400: "INTERNAL",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "UNIMPLEMENTED",
    429: "UNAVAILABLE",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
}
"""What a proxy's answer in place of a gRPC server's means (grpc, doc/http-grpc-status-mapping.md)."""

_VALUE = re.compile(r"[\x20-\x7e]*")
_MAX_TIMEOUT_MS = 99_999_999  # eight digits is what the header may have


def request_headers(authority: str, path: str, metadata: Mapping[str, str], timeout_s: float) -> Headers:
    """Headers of a call of `path` (`/PACKAGE.SERVICE/METHOD`) over TLS that is to take at most `timeout_s`
    seconds; names in `metadata` are in lower case.

    Raises ValueError, which does not show it, for a value that no header can carry.
    """
    timeout_ms = min(max(int(timeout_s * 1000), 1), _MAX_TIMEOUT_MS)
    headers = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "hbone",
        "grpc-timeout": f"{timeout_ms}m",
        **metadata,
    }
    for name, value in headers.items():
        if _VALUE.fullmatch(value) is None:
            raise ValueError(f"{name} has characters that no header can carry")
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def framed(message: bytes) -> bytes:
    """`message` as it goes into the stream."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def unframed(body: bytes) -> bytes:
    """The one message of an answer's body. Raises ValueError if it has none, several, or a compressed one."""
    if len(body) < PREFIX_BYTES:
        raise ValueError("no gRPC answer: there is no message in it")
    if body[0] != 0:
        raise ValueError("no gRPC answer: its message is compressed, which we have not offered to read")
    if int.from_bytes(body[1:PREFIX_BYTES], "big") != len(body) - PREFIX_BYTES:
        raise ValueError("no gRPC answer: it is not one whole message")
    return body[PREFIX_BYTES:]


def status(headers: Headers, trailers: Headers | None) -> tuple[str, str]:
    """The status of an answer, by its name in CODES, and what the server says about it, as it says it.
    `trailers` is None where the headers were all there was. An answer that is none of gRPC's gets the status
    that stands for its HTTP status."""
    http = _value(headers, b":status")
    if http != "200":
        number = int(http) if http.isdecimal() and len(http) == 3 else 0
        return _CODE_OF_HTTP.get(number, "UNKNOWN"), f"HTTP status {number}"
    if not _value(headers, b"content-type").startswith("application/grpc"):
        return "UNKNOWN", "not the answer of a gRPC server"
    last = headers if trailers is None else trailers
    code = _value(last, b"grpc-status")
    if not code:
        return "UNKNOWN", "the answer broke off: it has no grpc-status"
    text = unquote_to_bytes(_value(last, b"grpc-message")[:MAX_STATUS_CHARS]).decode("utf-8", "replace")
    known = code.isdecimal() and len(code) <= 2 and int(code) < len(CODES)
    return CODES[int(code)] if known else "UNKNOWN", text


def _value(headers: Headers, name: bytes) -> str:
    """The first value of `name`, or empty."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")
