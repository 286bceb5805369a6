"""The header fields of ordinary requests and answers: which of them pass between a client and the app.

Removed from a request:

- what has no meaning beyond one hop (RFC 9110 section 7.6.1, RFC 9113 section 8.2.2);
- `x-forwarded-client-cert`, which only an mTLS end may set, and does;
- the authorization that Cloud Run has checked: `x-serverless-authorization`, or else an `authorization` with
  a token for Cloud Run. An `authorization` beside `x-serverless-authorization`, or with anything else in it,
  is the app's own and stays (Cloud Run, "Authenticating service-to-service"). Behind an mTLS end nobody has
  checked any, and both stay;
- twins of these names and of those that we set: CGI, WSGI, Rack and PHP turn "-" into "_", some servers every
  character that is no letter or digit, so that for an app `x_forwarded_client_cert` is the real name.

Everything here is bytes in, bytes out; names are in lower case.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.http2.events import Headers

Field = tuple[bytes, bytes]

SIGNATURE_REMOVED = "SIGNATURE_REMOVED_BY_GOOGLE"
"""What Cloud Run puts in place of the signature of a token that it has checked."""

CLOUD_RUN_DOMAIN = ".run.app"

GRPC = b"application/grpc"
"""Content type of gRPC, alone or with "+" and the messages' format; "-web" is for HTTP/1.1."""

CONTINUE = b"100-continue"

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"transfer-encoding",
        b"upgrade",
        b"te",
        b"http2-settings",
    )
)

_OF_REQUESTS = frozenset((b"x-forwarded-client-cert", b"x-serverless-authorization"))
_DROPPED = HOP_BY_HOP | _OF_REQUESTS
_LOOKED_AT = frozenset(
    (
        b"host",
        b"cookie",
        b"authorization",
        b"content-length",
        b"expect",
        b"content-type",
        b"sec-websocket-key",
    )
)
_OWNED = _DROPPED | _LOOKED_AT

# Not in trailers (RFC 9110 section 6.5.1): framing, routing, credentials, how to read the content.
_NOT_IN_TRAILERS = frozenset(
    (
        b"cache-control",
        b"content-encoding",
        b"content-range",
        b"forwarded",
        b"max-forwards",
        b"proxy-authorization",
        b"range",
        b"trailer",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
    )
)
_NOT_IN_REQUEST_TRAILERS = _OWNED | _NOT_IN_TRAILERS

_LETTERS = (string.ascii_lowercase + string.digits + "-").encode()
_CANONICAL = bytes(
    byte if byte in _LETTERS else byte + 32 if 65 <= byte <= 90 else ord("-") for byte in range(256)
)
"""Turns each name into the one that the app may take it for."""


@dataclass(slots=True)
class RequestHead:
    """A request for the app, whichever protocol it is told in."""

    method: bytes = b""
    scheme: bytes = b""
    authority: bytes = b""
    path: bytes = b"/"
    protocol: bytes = b""
    """Of an extended CONNECT (RFC 8441), such as websocket; else empty."""

    fields: list[Field] = field(default_factory=list)
    """Without `host`."""

    has_length: bool = False
    """`content-length` is among the fields."""

    takes_trailers: bool = False
    """`te: trailers` was said."""

    is_grpc: bool = False

    @property
    def is_idempotent(self) -> bool:
        """Whether it may be sent again though the app may have dealt with it (RFC 9110 section 9.2.2)."""
        return self.method in (b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE")


def request_head(headers: Headers, *, bodiless: bool, client_certificate: bytes | None = None) -> RequestHead:
    """What the app is to see of a request's header list. `bodiless` says that no body follows;
    `client_certificate` is what an mTLS end tells of the client's, None: there was none."""
    head = RequestHead()
    fields = head.fields
    if client_certificate is not None:
        fields.append((b"x-forwarded-client-cert", client_certificate))
    # Both headers: Cloud Run looks at x-serverless-authorization only and leaves the other to the app.
    app_authorization = any(name == b"x-serverless-authorization" for name, _ in headers)
    cookies: list[bytes] = []
    host = b""
    for item in headers:
        name, value = item
        if name.translate(_CANONICAL) not in _OWNED:
            if name[0] != 58:  # a colon
                fields.append(item)
            elif name == b":method":
                head.method = value
            elif name == b":path":
                head.path = value
            elif name == b":authority":
                head.authority = value
            elif name == b":scheme":
                head.scheme = value
            elif name == b":protocol":
                head.protocol = value
        elif name in _LOOKED_AT:
            if name == b"host":
                host = value
            elif name == b"cookie":
                cookies.append(value)  # HTTP/2 may split it (RFC 9113 section 8.2.3)
            elif name == b"authorization":
                if app_authorization or client_certificate is not None or not checked_by_cloud_run(value):
                    fields.append(item)
            elif name == b"content-length":
                head.has_length = True
                fields.append(item)
            elif name == b"content-type":
                head.is_grpc = value == GRPC or value.startswith((GRPC + b"+", GRPC + b";"))
                fields.append(item)
            elif name == b"expect":
                if value.lower() == CONTINUE and not bodiless:
                    fields.append(item)
            elif not head.protocol:  # sec-websocket-key, which we make where we upgrade
                fields.append(item)
        elif name == b"te":  # the session accepts no other value than trailers
            head.takes_trailers = True
        elif name == b"x-serverless-authorization" and client_certificate is not None:
            fields.append(item)
    if cookies:
        fields.append((b"cookie", b"; ".join(cookies)))
    if not head.authority:
        head.authority = host
    return head


def request_trailers(trailers: Headers | None) -> list[Field]:
    """What the app is to see of a request's trailers."""
    return [item for item in trailers or () if item[0].translate(_CANONICAL) not in _NOT_IN_REQUEST_TRAILERS]


def response_fields(fields: Iterable[Field]) -> list[Field]:
    """What the client is to see of an answer's fields, whose names are in lower case."""
    fields = list(fields)
    dropped: frozenset[bytes] | set[bytes] = HOP_BY_HOP
    for name, value in fields:
        if name == b"connection":
            dropped = {*dropped, *(token.strip().lower() for token in value.split(b","))}
    return [item for item in fields if item[0] not in dropped]


def response_trailers(trailers: Headers | None) -> list[Field]:
    """What the client is to see of an answer's trailers."""
    return [item for item in trailers or () if item[0] not in HOP_BY_HOP and item[0] != b"content-length"]


def checked_by_cloud_run(authorization: bytes) -> bool:
    """Whether the header holds a token that Cloud Run has checked: its signature was taken out, or it was
    minted for a Cloud Run URL."""
    from shared.trust.token_claims import claims_of

    scheme, _, token = authorization.decode("latin-1").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer":
        return False
    if token.endswith("." + SIGNATURE_REMOVED):
        return True
    try:
        audience = claims_of(token).get("aud")
    except ValueError:
        return False
    return isinstance(audience, str) and audience.removesuffix("/").endswith(CLOUD_RUN_DOMAIN)
