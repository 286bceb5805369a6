"""krun as a whole: makes every long-lived object, starts them in order, stops them.

Start: what kubelet would mount, if krun is asked for it; the workload's certificates and tokens, if krun gets
them; the rules that capture outbound traffic, if there are to be any; the mTLS end on 15003; a file for the
app's gRPC, if it is asked for; the app, until it listens on its port, or answers another probe, whoever
starts it; then the tunnel port 15009, because the app could not serve an earlier request. End: SIGTERM goes
to the app at once. New streams are refused, and open ones may finish, until the app has ended or the drain
timeout is over. An app that stays is killed in time for all else to end before Cloud Run kills the container.
The app's exit code is krun's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.config.layers import Layers
from agent.config.settings import Settings
from agent.identity.workload_identity import WorkloadIdentity
from agent.mtls.mtls_end import MtlsEnd
from agent.ops.ops import GRPC, Ops
from shared import open_files, ports
from shared.address import Address
from shared.errors import (
    EXIT_OK,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    LimitError,
)
from shared.net.legs.tcp_end import last_bytes_left
from shared.ops.access_log import AccessLog
from shared.tasks import spawn
from shared.tunnel.tunnel_record import TunnelRecord

if TYPE_CHECKING:
    from agent.capture.capture import Capture
    from agent.egress.egress import Egress
    from agent.launch.launcher import App
    from agent.memory import Memory
    from agent.mounts.mounts import Mounts
    from agent.proxy.downstream import Caller, Downstream
    from agent.proxy.request_record import Record
    from agent.proxyless.bootstrap_file import BootstrapFile
    from agent.services.service_proxy import ServiceProxy
    from agent.ssh.sshd import Sshd
    from agent.tunnels.requests import Requests
    from agent.tunnels.reverse import ReverseTunnels
    from agent.tunnels.tunnel_port import TunnelPort
    from shared.credentials.kubernetes.kubernetes_access import Access
    from shared.net.http2.connection import Connection

log = logging.getLogger("hbone.agent")

FLUSH_S = 1.0
"""Seconds after the end of the app to send the last bytes of its responses."""

CLOSE_S = 0.5
"""For Envoy to end, where the app has taken all the time that it had."""

CAPTURE_CLOSE_S = 0.3
"""For rules to be removed, at the least: it takes tens of milliseconds."""

EXIT_SIGKILL = 137
"""The app's exit code if the kernel has killed it, which it does when the container has no memory left."""

START_EXITS = {signal.SIGTERM: EXIT_SIGTERM, signal.SIGINT: EXIT_SIGINT}
"""krun's exit code after a signal that came before the app was started."""


