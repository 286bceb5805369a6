"""hgate as a whole: makes every long-lived object, starts them in order, reloads the file, stops them.

Start: file, admin, metrics and health ports, listeners, ready. SIGHUP, or a change of the file, reads the
file again. SIGTERM and SIGINT drain; what is open after the drain is reset, with the flag STOPPED.

One of several workers does the same, with three differences: it has no ops ports and does not watch the file,
and its drain is cut short by SIGQUIT instead of a second signal. A worker can get the first signal twice:
from its parent, and from a sender that signals the whole group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.config import cluster_files
from gateway.config.config import GatewayConfig
from gateway.config.followed_list import FollowedList
from gateway.config.reload import (
    ConfigFile,
    Reloads,
    keep_fixed,
    log_warnings,
)
from gateway.config.route_settings import with_certificates
from gateway.drain import Drain
from gateway.hbone.hbone_port import HboneListener
from gateway.ops import admin, log_level, overview, page
from gateway.ops.ops_ports import OpsPorts
from gateway.ops.overview_part import OverviewPart
from gateway.ops.versions import log_versions
from gateway.ports.admission import Admission, report_refusal
from gateway.ports.hello import Hellos
from gateway.ports.listeners import Listeners
from gateway.reverse.reverse_port import ReverseListener
from gateway.rules.routes import RouteTable
from gateway.sni.cluster_endpoints import ClusterEndpoints
from gateway.sni.forward import Forward
from gateway.sni.new_audiences import NewAudiences
from gateway.sni.token_sources import TokenSources
from gateway.sni.tunnel import Tunnels
from gateway.sni.upstream import Upstreams
from gateway.sni.warm import WarmRoutes
from gateway.traces import trace_settings
from gateway.traces.exporting import Exporting
from gateway.traces.spans import SpanPipe, Spans
from gateway.workers import metric_sums
from gateway.workers.worker_link import LinkServer, Worker, watch_parent
from shared.credentials.certificates import certificates_in_use
from shared.credentials.token_sources.minters import minter_from_env
from shared.credentials.token_sources.token_settings import from_env
from shared.errors import (
    EXIT_OK,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    HboneError,
    LimitError,
    StoppedError,
)
from shared.http2 import window_growth
from shared.net.dial import Origin
from shared.net.names import resolver
from shared.net.pool.pool import Pool
from shared.net.relay.memory_budget import Holder, MemoryBudget, default_most_bytes
from shared.net.relay.tunnel_clock import TunnelClock
from shared.net.tls import revocation_watch
from shared.net.tls.contexts import read_again
from shared.net.tls.revocation_watch import Counted
from shared.ops import dns_metrics, families
from shared.ops import log as logs
from shared.ops.access_log import AccessLog
from shared.ops.http_server import Handler, Request, Response
from shared.ops.loop_lag import LoopLag
from shared.ops.metrics import LAG_BUCKETS_S, TunnelMetrics
from shared.ops.readiness import Readiness
from shared.ops.token_metrics import TokenMetrics
from shared.tunnel.tunnel_record import TunnelRecord

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.gateway")

LAST_BYTES_S = 3.0
"""Seconds for services to read the last bytes of the last tunnels. Together with the drain delay and the
drain timeout this is less than Kubernetes' 30 seconds."""


