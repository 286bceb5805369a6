"""-R: a port in the container that leads to this side.

A tunnel to `/_hbone/listen/PORT` makes krun listen there, as long as the tunnel lasts. In it krun speaks
HTTP/2 with its roles turned: it opens a stream for each connection that it accepts, and here the target is
connected for it. When the tunnel ends, as it does after the service's request timeout, it is asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from hbone.forward import unix_sockets
from hbone.forward.connections import MAX_CONNECTIONS
from hbone.forward.flags import RemoteForward
from hbone.forward.reports import Troubles, log
from hbone.forward.service import Service, pause_s
from shared.errors import HboneError, LimitError, RefusedError, StoppedError
from shared.http2.session import SessionLimits
from shared.net.dial import dial
from shared.net.http2.connection import Connection
from shared.net.http2.connection_leg import ConnectionLeg
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream, header_value
from shared.net.relay.relay import Relay
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_request import LISTEN_PREFIX
from shared.tunnel.tunnel_server import ServedTunnel

DIAL_TIMEOUT_S = 10.0
"""For the target on this side."""

LASTED_S = 10.0
"""A tunnel that has lasted so long is asked for again at once when it ends."""

MOST_STREAMS = 250
"""Connections at once by way of one port; krun resets more."""


class RemotePort:
    """One port in the container."""

    def __init__(self, forward: RemoteForward, service: Service, troubles: Troubles) -> None:
        self._forward = forward
        self._service = service
        self._troubles = troubles
        self._connection: Connection | None = None
        self._tunnels: set[ServedTunnel] = set()
        self._sent_bytes = 0  # to this side, of tunnels that are over
        self._received_bytes = 0
        self._stopping = False

    @property
    def name(self) -> str:
        """The port, for lines about it."""
        return f"127.0.0.1:{self._forward.port} in {self._service}"

    def __str__(self) -> str:
        return f"{self.name} -> {self._forward.target}"

    @property
    def open_connections(self) -> int:
        """How many are open by way of it."""
        return len(self._tunnels)

    @property
    def carried_bytes(self) -> tuple[int, int]:
        """What has gone to the container, and what has come from there."""
        relays = [tunnel.relay for tunnel in self._tunnels if tunnel.relay is not None]
        return (
            self._received_bytes + sum(relay.received_bytes for relay in relays),
            self._sent_bytes + sum(relay.sent_bytes for relay in relays),
        )

    async def run(self, listening: Callable[[], None], *, keep_trying: bool) -> None:
        """Keeps the port until it is cancelled. `listening()` is called once it is there for the first time,
        or has failed for the first time. Raises HboneError if it fails then, unless `keep_trying`."""
        loop = asyncio.get_running_loop()
        is_first, failures = True, 0
        while not self._stopping:
            began = loop.time()
            try:
                stream = await self._service.open(f"{LISTEN_PREFIX}{self._forward.port}")
            except HboneError as refused:
                if is_first and not keep_trying:
                    raise
                self._troubles.failed(self.name, f"not listening: {refused}")
            else:
                self._troubles.works(self.name)
                if is_first:
                    log.info("%s", self)
                    is_first = False
                    listening()
                error = await self._serve(stream)
                if self._stopping:
                    return
                age_s = loop.time() - began
                self._troubles.failed(self.name, self._service.cause(error, stream, age_s))
                if age_s >= LASTED_S:
                    failures = 0
                    continue
            if is_first:
                is_first = False
                listening()
            await asyncio.sleep(pause_s(failures))
            failures += 1

    def drain(self) -> None:
        """Takes no further connection; `run` returns with the last one."""
        self._stopping = True
        if self._connection is not None:
            self._connection.drain()

    async def _serve(self, stream: Stream) -> HboneError:
        """Serves what krun accepts until the tunnel of `stream` is over, and returns why."""
        over = asyncio.Event()
        connection = self._connection = Connection(
            client=False, limits=SessionLimits(max_streams=MOST_STREAMS), on_request=self._accepted
        )
        relay = Relay(ConnectionLeg(connection, stream), stream, lambda _: over.set())
        relay.start()
        try:
            await over.wait()
        finally:
            relay.abort(StoppedError("hbone ended"))
            self._connection = None
        return relay.error or RefusedError("krun gave the port up")

    def _accepted(self, stream: Stream) -> None:
        """krun has accepted a connection."""
        record = TunnelRecord(peer=stream.connection.peer_name, target=str(self._forward.target))
        tunnel = ServedTunnel(stream, record, self._over)
        self._tunnels.add(tunnel)
        if header_value(stream.headers, b":method") != b"POST":
            tunnel.refuse(HTTPStatus.METHOD_NOT_ALLOWED, RefusedError("a tunnel is opened with POST"))
        elif len(self._tunnels) > MAX_CONNECTIONS:
            text = f"{MAX_CONNECTIONS} connections are open"
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, LimitError(text, "connections"))
        else:
            tunnel.carry(self._connect, f"connection to {self._forward.target}")

    async def _connect(self) -> Leg:
        target = self._forward.target
        if isinstance(target, Path):
            return await unix_sockets.dial(target)
        return await dial(target, DIAL_TIMEOUT_S)

    def _over(self, tunnel: ServedTunnel) -> None:
        self._tunnels.discard(tunnel)
        record = tunnel.record
        self._sent_bytes += record.sent_bytes or 0
        self._received_bytes += record.received_bytes or 0
        if not record.opened and record.error is not None:
            self._troubles.failed(str(self._forward.target), f"not connected for {self.name}: {record.error}")
        else:
            self._troubles.works(str(self._forward.target))
        log.debug("%s: a connection ended after %.1f s", self, record.duration_s or 0.0)
