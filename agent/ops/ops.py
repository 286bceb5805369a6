"""What krun shows of itself: its readiness, the steps of its start, its metrics, its state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from agent.config.layers import Layers
from agent.config.settings import Settings
from agent.mtls.mtls_end import MtlsEnd
from agent.ops.krun_metrics import KrunMetrics
from shared.tunnel.tunnel_record import TunnelRecord

if TYPE_CHECKING:
    from prometheus_client import Metric

    from agent.ops.merged_metrics import MergedMetrics
    from agent.ops.ops_ports import OpsPorts
    from agent.proxy.request_record import Record
    from agent.ssh.sshd import Sshd
    from shared.net.http2.connection import Connection
    from shared.ops.http_server import Request, Response

log = logging.getLogger("hbone.agent")

MTLS_END, GRPC = "mTLS end", "gRPC"
TUNNELS = "tunnels"
"""The last step: afterwards tunnels are served."""


class Ops:
    """Made by the agent; nothing is open before `start`."""

    def __init__(
        self,
        settings: Settings,
        layers: Layers,
        mtls_end: MtlsEnd,
    ) -> None:
        """`layers` are what `settings` were read from."""
        self._settings = settings
        self._steps = ["identity", MTLS_END, *([] if settings.grpc is None else [GRPC]), "app", TUNNELS]
        self._layers = layers
        self._mtls_end = mtls_end
        self.metrics = KrunMetrics()
        self.metrics.mtls_end = mtls_end
        self.connections: Collection[Connection] = ()
        """The open ones."""
        self.sshd: Sshd | None = None
        """krun's own, if it may have one."""
        self.outbound = "none"
        """How the app's connections get into the mesh: a value of HBONE_CAPTURE, but not `auto`."""
        self._draining = False
        self._ports: OpsPorts | None = None
        self._merged: MergedMetrics | None = None
        self._began = self._step_at = 0.0  # by the loop's clock

    async def start(self) -> None:
        """Opens the ports. Raises UnavailableError if one that the settings name cannot be had."""
        self._began = self._step_at = asyncio.get_running_loop().time()
        settings = self._settings
        if settings.health is None and settings.metrics is None and settings.admin is None:
            return
        from agent.ops.merged_metrics import MergedMetrics
        from agent.ops.ops_ports import OpsPorts
        from shared.ops.http_server import Response

        self._merged = MergedMetrics(self.metrics, self._mtls_end, settings.app_metrics)
        self._ports = OpsPorts(
            ready=self._ready,
            live=lambda _: Response.text(200, "live"),
            scrape=self._merged.scrape,
            admin=self._pages(),
        )
        self.metrics.add(self._ports.families)
        self.metrics.add(_certificates)
        await self._ports.start(settings)

    def first(self, step: str) -> str:
        """Puts a step, which few starts have, before all others; returns it."""
        self._steps.insert(0, step)
        return step

    def started(self, step: str) -> None:
        """A step of the start is done. The last one writes a line for the log."""
        now = asyncio.get_running_loop().time()
        self._steps.remove(step)
        took_s = self.metrics.start_s
        if step != TUNNELS:
            took_s[step], self._step_at = now - self._step_at, now
            return
        told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took_s.items())
        log.info("started in %.2f s: %s", now - self._began, told)

    def over(self, record: Record) -> None:
        """A tunnel is over, or something else that is none."""
        if isinstance(record, TunnelRecord) and (record.name is not None or record.route):
            self.metrics.over(record)

    def drain(self) -> None:
        """krun is not ready from now on."""
        self._draining = True

    async def close(self) -> None:
        """Closes the ports."""
        if self._ports is not None:
            await self._ports.close()
        if self._merged is not None:
            self._merged.close()

    async def pending(self) -> list[str]:
        """What has to be there first."""
        if not self._steps and not await self._mtls_end.is_ready():
            return [MTLS_END]
        return self._steps

    async def _ready(self, _: Request) -> Response:
        from shared.ops.http_server import Response

        if self._draining:
            return Response.text(503, "draining")
        if pending := await self.pending():
            return Response.text(503, f"not ready, pending: {', '.join(pending)}")
        return Response.text(200, "ready")

    # The admin port.

    def _pages(self) -> dict[str, Callable[[Request], Any]]:
        from agent.ops import debug
        from shared.ops.http_server import Response

        shown: dict[str, Callable[[], Any]] = {
            "/config": lambda: debug.settings(self._layers),
            "/tunnels": lambda: debug.tunnels(self._tunnels()),
            "/connections": lambda: (
                debug.connections((*self.connections, *self._to_gateway())) + self._inner_connections()
            ),
            "/certs": debug.certificates,
            "/ssh": self._ssh,
        }

        async def status(_: Request) -> Response:
            return Response.json(await self._status())

        async def everything(_: Request) -> Response:
            parts = {path[1:]: show() for path, show in shown.items()}
            return Response.json({"status": await self._status(), **parts})

        def page(show: Callable[[], Any]) -> Callable[[Request], Response]:
            return lambda _: Response.json(show())

        pages = {path: page(show) for path, show in shown.items()}
        return {**pages, "/status": status, "/debug": everything}

    def _ssh(self) -> dict[str, Any]:
        return {"enabled": False, "why": "no keys are named"} if self.sshd is None else self.sshd.shown()

    def _tunnels(self) -> Iterator[Any]:
        return self.metrics.tunnels

    def _to_gateway(self) -> Collection[Connection]:
        return () if self.metrics.egress is None else self.metrics.egress.connections

    def _inner_connections(self) -> list[dict[str, Any]]:
        return [] if self._mtls_end.inner is None else self._mtls_end.inner.rows()

    async def _status(self) -> dict[str, Any]:
        from shared import version

        return {
            "version": version.installed(),
            "compiled": version.is_compiled(),
            "up_s": round(asyncio.get_running_loop().time() - self._began, 3),
            "pending": await self.pending(),
            "draining": self._draining,
            "started_s": {name: round(seconds, 3) for name, seconds in self.metrics.start_s.items()},
            "mtls_end": {
                "kind": self._mtls_end.kind,
                "address": str(self._mtls_end.address),
                "allow": self._mtls_end.allow,
                "deny": self._mtls_end.deny,
                "unenforced_policies": list(self._mtls_end.unenforced_policies),
            },
            "outbound": self.outbound,
            "egress": None if self.metrics.egress is None else self.metrics.egress.shown(),
        }


def _certificates() -> Iterator[Metric]:
    from shared.credentials.certificates import certificates_in_use

    return certificates_in_use.families()
