"""Requests of the app to Cloud Run services: each to its service's URL, with an ID token.

1. The name in a request says the service, and with our own project's number the URL. Every other name is
   refused: no stranger is shown a token.
2. The token is for the URL's host, of the account that krun runs as, unless the app has sent an
   `authorization` of its own. One that a service rejects (401) is not used again.
3. Requests go out in HTTP/2. Answers, interim ones and trailers come back as they are. What cannot have been
   dealt with is sent once more (`Exchange`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus

from agent.proxy.downstream import Downstream
from agent.proxy.exchange import Exchange, Waiting
from agent.proxy.fields import GRPC, HOP_BY_HOP, Field, RequestHead
from agent.proxy.http2_exchange import Http2Exchange, request_headers
from agent.services.service_names import ServiceName, parse
from shared.address import Address
from shared.credentials.tokens.minting import Minter
from shared.credentials.tokens.token_cache import CachedToken, TokenCache
from shared.errors import Flag, HboneError, LimitError, NoRouteError, RefusedError
from shared.http2.events import Headers
from shared.net.dial import Origin
from shared.net.http2.answers import answer
from shared.net.legs.stream import Stream
from shared.net.pool.pool import Pool
from shared.net.relay.memory_budget import Holder
from shared.ops.repeated_log import RepeatedLog
from shared.ports import HTTPS

log = logging.getLogger("hbone.services")

TIMEOUT_S = 30.0
"""For a connection to a service, its token included."""

MAYBE_NO_SERVICE = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
"""What Google's front end answers for names without a service, too, whose tokens are not worth keeping."""

SCHEME = b"http://"

_DROPPED = HOP_BY_HOP | {b"host", b"proxy-authorization", b"proxy-authenticate"}

Place = Callable[[ServiceName], Awaitable[str]]
"""The host of a service's URL. Raises HboneError."""


def service_origin(host: str) -> Origin:
    """Where the service of this host is."""
    return Origin("https", host, Address(host, HTTPS))


class ServiceRequests:
    """All requests to services. Made where the event loop runs."""

    def __init__(
        self,
        place: Place,
        minter: Minter,
        *,
        most: int,
        refusal: Callable[[], LimitError | None] = lambda: None,
        origin: Callable[[str], Origin] = service_origin,
    ) -> None:
        """`most` requests may be open at once; `refusal()` says why none is accepted now, if so."""
        self._place = place
        self._minter = minter
        self._most = most
        self._refusal = refusal
        self._origin = origin
        self._tokens = TokenCache()
        self._pool = Pool()
        self._open: dict[Exchange, None] = {}
        self._warnings = RepeatedLog(log)
        self._closing = False

    @property
    def open_requests(self) -> int:
        """Those whose answers have not ended."""
        return len(self._open)

    def holders(self) -> Iterator[Holder]:
        """Whatever holds bytes for a request."""
        return iter(list(self._open))

    @property
    def shared_bytes(self) -> int:
        """What waits on connections to services, for no request in particular."""
        return self._pool.buffered_bytes

    def serve(self, stream: Downstream) -> None:
        """Answers a request with the service's answer, or with why there is none."""
        refusal = self._refusal()
        if refusal is None and self.open_requests >= self._most:
            text = f"{self._most} requests to services are open, which is HBONE_MAX_REQUESTS"
            refusal = LimitError(text, "HBONE_MAX_REQUESTS")
        try:
            if refusal is not None:
                raise refusal
            asked = request_to_service(stream.headers)
        except RefusedError as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE if error is refusal else HTTPStatus.BAD_GATEWAY
            self._warnings.warning(error.flag, f"{status} to a request to a service: {error}")
            answer(stream, status, f"krun: {error}")
            return
        exchange = _ServiceExchange(stream, asked, self._over, self._carry, self._failed)
        self._open[exchange] = None
        self._carry(exchange)

    async def close(self, timeout_s: float) -> None:
        """Ends what is left."""
        self._closing = True
        for exchange in list(self._open):
            exchange.fail(HTTPStatus.BAD_GATEWAY, "krun stops")
        self._tokens.close()
        await self._pool.close(timeout_s)
        self._warnings.close()

    # One request.

    def _carry(self, exchange: Exchange) -> None:
        assert isinstance(exchange, _ServiceExchange)
        Waiting(exchange, self._carry_soon(exchange), f"request to {exchange.asked.name.service}")

    async def _carry_soon(self, exchange: _ServiceExchange) -> None:
        asked = exchange.asked
        try:
            host = exchange.host = await self._place(asked.name)
            pool = self._pool.of(self._origin(host))
            if not asked.is_authorized:
                await pool.connected(TIMEOUT_S)  # no token for a name that leads nowhere
                exchange.source = self._tokens.source(self._minter, f"https://{host}")
                exchange.token = await exchange.source.token()
            headers = asked.headers(host, exchange.token)
            pool = self._pool.of(self._origin(host))
            stream = await pool.open(headers, TIMEOUT_S, end_stream=exchange.stream.bodiless)
        except HboneError as error:
            exchange.carrier = None
            exchange.fail(HTTPStatus.BAD_GATEWAY, str(error))
        else:
            Http2Exchange(exchange, stream, upgraded=_refuse_tunnel, http1=lambda: None)

    def _over(self, exchange: Exchange) -> None:
        self._open.pop(exchange, None)

    def _failed(self, status: int, text: str) -> None:
        if not self._closing:
            self._warnings.warning(str(status), f"{status} to a request to a service: {text}")


