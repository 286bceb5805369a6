"""The front end: TLS with HTTP/2 towards clients, h2c towards the container, the caller's token checked.

The rules are those of Cloud Run's documentation ("Use HTTP/2 for services", "Authenticating
service-to-service", "Request timeout", "Concurrency"); each limit can be set.
Every stream is one request and may go to any instance; here there is one container.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from hbone.cloudrun.instance import Instance
from hbone.cloudrun.limits import FrontEndLimits
from shared.address import Address
from shared.credentials.token_sources.jwks import KeySet, key_id_of
from shared.errors import HboneError, TokenRejectedError, UnavailableError, UpstreamError
from shared.http2.events import Headers
from shared.http2.header_rules import list_bytes
from shared.http2.session import SessionLimits
from shared.listen import bound_address, listen
from shared.net.dial import Origin
from shared.net.http2.answers import answer
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream, header_value, status_of
from shared.net.pool.pool import Pool
from shared.net.pool.pool_limits import PoolLimits
from shared.net.relay.relay import Relay
from shared.net.tls.contexts import server_context
from shared.tasks import spawn
from shared.trust.jwt_check import TokenChecker
from shared.trust.token_claims import shown_claim

log = logging.getLogger("hbone.cloudrun")

CONTAINER_STREAMS = 1000
"""Streams on one connection to the container: the most requests that an instance may be given at once."""

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class _Caller:
    audience: str = ""
    expires: int = 0
    email: str = ""


class FrontEnd:
    """Serves one service. Without a `checker` every caller may come in, as with "allow unauthenticated".
    `keys` are the checker's keys, if they have to be fetched."""

    def __init__(
        self,
        container: Address,
        checker: TokenChecker | None,
        limits: FrontEndLimits,
        keys: KeySet | None = None,
        *,
        invokers: Collection[str] = (),
        is_internal: bool = False,
        instance: Instance | None = None,
    ) -> None:
        """`invokers` are the e-mail addresses that may call the service; empty: whoever has a token.
        `is_internal`: its ingress setting keeps all of us out. The first request starts `instance`; None: the
        container is there."""
        self._invokers = invokers
        self._is_internal = is_internal
        self._instance = instance
        self._origin = Origin("http", container.host, container, searched=True)
        self._checker = checker
        self._keys = keys
        self._limits = limits
        # A client that does not read must not block the other streams of the connection to the container.
        session = SessionLimits(
            connection_window_bytes=CONTAINER_STREAMS * SessionLimits().stream_window_bytes
        )
        self._pool = Pool(limits=PoolLimits(CONNECT_TIMEOUT_S, CONTAINER_STREAMS, session=session))
        self._connections: set[Connection] = set()
        self._open_requests = 0
        self._server: asyncio.Server | None = None

    async def start(self, address: Address, certificate: Path, key: Path) -> Address:
        """Listens on `address` and returns where it really does.

        Raises:
            UnavailableError: the address or the certificate cannot be had.
        """
        context = server_context(certificate, key)
        self._server = await listen(address, self._accept, purpose="cloudrun", tls=context)
        return bound_address(self._server)

    def close(self) -> None:
        """Stops listening and drops all connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        self._pool.drain()

    def _accept(self) -> Connection:
        session_limits = SessionLimits(
            max_streams=self._limits.streams_per_connection,
            # A little above ours, so that we can answer 431 instead of ending the connection.
            max_header_list_bytes=self._limits.header_bytes * 2 + (16 << 10),
        )
        connection = Connection(
            client=False, limits=session_limits, on_request=self._received, on_lost=self._connections.discard
        )
        self._connections.add(connection)
        return connection

    def _received(self, stream: Stream) -> None:
        if self._is_internal:
            _answer_page(stream, 404, "Page not found", "The requested URL was not found on this server.")
            return
        size = list_bytes(stream.headers)
        if size > self._limits.header_bytes:
            self._refuse(stream, 431, f"headers of {size} bytes, the limit is {self._limits.header_bytes}")
            return
        key_id = key_id_of(_authorization(stream.headers)) if self._keys is not None else None
        if self._keys is None or self._keys.is_ready(key_id):
            self._admit(stream)
            return
        fetching = spawn(self._admit_with(self._keys, key_id, stream), name=f"keys for stream {stream.id}")

        def gone(_error: HboneError) -> None:
            fetching.cancel()

        stream.on_gone = gone

    async def _admit_with(self, keys: KeySet, key_id: str | None, stream: Stream) -> None:
        try:
            await keys.prepare(key_id)
        except UnavailableError as error:
            self._refuse(stream, 503, str(error))
            return
        stream.on_gone = None
        self._admit(stream)

    def _admit(self, stream: Stream) -> None:
        try:
            caller = self._check(stream.headers)
        except TokenRejectedError as error:
            self._refuse(stream, error.status, error.reason)
            return
        if self._invokers and caller.email not in self._invokers:
            self._refuse(stream, 403, f"{caller.email} lacks roles/run.invoker")
            return
        if self._open_requests >= self._limits.concurrency:
            self._refuse(stream, 429, "no instance is free: concurrency is used up")
            return
        self._open_requests += 1  # before any await: a burst of requests comes in one read
        forwarding = spawn(self._forward(stream, caller), name=f"request on stream {stream.id}")

        def gone(_error: HboneError) -> None:
            """The client left: the container need not hear of a request that it has not got yet."""
            if forwarding.cancel():
                self._open_requests -= 1

        stream.on_gone = gone

    def _check(self, headers: Headers) -> _Caller:
        if self._checker is None:
            return _Caller()
        claims = self._checker.check(_authorization(headers))
        email = shown_claim(claims.get("email", ""))
        return _Caller(shown_claim(claims.get("aud")), int(claims.get("exp", 0)), email)

    async def _forward(self, stream: Stream, caller: _Caller) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        request = _to_container(stream, was_checked=self._checker is not None)
        if self._instance is not None and not self._instance.is_there:
            try:
                await self._instance.ready(self._limits.start_wait_s)
            except TimeoutError:
                self._give_back(stream, 429, "no instance is available: it takes too long to start")
                return
            except UnavailableError as error:
                self._give_back(stream, 503, str(error))
                return
        try:
            upstream = await self._pool.of(self._origin).open(request, CONNECT_TIMEOUT_S)
        except UpstreamError as error:
            self._give_back(stream, 503, f"the container is not there: {error}")
            return
        stream.on_gone = None
        upstream.connection.has_carried = True
        upstream.on_response = lambda headers: stream.respond(_to_client(headers))
        if upstream.headers:  # they came before we did
            upstream.on_response(upstream.headers)
        relay: _Exchange

        def finished(ended: Relay) -> None:
            timer.cancel()
            self._open_requests -= 1
            _log_request(stream, upstream, caller, ended, loop.time() - started)

        def overdue() -> None:
            error = UpstreamError(f"request timeout of {self._limits.request_timeout_s:g} s")
            if not upstream.headers:
                relay.give_up(error)
                self._refuse(stream, 504, str(error))
            else:
                relay.abort(error)

        timer = loop.call_at(started + self._limits.request_timeout_s, overdue)
        relay = _Exchange(stream, upstream, finished)
        relay.start()

    def _give_back(self, stream: Stream, status: int, reason: str) -> None:
        """Refuses a request that has a place at the instance."""
        self._open_requests -= 1
        stream.on_gone = None  # or its end would give the place back once more
        self._refuse(stream, status, reason)

    def _refuse(self, stream: Stream, status: int, reason: str) -> None:
        log.warning(
            "refused", extra={"stream": stream.id, "path": _path(stream), "status": status, "reason": reason}
        )
        answer(stream, status, reason, [_date()])


def _authorization(headers: Headers) -> str | None:
    """The credentials of the caller: of two headers, the one that is for Cloud Run alone."""
    value = header_value(headers, b"x-serverless-authorization")
    value = value or header_value(headers, b"authorization")
    return value.decode("latin-1") or None


class _Exchange(Relay):
    """A request and its response: a relay that carries trailers too."""

    __slots__ = ()

    def ended(self, leg: Leg) -> None:
        other = self.upstream if leg is self.downstream else self.downstream
        if isinstance(leg, Stream) and isinstance(other, Stream) and leg.trailers is not None:
            other.end_with_trailers(leg.trailers)
        super().ended(leg)

    def failed(self, leg: Leg, error: HboneError) -> None:
        upstream = self.upstream
        if leg is upstream and isinstance(upstream, Stream) and not upstream.headers and not self.over:
            self.give_up(error)
            if isinstance(self.downstream, Stream):
                answer(self.downstream, 503, f"the container broke off: {error}")
            return
        super().failed(leg, error)

    def give_up(self, error: HboneError) -> None:
        """Ends the exchange with the container; the client is still to be answered."""
        self.error = error
        self.upstream.abort()
        self._finish()


def _to_container(stream: Stream, *, was_checked: bool) -> Headers:
    """The request as the container gets it: the signature taken out of a token that was checked, the client's
    address added."""
    checked = b""
    if was_checked:
        has_own = header_value(stream.headers, b"x-serverless-authorization")
        checked = b"x-serverless-authorization" if has_own else b"authorization"
    headers = [
        (name, _without_signature(value) if name == checked else value) for name, value in stream.headers
    ]
    client = stream.connection.peer_name.rpartition(":")[0].strip("[]").encode()
    headers.append((b"x-forwarded-for", client))
    headers.append((b"x-forwarded-proto", b"https"))
    return headers


def _without_signature(value: bytes) -> bytes:
    signed, dot, _ = value.rpartition(b".")
    return signed + dot + b"SIGNATURE_REMOVED_BY_GOOGLE" if signed.count(b".") == 1 else value


def _to_client(headers: Headers) -> Headers:
    return [*headers, (b"server", b"hbone cloudrun"), _date()]


def _date() -> tuple[bytes, bytes]:
    return b"date", formatdate(usegmt=True).encode()


def _answer_page(stream: Stream, status: int, title: str, text: str) -> None:
    """Answers as Google's front end does in the place of a service: in HTML."""
    body = f"<title>{status} {title}</title>\n<h1>Error: {title}</h1>\n<h2>{text}</h2>\n".encode()
    length = str(len(body)).encode()
    headers = [(b":status", str(status).encode()), (b"content-type", b"text/html; charset=UTF-8")]
    stream.respond([*headers, (b"content-length", length), (b"server", b"hbone cloudrun"), _date()])
    stream.write(body)
    stream.close()


def _path(stream: Stream) -> str:
    return header_value(stream.headers, b":path").decode("latin-1")


def _log_request(stream: Stream, upstream: Stream, caller: _Caller, relay: Relay, duration_s: float) -> None:
    log.info(
        "request",
        extra={
            "stream": stream.id,
            "path": _path(stream),
            "status": status_of(upstream.headers),
            "token_audience": caller.audience,
            "token_expires": caller.expires,
            "caller": caller.email,
            "bytes_sent": relay.sent_bytes,
            "bytes_recv": relay.received_bytes,
            "duration_ms": round(duration_s * 1000, 1),
            "error": str(relay.error) if relay.error else None,
        },
    )
