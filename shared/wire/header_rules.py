"""What a decoded header list must be, whatever it came from.

Owned here: RFC 9113 sections 8.1.1 to 8.3, content-length, and the size of a list. A list is looked at once,
when it has been decoded: `HeaderBlock` is the list with what was found. What becomes of a stream with wrong
headers is `header_receiver.py`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from shared.wire.events import Headers
from shared.wire.static_table import ENTRY_OVERHEAD_BYTES, INDEX_OF_NAME

NO_LENGTH = -1
"""`HeaderBlock.content_length` of a list that promises none."""

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
"""Names that need no look."""

_OF_REQUESTS = frozenset((b":method", b":scheme", b":authority", b":path", b":protocol"))


class Shape(Enum):
    """What a header list can be; no list can be two of these."""

    REQUEST = "request"
    RESPONSE = "response"
    TRAILERS = "trailers"
    MALFORMED = "malformed"


@dataclass(slots=True)
class HeaderBlock:
    """A decoded header list and what it is. Nobody may change it, for it may serve again."""

    fields: Headers

    shape: Shape

    content_length: int
    """Bytes of body that it promises, or NO_LENGTH."""

    status: bytes
    """Of a response."""


def list_bytes(headers: Headers) -> int:
    """The size of a header list as MAX_HEADER_LIST_SIZE counts it (RFC 9113 section 6.5.2)."""
    return sum(len(name) + len(value) for name, value in headers) + ENTRY_OVERHEAD_BYTES * len(headers)


def examine(headers: Headers) -> HeaderBlock:
    """Looks at a decoded list. Several cookie fields become one (RFC 9113 section 8.2.3)."""
    pseudo: dict[bytes, bytes] = {}
    length = NO_LENGTH
    hosts: list[bytes] = []
    cookies = 0
    malformed = HeaderBlock(headers, Shape.MALFORMED, NO_LENGTH, b"")
    in_front = True  # where pseudo-header fields stand
    values = b"".join([value for _, value in headers])
    if b"\0" in values or b"\n" in values or b"\r" in values:
        return malformed
    for name, value in headers:
        if value != value.strip(_BLANKS):
            return malformed
        if name in _PLAIN_NAMES:
            in_front = False
        elif name.startswith(b":"):
            if not in_front or name in pseudo:
                return malformed
            pseudo[name] = value
        elif not _NAME.fullmatch(name) or name in _OF_CONNECTIONS:
            return malformed
        else:
            in_front = False
            if name == b"content-length":
                # A number, and the same one each time (RFC 9110 section 8.6).
                if not value.isdigit() or len(value) > LENGTH_DIGITS:
                    return malformed
                if length not in (NO_LENGTH, int(value)):
                    return malformed
                length = int(value)
            elif name == b"host":
                hosts.append(value)
            elif name == b"cookie":
                cookies += 1
            elif name == b"te" and value.lower() != b"trailers":
                return malformed
    if cookies > 1:
        headers = _one_cookie(headers)
    return HeaderBlock(headers, _shape(pseudo, hosts), length, pseudo.get(b":status", b""))


def _shape(pseudo: dict[bytes, bytes], hosts: list[bytes]) -> Shape:
    if not pseudo:
        return Shape.TRAILERS
    if b":status" in pseudo:
        return Shape.RESPONSE if len(pseudo) == 1 else Shape.MALFORMED
    if not pseudo.keys() <= _OF_REQUESTS or not _has_a_goal(pseudo):
        return Shape.MALFORMED
    # One host, or :authority, or both if they agree (RFC 9113 section 8.3.1).
    authority = pseudo.get(b":authority")
    if authority is None:
        return Shape.REQUEST if len(hosts) == 1 else Shape.MALFORMED
    return Shape.REQUEST if hosts in ([], [authority]) else Shape.MALFORMED


def _has_a_goal(pseudo: dict[bytes, bytes]) -> bool:
    """Whether scheme and path are there, or, for a plain CONNECT, are not (RFC 9113 sections 8.3.1 and
    8.5)."""
    method = pseudo.get(b":method")
    if method == b"CONNECT" and b":protocol" not in pseudo:
        return b":scheme" not in pseudo and b":path" not in pseudo
    if method is None or (b":protocol" in pseudo and method != b"CONNECT"):
        return False
    return b":scheme" in pseudo and bool(pseudo.get(b":path"))


def _one_cookie(fields: Headers) -> Headers:
    cookie = b"; ".join(value for name, value in fields if name == b"cookie")
    return [*(field for field in fields if field[0] != b"cookie"), (b"cookie", cookie)]
