"""The rules for a decoded header list: RFC 9113 sections 8.1.1 to 8.3, the syntax of pseudo-header fields
(RFC 9110, RFC 3986), content-length, and the size of a list. A list is examined once, when it has been
decoded: `HeaderBlock` is the list with what was found.

Where the RFCs leave room we accept what nghttp2 and Envoy accept: any visible character, and any byte above
ASCII, in a path; any number as a port. Envoy checks no other part of an authority than its characters, and
neither of them checks that a host agrees with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from shared.http2.events import Headers
from shared.http2.static_table import ENTRY_OVERHEAD_BYTES, INDEX_OF_NAME

LENGTH_DIGITS = 19
"""Of a content-length: a body of more bytes ends in no lifetime."""

# RFC 9113 section 8.2.1: visible ASCII, no upper case, a colon only in front.
_NAME = re.compile(rb":?[!-9;-@\[-~]+")
_BLANKS = b" \t"
"""A value neither begins nor ends with one."""

# RFC 9113 section 8.2.2.
_OF_CONNECTIONS = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_PLAIN_NAMES = (
    frozenset(name for name in INDEX_OF_NAME if not name.startswith(b":"))
    - _OF_CONNECTIONS
    - {b"content-length", b"cookie", b"host"}
)
"""Names that need no further check."""

_OF_REQUESTS = frozenset((b":method", b":scheme", b":authority", b":path", b":protocol"))

# Usual values, which need no further check.
_METHODS = frozenset((b"CONNECT", b"DELETE", b"GET", b"HEAD", b"OPTIONS", b"PATCH", b"POST", b"PUT"))
_DEFAULT_PORTS = {b"https": b":443", b"http": b":80"}
"""RFC 9110 sections 4.2.1 and 4.2.2."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*")  # RFC 3986 section 3.1
_PATH = re.compile(rb"/[^\x00-\x20#\x7f]*")  # RFC 9113 section 8.3.1: path and query of RFC 3986
_STATUS = re.compile(rb"[1-9][0-9][0-9]")  # RFC 9110 section 15

# RFC 3986 section 3.2: a name or an address, and a port. RFC 9113 section 8.3.1 forbids userinfo. No part
# can match in two ways, so that a long value takes no longer than it is.
_NAME_CHARS = rb"-A-Za-z0-9._~!$&'()*+,;="
_AUTHORITY = re.compile(
    rb"(?:(?=[^:])[%b]*(?:%%[0-9A-Fa-f]{2}[%b]*)*"
    rb"|\[(?:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%%25[A-Za-z0-9._~%%-]+)?|[vV][0-9A-Fa-f]+\.[%b:]+)\])"
    rb"(?::[0-9]*)?" % (_NAME_CHARS, _NAME_CHARS, _NAME_CHARS)
)
# The target of a CONNECT is checked where it is dialled, with a better error. Nothing in it
# may mean something else to another reader.
_TARGET = re.compile(rb"[%b%%:\[\]]+" % _NAME_CHARS)


class Shape(Enum):
    """What a header list can be; no list can be two of these."""

    REQUEST = "request"
    RESPONSE = "response"
    TRAILERS = "trailers"
    MALFORMED = "malformed"


@dataclass
class HeaderBlock:
    """A decoded header list and what it is. Nobody may change it, for it may serve again."""

    fields: Headers

    shape: Shape

    content_length: int | None
    """Bytes of body that it promises."""

    status: bytes
    """Of a response."""

    fault: str = ""
    """What is wrong with a malformed list; nothing of it is quoted, for it may be a token."""


def list_bytes(headers: Headers) -> int:
    """The size of a header list as MAX_HEADER_LIST_SIZE counts it (RFC 9113 section 6.5.2)."""
    return sum(len(name) + len(value) for name, value in headers) + ENTRY_OVERHEAD_BYTES * len(headers)


