"""Several workers on the same ports: starts them, restarts those that die, passes signals on, waits for all.

Owned here: the parent of `hgate --workers N` and its processes. Beside the workers there is the front
(`front.py`), which has the admin, metrics and health ports for all of them. Each worker listens on all
addresses by itself (SO_REUSEPORT), so the kernel deals the connections out, and a worker that dies takes only
its own with it. What a worker is, is `app.py`'s.

The parent has no event loop and no thread, so that it can fork at any time. It forks after all imports: a
worker then has 7 MiB of its own instead of 22, the rest is shared, and is there in milliseconds instead of
0.3 s.

The rules:

1. A process that dies while nothing drains is started again: after FIRST_DELAY_S, and twice as long each
   further time, until it has lived for LIVED_S. One that gives up by itself right at the start (a port in
   use) ends all. What several of them complain of is told once, by us.
2. SIGHUP goes to the front, which has every worker read the file again.
3. SIGTERM and SIGINT make all drain. A second one forces the end, a third kills. The front goes last.
4. The processes lead groups of their own, so that a terminal's SIGINT reaches the parent alone. Should the
   parent be killed, they notice and drain.
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
from gateway.workers.front import Front
from gateway.workers.stopping import StopRequests
from gateway.workers.worker_link import Asker, Crew, pair
from shared import loop
from shared.address import Address
from shared.credentials.token_sources.minters import minter_from_env
from shared.errors import EXIT_INTERNAL, EXIT_OK, HboneError
from shared.listen import unavailable
from shared.ops.access_log import AccessLog
from shared.ops.log import Format, one_line, set_worker

log = logging.getLogger("hbone.gateway")

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
"""Before a dead process is started again; a fault that comes back at once must not take the CPU."""

LIVED_S = 60.0
"""Who has lived so long has not died of its start."""

STARTING_S = 10.0
"""Who gives up before has not come up: a port in use, a wrong variable. The others would not either."""

MAX_COMPLAINT_BYTES = select.PIPE_BUF - 1
"""Of what a process says as it gives up; a pipe takes as much in one piece (POSIX write(), PIPE_BUF)."""

_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_FRONT = 0
"""The front's number; workers count from 1."""


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
    """When it is to be started again."""

    @property
    def name(self) -> str:
        return "front" if self.number == _FRONT else f"worker {self.number}"


class Workers:
    """The parent. Works in the process that calls `run`, and in no other thread."""

    def __init__(
        self,
        config_file: Path,
        environ: Mapping[str, str],
        count: int,
        log_format: Format | None,
        work: Callable[[AccessLog, Crew], Awaitable[int]],
    ) -> None:
        """`work` is what each worker does, until its exit code.

        Raises ConfigError if the file has a mistake, UsageError if a variable of `environ` is wrong,
        UnavailableError if an address cannot be had."""
        self._file = config_file
        self._work = work
        self._log_format = log_format
        self._count = count
        config = load(config_file)
        log_warnings(config)
        minter_from_env(environ, config.tokens)
        self._reserved = _Reserved("listen", config.listen)
        self._reserved_for_hbone = _Reserved("hbone", config.hbone.listen if config.hbone else ())
        self._reserved_for_reverse = _Reserved("reverse", config.reverse.listen if config.reverse else ())
        for purpose in ("health", "metrics", "admin"):  # the front's, which would only find out later
            address = getattr(config, purpose)
            _Reserved(purpose, () if address is None else (address,)).release()
        self._questions = {number: pair() for number in range(1, count + 1)}
        self._children = [_Child(number) for number in range(count + 1)]
        self._lifeline, self._life = os.pipe()
        self._complaints, self._complain = os.pipe()
        os.set_blocking(self._complaints, False)
        self._told: dict[bytes, float] = {}  # when, by the steady clock
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who started us may have it ignored
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
        front = self._children[_FRONT]
        self._kill(front, signal.SIGQUIT)
        while front.pid is not None:
            self._wait()
        return self._code

    def _workers_left(self) -> bool:
        return any(child.pid is not None or child.start_at is not None for child in self._children[1:])

    def _wait(self) -> None:
        """Until a signal comes, or it is time to start somebody again."""
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
            self._kill(self._children[_FRONT], signal.SIGHUP)
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
        log.warning("asked again: the workers end at once")
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
        main = self._front if child.number == _FRONT else self._worker
        child.pid = self._fork(lambda: main(child))
        log.info("%s is process %d", child.name, child.pid)

    def _fork(self, main: Callable[[], int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = EXIT_INTERNAL
        try:
            os.setpgid(0, 0)
            os.close(self._life)
            os.close(self._complaints)
            # Until it has handlers of its own: SIGINT ends it as SIGTERM does, without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            code = main()
        except HboneError as error:
            code = error.exit_code
            with suppress(OSError):  # nobody is left to tell
                os.write(self._complain, one_line(f"hgate: {error}").encode()[:MAX_COMPLAINT_BYTES] + b"\n")
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # what stands above us on the stack is the parent's

    def _front(self, child: _Child) -> int:
        askers = [Asker(number, ours) for number, (ours, _) in self._questions.items()]

        async def serve() -> int:
            front = Front(self._file, askers, self._lifeline, is_replacement=child.generation > 1)
            return await front.run()

        return loop.run(serve())

    def _worker(self, child: _Child) -> int:
        crew = Crew(
            child.number,
            self._count,
            self._questions[child.number][1],
            self._lifeline,
            self._reserved.ports,
            self._reserved_for_hbone.ports,
            self._reserved_for_reverse.ports,
        )
        set_worker(child.number)

        async def serve() -> int:
            access_log = AccessLog(sys.stdout, self._log_format, "hgate", worker=child.number)
            return await self._work(access_log, crew)

        return loop.run(serve())

    def _tell_complaints(self) -> None:
        """Why processes have given up, each reason once: what one worker lacks, all of them lack at once."""
        now = time.monotonic()
        self._told = {line: at for line, at in self._told.items() if now - at < STARTING_S}
        with suppress(BlockingIOError):
            while complaints := os.read(self._complaints, select.PIPE_BUF):
                for line in complaints.splitlines(keepends=True):
                    if line not in self._told:
                        self._told[line] = now
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
                if child.pid == pid:  # else an orphan that we inherited as process 1
                    child.pid = None
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        """`code` is negative if a signal ended it."""
        self._tell_complaints()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        lived_s = time.monotonic() - child.started
        if self._stops.count or (child.number == _FRONT and not self._workers_left()):
            if child.number != _FRONT and not self._has_failed:
                self._code = max(self._code, code if code >= 0 else 128 - code)
            if code and not self._has_failed:  # else why is told already, or it ended because we told it to
                log.warning("%s %s", child.name, how)
            return
        if code > 0 and child.generation == 1 and lived_s < STARTING_S:
            log.error("%s %s: so the others end too", child.name, how)
            self._stops.add(signal.SIGTERM, time.monotonic())
            self._code = code
            self._has_failed = True
            self._drain(signal.SIGTERM)
            return
        child.deaths = 0 if lived_s >= LIVED_S else child.deaths + 1
        delay_s = min(FIRST_DELAY_S * 2 ** max(0, child.deaths - 1), MAX_DELAY_S)
        child.start_at = time.monotonic() + delay_s
        log.error("%s %s; a new one starts in %g s", child.name, how, delay_s)


class _Reserved:
    """Addresses to listen on, bound once before there is a worker: one that cannot be had shows at once, and
    a free port that was found in place of port 0 stays ours."""

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
        """Gives up what is kept in place of port 0: one process alone will listen there."""
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
