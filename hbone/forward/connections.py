"""Local connections and what carries them: each is accepted, led some way, relayed, and counted.

A connection is reset if its way does not open, so its client sees at once that there is nothing; why is a
line on standard error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from hbone.forward.reports import Troubles, amount, log
from shared.errors import HboneError, StoppedError
from shared.net.legs.accepted import AcceptedLeg
from shared.net.legs.contract import Leg
from shared.net.legs.tcp import Surplus
from shared.net.legs.tcp_end import last_bytes_left
from shared.net.relay.relay import Relay
from shared.tasks import spawn

MAX_CONNECTIONS = 1000
"""At once, all forwards together: as many tunnels as krun accepts unless it is told otherwise."""


class Way(Protocol):
    """Where local connections are led. `str` names it in lines for the user."""

    async def open(self) -> Leg:
        """The far side of one connection, within a deadline of its own. Raises HboneError."""

    def cause(self, error: HboneError, leg: Leg, age_s: float) -> str:
        """Why the connection whose far side was `leg` broke with `error`, `age_s` seconds after `open`."""


class Connections:
    """All that are open, and what they have carried."""

    def __init__(self, troubles: Troubles, most: int = MAX_CONNECTIONS) -> None:
        self.troubles = troubles
        self._most = most
        self._open: set[Connection] = set()
        self._sent_bytes = 0  # of those that are over
        self._received_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._last = (asyncio.get_running_loop().time(), 0, 0)  # when the rates were asked for, and the bytes

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, accepted: Callable[[AcceptedLeg], None]) -> asyncio.BaseProtocol:
        """The protocol of a new connection; `accepted(leg)` is called if there may be one more."""
        if len(self._open) < self._most:
            return AcceptedLeg(accepted)
        text = f"a connection was refused: {self._most} are open, which is as many as there may be"
        return Surplus(lambda peer: self.troubles.noted("limit", text))

    def begin(self, leg: AcceptedLeg) -> Connection:
        """A connection that counts from now on, until it is `over`."""
        connection = Connection(self, leg)
        self._open.add(connection)
        self._idle.clear()
        return connection

    def ended(self, connection: Connection) -> None:
        """It is over."""
        if connection in self._open:
            self._open.discard(connection)
            self._sent_bytes += connection.sent_bytes
            self._received_bytes += connection.received_bytes
            if not self._open:
                self._idle.set()

    def rates(self) -> str:
        """One line: how many are open, and what has passed each way since the last call."""
        sent = self._sent_bytes + sum(connection.sent_bytes for connection in self._open)
        received = self._received_bytes + sum(connection.received_bytes for connection in self._open)
        now = asyncio.get_running_loop().time()
        before, sent_before, received_before = self._last
        self._last = (now, sent, received)
        took_s = max(now - before, 0.001)
        up, down = (sent - sent_before) / took_s, (received - received_before) / took_s
        return (
            f"{len(self._open)} open, {amount(up)}/s to the container ({amount(sent)}), "
            f"{amount(down)}/s from it ({amount(received)})"
        )

    async def finish(self, timeout_s: float) -> None:
        """Waits for the open ones to end, with their last bytes; what is left after `timeout_s` seconds is
        reset."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await last_bytes_left().wait()
        except TimeoutError:
            for connection in list(self._open):
                connection.abort(StoppedError("hbone ended"))


class Connection:
    """One local connection."""

    def __init__(self, connections: Connections, leg: AcceptedLeg) -> None:
        self._connections = connections
        self._leg = leg
        self._relay: Relay | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def sent_bytes(self) -> int:
        """What has gone to the far side."""
        return 0 if self._relay is None else self._relay.sent_bytes

    @property
    def received_bytes(self) -> int:
        """What has come from there."""
        return 0 if self._relay is None else self._relay.received_bytes

    def carry(self, way: Way) -> None:
        """Leads it `way`."""

        async def known() -> Way:
            return way

        self.carry_to(known, str(way))

    def carry_to(
        self,
        find: Callable[[], Awaitable[Way]],
        name: str,
        *,
        opened: Callable[[], None] = lambda: None,
        refused: Callable[[HboneError], None] | None = None,
    ) -> None:
        """The same, where the way to `name` has to be found first. `opened()` is called before the first byte
        is relayed. If it is not opened, `refused(error)` tells the client, and it is closed in order."""
        self._task = spawn(self._carry(find, name, opened, refused), name=f"connection to {name}")

    def turn_away(self) -> None:
        """Closes it in order: it has been told why."""
        self._leg.close()
        self._connections.ended(self)

    def abort(self, error: HboneError) -> None:
        """Resets it."""
        if self._task is not None:
            self._task.cancel()
        if self._relay is not None:
            self._relay.abort(error)
        else:
            self._leg.abort()
            self._connections.ended(self)

    async def _carry(
        self,
        find: Callable[[], Awaitable[Way]],
        name: str,
        opened: Callable[[], None],
        refused: Callable[[HboneError], None] | None,
    ) -> None:
        troubles = self._connections.troubles
        loop = asyncio.get_running_loop()
        began = loop.time()
        peer = self._leg.peer_name
        try:
            way = await find()
            name = str(way)
            upstream = await way.open()
        except HboneError as error:
            troubles.failed(name, f"not opened: {error}")
            if refused is None:
                self._leg.abort()
            else:
                refused(error)
                self._leg.close()
            self._connections.ended(self)
            return
        except BaseException:
            self._leg.abort()
            self._connections.ended(self)
            raise
        finally:
            self._task = None
        troubles.works(name)
        log.debug("%s: opened for %s in %.0f ms", name, peer, (loop.time() - began) * 1000)

        def over(relay: Relay) -> None:
            age_s = loop.time() - began
            counted = f"{relay.sent_bytes} bytes sent, {relay.received_bytes} received"
            if relay.error is not None and relay.broken is relay.upstream:
                troubles.broke(name, way.cause(relay.error, relay.upstream, age_s))
            log.debug("%s: %s ended after %.1f s: %s", name, peer, age_s, counted)
            self._connections.ended(self)

        opened()
        self._relay = Relay(self._leg, upstream, over)
        self._relay.start()
