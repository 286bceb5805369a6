"""Several workers on the same ports: starts them, restarts those that die, passes signals on, waits for all.

The parent of `hgate --workers N` starts the workers and the ops process, which serves the admin, metrics and
health ports for all of them. Each worker listens on all addresses itself (SO_REUSEPORT): the kernel
distributes the connections, and a worker that dies breaks only its own.

The parent has no event loop and no thread, so that it can fork at any time. It forks after all imports: a
worker then has 7 MiB of its own instead of 22, and starts in milliseconds instead of 0.3 s.

The rules:

1. A process that dies, except during a drain, is started again: after FIRST_DELAY_S, and after twice as long
   each further time, until it has lived for LIVED_S. A process that exits with an error right after its first
   start (a port in use) ends all. An error that several processes have is printed once, by the parent.
2. SIGHUP goes to the ops process, which has every worker read the file again.
3. SIGTERM and SIGINT make all workers drain. A second signal cuts the drain short, a third kills. The ops
   process ends last.
4. Each process leads a process group of its own, so that a terminal's SIGINT reaches the parent alone. If the
   parent is killed, the others notice and drain.
5. The exit code is 0 if every worker ended in order, else the highest of theirs, or 128+N of a forced end's
   signal.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.config.config import load
from gateway.config.reload import log_warnings
from gateway.ports.listeners import Key, keys
from gateway.traces import trace_settings
from gateway.traces.exporting import Exporting
from gateway.traces.spans import SpanPipe
from gateway.workers.ops_process import OpsProcess
from gateway.workers.stopping import StopRequests
from gateway.workers.worker_link import LinkClient, ParentLink, Worker, socket_pair
from shared import loop
from shared.address import Address
from shared.backoff import doubled_s
from shared.credentials.token_sources.minters import minter_from_env
from shared.errors import EXIT_INTERNAL, EXIT_OK, HboneError
from shared.listen import unavailable
from shared.ops.access_log import AccessLog
from shared.ops.log import Format, one_line, set_worker

log = logging.getLogger("hbone.gateway")

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
"""Seconds before a dead process is started again: an error that comes back at once must not use up the
CPU."""

LIVED_S = 60.0
"""Seconds after which a process counts as well started."""

STARTING_S = 10.0
"""Seconds within which a process that exits has failed to start: a port in use, a wrong variable. The others
would fail, too."""

MAX_ERROR_BYTES = select.PIPE_BUF - 1
"""Of the error with which a process exits; a pipe takes as much in one piece (POSIX write(), PIPE_BUF)."""

_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_OPS = 0
"""The number of the ops process; workers count from 1."""


@dataclass(slots=True)
class _Child:
    """One of the processes, dead or alive."""

    number: int
    pid: int | None = None
    started: float = 0.0
    deaths: int = 0
    """Since it last lived for LIVED_S."""
    generation: int = 0
    start_at: float | None = None
    """When it is to be started again, by the steady clock."""

    @property
    def name(self) -> str:
        return "ops process" if self.number == _OPS else f"worker {self.number}"


class Workers:
    """The parent. Works in the process that calls `run`, and in no other thread."""

    def __init__(
        self,
        config_file: Path,
        environ: Mapping[str, str],
        count: int,
        log_format: Format | None,
        work: Callable[[AccessLog, Worker], Awaitable[int]],
    ) -> None:
        """`work` is what each worker does; it returns the exit code.

        Raises ConfigError if the file has a mistake, UsageError if a variable of `environ` is wrong,
        UnavailableError if an address cannot be had."""
        self._file = config_file
        self._work = work
        self._log_format = log_format
        self._count = count
        config = load(config_file)
        log_warnings(config)
        minter_from_env(environ, config.tokens)
        self._environ = environ
        self._traces = trace_settings.from_env(environ)
        self._span_pipe = SpanPipe.open() if self._traces is not None else None
        self._reserved = _Reserved("listen", config.listen)
        self._reserved_for_hbone = _Reserved("hbone", config.hbone.listen if config.hbone else ())
        self._reserved_for_posts = _Reserved("hbone", config.hbone.tunnel_listen if config.hbone else ())
        self._reserved_for_reverse = _Reserved("reverse", config.reverse.listen if config.reverse else ())
        for purpose in ("health", "metrics", "admin"):  # the ops process' own, which would find out later
            address = getattr(config, purpose)
            _Reserved(purpose, () if address is None else (address,)).release()
        self._requests = {number: socket_pair() for number in range(1, count + 1)}
        self._children = [_Child(number) for number in range(count + 1)]
        self._parent_pipe, self._parent_end = os.pipe()
        self._errors, self._errors_end = os.pipe()
        os.set_blocking(self._errors, False)
        self._printed: dict[bytes, float] = {}  # errors, and when, by the steady clock
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may be ignored by inheritance
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._stops = StopRequests()
        self._code = EXIT_OK
        self._has_failed = False

    def run(self) -> int:
        """Serves until a signal ends it; returns the exit code."""
        gc.collect()
        gc.freeze()  # what is there now is shared; the collector must not touch it in every worker
        gc.enable()
        for child in self._children:
            self._start(child)
        while self._workers_left():
            self._wait()
        ops_process = self._children[_OPS]
        self._kill(ops_process, signal.SIGQUIT)
        while ops_process.pid is not None:
            self._wait()
        return self._code

    def _workers_left(self) -> bool:
        return any(child.pid is not None or child.start_at is not None for child in self._children[1:])

    def _wait(self) -> None:
        """Waits until a signal comes, or until it is time to start a process again."""
        due = min((child.start_at for child in self._children if child.start_at is not None), default=None)
        if due is None:
            self._signalled(signal.sigwaitinfo(_SIGNALS).si_signo)
        elif info := signal.sigtimedwait(_SIGNALS, max(0.0, due - time.monotonic())):
            self._signalled(info.si_signo)
        for child in self._children:
            if child.start_at is not None and child.start_at <= time.monotonic():
                self._start(child)

    # Signals.

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGHUP:
            self._kill(self._children[_OPS], signal.SIGHUP)
        else:
            self._stop(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        if not self._stops.add(number, time.monotonic()):
            return
        if self._stops.count == 1:
            log.info("draining %d workers", self._count)
            self._drain(number)
            return
        self._code = 128 + number
        log.warning("second signal: the workers end at once")
        for child in self._children[1:]:
            self._kill(child, signal.SIGQUIT if self._stops.count == 2 else signal.SIGKILL)

    def _drain(self, number: signal.Signals) -> None:
        for child in self._children:
            child.start_at = None
            self._kill(child, number)

    def _kill(self, child: _Child, number: signal.Signals) -> None:
        if child.pid is not None:  # not reaped yet, so the number is still its own
            os.kill(child.pid, number)

    # Processes.

    def _start(self, child: _Child) -> None:
        child.start_at = None
        child.started = time.monotonic()
        child.generation += 1
        main = self._ops_process if child.number == _OPS else self._worker
        child.pid = self._fork(lambda: main(child))
        log.info("%s has pid %d", child.name, child.pid)

    def _fork(self, main: Callable[[], int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = EXIT_INTERNAL
        try:
            os.setpgid(0, 0)
            os.close(self._parent_end)
            os.close(self._errors)
            # Until it has handlers of its own: SIGINT ends it as SIGTERM does, without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            code = main()
        except HboneError as error:
            code = error.exit_code
            with suppress(OSError):  # the parent is gone
                os.write(self._errors_end, one_line(f"hgate: {error}").encode()[:MAX_ERROR_BYTES] + b"\n")
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # the callers on the stack are the parent's

    def _ops_process(self, child: _Child) -> int:
        workers = [LinkClient(number, client) for number, (client, _) in self._requests.items()]

        async def serve() -> int:
            exporting = None
            if self._traces is not None and self._span_pipe is not None:
                exporting = Exporting(self._traces, self._span_pipe, self._environ)
            process = OpsProcess(
                self._file,
                workers,
                self._parent_pipe,
                is_replacement=child.generation > 1,
                exporting=exporting,
            )
            return await process.run()

        return loop.run(serve())

    def _worker(self, child: _Child) -> int:
        worker = Worker(
            child.number,
            self._count,
            ParentLink(self._requests[child.number][1], self._parent_pipe),
            self._reserved.ports,
            self._reserved_for_hbone.ports,
            self._reserved_for_posts.ports,
            self._reserved_for_reverse.ports,
            self._span_pipe.write_end if self._span_pipe is not None else None,
        )
        set_worker(child.number)

        async def serve() -> int:
            access_log = AccessLog(sys.stdout, self._log_format, "hgate", worker=child.number)
            return await self._work(access_log, worker)

        return loop.run(serve())

    def _print_errors(self) -> None:
        """Prints the errors with which processes have exited, each once: all workers have the same at
        once."""
        now = time.monotonic()
        self._printed = {line: at for line, at in self._printed.items() if now - at < STARTING_S}
        with suppress(BlockingIOError):
            while read := os.read(self._errors, select.PIPE_BUF):
                for line in read.splitlines(keepends=True):
                    if line not in self._printed:
                        self._printed[line] = now
                        sys.stderr.write(line.decode())
        sys.stderr.flush()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for child in self._children:
                if child.pid == pid:  # else an orphan that process 1 has inherited
                    child.pid = None
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        """`code` is negative if a signal ended it."""
        self._print_errors()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        lived_s = time.monotonic() - child.started
        if self._stops.count or (child.number == _OPS and not self._workers_left()):
            if child.number != _OPS and not self._has_failed:
                self._code = max(self._code, code if code >= 0 else 128 - code)
            if code and not self._has_failed:  # else the error is printed, or the parent has ended it
                log.warning("%s %s", child.name, how)
            return
        if code > 0 and child.generation == 1 and lived_s < STARTING_S:
            log.error("%s %s: the others end, too", child.name, how)
            self._stops.add(signal.SIGTERM, time.monotonic())
            self._code = code
            self._has_failed = True
            self._drain(signal.SIGTERM)
            return
        child.deaths = 0 if lived_s >= LIVED_S else child.deaths + 1
        delay_s = doubled_s(FIRST_DELAY_S, MAX_DELAY_S, max(0, child.deaths - 1))
        child.start_at = time.monotonic() + delay_s
        log.error("%s %s; a new one starts in %g s", child.name, how, delay_s)


class _Reserved:
    """Addresses to listen on, bound before there is a worker: one that cannot be had is an error of the
    start, and a free port that was found in place of port 0 stays reserved."""

    def __init__(self, purpose: str, addresses: Sequence[Address]) -> None:
        """`purpose` is the setting that names them. Raises UnavailableError if one cannot be had."""
        self.ports: dict[Key, Address] = {}
        self._kept: list[socket.socket] = []
        for address, number in keys(addresses):
            sock = _bound(purpose, address)
            if address.port:
                sock.close()
                continue
            self.ports[address, number] = Address(address.host, sock.getsockname()[1])
            self._kept.append(sock)

    def release(self) -> None:
        """Gives up what is reserved in place of port 0: one process alone will listen there."""
        for sock in self._kept:
            sock.close()


def _bound(purpose: str, address: Address) -> socket.socket:
    """A socket that does not listen; the kernel gives it no connection."""
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(name)
    except OSError as error:
        raise unavailable(purpose, address, error) from error
    return sock