def examine(headers: Headers) -> HeaderBlock:
    """Looks at a decoded list. Several cookie fields become one (RFC 9113 section 8.2.3)."""
    pseudo: dict[bytes, bytes] = {}
    length: int | None = None
    hosts: list[bytes] = []
    cookies = 0
    in_front = True  # where pseudo-header fields stand
    values = b"".join([value for _, value in headers])
    if b"\0" in values or b"\n" in values or b"\r" in values:
        return _malformed(headers, "a control character in a value")
    for name, value in headers:
        if value != value.strip(_BLANKS):
            return _malformed(headers, "a value that begins or ends with a blank")
        if name in _PLAIN_NAMES:
            in_front = False
        elif name.startswith(b":"):
            if not in_front or name in pseudo:
                return _malformed(headers, "a pseudo-header field behind others, or twice")
            pseudo[name] = value
        elif not _NAME.fullmatch(name):
            return _malformed(headers, "a name with characters that names do not have")
        elif name in _OF_CONNECTIONS:
            return _malformed(headers, "a field of HTTP/1.1 connections")
        else:
            in_front = False
            if name == b"content-length":
                # A number, and the same one each time (RFC 9110 section 8.6).
                if not value.isdigit() or len(value) > LENGTH_DIGITS:
                    return _malformed(headers, "content-length is not a number")
                if length not in (None, int(value)):
                    return _malformed(headers, "several content-lengths")
                length = int(value)
            elif name == b"host":
                hosts.append(value)
            elif name == b"cookie":
                cookies += 1
            elif name == b"te" and value.lower() != b"trailers":
                return _malformed(headers, "te is not trailers")
    if cookies > 1:
        headers = _one_cookie(headers)
    if b":method" in pseudo:
        fault = _fault_of_request(pseudo, hosts)
        return _malformed(headers, fault) if fault else HeaderBlock(headers, Shape.REQUEST, length, b"")
    if not pseudo:
        return HeaderBlock(headers, Shape.TRAILERS, length, b"")
    status = pseudo.get(b":status")
    if status is None:
        return _malformed(headers, "no :method")
    if len(pseudo) > 1:
        return _malformed(headers, "a pseudo-header field that answers do not have")
    if not _STATUS.fullmatch(status):
        return _malformed(headers, ":status is not a number of three digits")
    if status == b"101":  # RFC 9113 section 8.6
        return _malformed(headers, "101, which HTTP/2 does not have")
    return HeaderBlock(headers, Shape.RESPONSE, length, status)


def _malformed(headers: Headers, fault: str) -> HeaderBlock:
    return HeaderBlock(headers, Shape.MALFORMED, None, b"", fault)


def _fault_of_request(pseudo: dict[bytes, bytes], hosts: list[bytes]) -> str:
    """What is wrong with a request's pseudo-header fields (RFC 9113 sections 8.3.1 and 8.5, RFC 8441 section
    4); empty if nothing is."""
    method = pseudo[b":method"]
    if method not in _METHODS and not _TOKEN.fullmatch(method):
        return ":method is not a token"
    if not pseudo.keys() <= _OF_REQUESTS:
        return "a pseudo-header field that requests do not have"
    authority = pseudo.get(b":authority")
    if method == b"CONNECT" and b":protocol" not in pseudo:
        if b":scheme" in pseudo or b":path" in pseudo:
            return "CONNECT with a :scheme or a :path"
        if authority is None or not _TARGET.fullmatch(authority):
            return "CONNECT whose :authority is not a host and port"
        return "" if not hosts or _is_same(hosts, authority, b"") else "host is not :authority"
    if b":protocol" in pseudo and (method != b"CONNECT" or not _TOKEN.fullmatch(pseudo[b":protocol"])):
        return ":protocol without CONNECT, or not a token"
    scheme, path = pseudo.get(b":scheme"), pseudo.get(b":path")
    if scheme is None or (scheme not in _DEFAULT_PORTS and not _SCHEME.fullmatch(scheme)):
        return ":scheme is not a scheme"
    if path is None or not (_PATH.fullmatch(path) or (path == b"*" and method == b"OPTIONS")):
        return ":path is not a path"
    # One host, or :authority, or both if they agree.
    if authority is None:
        if len(hosts) != 1 or not _AUTHORITY.fullmatch(hosts[0]):
            return "no :authority, and no host in its place"
        return ""
    if not _AUTHORITY.fullmatch(authority):
        return ":authority is not a host and port"
    return "" if not hosts or _is_same(hosts, authority, scheme) else "host is not :authority"


def _is_same(hosts: list[bytes], authority: bytes, scheme: bytes) -> bool:
    """Whether there is one host, and it names what `authority` does (RFC 3986 section 6.2.3)."""
    return hosts == [authority] or (
        len(hosts) == 1 and _normal(hosts[0], scheme) == _normal(authority, scheme)
    )


def _normal(authority: bytes, scheme: bytes) -> bytes:
    return authority.lower().removesuffix(_DEFAULT_PORTS.get(scheme.lower(), b":")).removesuffix(b":")


def _one_cookie(fields: Headers) -> Headers:
    cookie = b"; ".join(value for name, value in fields if name == b"cookie")
    return [*(field for field in fields if field[0] != b"cookie"), (b"cookie", cookie)]
