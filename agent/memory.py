"""The memory budget for the bytes that krun buffers: of tunnels, of requests to the app, of the app's own to
services and into the mesh, of the built-in mTLS end, and of HTTP/2 connections.

There is one budget for all. Requests to the app may use `REQUESTS_SHARE` of it, so that a client that sends
the app more than it reads does not get tunnels refused or reset.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from agent.config.settings import Settings
from agent.mtls.mtls_end import MtlsEnd
from agent.tunnels.request_bounds import HeldRequest
from agent.tunnels.requests import Requests
from agent.tunnels.tunnel_port import LIMITS
from shared.errors import HboneError, LimitError
from shared.http2 import window_growth
from shared.net.http2.connection import Connection
from shared.net.relay.memory_budget import (
    Holder,
    MemoryBudget,
    Part,
    default_most_bytes,
)

if TYPE_CHECKING:
    from agent.egress.egress import Egress
    from agent.services.service_requests import ServiceRequests

log = logging.getLogger("hbone.agent")

SETTING = "HBONE_MAX_BUFFERED"

REQUESTS_SHARE = 0.75
"""Of the budget."""


class Memory:
    """The budget, and what is counted in it."""

    def __init__(self, settings: Settings, connections: Collection[Connection], mtls_end: MtlsEnd) -> None:
        self.requests: Requests | None = None
        """The tunnels and requests on `connections`; to be set before `start`."""
        self.services: ServiceRequests | None = None
        """The app's own requests to services, if krun carries them."""
        self.egress: Egress | None = None
        """The app's own tunnels into the mesh, likewise."""
        self._connections = connections
        self._mtls_end = mtls_end
        most = settings.max_buffered_bytes
        self._budget = budget = MemoryBudget(
            default_most_bytes() if most is None else most,
            self._holders,
            others=self._others,
            setting=SETTING,
            may_come=self._may_come,
            part=Part(lambda holder: isinstance(holder, HeldRequest), REQUESTS_SHARE, "requests to the app"),
        )
        window_growth.PROCESS.most = lambda: budget.growth_bytes

    def refusal(self) -> LimitError | None:
        """Why new tunnels and requests are refused now; None if they are not."""
        return self._budget.refusal()

    def request_refusal(self) -> LimitError | None:
        """Why new requests to the app are refused now; None if they are not."""
        return self._budget.part_refusal()

    @property
    def held_bytes(self) -> int:
        """What is held for all peers, when last measured."""
        return self._budget.held_bytes

    @property
    def most_bytes(self) -> int:
        """What may be held; 0: there is no bound."""
        return self._budget.most_bytes

    def start(self) -> None:
        """Starts to measure."""
        self._budget.start()

    def close(self) -> None:
        """Stops to measure."""
        self._budget.close()

    def _holders(self) -> Iterator[Holder]:
        yield from self._mtls_end.holders()
        for connection in self._connections:
            yield HeldConnection(connection)
        if self.requests is not None:
            yield from self.requests.tunnels
            yield from self.requests.app.holders()
        if self.services is not None:
            yield from self.services.holders()
        if self.egress is not None:
            yield from self.egress.holders()

    def _others(self) -> int:
        to_services = 0 if self.services is None else self.services.shared_bytes
        to_gateway = 0 if self.egress is None else self.egress.shared_bytes
        return to_services + to_gateway + (0 if self.requests is None else self.requests.app.shared_bytes)

    def _may_come(self) -> int:
        first = len(self._connections) * LIMITS.connection_window_bytes
        return first + window_growth.PROCESS.granted_bytes


class HeldConnection:
    """The bytes that an HTTP/2 connection has to send, without those of its streams."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def buffered_bytes(self) -> int:
        """Bytes for its peer."""
        return self._connection.buffered_bytes

    def abort(self, error: HboneError) -> None:
        """Ends the connection, and its streams."""
        log.warning("connection of %s dropped: %s", self._connection.peer_name, error)
        self._connection.abort(str(error))
