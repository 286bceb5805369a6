"""Streams to tunnels' targets, answered with 200: what the gateway does between the route and the relay.

Owned here: what all openings share: the request of each target, the budget of retries of each origin, and the
deadlines of those that wait for an answer without a task. The story of one is `opening.py`'s, connections are
`shared/net/pool/pool.py`'s, tokens `token_sources.py`'s; who wants the stream, and what becomes of it, is
`tunnel.py`'s.

Why nothing is lost or said twice: the ClientHello, and whatever else the client has sent, stays with the
downstream leg until the relay stands, so an attempt that fails has carried nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Protocol

from gateway.config.limit_settings import Limits
from gateway.ports.admission import network_of
from gateway.rules.routes import MAX_CACHED_TARGETS, Target
from gateway.sni.deadlines import Deadlines
from gateway.sni.new_audiences import NewAudiences
from gateway.sni.target_request import TargetRequest
from gateway.sni.token_sources import TokenSources
from shared.errors import DialError
from shared.net.dial import Origin, reason
from shared.net.names import names
from shared.net.pool.pool import Pool
from shared.ops.metrics import TunnelMetrics
from shared.tunnel.retry import RetryBudget, RetryRules


class Answerable(Hashable, Protocol):
    """Who waits for an answer."""

    def overdue(self) -> None:
        """It did not come in time."""


class Upstreams:
    """Opens streams to targets. All calls are made on the event loop's thread."""

    def __init__(
        self,
        pool: Pool,
        tokens: TokenSources,
        metrics: TunnelMetrics,
        *,
        limits: Limits,
        new_audiences: NewAudiences | None = None,
    ) -> None:
        """`new_audiences` bounds the tokens for audiences that nobody has had a tunnel with; None: by the
        default limits."""
        self.new_audiences = new_audiences or NewAudiences(limits)
        self.pool = pool
        self.tokens = tokens
        self.metrics = metrics
        self.use_limits(limits)
        self.loop = asyncio.get_running_loop()
        self._requests: dict[int, TargetRequest] = {}
        """By the id of the target, which is kept alive so: a hash of its many fields costs more."""
        self._budgets: dict[Origin, RetryBudget] = {}  # of origins with a request under way
        self._deadlines = Deadlines[Answerable](lambda opening: opening.overdue())

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for requests to come."""
        self.response_timeout_s = limits.response_timeout_s
        self.rules = RetryRules(limits.max_retries, limits.retry_budget_percent)

    def request_of(self, target: Target) -> TargetRequest:
        """The tunnel request of `target`, made once."""
        request = self._requests.get(id(target))
        if request is None:
            if len(self._requests) >= MAX_CACHED_TARGETS:
                self._requests.clear()
            request = self._requests[id(target)] = TargetRequest(target)
        return request

    async def look_up(self, request: TargetRequest, peer: str, timeout_s: float) -> None:
        """Looks the origin's name up at the expense of the client `peer` (HOST:PORT), if that has chosen it
        and there is no connection yet: so the dial finds the answer, and what clients invent keeps no dial of
        others waiting.

        Raises:
            DialError: it has no address, or nobody says which within `timeout_s` seconds.
            LimitError: too many names are being looked up for this client.
        """
        origin = request.origin
        if not request.target.named_by_client or self.pool.is_connected(origin):
            return
        timeout_s = min(timeout_s, self.pool.limits.connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await names.resolve(origin.to_look_up, network_of(peer))
        except TimeoutError as error:
            text = f"connect to {origin}: its name was not looked up within {timeout_s:g} s"
            raise DialError(text) from error
        except OSError as error:
            raise DialError(f"connect to {origin}: {reason(error)}") from error

    def enter(self, origin: Origin) -> RetryBudget:
        """A request to `origin` is under way, until `leave`; its budget."""
        budget = self._budgets.get(origin)
        if budget is None:
            budget = self._budgets[origin] = RetryBudget()
        budget.requests += 1
        return budget

    def leave(self, origin: Origin, budget: RetryBudget) -> None:
        """It is not any more."""
        budget.requests -= 1
        if not budget.requests:
            del self._budgets[origin]

    def await_answer(self, opening: Answerable, due: float) -> None:
        """`opening.overdue` is called at the loop's time `due`, unless it is answered before."""
        self._deadlines.add(opening, due)

    def await_no_more(self, opening: Answerable) -> None:
        """It has its answer."""
        self._deadlines.drop(opening)
