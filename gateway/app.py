"""hgate as a whole: makes every long-lived object, starts them in order, drains and stops them.

Start: file → admin, metrics and health ports → listeners → ready. SIGTERM or SIGINT: not ready, no new
connections, tunnels finish up to the drain timeout, then the rest is reset. SIGHUP reads the file again; a
file with a mistake changes nothing and says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from gateway.config import load
from gateway.hello import EmptyConnectionError, HelloPeek
from gateway.routes import RouteTable
from gateway.templates import Template
from gateway.tunnel import TokenSources, Tunnels
from shared.errors import DOWNSTREAM_RESET, EXIT_OK, ConfigError, HboneError
from shared.identity.tokens import DEFAULT_METADATA_HOST
from shared.net.address import Address
from shared.net.dial import Origin
from shared.net.listen import bound_address, listen
from shared.net.pool import Pool
from shared.net.tcp import address_text
from shared.ops.access_log import AccessLog
from shared.ops.http_server import HttpServer, Request, Response
from shared.ops.metrics import TunnelMetrics
from shared.ops.readiness import Readiness

log = logging.getLogger("hbone.gateway")

OVER_LIMIT = "LIMIT"
"""Response flag of a connection that came while `max_connections` were open."""


class StoppedError(HboneError):
    """The gateway ended before the connection did."""

    flag = "STOPPED"


class Gateway:
    """The running gateway."""

    def __init__(self, config_file: Path, environ: Mapping[str, str], access_log: AccessLog) -> None:
        """Raises ConfigError if the file has a mistake, UsageError if a variable of `environ` is wrong."""
        self._file = config_file
        self._config = load(config_file)
        self._access_log = access_log
        self.metrics = TunnelMetrics("gateway", more_flags=(OVER_LIMIT, DOWNSTREAM_RESET))
        self.readiness = Readiness()
        limits = self._config.limits
        self._pool = Pool(
            connect_timeout_s=limits.connect_timeout_s,
            streams_per_connection=limits.streams_per_connection,
            opened=lambda origin: self.metrics.origin(_name(origin)).opened(),
            closed=lambda origin: self.metrics.origin(_name(origin)).closed(),
        )
        self._tunnels = Tunnels(
            RouteTable(self._config.routes),
            self._pool,
            TokenSources(environ.get("GCE_METADATA_HOST") or DEFAULT_METADATA_HOST),
            access_log,
            self.metrics,
            connect_timeout_s=limits.connect_timeout_s,
            response_timeout_s=limits.response_timeout_s,
            changed=self._tunnel_over,
        )
        self._peeking: set[HelloPeek] = set()
        self._listeners: list[asyncio.Server] = []
        self._servers: list[HttpServer] = []
        self._idle = asyncio.Event()
        self._stop = asyncio.Event()
        self.metrics.watch(
            "hbone_connections_open", "Downstream connections, from accept to end.", self._open_connections
        )
        self.metrics.watch(
            "hbone_connections_limit",
            "Downstream connections that may be open.",
            lambda: self._config.limits.max_connections,
        )

    async def run(self) -> int:
        """Serves until a signal ends it; returns the exit code.

        Raises:
            UnavailableError: a port cannot be had.
        """
        loop = asyncio.get_running_loop()
        started = self.readiness.task("listeners")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            await self._start()
            started.done()
            await self._stop.wait()
            await self._drain()
        finally:
            await self._close()
        return EXIT_OK

    def reload(self) -> None:
        """Reads the file again: its routes count for new connections, open tunnels stay as they are."""
        try:
            config = load(self._file)
        except ConfigError as error:
            log.error("reload: %s; the running configuration stays", error)
            return
        self._tunnels.routes = RouteTable(config.routes)
        kept = (config.listen, config.admin, config.metrics, config.health, config.limits)
        running = self._config
        self._config = dataclasses.replace(running, routes=config.routes)
        if kept != (running.listen, running.admin, running.metrics, running.health, running.limits):
            log.warning("reload: ports and limits change at the next start only")
        log.info("reload: %d routes from %s", len(config.routes), self._file)

    # Start and stop.

    async def _start(self) -> None:
        config = self._config
        health = HttpServer(
            {("GET", "/healthz/ready"): self.readiness.healthz, ("GET", "/healthz/live"): _alive},
            name="health",
        )
        metrics = HttpServer(
            {("GET", "/metrics"): self._scrape, ("GET", "/stats/prometheus"): self._scrape}, name="metrics"
        )
        admin = HttpServer(
            {
                ("GET", "/config"): self._show_config,
                ("GET", "/tunnels"): self._show_tunnels,
                ("GET", "/connections"): self._show_connections,
            },
            name="admin",
        )
        for server, address in ((health, config.health), (metrics, config.metrics), (admin, config.admin)):
            if address is not None:
                bound = await server.start(address)
                self._servers.append(server)
                log.info("%s on %s", server.name, bound)
        for address in config.listen:
            listener = await listen(address, self._peek, purpose="listen")
            self._listeners.append(listener)
            log.info(
                "listening on %s", bound_address(listener), extra={"address": str(bound_address(listener))}
            )

    async def _drain(self) -> None:
        self.readiness.draining = True
        for listener in self._listeners:
            listener.close()
        waiting = self._open_connections()
        if not waiting:
            return
        timeout_s = self._config.limits.drain_timeout_s
        log.info("draining: %d connections have up to %g s", waiting, timeout_s)
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain timeout: %d connections are reset", self._open_connections())

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        stopped = StoppedError("the gateway stops")
        for peek in list(self._peeking):
            peek.stop(stopped)
        self._tunnels.abort_all(stopped)
        self._pool.close()
        for server in self._servers:
            await server.close()
        self._access_log.close()

    # Connections.

    def _peek(self) -> asyncio.BaseProtocol:
        if self._open_connections() >= self._config.limits.max_connections:
            return _OverLimit(self._over_limit)
        timeout_s = self._config.limits.hello_timeout_s
        return HelloPeek(timeout_s, self._peeking, self._tunnels.take, self._refused)

    def _refused(self, peer: str, started: float, error: HboneError) -> None:
        self.metrics.refused(error.flag)
        if not isinstance(error, EmptyConnectionError):
            self._access_log.refused(
                src_addr=peer,
                duration_s=asyncio.get_running_loop().time() - started,
                flags=error.flag,
                error=str(error),
            )
        self._tunnel_over()

    def _over_limit(self, peer: str) -> None:
        self.metrics.refused(OVER_LIMIT)
        limit = self._config.limits.max_connections
        self._access_log.refused(
            src_addr=peer, flags=OVER_LIMIT, error=f"{limit} connections are open, which is max_connections"
        )

    def _open_connections(self) -> int:
        return len(self._peeking) + len(self._tunnels.open)

    def _tunnel_over(self) -> None:
        if not self._open_connections():
            self._idle.set()

    # Admin.

    def _scrape(self, request: Request) -> Response:
        self._tunnels.count_bytes()
        content_type, body = self.metrics.render(request.headers.get("accept", ""))
        return Response(200, content_type, body)

    def _show_config(self, _: Request) -> Response:
        return _json(_plain(self._config))

    def _show_tunnels(self, _: Request) -> Response:
        now = asyncio.get_running_loop().time()
        return _json(
            [
                {
                    "src.addr": tunnel.peer,
                    "sni": tunnel.sni,
                    "route": tunnel.route,
                    "dst.addr": str(tunnel.target.dial) if tunnel.target else None,
                    "stream": tunnel.stream_id,
                    "age_s": round(now - tunnel.started, 3),
                    "bytes_sent": tunnel.relay.sent_bytes if tunnel.relay else 0,
                    "bytes_recv": tunnel.relay.received_bytes if tunnel.relay else 0,
                }
                for tunnel in self._tunnels.open
            ]
        )

    def _show_connections(self, _: Request) -> Response:
        return _json(
            [
                {"origin": str(pool.origin), "streams": connection.open_streams, "room": connection.room}
                for pool in self._pool.origins.values()
                for connection in pool.connections
            ]
        )


class _OverLimit(asyncio.Protocol):
    """Lets a connection go that is one too many."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        self._refused = refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._refused(address_text(transport.get_extra_info("peername")))
        cast("asyncio.Transport", transport).abort()


def _name(origin: Origin) -> str:
    return f"{origin.scheme}://{origin.host}"


def _alive(_: Request) -> Response:
    return Response.text(200, "alive")


def _json(value: object) -> Response:
    return Response(200, "application/json", json.dumps(value, indent=2).encode() + b"\n")


def _plain(value: Any) -> Any:
    """The configuration as JSON has it. It names token files and audiences and holds no secret."""
    if isinstance(value, Template):
        return value.text
    if isinstance(value, Address | Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