def _refuse_tunnel(exchange: Exchange, upstream: Stream) -> None:
    """Never called: no request here is an extended CONNECT."""
    upstream.abort()
    exchange.fail(HTTPStatus.BAD_GATEWAY, "a tunnel that nobody has asked for")


class _ServiceExchange(Exchange):
    """A request to a service."""

    def __init__(
        self,
        stream: Downstream,
        asked: AskedService,
        over: Callable[[Exchange], None],
        repeat: Callable[[Exchange], None],
        failed: Callable[[int, str], None],
    ) -> None:
        super().__init__(stream, asked.head, over, repeat, failed)
        self.asked = asked
        self.host = asked.name.service
        self.source: CachedToken | None = None
        self.token: str | None = None

    @property
    def upstream_name(self) -> str:
        return self.host

    def respond(self, status: int, fields: list[Field], *, end: bool = False) -> None:
        if self.source is not None and self.token is not None:
            if status == HTTPStatus.UNAUTHORIZED:
                self.source.invalidate(self.token)
            elif status not in MAYBE_NO_SERVICE:
                self.source.accepted()
        super().respond(status, fields, end=end)

    def _fail(self, status: int, text: str, code: int, flag: Flag) -> None:
        super()._fail(status, f"krun: {text}", code, flag)


@dataclass(slots=True)
class AskedService:
    """A request, as it is to be sent."""

    name: ServiceName
    head: RequestHead
    is_authorized: bool
    """It has an authorization of its own."""

    fields: list[Field]

    def headers(self, host: str, token: str | None) -> Headers:
        """The header list for its service."""
        self.head.authority = host.encode()
        own = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        self.head.fields = [*self.fields, *own]
        return request_headers(self.head)


def is_service(authority: bytes) -> bool:
    """Whether HOST or HOST:80 names a service."""
    try:
        parse(authority.decode("latin-1"))
    except NoRouteError:
        return False
    return True


def request_to_service(headers: Headers) -> AskedService:
    """What a request asks of whom: `:path` has a URL, as a proxy is asked, or a path beside a `host` or
    `:authority`. Raises NoRouteError if that is no service, RefusedError if it is no request for a proxy."""
    told: dict[bytes, bytes] = {}
    fields: list[Field] = []
    dropped: set[bytes] = set(_DROPPED)
    for name, value in headers:
        if name == b"connection":
            dropped |= {token.strip().lower() for token in value.split(b",")}
        if name[:1] == b":" or name in (b"host", b"te"):
            told.setdefault(name, value)
        else:
            fields.append((name, value))
    method, target = told.get(b":method", b""), told.get(b":path", b"")
    if method == b"CONNECT":
        raise RefusedError("CONNECT leads to SERVICE:80 only: what is in NO_PROXY is reached directly")
    authority = told.get(b":authority") or told.get(b"host", b"")
    if target[: len(SCHEME)].lower() == SCHEME:
        authority, slash, rest = target[len(SCHEME) :].partition(b"/")
        target = slash + rest
        if not slash:
            authority, mark, query = authority.partition(b"?")
            target = b"/" + mark + query
    elif not target.startswith(b"/") and target != b"*":
        raise NoRouteError("services are reached by http://SERVICE here")
    service = parse(authority.decode("latin-1"))
    kept = [(key, value) for key, value in fields if key not in dropped]
    content_type = next((value for key, value in kept if key == b"content-type"), b"")
    head = RequestHead(
        method,
        b"https",
        path=target,
        has_length=any(key == b"content-length" for key, _ in kept),
        takes_trailers=b"trailers" in told.get(b"te", b"").lower(),
        is_grpc=content_type.startswith(GRPC),
    )
    is_authorized = any(key == b"authorization" for key, _ in kept)
    return AskedService(service, head, is_authorized, kept)
