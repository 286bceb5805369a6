"""A stream to a tunnel's target, answered with 200: what the gateway does between the route and the relay.

Owned here: the tunnel request and its token, the stream on a pooled connection, the wait for its answer, and
sending the request again where that can help. Which answers are worth it, with their sources, is in
`shared/net/retry.py`; connections are `shared/net/pool.py`'s, tokens `token_sources.py`'s; who wants the
stream, and what becomes of it, `tunnel.py`'s.

Why nothing is lost or said twice: the ClientHello, and whatever else the client has sent, stays with the
downstream leg until the relay stands, so an attempt that fails has carried nothing. The rules beside those of
`retry.py`:

1. All attempts and the pauses between them have `response_timeout_s` together. A pause that would outlast it
   is not begun: the answer that asks for it is final, at once.
2. An attempt is let go of before the next begins, its stream reset with CANCEL if it is not over. Only of
   the answer that is final the first bytes are read, for the log.
3. After a 401 the token is dropped and asked for once more. Only another token than the one that was rejected
   is worth an attempt, so without a token, with a file that has not changed and with a metadata server that
   sticks to its token the 401 is final. After a pause the token is asked for anew, too: it may have ended.
4. The traceparent stays: it is one tunnel, however often it is asked for.
5. Nothing more is asked for a client that has gone. Whoever notices that cancels `open`, except while an
   answer is awaited: that stream is let go of when it is answered. A client can come and go a thousand times
   a second, and as many unanswered streams reset would be a rapid reset (CVE-2023-44487) in the far side's
   eyes, for which it ends the connection with everybody's tunnels.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol
from weakref import WeakSet

from gateway.routes import Target
from gateway.token_sources import TokenSources
from shared.errors import StatusError, StreamResetError, UpstreamError
from shared.net.answers import refusal
from shared.net.connection import Connection
from shared.net.dial import Origin
from shared.net.pool import Pool
from shared.net.retry import Retries, Retry, RetryBudget, RetryRules, retry_after_s
from shared.net.stream import Stream, header_value
from shared.ops.metrics import TunnelMetrics
from shared.wire import request_context, tunnel_request
from shared.wire.events import Headers

log = logging.getLogger("hbone.upstream")

OK = 200
UNAUTHORIZED = 401


class Asking(Protocol):
    """Who wants a stream. What is learnt on the way is written into it, for its line in the access log."""

    @property
    def peer(self) -> str:
        """The client, HOST:PORT."""

    @property
    def route(self) -> str:
        """The host glob of its route."""

    @property
    def traceparent(self) -> bytes:
        """W3C trace context of the tunnel."""

    @property
    def gone(self) -> bool:
        """The client is not there any more."""

    awaiting_answer: bool
    """A stream is open and not answered yet: not to be cancelled for the client's sake."""

    stream_id: int | None
    """Number of the last stream on its connection."""

    status: int | None
    """HTTP status of the last attempt's answer."""

    attempts: int
    """How often a stream was asked for."""


class Upstreams:
    """Opens streams to targets. All calls are made on the event loop's thread."""

    def __init__(
        self,
        pool: Pool,
        tokens: TokenSources,
        metrics: TunnelMetrics,
        *,
        response_timeout_s: float,
        rules: RetryRules,
    ) -> None:
        self.rules = rules
        """May be replaced at any time; counts for requests to come."""
        self.pool = pool
        self.tokens = tokens
        self.metrics = metrics
        self.response_timeout_s = response_timeout_s
        self.answered: WeakSet[Connection] = WeakSet()
        """Connections on which there has been an answer: one of these that breaks was a good one once."""
        self._budgets: dict[Origin, RetryBudget] = {}  # of origins with a request under way

    async def open(self, asking: Asking, target: Target) -> Stream:
        """A stream to `target`, which is a tunnel's, on which nothing has been sent yet.

        Raises:
            TokenError: there should be a token and is none; nothing was sent with another.
            UpstreamError: the far side cannot be reached, broke off or answered with something else than 200.
        """
        origin = Origin(target.scheme, target.host, target.dial, target.ca, target.identity)
        budget = self._budgets.get(origin) or RetryBudget()
        opening = _Opening(self, asking, target, origin, budget)
        self._budgets[origin] = budget
        budget.requests += 1
        try:
            return await opening.run()
        finally:
            budget.requests -= 1
            budget.retries -= opening.in_budget
            if not budget.requests:
                del self._budgets[origin]