class Gateway:
    """The running gateway."""

    def __init__(
        self,
        config_file: Path,
        environ: Mapping[str, str],
        access_log: AccessLog,
        worker: Worker | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`worker`: which of several it is; tokens expire by `wall_clock`, in seconds since 1970.

        Raises ConfigError if the file has a mistake, UsageError if a variable of `environ` is wrong.
        """
        file = ConfigFile(config_file)
        self._file = config_file
        self._environ = environ
        self._config = file.read()
        self._worker = worker or Worker()
        link = self._worker.link
        self._reloads = Reloads(file, self._apply, quiet=link is not None)
        self._access_log = access_log
        self._wall_clock = wall_clock

        # Traces, if OpenTelemetry's variables ask for them.
        self._span_pipe: SpanPipe | None = None
        self._spans: Spans | None = None
        self._exporting: Exporting | None = None
        traces = trace_settings.from_env(environ)
        if traces is not None:
            write_end = self._worker.span_pipe
            if write_end is None:
                self._span_pipe = SpanPipe.open()
                self._exporting = Exporting(traces, self._span_pipe, environ)
                write_end = self._span_pipe.write_end
            self._spans = Spans(write_end, traces.sampler)
            access_log.finished = self._spans.finished

        # What all ports share.
        self.metrics = TunnelMetrics()
        self.readiness = Readiness()
        self._cluster_list = (
            self.readiness.task("the cluster's routes") if self._config.awaits_cluster else None
        )
        limits = self._config.limits
        self._pool = Pool(
            limits=limits.pool(),
            counts=lambda origin: self.metrics.origin(_name(origin)),
            wall_clock=wall_clock,
        )
        self._resolver = resolver.current()
        self._use_lookup_limits()
        self._memory = MemoryBudget(self._most_buffered(), self._holders, self._other_bytes)
        window_growth.PROCESS.most = lambda: self._memory.growth_bytes
        self._admission = Admission(
            limits,
            share=self._worker.share,
            open_connections=self._open_connections,
            is_full=lambda: self._memory.full,
        )
        self._report = partial(
            report_refusal,
            access_log=access_log,
            metrics=self.metrics,
            refusals=self._admission.refusals,
        )
        self._clock = TunnelClock(limits.idle_timeout_s, limits.max_tunnel_lifetime_s)

        # Tunnels by SNI, from the tokens up to the listeners.
        self._token_metrics = TokenMetrics(wall_clock)
        tokens = self._config.tokens
        self._tokens = TokenSources(
            minter_from_env(environ, tokens),
            self._token_metrics.of,
            of_account=lambda account: minter_from_env(environ, tokens, account),
            now=wall_clock,
        )
        self._new_audiences = NewAudiences(limits, share=self._worker.share)
        self._upstreams = Upstreams(
            self._pool,
            self._tokens,
            self.metrics,
            new_audiences=self._new_audiences,
            admission=self._admission,
            limits=limits,
        )
        self._warm = WarmRoutes(self._upstreams, self.readiness)
        self._endpoints = ClusterEndpoints()
        self._addresses: FollowedList[Mapping[str, str]] = FollowedList(
            cluster_files.ADDRESSES, cluster_files.read_addresses, {}
        )
        self._forward = Forward(limits, self._endpoints)
        self._reverse = self._reverse_listener()
        self._tunnels = Tunnels(
            RouteTable(self._config.routes),
            self._upstreams,
            access_log,
            self.metrics,
            self._admission,
            self._clock,
            forward=self._forward,
            reverse=self._reverse,
            limits=limits,
            changed=self._tunnel_over,
            traceparents=self._spans.traceparents() if self._spans is not None else None,
        )
        self._hellos = Hellos(
            limits,
            admit=self._admission.enter,
            turned_away=self._turned_away,
            taken=self._tunnels.accept,
            refused=self._refused,
        )
        self._listeners = Listeners(
            self._hellos.accepted, siblings=self._worker.count, ports=self._worker.ports
        )

        # The other ports.
        self._hbone = self._hbone_listener()
        lists: dict[str, Handler] = {
            "/tunnels": self._show_tunnels,
            "/connections": self._show_connections,
            "/certs": _show_certificates,
            "/tokens": self._show_tokens,
            "/config_dump": self._dump_config,
        }
        self._overview = OverviewPart(
            self._tunnels,
            self._hbone,
            self._reverse,
            readiness=self.readiness,
            pool=self._pool,
            admission=self._admission,
            metrics=self.metrics,
            file=config_file,
            tokens=self._tokens.statuses,
            connections=self._open_connections,
            wall_clock=wall_clock,
        )
        self._ports = OpsPorts(
            ready=self.readiness.healthz,
            live=_alive,
            scrape=self._scrape,
            admin={
                **page.handlers(),
                "/overview": self._show_overview,
                "/config": lambda _: admin.config(self._config),
                **lists,
                log_level.PATH: _show_log_level,
            },
            changes={log_level.PATH: log_level.changed},
        )
        self._link_server = LinkServer(link.requests, {**self._link_handlers(), **lists}) if link else None

        # The end, and what is measured.
        self._drain = Drain(
            self.readiness,
            self._ports,
            self._reloads,
            self._listeners,
            self._hbone,
            self._reverse,
            limits=lambda: self._config.limits,
            open_connections=self._open_connections,
            second_cuts_short=link is None,
        )
        self._watch_limits()
        self._loop_lag = LoopLag(self.metrics.histogram(families.LOOP_LAG, LAG_BUCKETS_S))
        if self._spans is not None:
            self.metrics.add(self._spans.families)
        if self._exporting is not None:
            self.metrics.add(self._exporting.families)
        if link is None:
            self.metrics.watch(families.READY, lambda: float(self.readiness.ready))
            self.metrics.add(self._reloads.families)
            self.metrics.add(self._ports.families)

    async def run(self) -> int:
        """Serves until a signal ends it; returns the exit code.

        Raises:
            UnavailableError: a port cannot be had.
        """
        loop = asyncio.get_running_loop()
        started = self.readiness.task("listeners")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain.request, number)
        loop.add_signal_handler(signal.SIGHUP, self._reloads.request)
        try:
            await self._start()
            started.done()
            if self._worker.link is None:
                log_versions()
            await self._drain.requested.wait()
            await self._drain.run()
        finally:
            await self._close()
        if self._worker.link is None and self._drain.forced.is_set():
            return EXIT_SIGINT if self._drain.signal is signal.SIGINT else EXIT_SIGTERM
        return EXIT_OK

    # Start and stop.

    async def _start(self) -> None:
        link = self._worker.link
        if link is None or self._link_server is None:
            log_warnings(self._config)
            await self._ports.start(self._config)
        else:
            asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._drain.cut_short)
            watch_parent(link.parent_pipe, self._drain.requested)
            self._link_server.start()
        await self._listeners.open(self._config.listen)
        if self._hbone is not None:
            await self._hbone.start()
        await self._follow_lists()
        self._memory.start()
        if self._exporting is not None:
            self._exporting.start()
        self._loop_lag.start()
        self._warm.use(self._tunnels.routes.warm(), at_start=True)
        if self._reverse is not None:
            await self._reverse.start()
        self._reloads.watch(changes=link is None)

    async def _close(self) -> None:
        self._listeners.abort()
        self._reloads.close()
        stopped = StoppedError("the gateway stops")
        for peek in list(self._hellos.peeking):
            peek.stop(stopped)
        self._tunnels.abort_all(stopped)
        if self._hbone is not None:
            await self._hbone.close(stopped)
        self._clock.close()
        self._memory.close()
        self._loop_lag.close()
        if self._reverse is not None:
            await self._reverse.close(str(stopped))
        self._warm.close()
        self._tokens.close()
        await self._pool.close(0.0 if self._drain.forced.is_set() else LAST_BYTES_S)
        self._forward.close()
        self._endpoints.close()
        self._addresses.close()
        await self._ports.close()
        if self._link_server is not None:
            self._link_server.close()
        self._access_log.close()
        self._access_log.finished = None
        if self._exporting is not None:
            await self._exporting.close()
        if self._span_pipe is not None:
            self._span_pipe.close()

    # Reload.

    async def _apply(self, config: GatewayConfig) -> None:
        """Applies a new configuration. Its routes, listeners and limits hold for new connections; for open
        ones only the idle timeout and the memory budget change. Raises HboneError, and changes nothing, if it
        cannot be applied."""
        if self._config.hbone is not None:  # whose certificates are fixed, inside of tunnels as well
            of_port = with_certificates(config.routes, self._config.hbone.certificates)
            config = replace(config, routes=of_port)
        routes = await asyncio.to_thread(_prepare, config)
        await self._listeners.open(config.listen)  # raises if a drain has begun meanwhile
        self._tunnels.routes = routes
        self._warm.use(routes.warm())
        self._config = keep_fixed(self._config, config)
        await self._follow_lists()
        if self._cluster_list is not None and not config.awaits_cluster:
            self._cluster_list.done()
        if self._hbone is not None and self._config.hbone is not None:
            self._hbone.apply(self._config.hbone)
        if self._reverse is not None and self._config.reverse is not None:
            self._reverse.apply(self._config.reverse)
        self._use_limits()
        await self._listeners.keep_only(config.listen)

    async def _follow_lists(self) -> None:
        cluster = self._config.cluster
        reaches = cluster is not None and any(rule.services for rule in cluster.allow)
        await self._endpoints.follow(cluster.folder if cluster is not None and reaches else None)
        takes = self._hbone is not None and any(route.takes_connects for route in self._config.routes)
        await self._addresses.follow(cluster.folder if cluster is not None and takes else None)

    def _use_limits(self) -> None:
        """Hands the limits of the configuration to all that go by them."""
        limits = self._config.limits
        for user in (
            self._admission,
            self._new_audiences,
            self._upstreams,
            self._forward,
            self._tunnels,
            self._hellos,
            self._hbone,
            self._reverse,
        ):
            if user is not None:
                user.use_limits(limits)
        self._pool.set_limits(limits.pool())
        self._use_lookup_limits()
        self._clock.idle_s = limits.idle_timeout_s
        self._clock.lifetime_s = limits.max_tunnel_lifetime_s
        self._memory.most_bytes = self._most_buffered()

    def _use_lookup_limits(self) -> None:
        limits = self._config.limits
        share = self._worker.share
        most, most_each = share(limits.max_lookups), share(limits.max_lookups_per_client)
        self._resolver.clients.limits = resolver.client_limits(most, most_each)

    # Connections.

    def _turned_away(self, peer: str, error: LimitError) -> None:
        self._report(TunnelRecord(peer=peer), error)

    def _refused(self, peer: str, started: float, error: HboneError) -> None:
        self._admission.leave(peer)
        self._report(TunnelRecord(peer=peer), error, asyncio.get_running_loop().time() - started)
        self._tunnel_over()

    def _open_connections(self) -> int:
        return len(self._hellos.peeking) + len(self._tunnels.open)

    def _most_buffered(self) -> int:
        """Bytes; 0: no bound."""
        most = self._config.limits.max_buffered_bytes
        most = default_most_bytes() if most is None else most
        return self._worker.share(most) if most else 0

    def _holders(self) -> Iterator[Holder]:
        yield from self._tunnels.open
        if self._hbone is not None:
            yield from self._hbone.tunnels.open

    def _other_bytes(self) -> int:
        """Held outside of tunnels: what HTTP/2 connections have to send, and incomplete hellos."""
        of_hbone = self._hbone.buffered_bytes if self._hbone is not None else 0
        return (
            of_hbone + self._pool.buffered_bytes + sum(peek.buffered_bytes for peek in self._hellos.peeking)
        )

    def _tunnel_over(self) -> None:
        self._drain.connection_over()

    def _hbone_listener(self) -> HboneListener | None:
        if self._config.hbone is None:
            return None
        return HboneListener(
            self._config.hbone,
            self._access_log,
            self.metrics,
            limits=self._config.limits,
            changed=self._tunnel_over,
            refusals=self._admission.refusals,
            is_full=lambda: self._memory.full,
            siblings=self._worker.count,
            ports=self._worker.hbone_ports,
            post_ports=self._worker.post_ports,
            share=self._worker.share,
            wall_clock=self._wall_clock,
            by_route=self._tunnels,
            name_of=lambda address: self._addresses.value.get(address),
        )

    def _reverse_listener(self) -> ReverseListener | None:
        if self._config.reverse is None:
            return None
        return ReverseListener(
            self._config.reverse,
            self._access_log,
            self.metrics,
            refusals=self._admission.refusals,
            is_full=lambda: self._memory.full,
            siblings=self._worker.count,
            ports=self._worker.reverse_ports,
            share=self._worker.share,
            limits=self._config.limits,
            wall_clock=self._wall_clock,
        )

    # What operators see.

    def _watch_limits(self) -> None:
        """Adds the metrics of each bound, and of what came up against it."""
        admission, memory, pipes = self._admission, self._memory, self._forward.pipes
        for gauge, read in (
            (families.CONNECTIONS_OPEN, self._open_connections),
            (families.CONNECTIONS_LIMIT, lambda: admission.most_connections),
            (families.SOURCE_CONNECTIONS_MAX, lambda: admission.sources.largest),
            (families.SOURCE_CONNECTIONS_LIMIT, lambda: admission.most_per_source),
            (families.TUNNELS_STARTING_LIMIT, lambda: admission.most_starting),
            (families.BUFFERED_BYTES, lambda: memory.held_bytes),
            (families.BUFFERED_BYTES_LIMIT, lambda: memory.most_bytes),
            (families.WINDOW_GROWTH_BYTES, lambda: window_growth.PROCESS.granted_bytes),
            (families.WINDOW_GROWTH_BYTES_LIMIT, lambda: memory.growth_bytes),
            (families.UPSTREAM_WAITING_LIMIT, lambda: self._pool.limits.max_waiting),
            (families.SPLICE_PIPES, lambda: pipes.lent),
            (families.SPLICE_PIPES_LIMIT, lambda: pipes.most),
            (families.NEW_AUDIENCES_LEFT, lambda: self._new_audiences.left),
            (families.NEW_AUDIENCES_LIMIT, lambda: self._new_audiences.most),
        ):
            self.metrics.watch(gauge, read)
        self.metrics.add(admission.refusals.families)
        self.metrics.add(lambda: admission.route_families(self._config.routes))
        self.metrics.add(self._log_families)
        self.metrics.add(lambda: revocation_watch.families(self._revocations()))
        self.metrics.add(certificates_in_use.families)
        self.metrics.add(lambda: dns_metrics.families(self._resolver.numbers))
        tokens, cache = self._tokens, self._tokens.cache
        self.metrics.add(
            lambda: self._token_metrics.families(
                tokens.statuses(), (cache.size, cache.most), (cache.new_size, cache.most_new)
            )
        )

    def _revocations(self) -> Iterator[tuple[str, str, Counted]]:
        for place, listener in (("hbone", self._hbone), ("reverse", self._reverse)):
            if listener is not None and listener.revocations is not None:
                yield "destination", place, listener.revocations
        for watch in self._hbone.inner_revocations if self._hbone is not None else ():
            yield "source", "routes", watch
        for watch in self._pool.watches.values():
            yield "source", "routes", watch

    def _log_families(self) -> Iterator[Metric]:
        yield families.ACCESS_LOG_DROPPED.value(self._access_log.dropped)

    def _link_handlers(self) -> dict[str, Handler]:
        """What one of several workers answers to the ops process, beside the lists of the admin port."""
        return {
            "/started": self.readiness.healthz,
            "/ready": self._ports.ready,
            "/live": _alive,
            "/metrics": self._encode_metrics,
            "/reload": self._reload,
            "/overview": self._overview.response,
            **log_level.of_worker(),
        }

    def _encode_metrics(self, _: Request) -> Response:
        self._count_bytes()
        return Response(200, str(os.getpid()), metric_sums.encode(self.metrics.collect()))

    async def _reload(self, _: Request) -> Response:
        await self._reloads.now()
        return Response.text(200, "reloaded")

    def _scrape(self, request: Request) -> Response:
        self._count_bytes()
        content_type, body = self.metrics.render(request.headers.get("accept", ""))
        return Response(200, content_type, body)

    def _count_bytes(self) -> None:
        self._tunnels.count_bytes()
        if self._hbone is not None:
            self._hbone.count_bytes()

    def _show_overview(self, request: Request) -> Response:
        return overview.shown(
            {self._worker.number: self._overview.part(overview.wanted(request))},
            reload_is_good=self._reloads.last_succeeded,
        )

    def _dump_config(self, _: Request) -> Response:
        return admin.config_dump(
            self._config,
            self._file,
            routes=self._tunnels.routes.routes,
            tokens=from_env(self._environ, self._config.tokens),
        )

    def _show_tunnels(self, _: Request) -> Response:
        of_hbone = self._hbone.rows() if self._hbone is not None else []
        return Response.json([*(tunnel.row() for tunnel in self._tunnels.open), *of_hbone])

    def _show_connections(self, _: Request) -> Response:
        now = asyncio.get_running_loop().time()
        return admin.connections(self._pool, now, self._reverse.rows(now) if self._reverse else [])

    def _show_tokens(self, _: Request) -> Response:
        return admin.tokens(self._tokens.statuses(), self._wall_clock())


def _prepare(config: GatewayConfig) -> RouteTable:
    """The slow part of a reload, for a thread. Reads the CA files again, for new connections. Raises
    UnavailableError if one of them has no certificates any more."""
    routes = RouteTable(config.routes)
    for ca in {route.ca for route in config.routes if route.tunnel and route.tunnel.scheme == "https"}:
        read_again(ca)
    return routes


def _name(origin: Origin) -> str:
    return f"{origin.scheme}://{origin.host}"


def _show_log_level(request: Request) -> Response:
    return log_level.shown(request, {1: logs.level()})


def _show_certificates(_: Request) -> Response:
    return Response.json(certificates_in_use.rows())


def _alive(_: Request) -> Response:
    return Response.text(200, "alive")
