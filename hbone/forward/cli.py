"""`hbone forward`: ports of this machine led into a container, and ports of a container led here.

What fails at the start ends it: a target that is not there, a token that is refused, a port that is taken.
What fails later is a line on standard error, and is tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Awaitable, Mapping
from typing import Any

from hbone import destination
from hbone.destination import Destination
from hbone.forward import flags, reports, service
from hbone.forward.connections import Connections, Way
from hbone.forward.flags import LocalForward
from hbone.forward.local_ports import LocalPort, TargetPort
from hbone.forward.remote_port import RemotePort
from hbone.forward.reports import Troubles, amount, log
from hbone.forward.service import Service
from shared import loop, open_files
from shared.address import Address
from shared.errors import DialError, HboneError, UsageError
from shared.net.pool.pool import Pool
from shared.tasks import spawn
from shared.tunnel.tunnel_request import TUNNEL_PREFIX, target_name

FINISH_S = 5.0
"""For open connections to end, after the first signal; a second one ends them at once."""

CLOSE_S = 1.0
"""For the HTTP/2 connections, after that."""

UNNAMED = "unnamed"
"""The target of a SERVICE that names none; -L has to, then."""


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Forwards until a signal ends it; returns the exit code, 128+N for signal N. Raises HboneError."""
    plan = Plan(options)
    open_files.allow_many()
    return loop.run(_run(plan, environ))


class Plan:
    """What the command line asks for, checked as far as it can be without a network."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises UsageError."""
        self.options = options
        self.local = [flags.local_forward(text) for text in options.local or ()]
        self.remote = [flags.remote_forward(text) for text in options.remote or ()]
        self.socks = [flags.listening("-D", text) for text in options.socks or ()]
        if not (self.local or self.remote or self.socks):
            raise UsageError("nothing to forward: write -L, -R or -D; see hbone forward --help")
        ports = [forward.port for forward in self.remote]
        if len(set(ports)) < len(ports):
            raise UsageError("-R: a port in the container can be listened on once")
        self.through_gateway = options.sni is not None
        if self.through_gateway:
            self._check_gateway()
        elif options.cert or options.key or options.peer:
            raise UsageError("--cert, --key and --peer need --sni")

    def _check_gateway(self) -> None:
        options = self.options
        if self.remote or self.socks:
            raise UsageError("--sni: only -L goes through a gateway")
        if options.token_file or options.audience or options.connect:
            raise UsageError("--sni: no token is sent to a gateway, and SERVICE is its address")
        for forward in self.local:
            if forward.target:
                raise UsageError(
                    f"-L {forward.listen}:{forward.target}: "
                    "with --sni the name chooses the target; write [ADDR:]PORT"
                )


