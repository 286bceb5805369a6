"""Asking a service for a tunnel: its request, its token, a stream on a pooled connection.

A token that has to be fetched is fetched once there is a connection to the origin: a name that leads nowhere,
or to somebody else, costs none. Tokens for audiences with which no tunnel was opened yet are bounded in
number, which is checked before anything is dialled. The time that a token takes does not count towards the
deadline of the answer. After a pause the token is asked for again, as it may have expired.

Nothing is lost: what the client has sent stays with the downstream leg until the relay is there. An attempt
that fails has carried the client's first flight at most, which may arrive more than once.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from gateway.config.limit_settings import Limits
from gateway.ports.admission import Admission, network_of
from gateway.rules.routes import MAX_CACHED_TARGETS, Target
from gateway.sni.new_audiences import NewAudiences
from gateway.sni.token_sources import TokenSources
from shared.credentials.tokens.tokens import TokenSource
from shared.errors import DialError
from shared.http2.events import Headers
from shared.net.dial import Origin, reason
from shared.net.http2.answers import AskedOf
from shared.net.legs.stream import Stream
from shared.net.names import names
from shared.net.pool.pool import Pool
from shared.ops.metrics import TunnelMetrics
from shared.tunnel import request_context, tunnel_request
from shared.tunnel.pooled_upstream import TokenUpstream
from shared.tunnel.retry import RetryBudget, RetryRules
from shared.tunnel.tunnel_record import TunnelRecord


class TargetRequest:
    """The tunnel request of `target`, made once for all its tunnels: only the trace, the client of a CONNECT,
    and now and then the token differ. `budget` is shared by all requests to the origin."""

    __slots__ = ("_head", "_token", "address", "budget", "in_mesh", "origin", "source", "target", "url")

    def __init__(self, target: Target, source: TokenSource) -> None:
        self.target = target
        self.source = source
        self.origin = Origin(
            target.scheme, target.host, target.dial, target.ca, target.identity, target.is_connect
        )
        self.budget = RetryBudget()
        self.address = str(target.dial)
        self.url = target.url
        self.in_mesh = target.method == "CONNECT"
        """The far side is a member of the mesh, and no service of Cloud Run."""
        self._token: str | None = None
        self._head = self._make_head()

    def headers(self, peer: str, traceparent: bytes, token: str | None) -> Headers:
        """Those for a tunnel of the client `peer` (HOST:PORT), with this trace and, unless it is None, this
        token."""
        if token != self._token:
            self._token = token
            self._head = self._make_head()
        if self.in_mesh:
            forwarded = (b"forwarded", request_context.forwarded(peer))
            return [*self._head, forwarded, (b"traceparent", traceparent)]
        return [*self._head, (b"traceparent", traceparent)]

    def _make_head(self) -> Headers:
        target = self.target
        if not self.in_mesh:
            return tunnel_request.post(target.scheme, target.authority, target.path, self._token)
        baggage = request_context.baggage(target.namespace, target.service)
        told = [(b"baggage", baggage)] if baggage else []
        return tunnel_request.connect(target.connect_target, self._token, told)


class Upstreams:
    """What all tunnels to services share. All calls are made on the event loop's thread."""

    def __init__(
        self,
        pool: Pool,
        tokens: TokenSources,
        metrics: TunnelMetrics,
        *,
        limits: Limits,
        new_audiences: NewAudiences | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`new_audiences` bounds the tokens for audiences that nobody has had a tunnel with; None: by the
        default limits. `admission` bounds and counts those who wait for a service to start; likewise."""
        self.admission = admission or Admission(limits, open_connections=int)
        self.new_audiences = new_audiences or NewAudiences(limits)
        self.pool = pool
        self.tokens = tokens
        self.metrics = metrics
        self.use_limits(limits)
        self.loop = asyncio.get_running_loop()
        self._requests: dict[int, TargetRequest] = {}
        """By the id of the target, which is kept alive so: a hash of its many fields costs more."""
        self._budgets: WeakValueDictionary[Origin, RetryBudget] = WeakValueDictionary()

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for requests to come."""
        self.response_timeout_s = limits.response_timeout_s
        self.rules = RetryRules(
            limits.max_retries, limits.retry_budget_percent, max_starting=self.admission.most_starting
        )

    def request_of(self, target: Target) -> TargetRequest:
        """The tunnel request of `target`, made once. Raises TokenError if nobody can have its token."""
        request = self._requests.get(id(target))
        if request is None:
            if len(self._requests) >= MAX_CACHED_TARGETS:
                self._requests.clear()
            request = self._requests[id(target)] = TargetRequest(target, self.tokens.of(target.token))
            request.budget = self._budgets.setdefault(request.origin, request.budget)
        return request


class ServiceUpstream(TokenUpstream):
    """A service, asked for one client's tunnel, of which `record` has what is known."""

    def __init__(
        self,
        shared: Upstreams,
        request: TargetRequest,
        record: TunnelRecord,
        traceparent: bytes,
        extra: Headers = (),
    ) -> None:
        """The request has the headers `extra`, too."""
        super().__init__(request.source)
        self._shared = shared
        self._request = request
        self._record = record
        self._traceparent = traceparent
        self._extra = extra

    def __str__(self) -> str:
        return str(self._request.origin)

    @property
    def asked_of(self) -> AskedOf:
        return AskedOf(token_sent=self._token is not None, in_mesh=self._request.in_mesh)

    def request_now(self) -> Stream | None:
        token = self._source.token_now()
        if token is None:
            return None
        self._token = token or None
        return self._shared.pool.open_now(self._request.origin, self._headers())

    async def prepare(self, deadline: float) -> float:
        """The token.

        Raises:
            TokenError: there should be one and is none.
            LimitError: it would be one for a new audience too many, or too many names are being looked up for
                the client.
            UpstreamError: there is no connection to the origin.
        """
        token = self._source.token_now()
        took_s = 0.0
        if token is None:
            shared, origin = self._shared, self._request.origin
            if self._source.is_new:
                shared.new_audiences.check(self._record.peer, self._audience)
            await self._look_up(deadline)
            asked = shared.loop.time()
            await shared.pool.of(origin).connected(deadline - asked)
            began = shared.loop.time()
            self._record.waited("connect", asked, began)
            token = await self._fetch()
            took_s = shared.loop.time() - began
        self._token = token or None
        return took_s

    async def request(self, deadline: float) -> Stream:
        await self._look_up(deadline)
        shared = self._shared
        began = shared.loop.time()
        stream = await shared.pool.of(self._request.origin).open(self._headers(), deadline - began)
        self._record.waited("stream", began, shared.loop.time())
        return stream

    def retrying(self, reason: str, *, over_budget: bool = False) -> None:
        counts = self._shared.metrics.route(self._record.route)
        if over_budget:
            counts.retries_over_budget += 1
        else:
            counts.retried(reason)

    def starting(self, waits: bool) -> None:
        counts = self._shared.admission.starting
        if waits:
            counts.add(self._record.route)
        else:
            counts.drop(self._record.route)

    def too_many_start(self) -> str:
        admission = self._shared.admission
        count = sum(admission.starting.values())
        if count < admission.most_starting_together:
            return ""
        return f"{count} wait for services to start, the most that may together"

    async def _look_up(self, deadline: float) -> None:
        """Looks the origin's name up at the client's expense, if the client has chosen it and there is no
        connection yet: so the dial finds the answer, and what clients invent keeps no dial of others waiting.

        Raises:
            DialError: it has no address, or there is no answer in time.
            LimitError: too many names are being looked up for this client.
        """
        origin, shared = self._request.origin, self._shared
        if not self._request.target.named_by_client or shared.pool.is_connected(origin):
            return
        began = shared.loop.time()
        timeout_s = min(deadline - began, shared.pool.limits.connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await names.resolve(origin.to_look_up, network_of(self._record.peer))
            self._record.waited("look-up", began, shared.loop.time())
        except TimeoutError as error:
            text = f"connect to {origin}: its name was not looked up within {timeout_s:g} s"
            raise DialError(text) from error
        except OSError as error:
            raise DialError(f"connect to {origin}: {reason(error)}") from error

    async def _fetch(self) -> str | None:
        began = self._shared.loop.time()
        token = await self._source.token(self._admit)
        self._record.waited("token", began, self._shared.loop.time())
        return token

    def _admit(self) -> None:
        self._shared.new_audiences.spend(self._record.peer, self._audience)

    @property
    def _audience(self) -> str:
        return self._request.target.token.value

    def _headers(self) -> Headers:
        headers = self._request.headers(self._record.peer, self._traceparent, self._token)
        return [*headers, *self._extra] if self._extra else headers
