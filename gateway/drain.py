"""The end of the gateway, on SIGTERM or SIGINT.

1. The gateway is not ready any more. For the drain delay connections are still accepted, so that load
   balancers have time to notice. There is no delay after SIGINT, which is a person's.
2. The listeners are closed without losing a connection.
3. Open tunnels have the drain timeout to finish.

What is left then is reset by the gateway. A second request leads there at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from signal import SIGINT, Signals

from gateway.config.limit_settings import Limits
from gateway.config.reload import Reloads
from gateway.hbone.hbone_port import HboneListener
from gateway.ops.ops_ports import OpsPorts
from gateway.ports.listeners import Listeners
from gateway.reverse.reverse_port import ReverseListener
from gateway.workers.stopping import StopRequests
from shared.net.legs.tcp_end import last_bytes_left
from shared.ops.readiness import Readiness
from shared.tasks import spawn

log = logging.getLogger("hbone.gateway")

NOTICE_S = 5.0
"""Seconds of drain delay where the file has none and somebody polls the readiness: two probes of a kubelet
that sends one every 3 s, or several times the second in which endpoints reach every node."""


class Drain:
    """Waits for a request to stop, then drains."""

    def __init__(
        self,
        readiness: Readiness,
        ports: OpsPorts,
        reloads: Reloads,
        listeners: Listeners,
        hbone: HboneListener | None,
        reverse: ReverseListener | None,
        *,
        limits: Callable[[], Limits],
        open_connections: Callable[[], int],
        second_cuts_short: bool,
    ) -> None:
        """`open_connections` counts those of `listeners`. `second_cuts_short`: a second request does what
        `cut_short` does."""
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        """The drain has been cut short."""
        self._readiness = readiness
        self._ports = ports
        self._reloads = reloads
        self._listeners = listeners
        self._hbone = hbone
        self._reverse = reverse
        self._limits = limits
        self._open_connections = open_connections
        self._second_cuts_short = second_cuts_short
        self._requests = StopRequests()
        self._idle = asyncio.Event()

    @property
    def signal(self) -> Signals:
        """Of the latest request."""
        return self._requests.signal

    def request(self, number: Signals) -> None:
        """The process got the signal `number`."""
        self._requests.add(number, asyncio.get_running_loop().time())
        if self._requests.count > 1 and self._second_cuts_short:
            self.forced.set()
        self.requested.set()

    def cut_short(self) -> None:
        """Ends a drain, or what would become one."""
        self.forced.set()
        self.requested.set()

    def connection_over(self) -> None:
        """One of the connections that a drain waits for has ended."""
        if not self._unfinished():
            self._idle.set()

    async def run(self) -> None:
        """Returns when all connections have ended, or may not last any longer."""
        self._readiness.draining = True
        self._ports.leave_to_successor()
        self._reloads.close()
        if self._reverse is not None:  # first, so that workloads are with our successor before clients are
            await self._reverse.leave()
        await self._stop_accepting()
        waiting = self._unfinished()
        if self.forced.is_set() or (not waiting and last_bytes_left().is_set()):
            return
        timeout_s = self._limits().drain_timeout_s
        log.info("draining: %d connections have up to %g s", waiting, timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        if waiting:
            self._idle.clear()
        else:
            self._idle.set()
        if await _within(timeout_s, self._idle, self.forced) and not self.forced.is_set():
            # The last bytes of tunnels whose client has gone already.
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            await _within(left_s, last_bytes_left(), self.forced)
        if self.forced.is_set():
            log.warning("second signal: %d connections are reset", self._unfinished())
        elif not self._idle.is_set():
            log.warning("drain timeout: %d connections are reset", self._unfinished())

    async def _stop_accepting(self) -> None:
        delay_s = self._delay_s()
        if delay_s:
            log.info("not ready any more; connections are accepted for another %g s", delay_s)
            await _within(delay_s, self.forced)
        if not self.forced.is_set():
            draining = [] if self._hbone is None else [self._hbone.drain()]
            await asyncio.gather(self._listeners.close(), *draining)

    def _delay_s(self) -> float:
        delay_s = self._limits().drain_delay_s
        if self.signal is SIGINT:
            return 0.0
        if delay_s is not None:
            return delay_s
        polled = self._ports.readiness_is_asked_for
        return NOTICE_S if polled and not self._listeners.have_company() else 0.0

    def _unfinished(self) -> int:
        """Connections that a drain waits for."""
        return self._open_connections() + (self._hbone.unfinished if self._hbone else 0)


async def _within(seconds: float, *events: asyncio.Event) -> bool:
    """Whether one of `events` is set within so many seconds."""
    waits = {spawn(event.wait(), name="wait for the end") for event in events}
    try:
        done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for task in waits:
            task.cancel()