async def _run(plan: Plan, environ: Mapping[str, str]) -> int:
    forwards = Forwards(plan, environ)
    stopped: asyncio.Queue[signal.Signals] = asyncio.Queue()
    running_loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays
            running_loop.add_signal_handler(number, stopped.put_nowait, number)
    serving = spawn(forwards.serve(), name="forward")
    waiting = spawn(stopped.get(), name="wait for a signal")
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises what has ended it
        number = await waiting
        ending = spawn(forwards.finish(), name="end of the forwards")
        again = spawn(stopped.get(), name="wait for another signal")
        await asyncio.wait({ending, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        ending.cancel()
        return 128 + number
    finally:
        serving.cancel()
        waiting.cancel()
        await forwards.close()


class Forwards:
    """All forwards of one command."""

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._options = plan.options
        self._environ = environ
        options = plan.options
        self._screen = reports.set_up(self._rates, environ, quiet=options.quiet, verbose=options.verbose)
        self._troubles = Troubles()
        self._connections = Connections(self._troubles)
        self._pool: Pool | None = None
        self._services: list[Service] = []
        self._ports: list[LocalPort] = []
        self._remote: list[RemotePort] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Opens everything and serves it, for ever. Raises HboneError if something is not there at the
        start."""
        if self._plan.through_gateway:
            await self._open_gateway()
        else:
            await self._open_service()
        log.info("ready")
        self._screen.with_time = True
        self._screen.start()
        await self._failed

    async def _open_service(self) -> None:
        options, plan = self._options, self._plan
        self._pool = service.pool_of(options.keepalive)
        found = await destination.find(options.url, options, self._environ, default_port=UNNAMED)
        own = self._service(found)
        ways = [own.target(_target_of(forward, found)) for forward in plan.local]
        for forward, way in zip(plan.local, ways, strict=True):
            self._ports.append(TargetPort(forward.listen, self._connections, way))
        if plan.socks:
            from hbone.forward.socks_port import Reach, SocksPort

            reach = Reach(own, options.url, options, self._environ, self._service)
            self._ports += [SocksPort(place, self._connections, reach) for place in plan.socks]
        for port in self._ports:  # before anybody is asked: a port that is taken is found at once
            await port.open()
        different = {str(way): way for way in ways}
        checks: dict[str, Awaitable[None]] = {name: way.check() for name, way in different.items()}
        if not (checks or plan.remote):
            checks[str(own)] = own.connected()
        await self._check(own, checks)
        for port in self._ports:
            log.info("%s", port)
        await self._open_remote(own)

    async def _check(self, own: Service, checks: Mapping[str, Awaitable[None]]) -> None:
        """Raises the first error of `checks`, by what they are about, or says them, with --keep-trying."""
        found = await asyncio.gather(*checks.values(), return_exceptions=True)
        wrong = {way: error for way, error in zip(checks, found, strict=True) if error is not None}
        for way, error in wrong.items():
            if not (isinstance(error, HboneError) and self._options.keep_trying):
                raise error
            self._troubles.lost(way)
            if isinstance(error, DialError):
                own.recover()
        for text in dict.fromkeys(map(str, wrong.values())):  # each way may have the same to say
            log.warning("%s", text)

    async def _open_remote(self, own: Service) -> None:
        left = len(self._plan.remote)
        if not left:
            return
        listening = asyncio.Event()

        def one_listens() -> None:
            nonlocal left
            left -= 1
            if not left:
                listening.set()

        for forward in self._plan.remote:
            port = RemotePort(forward, own, self._troubles)
            self._remote.append(port)
            run = port.run(one_listens, keep_trying=self._options.keep_trying)
            task = spawn(run, name=f"port {forward.port} in the container")
            self._tasks.add(task)
            task.add_done_callback(self._remote_ended)
        waiting = spawn(listening.wait(), name="wait for ports in the container")
        waits: set[asyncio.Future[Any]] = {waiting, self._failed}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            waiting.cancel()

    def _remote_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _open_gateway(self) -> None:
        from hbone.forward.sni_gateway import SniGateway

        options = self._options
        gateway: Way = SniGateway.of(
            _gateway_address(options.url),
            options.sni,
            options.cert,
            options.key,
            options.ca,
            options.peer or (),
            options.keepalive,
        )
        self._ports += [TargetPort(one.listen, self._connections, gateway) for one in self._plan.local]
        for port in self._ports:
            await port.open()
        try:
            leg = await gateway.open()
            leg.abort()
        except HboneError as error:
            if not options.keep_trying:
                raise
            self._troubles.failed(str(gateway), str(error))
        for port in self._ports:
            log.info("%s", port)

    def _service(self, found: Destination) -> Service:
        assert self._pool is not None
        made = Service(found, self._pool, self._troubles)
        self._services.append(made)
        return made

    def _rates(self) -> str:
        carried = [port.carried_bytes for port in self._remote]
        to_container, from_container = map(sum, zip(*carried, strict=True)) if carried else (0, 0)
        line = self._connections.rates()
        if not carried:
            return line
        count = sum(port.open_connections for port in self._remote)
        return f"{line}; -R: {count} open, {amount(from_container)} from it, {amount(to_container)} to it"

    async def finish(self) -> None:
        """Accepts nothing more, and waits for what is open."""
        for port in self._ports:
            port.close()
        for remote in self._remote:
            remote.drain()
        try:
            async with asyncio.timeout(FINISH_S):
                if self._tasks:
                    await asyncio.wait(self._tasks)
                await self._connections.finish(FINISH_S)
        except TimeoutError:
            pass  # `close` ends the rest

    async def close(self) -> None:
        """Ends everything."""
        for port in self._ports:
            port.close()
        for task in list(self._tasks):
            task.cancel()
        for one in self._services:
            one.close()
        await self._connections.finish(0.0)
        if self._pool is not None:
            await self._pool.close(CLOSE_S)
        self._troubles.close()
        self._screen.stop()


def _target_of(forward: LocalForward, found: Destination) -> str:
    """The name of the target of `forward`: its own, else that in the URL. Raises UsageError if there is
    none."""
    named = forward.target or target_name(found.target.path.encode()) or UNNAMED
    if named == UNNAMED:
        text = f"-L {forward.listen}: no target; write [ADDR:]PORT:TARGET"
        raise UsageError(f"{text}, or a URL such as https://HOST{TUNNEL_PREFIX}DB")
    return named


def _gateway_address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise UsageError(f"{text}: with --sni the gateway's HOST:PORT is needed: {error}") from error
