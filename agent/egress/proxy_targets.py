"""What a client of the proxy asks for: the target of a CONNECT, or the URL of a plain request. No I/O.

RFC 9110 section 7.1 and RFC 9112 section 3.2: a CONNECT has HOST:PORT, every other request of a proxy's
client a whole URL. What can be understood in two ways is refused.
"""

from __future__ import annotations

from agent.proxy.fields import HOP_BY_HOP, Field, RequestHead
from shared.address import MAX_PORT, Address
from shared.errors import BadRequestError
from shared.http2.events import Headers

HTTP = 80
"""The port of a URL that names none."""

MAX_AUTHORITY_BYTES = 300
"""A host name of 253 characters, a colon and a port have less."""

SCHEME = b"http://"
SECURE = b"https://"

VIA = (b"via", b"1.1 krun")
"""RFC 9110 section 7.6.3: a proxy says that it was one."""

_DROPPED = HOP_BY_HOP | {b"host", b"proxy-authorization", b"proxy-authenticate"}


def connect_target(text: bytes) -> Address:
    """The target of `CONNECT text`. Raises BadRequestError."""
    return _read(text, "CONNECT")


def plain_target(asked: bytes) -> Address:
    """The target of a request for the URL `asked`. Raises BadRequestError."""
    scheme = asked[: len(SCHEME)].lower()
    if scheme != SCHEME:
        if asked[: len(SECURE)].lower() == SECURE:
            raise BadRequestError("an https URL is asked for with CONNECT")
        raise BadRequestError("a proxy is asked for http://HOST[:PORT]/PATH, or with CONNECT")
    authority = asked[len(SCHEME) :]
    for end in (b"/", b"?", b"#"):
        authority = authority.partition(end)[0]
    if b"@" in authority:
        raise BadRequestError("the URL has a user's name: send it as authorization")
    has_port = b":" in authority.rpartition(b"]")[2]
    return _read(authority if has_port else b"%b:%d" % (authority, HTTP), "the URL")


def plain_head(asked: bytes, headers: Headers, wanted: Address) -> RequestHead:
    """The request as it is sent to its target: the path alone, the target's name as host, nothing that is for
    the proxy. Raises BadRequestError for what a proxy does not pass on."""
    told: dict[bytes, bytes] = {}
    fields: list[Field] = []
    for name, value in headers:
        if name[:1] == b":":
            told[name] = value
        elif name not in _DROPPED:
            fields.append((name, value))
    if b":protocol" in told:
        raise BadRequestError("a WebSocket is asked for with CONNECT")
    if b"#" in asked:
        raise BadRequestError("the URL has a fragment, which is nobody's business but the client's")
    path = told.get(b":path", b"")
    if told.get(b":method") == b"OPTIONS" and _is_bare(asked):
        path = b"*"  # RFC 9112 section 3.2.4
    authority = wanted.host if ":" not in wanted.host else f"[{wanted.host}]"
    if wanted.port != HTTP:
        authority = f"{authority}:{wanted.port}"
    return RequestHead(
        told.get(b":method", b""),
        b"http",
        authority=authority.encode(),
        path=path,
        fields=[*fields, VIA],
        has_length=any(name == b"content-length" for name, _ in fields),
    )


def _is_bare(asked: bytes) -> bool:
    """Whether a URL has neither a path nor a query."""
    rest = asked[len(SCHEME) :]
    return b"/" not in rest and b"?" not in rest


def _read(authority: bytes, where: str) -> Address:
    if len(authority) > MAX_AUTHORITY_BYTES:
        raise BadRequestError(f"{where}: over {MAX_AUTHORITY_BYTES} bytes of HOST:PORT")
    try:
        target = Address.parse(authority.decode("ascii"))
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{where}: not ASCII") from error
    except ValueError as error:
        raise BadRequestError(f"{where}: {error}") from error
    if not 0 < target.port <= MAX_PORT:
        raise BadRequestError(f"{where}: port 0 cannot be dialled")
    if "%" in target.host:
        raise BadRequestError(f"{where}: an address with a zone means another machine's link")
    return Address(target.host.removesuffix("."), target.port)