class Agent:
    """The running agent."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        environ: Mapping[str, str],
        access_log: AccessLog,
        layers: Layers | None = None,
        access: Access | None = None,
    ) -> None:
        """`command` is the app's, empty for a sidecar; `environ` is krun's, of which the app gets a part.
        `layers` are what `settings` were read from; None: `environ` alone. `access` leads to the cluster that
        MESH names; None: it names none."""
        self._settings = settings
        self._command = command
        self._environ = environ
        self._access_log = access_log
        self._connections: set[Connection] = set()
        self._port: TunnelPort | None = None
        self._reverse: ReverseTunnels | None = None
        self._cluster_access = access
        self._mounts: Mounts | None = None
        self._identity = WorkloadIdentity(settings, access)
        self._memory: Memory | None = None
        self._capture: Capture | None = None
        self._mtls_end = MtlsEnd(
            settings,
            environ.get("PATH"),
            self._over,
            self._refusal,
            self._serve_request,
            self._captures_outbound,
            access,
        )
        self._services: ServiceProxy | None = None
        self._egress: Egress | None = None
        self._sshd: Sshd | None = None
        self._grpc: BootstrapFile | None = None
        self._app: App | None = None
        self._app_listens = False  # its port has been open
        self._stopping_app = False  # by us, and not for a signal
        self._overdue: asyncio.TimerHandle | None = None  # when the app is killed
        self._end_by: float | None = None  # by the loop's clock
        self._requests: Requests | None = None
        self._ops = Ops(settings, layers or Layers.of(environ), self._mtls_end)
        self._ops.metrics.connections = lambda: len(self._connections)
        self._ops.metrics.dropped_lines = lambda: access_log.dropped
        self._stop = asyncio.Event()
        self._stop_signal: signal.Signals | None = None
        self._files = 0  # that may be open
        self._ignored_signals: frozenset[signal.Signals] = frozenset()  # inherited
        self._idle = asyncio.Event()

    async def run(self) -> int:
        """Serves until the app or a signal ends it; returns the exit code.

        Raises:
            UnavailableError: a port, a program or a file cannot be had; the exit code is the error's.
            HboneError: what `Mounts.start`, `WorkloadIdentity.start` and `MtlsEnd.start` raise.
        """
        from agent.launch.launcher import ignored_signals

        loop = asyncio.get_running_loop()
        self._files = open_files.allow_many()
        self._ignored_signals = ignored_signals()
        for number in START_EXITS.keys() - self._ignored_signals:  # until there is an app to get them, too
            loop.add_signal_handler(number, self._signalled, number)
        try:
            steps = [("identity", self._identity.start), ("mTLS end", self._mtls_end.start)]
            if self._settings.grpc is not None:
                steps.append((GRPC, self._make_bootstrap_file))
            if (mounts := self._make_mounts()) is not None:
                steps.insert(0, (self._ops.first("mounts"), mounts.start))
                self._ops.metrics.add(mounts.families)
            await self._ops.start()
            self._start_sshd()
            for name, start in steps:
                await self._unless_stopped(start(), name)
                self._ops.started(name)
                if self._stop_signal is not None:
                    return START_EXITS[self._stop_signal]
            if self._settings.capture.services is not None:
                from agent.services.service_proxy import ServiceProxy

                self._services = ServiceProxy(self._settings, self._refusal)
                where = await self._services.start(self._settings.capture.services)
                log.info("services of the project on http://%s", where)
            await self._start_egress()
            self._settings = dataclasses.replace(self._settings, inbound_listen=self._mtls_end.address)
            if self._command:
                if not await self._start_app():
                    return await self._app_exit()
            elif not await self._answered():
                assert self._stop_signal is not None
                return START_EXITS[self._stop_signal]
            self._ops.started("app")
            await self._open()
            self._ops.started("tunnels")
            return await self._serve()
        finally:
            await self._close()

    # Start.

    async def _unless_stopped(self, starting: Coroutine[Any, Any, None], name: str) -> None:
        """Runs `starting` to its end, or until a signal comes."""
        first = spawn(starting, name=name)
        stopped = spawn(self._stop.wait(), name="wait for a signal")
        try:
            await asyncio.wait({first, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                await first
        finally:
            first.cancel()
            stopped.cancel()
            await asyncio.wait({first, stopped})

    async def _captures_outbound(self, inbound: str, pilot_agent: Path | None) -> bool:
        """Whether the app's connections get to the Envoy of the mTLS end `inbound`, one way or the other.
        Raises UnavailableError."""
        if pilot_agent is None and self._settings.capture.mode in ("auto", "none"):
            return False  # as most starts, which need none of it
        from agent.capture.capture import Capture

        egress = self._settings.egress
        self._capture = Capture(
            self._settings.capture,
            self._environ.get("PATH"),
            proxy_taken_by="HBONE_EGRESS_APP_PROXY" if egress is not None and egress.app_proxy else "",
        )
        await self._capture.start(inbound, pilot_agent)
        self._ops.outbound = self._capture.mode
        return self._capture.mode != "none"

    def _make_mounts(self) -> Mounts | None:
        """None: nothing is to be mounted, and no variable of the app's is a reference."""
        settings = self._settings.mounts
        if not settings.asks_cluster and not (self._command and settings.has_references(self._environ)):
            return None
        from agent.mounts.mounts import Mounts

        environ = self._app_environment() if self._command else None
        self._mounts = Mounts(settings, environ, self._cluster_access)
        return self._mounts

    def _app_environment(self) -> dict[str, str]:
        from agent.launch.app_environment import app_environment

        return app_environment(self._environ, self._settings)

    async def _make_bootstrap_file(self) -> None:
        from agent.proxyless.bootstrap_file import BootstrapFile

        assert self._settings.grpc is not None
        self._grpc = BootstrapFile(self._settings, self._settings.grpc)
        await self._grpc.start()

    def _start_sshd(self) -> None:
        """Looks for its keys, if any place is named where they may be."""
        settings = self._settings.ssh
        access = self._cluster_access
        if not (settings.auth or settings.folder or settings.asks_cluster or access is not None):
            return
        from agent.ssh.sshd import Sshd

        self._sshd = self._ops.sshd = Sshd(settings, self._session_environment, access)
        self._ops.metrics.add(self._sshd.families)
        self._sshd.start()

    def _session_environment(self) -> Mapping[str, str]:
        """That of ssh sessions: the app's, as it was started."""
        if self._app is not None:
            from agent.launch.app_environment import of_process

            if environ := of_process(self._app.pid):
                return environ
        return {**self._app_environment(), "PORT": str(self._settings.app.port)}

    async def _start_egress(self) -> None:
        """Opens the app's way into the mesh, which it may need as soon as it is started."""
        if self._settings.egress is None:
            return
        from agent.egress.egress import Egress
        from agent.tunnels.descriptors import egress_share

        most = egress_share(self._settings, self._files)
        self._egress = Egress(
            self._settings, self._settings.egress, most=most, refusal=self._refusal, over=self._egress_over
        )
        self._ops.metrics.egress = self._egress
        self._ops.metrics.add(self._egress.families)
        self._files -= most
        await self._egress.start()

    async def _start_app(self) -> bool:
        """Starts the app and waits for its port; False when it ended before."""
        from agent.launch.launcher import App
        from agent.launch.startup import accepts, ready

        settings = self._settings
        if await accepts(settings.app):
            log.warning(
                "another process listens on %s before the app has started, and krun would take it for the "
                "app: end it, or set HBONE_APP to another port",
                settings.app,
            )
        environ = self._app_environment() if self._mounts is None else self._mounts.environment()
        if self._grpc is not None:
            from agent.launch.app_environment import with_grpc

            environ = with_grpc(environ, self._grpc.path)
        if (proxy := self._proxy()) is not None:
            from agent.launch.app_environment import with_proxy

            environ = with_proxy(environ, proxy)
        self._app = await App.start(
            self._command,
            environ,
            settings.app.port,
            ignored=self._ignored_signals,
        )
        self._app.exited.add_done_callback(self._app_ended)
        self._app.forward_signals(self._signalled)
        if self._stop.is_set():  # it came while the app was being started, and was not passed on
            self._app.send(signal.SIGTERM)
        self._app_listens = await ready(settings.probe, settings.app_start_timeout_s, self._app.exited)
        return self._app_listens

    def _proxy(self) -> Address | None:
        """What the app's HTTP_PROXY is to be."""
        if self._services is not None:
            return self._settings.capture.services
        if self._egress is not None and self._egress.proxy is not None:
            egress = self._settings.egress
            if egress is not None and egress.app_proxy:
                return self._egress.proxy
        if self._capture is not None and self._capture.mode == "proxy":
            return Address("127.0.0.1", ports.HTTP_PROXY)
        return None

    async def _answered(self) -> bool:
        """Waits for the app, which somebody else starts; False when a signal comes before."""
        from agent.launch.startup import ready

        stopped = spawn(self._stop.wait(), name="wait for a signal")
        try:
            return await ready(self._settings.probe, self._settings.app_start_timeout_s, stopped)
        finally:
            stopped.cancel()

    async def _open(self) -> None:
        # Imported only now: an app that ends before it listens needs none of them.
        from agent.memory import Memory
        from agent.tunnels.descriptors import shares_of
        from agent.tunnels.requests import Requests
        from agent.tunnels.tunnel_port import TunnelPort

        self._memory = Memory(self._settings, self._connections, self._mtls_end)
        if self._services is not None:
            self._memory.services = self._services.requests
        self._memory.egress = self._egress
        shares = shares_of(self._settings, self._files, self._mtls_end.files_per_tunnel)
        self._mtls_end.limit(shares.tunnels)
        self._requests = self._memory.requests = Requests(
            self._settings,
            self._over,
            shares=shares,
            refusal=self._memory.refusal,
            app_refusal=self._memory.request_refusal,
            dial_sshd=None if self._sshd is None else self._sshd.connect,
            hbone=self._mtls_end,
        )
        self._memory.start()
        self._ops.metrics.requests, self._ops.metrics.memory = self._requests, self._memory
        self._ops.metrics.most_connections = shares.connections
        self._ops.connections = self._connections
        if self._settings.listen is not None:
            self._port = TunnelPort(
                most_connections=shares.connections,
                idle_timeout_s=self._settings.connection_idle_timeout_s or None,
                request=self._requests.serve,
                opened=self._connections.add,
                lost=self._lost,
                turned_away=self._turned_away,
                refusal=self._memory.refusal,
            )
            log.info("tunnels on %s", await self._port.open(self._settings.listen))
        if self._settings.reverse is not None:
            from agent.tunnels.reverse import ReverseTunnels

            self._reverse = ReverseTunnels(
                self._settings.reverse,
                self._settings.certificates,
                self._settings.dial_timeout_s,
                drain_timeout_s=self._settings.drain_timeout_s,
                trust=self._settings.trust(self._settings.reverse.peers),
                crl=self._settings.crl,
                request=self._requests.serve,
                opened=self._connections.add,
                lost=self._lost,
            )
            self._reverse.start()

    # Serving.

    async def _serve(self) -> int:
        stopped = spawn(self._stop.wait(), name="wait for a signal")
        waits: set[asyncio.Future[Any]] = {stopped}
        if self._app is not None:
            waits.add(self._app.exited)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await self._drain()
        return await self._app_exit()

    def _refusal(self) -> LimitError | None:
        """Why new tunnels are refused now; None if they are not."""
        return None if self._memory is None else self._memory.refusal()

    def _serve_request(self, request: Downstream, caller: Caller) -> None:
        """Answers a request of the built-in mTLS end's."""
        if self._requests is not None:
            self._requests.app.serve(request, caller)
        else:
            from agent.mtls.inbound import no_app

            no_app(request, caller)

    def _turned_away(self, peer: str, error: LimitError) -> None:
        record = TunnelRecord(peer=peer)
        record.fail(error)
        self._ops.over(record)
        record.write(self._access_log)

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._idle.set()

    def _signalled(self, number: int) -> None:
        if number in START_EXITS:
            who = "krun ends" if self._app is None else f"the app (pid {self._app.pid}) gets it, too"
            self._stop_signal = signal.Signals(number)
            log.info("%s: %s", self._stop_signal.name, who)
            self._stop.set()
            self._limit_end()

    def _limit_end(self) -> None:
        """After SIGTERM, which platforms send; SIGINT is a person's."""
        stop_s = self._settings.app_stop_s
        if self._stop_signal is signal.SIGTERM and stop_s is not None and self._end_by is None:
            loop = asyncio.get_running_loop()
            self._end_by = loop.time() + stop_s + CLOSE_S
            self._overdue = loop.call_later(stop_s, self._kill_app, stop_s)

    def _kill_app(self, stop_s: float) -> None:
        if self._app is not None and not self._app.exited.done():
            log.warning("app has not ended %g s after SIGTERM: killed", stop_s)
            self._app.send(signal.SIGKILL)

    def _app_ended(self, exited: asyncio.Future[int]) -> None:
        assert self._app is not None
        if exited.cancelled():
            return
        when = "" if self._app_listens else f" before it listened on {self._settings.app}"
        text = f"the app has ended{when}: {self._app.end}"
        if self._stop_signal is not None:
            code = f"; krun ends with {exited.result()}" if exited.result() == EXIT_SIGKILL else ""
            log.info("%s, after %s%s", text, self._stop_signal.name, code)
        elif self._stopping_app or exited.result() == EXIT_OK:
            log.info("%s", text)
        else:
            memory = ", perhaps because memory ran out" if exited.result() == EXIT_SIGKILL else ""
            log.warning("%s%s; krun ends with %d", text, memory, exited.result())

    async def _drain(self) -> None:
        """Tells the peers to open no new streams, and waits for the open ones until the drain timeout, or the
        end of the app. A connection ends when all its bytes have been sent, after the end of its last stream.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.drain_timeout_s
        self._ops.drain()
        if self._port is not None:
            await self._port.drain()
        if self._reverse is not None:
            self._reverse.stop()
        if self._requests is not None:
            self._requests.drain()
        for connection in list(self._connections):
            connection.drain()
        await self._mtls_end.drain()  # an Envoy that hangs takes its time
        if self._connections:
            self._idle.clear()
        elif (
            last_bytes_left().is_set() and not self._mtls_end.connections and self._app_uses_egress() is None
        ):
            return
        else:
            self._idle.set()
        timeout_s = self._settings.drain_timeout_s
        log.info(
            "draining: %d streams have up to %g s; open are %s",
            self._open_streams(),
            timeout_s,
            self._unfinished(),
        )
        idle = spawn(self._finished(), name="wait for the last stream")
        waits: set[asyncio.Future[Any]] = {idle}
        if self._app is not None:
            waits.add(self._app.exited)
        left_s = max(0.0, end - loop.time())
        await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self._app is not None and self._app.exited.done():
            await asyncio.wait({idle}, timeout=FLUSH_S)
        idle.cancel()
        if streams := self._open_streams():
            log.warning("end of the drain: %d streams are reset", streams)
        self._drop_connections()

    async def _finished(self) -> None:
        """Returns when the last stream has ended, and its last bytes have been read."""
        await self._idle.wait()
        await self._mtls_end.emptied()
        if (egress := self._app_uses_egress()) is not None:
            await egress.emptied()
        await last_bytes_left().wait()

    def _app_uses_egress(self) -> Egress | None:
        """Whose end a drain waits for, beside an app that krun has not started: it may have last words for
        the mesh. An app of ours ends first in any case."""
        egress = self._egress
        return egress if self._app is None and egress is not None and egress.tunnels else None

    def _drop_connections(self) -> None:
        for connection in list(self._connections):
            connection.abort("krun stops")

    def _unfinished(self) -> str:
        """What a drain waits for, as text."""
        assert self._requests is not None
        return (
            f"{self._requests.open_tunnels} tunnels, {self._requests.app.open_requests} requests to the app, "
            f"{self._mtls_end.connections} connections of the mTLS end"
        )

    def _open_streams(self) -> int:
        return sum(connection.open_streams for connection in self._connections)

    async def _app_exit(self) -> int:
        """Waits for the app to end by itself, and returns its exit code; EXIT_OK without an app."""
        if self._app is None:
            return EXIT_OK
        if not self._app.exited.done():
            log.info("waiting for the app (pid %d) to end", self._app.pid)
        return await self._app.wait()

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as last:  # upwards, and each whatever the others raise
            last.callback(self._access_log.close)
            last.push_async_callback(self._ops.close)
            if self._mounts is not None:
                last.callback(self._mounts.close)
            last.push_async_callback(self._identity.close)
            last.push_async_callback(self._close_mtls_end)
            if self._grpc is not None:
                last.callback(self._grpc.close)
            last.push_async_callback(self._close_capture)
            if self._services is not None:
                last.push_async_callback(self._services.close)
            if self._egress is not None:
                last.push_async_callback(self._egress.close)
            last.push_async_callback(self._stop_app)
            if self._sshd is not None:
                last.push_async_callback(self._sshd.close)
            if self._requests is not None:
                last.callback(self._requests.close)
            if self._memory is not None:
                last.callback(self._memory.close)
            last.callback(self._drop_connections)
            if self._reverse is not None:
                last.callback(self._reverse.close)
            if self._port is not None:
                last.callback(self._port.close)

    async def _stop_app(self) -> None:
        if self._app is not None and not self._app.exited.done():
            self._stopping_app = True
            await self._app.stop(self._settings.drain_timeout_s)
        if self._overdue is not None:
            self._overdue.cancel()

    async def _close_capture(self) -> None:
        if self._capture is not None:
            left_s = self._left_s()
            await self._capture.close(None if left_s is None else max(left_s, CAPTURE_CLOSE_S))

    async def _close_mtls_end(self) -> None:
        await self._mtls_end.close(self._left_s())

    def _left_s(self) -> float | None:
        """The seconds that are left for Envoy; None: there is no hurry."""
        return None if self._end_by is None else max(0.0, self._end_by - asyncio.get_running_loop().time())

    # Records.

    def _over(self, record: Record) -> None:
        """Of a tunnel, or of a connection or a request of the mTLS end."""
        self._ops.over(record)
        record.write(self._access_log)

    def _egress_over(self, record: TunnelRecord) -> None:
        """Of a tunnel of the app's own."""
        self._ops.over(record)
        record.name = record.name or None  # nothing was asked for that could be understood
        record.write(self._access_log)
