"""The front end before the gateway, where only HTTPS gets out: each of krun's connections to the gateway is
carried by a POST over HTTP/2, with its mTLS in it. The front end sees ciphertext.

1. A POST is asked for as any tunnel is (`opening`), and again only where it cannot have been dealt with.
2. What the front end answers instead of 200, and a 200 that is a page, is a dial that failed: one line, which
   says what it was. No redirect is followed.
3. A token is sent if a setting says so, in the POST alone.
4. When the front end ends a connection, those in it get no new tunnels (`retire`): they are to end, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from agent.config.egress_settings import EgressSettings, GatewayUrl
from shared.credentials.token_sources.metadata import MetadataMinter
from shared.credentials.tokens.token_cache import TokenCache
from shared.credentials.tokens.tokens import NoToken, TokenSource
from shared.errors import DialError, HboneError
from shared.http2.events import Headers
from shared.net.dial import Origin, carry_http2
from shared.net.http2.answers import AskedOf
from shared.net.http2.connection import Connection
from shared.net.legs.stream import header_value
from shared.net.names.endpoint import Resolve
from shared.net.pool.pool import Pool
from shared.net.tls.contexts import client_context
from shared.net.tls.revocation_watch import RevocationWatch
from shared.ops.pool_counts import OriginCounts
from shared.tunnel import tunnel_request
from shared.tunnel.opening import Opening
from shared.tunnel.pooled_upstream import PooledUpstream
from shared.tunnel.retry import RetryBudget, RetryRules

RULES = RetryRules(pauses=False)

_HINTS = {
    404: "it has no route for this path, or what is behind it is not hgate's tunnel_listen",
    405: "what is behind it is not hgate's tunnel_listen",
    502: "it does not reach hgate's tunnel_listen: does it speak HTTP/2 without TLS (h2c) to it?",
    503: "it does not reach hgate's tunnel_listen, or hgate has no room",
    504: "hgate does not answer it",
}


class _FrontEndAsked(AskedOf):
    """What the status of a refusal means."""

    __slots__ = ()

    def hint(self, status: int, challenge: bytes) -> str:
        if status in (401, 403):
            if self.token_sent:
                return "it does not accept the token: is HBONE_EGRESS_AUDIENCE its audience?"
            return "it lets nobody in without a token: HBONE_EGRESS_AUDIENCE asks for one"
        if 300 <= status < 400:
            return "krun follows no redirect; is that a page to log in?"
        return _HINTS.get(status, "")


class FrontEnd:
    """Made by `Egress`; `dial` is what its pool dials with."""

    def __init__(
        self,
        url: GatewayUrl,
        settings: EgressSettings,
        *,
        retire: Callable[[Connection], None],
        resolve: Resolve,
    ) -> None:
        """`retire(connection)` has a connection to the gateway get no new streams.

        Raises UnavailableError if the certificates to trust cannot be had.
        """
        if url.scheme == "https":
            client_context(settings.ca, asyncio.get_running_loop().time())
        self.origin = Origin(url.scheme, url.address.host, url.address, settings.ca, searched=True)
        self.counts = OriginCounts()
        self.pool = Pool(counts=lambda origin: self.counts, resolve=resolve, let_go=self._let_go)
        self._url = url
        self._retire = retire
        self._tokens = TokenCache()
        self._source: TokenSource = NoToken()
        if settings.audience:
            self._source = self._tokens.source(MetadataMinter(settings.metadata_host), settings.audience)
        self._budget = RetryBudget()
        self._carried: dict[Connection, set[Connection]] = {}  # by what carries them

    async def dial(
        self,
        origin: Origin,
        timeout_s: float,
        make: Callable[[], Connection],
        resolve: Resolve,
        revocations: RevocationWatch | None,
    ) -> Connection:
        """As `dial_http2`. Raises DialError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        upstream = PooledUpstream(
            self.pool,
            self.origin,
            self._source,
            self._headers,
            name=str(self.origin),
            asked_of=_FrontEndAsked,
        )
        try:
            async with asyncio.timeout(timeout_s):
                stream = await Opening(upstream, timeout_s, RULES, budget=self._budget).run()
        except TimeoutError as error:
            raise DialError(f"{self._url}: no tunnel within {timeout_s:g} s", passes=True) from error
        except HboneError as error:
            raise DialError(f"{self._url}: {error}", passes=True) from error
        if kind := header_value(stream.headers, b"content-type"):
            stream.abort()
            shown = kind[:60].decode("ascii", "replace")
            raise DialError(
                f"{self._url}: answered 200 with {shown!a}: that is a page, and no tunnel of hgate's"
            )
        outer = cast("Connection", stream.connection)
        pool = self.pool.origins.get(self.origin)
        if pool is None or outer not in pool.connections:
            stream.abort()
            raise DialError(f"{self._url}: the front end ends the connection", passes=True)
        carried = self._carried.setdefault(outer, set())

        def made() -> Connection:
            connection = make()
            carried.add(connection)
            return connection

        left_s = deadline - loop.time()
        connection = await carry_http2(origin, stream, left_s, made, revocations, carried.discard)
        if outer not in self._carried:
            connection.abort("the front end ends the connection")
            raise DialError(f"{self._url}: the front end ends the connection", passes=True)
        return connection

    async def close(self, timeout_s: float) -> None:
        """Ends it; the connections that it carries come first."""
        self._tokens.close()
        await self.pool.close(timeout_s)

    def _headers(self, token: str | None) -> Headers:
        url = self._url
        return tunnel_request.post(url.scheme, url.authority, url.path, token)

    def _let_go(self, outer: Connection) -> None:
        for connection in self._carried.pop(outer, ()):
            self._retire(connection)