class _Opening:
    """One tunnel's way to its 200."""

    __slots__ = (
        "_asking",
        "_budget",
        "_deadline",
        "_loop",
        "_origin",
        "_retries",
        "_rules",
        "_source",
        "_target",
        "_token",
        "_token_dropped",
        "_upstreams",
        "_why_not",
        "in_budget",
    )

    def __init__(
        self, upstreams: Upstreams, asking: Asking, target: Target, origin: Origin, budget: RetryBudget
    ) -> None:
        self.in_budget = False
        self._upstreams = upstreams
        self._asking = asking
        self._target = target
        self._origin = origin
        self._budget = budget
        self._rules = upstreams.rules
        self._retries = Retries(self._rules)
        self._source = upstreams.tokens.of(target.token)
        self._token: str | None = None
        self._token_dropped = False
        self._loop = asyncio.get_running_loop()
        self._deadline = 0.0
        self._why_not = ""  # a retry that the rules allow was not made, for the log

    async def run(self) -> Stream:
        asking, pool = self._asking, self._upstreams.pool
        self._token = await self._source.token()
        left_s = self._upstreams.response_timeout_s
        self._deadline = self._loop.time() + left_s
        while True:
            asking.attempts += 1
            asking.status = None
            stream = await pool.of(self._origin).open(_request(asking, self._target, self._token), left_s)
            asking.stream_id = stream.id
            try:
                retry = await self._outcome(stream)
            except BaseException:
                stream.abort()
                raise
            if retry is None:
                return stream
            stream.close()
            log.debug("%s: %s, once more in %.3g s", self._origin, retry.reason, retry.wait_s)
            if retry.wait_s:
                await asyncio.sleep(retry.wait_s)
                self._token = await self._source.token()
            left_s = self._left_s

    @property
    def _left_s(self) -> float:
        return self._deadline - self._loop.time()

    async def _outcome(self, stream: Stream) -> Retry | None:
        """None if the answer is 200; raises what is final."""
        upstreams, asking = self._upstreams, self._asking
        connection = stream.connection
        asking.awaiting_answer = True
        try:
            status = await stream.response(self._left_s)
        except StreamResetError as error:
            retry = self._retries.after_reset(
                error.code,
                connection_lost=connection.lost,
                answered_before=connection in upstreams.answered,
            )
            if self._may(retry):
                return retry
            raise
        except UpstreamError as error:
            timeout_s = upstreams.response_timeout_s  # of all attempts together
            raise UpstreamError(f"no response headers within {timeout_s:g} s") from error
        finally:
            asking.awaiting_answer = False
        asking.status = status
        upstreams.answered.add(connection)
        if status == OK:
            return None
        retry = await self._after_status(stream, status)
        if self._may(retry):
            return retry
        final = await refusal(stream, status)
        raise StatusError(status, f"{final}{self._why_not}")

    async def _after_status(self, stream: Stream, status: int) -> Retry | None:
        if status != UNAUTHORIZED:
            asked_s = retry_after_s(header_value(stream.headers, b"retry-after"), time.time())
            return self._retries.after_status(status, asked_s)
        rejected = self._token
        if rejected is None or self._token_dropped:
            return None
        self._token_dropped = True
        self._source.invalidate(rejected)  # it may have been revoked before its time
        retry = self._retries.after_rejected_token()
        if retry is None:
            return None
        self._token = await self._source.token()
        return retry if self._token != rejected else None

    def _may(self, retry: Retry | None) -> bool:
        """Whether somebody still waits, there is time, and room in the budget for a retry after a pause."""
        if retry is None or self._asking.gone:
            return False
        counts = self._upstreams.metrics.route(self._asking.route)
        if retry.wait_s >= self._left_s:
            self._why_not = f"; not asked again: no time for a pause of {retry.wait_s:.3g} s"
            return False
        if retry.wait_s and not self.in_budget:
            if not self._budget.has_room(self._rules.budget_percent):
                counts.retries_over_budget += 1
                self._why_not = f"; not asked again: {self._budget.retries} requests are retries already"
                return False
            self._budget.retries += 1
            self.in_budget = True
        counts.retried(retry.reason)
        return True


def _request(asking: Asking, target: Target, token: str | None) -> Headers:
    trace = (b"traceparent", asking.traceparent)
    if target.method == "CONNECT":
        told = [(b"forwarded", request_context.forwarded(asking.peer)), trace]
        if baggage := request_context.baggage(target.namespace, target.service):
            told.insert(0, (b"baggage", baggage))
        return tunnel_request.connect(target.connect_target, token, told)
    return tunnel_request.post(target.scheme, target.authority, target.path, token, [trace])
