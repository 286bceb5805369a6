"""hgate's file while hgate runs: found to have changed, read again, put into effect or refused.

It is read again on request (SIGHUP), and when it, a CA file that a route names, or the list of the
cluster's routes has changed. `stat` is called every `WATCH_S` seconds, with a cluster every
`CLUSTER_WATCH_S`; it sees a ConfigMap's swapped symlink as well as an editor's new file. A file
that is still being written is left alone until two calls of `stat` agree. Reading 1,000 routes takes 0.3 s
and is done in a thread, as is `stat`, because a file system may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.config import cluster_files
from gateway.config.cluster_settings import ClusterSettings
from gateway.config.config import GatewayConfig, load
from gateway.config.sections import Section
from gateway.rules.cluster_rules import JudgedRoutes, ServiceRoute
from gateway.rules.routes import Route
from shared.config.fields import file_name, table_of
from shared.errors import ConfigError, HboneError, UnavailableError
from shared.ops import families
from shared.tasks import spawn
from shared.watched_file import Stamp, stamp

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.gateway")

T = TypeVar("T")

WATCH_S = 2.0
"""Seconds between two checks of the files: a check costs microseconds, and the kubelet takes a minute to
bring a changed ConfigMap."""

CLUSTER_WATCH_S = 0.25
"""The same where routes come from the cluster: an annotated Service is a route within two seconds."""

SETTLE_S = 0.1
"""Seconds between the checks of a file that has changed."""

MAX_CHECKS = 20
"""Checks after which a file that keeps changing is read all the same."""

MAX_LOGGED = 100
"""Mistakes, or warnings, of one file that are logged."""

TURN_S = 0.0005
"""Seconds that the thread that reads may keep the event loop waiting at a time. With Python's usual 5 ms a
round trip took 12 ms while 1,000 routes were read."""

Stamps = dict[Path, Stamp | None]
"""Of each file its stamp, with symlinks followed; None where there is no file."""


class ConfigFile:
    """The file and the CA files that it names. Its methods block; one is called at a time."""

    def __init__(self, path: Path, *, with_cluster: bool = True) -> None:
        """Without `with_cluster` it is the file alone, for the process that makes the cluster's routes."""
        self.path = path
        self._with_cluster = with_cluster
        self.seen: Stamps = {}
        """The files' stamps when they were read."""
        self.watch_s = WATCH_S
        """Seconds between two checks of them."""
        self.is_as_before = False
        """Whether only the list of the cluster's routes was read last, for nothing else had changed."""
        self._loaded: GatewayConfig | None = None
        self._wanted: Sequence[ServiceRoute] | None = None
        self._judged = JudgedRoutes()
        self._folder: Path | None = None

    def read(self) -> GatewayConfig:
        """What the file says now. Raises ConfigError for a mistake."""
        # The stamps come first: what changes while we read is a change.
        before, self.seen = self.seen, _stamps({self.path, *self.seen})
        changed = {path for path, now in self.seen.items() if path not in before or before[path] != now}
        # Reading the file again for each object that changes would take most of a core from the tunnels.
        last, self._loaded = self._loaded, None
        of_cluster = {self._folder / cluster_files.ROUTES} if self._folder is not None else set()
        self.is_as_before = last is not None and bool(changed) and changed == of_cluster
        config = last if last is not None and self.is_as_before else load(self.path)
        self._loaded = config
        files = {self.path, *(route.ca for route in config.routes if route.ca is not None)}
        self.watch_s = WATCH_S
        if config.cluster is not None and self._with_cluster:
            self._folder = self._folder or config.cluster.folder  # another one counts at the next start
            files.add(self._folder / cluster_files.ROUTES)
            self.watch_s = CLUSTER_WATCH_S
        known = {path: before for path, before in self.seen.items() if path in files}
        self.seen = _stamps(files - known.keys()) | known
        if config.cluster is None or not self._with_cluster:
            return config
        return config.with_cluster(self._of_cluster(config.cluster, self._folder or config.cluster.folder))

    def _of_cluster(self, settings: ClusterSettings, folder: Path) -> tuple[Route, ...] | None:
        """What the cluster's objects ask for, as far as they may; what they asked for before if that cannot
        be read now."""
        try:
            self._wanted = cluster_files.read_routes(folder)
        except UnavailableError as error:
            log.error("%s; the cluster's routes stay as they are", error)
        if self._wanted is None:
            return None
        return self._judged.of(self._wanted, settings.allow, settings.domain)

    def check(self) -> Stamps:
        """Their stamps now."""
        return _stamps(self.seen)


def _stamps(paths: Iterable[Path]) -> Stamps:
    return {path: stamp(path) for path in paths}


def log_warnings(config: GatewayConfig) -> None:
    """Says what may be a mistake in the file: at the start, and at each reload."""
    for warning in config.warnings[:MAX_LOGGED]:
        log.warning("%s", warning)


class Reloads:
    """Reads the file again when that is due. `apply(config)` puts it into effect; if it raises an HboneError,
    or the file has a mistake, everything stays as it is."""

    def __init__(
        self, file: ConfigFile, apply: Callable[[GatewayConfig], Awaitable[None]], *, quiet: bool = False
    ) -> None:
        """With `quiet` the log says how it went at debug only: another process says it."""
        self.succeeded = 0
        self.failed = 0
        self.last_succeeded = True
        """Whether what is in effect is what the file says."""
        self.last_success = time.time()
        """Seconds since the epoch; the start is the first success."""
        self._file = file
        self._apply = apply
        self._quiet = quiet
        self._asked = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def watch(self, *, changes: bool = True) -> None:
        """From now on reads the file on request, and with `changes` whenever it has changed."""
        self._task = spawn(self._watch(changes), name=f"watch {self._file.path}")

    def request(self) -> None:
        """Reads the file again soon, changed or not."""
        self._asked.set()

    async def now(self) -> None:
        """Reads the file again. Raises HboneError if it stays without effect."""
        async with self._one_at_a_time:
            try:
                with _taking_turns():
                    config = await asyncio.to_thread(self._file.read)
                    await self._apply(config)
            except HboneError as error:
                self.failed += 1
                self.last_succeeded = False
                level = logging.DEBUG if self._quiet else logging.ERROR
                for one in error.all[:MAX_LOGGED] if isinstance(error, ConfigError) else (error,):
                    log.log(level, "reload: %s; the running configuration stays", one)
                raise
            self.succeeded += 1
            self.last_succeeded = True
            self.last_success = time.time()
            level = logging.DEBUG if self._quiet else logging.INFO
            log.log(level, "reload: %d routes from %s", len(config.routes), self._file.path)
            if not (self._quiet or self._file.is_as_before):
                log_warnings(config)

    def close(self) -> None:
        """Follows the file no longer."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, changes: bool) -> None:
        while True:
            try:
                async with asyncio.timeout(self._file.watch_s if changes else None):
                    await self._asked.wait()
                self._asked.clear()
            except TimeoutError:
                if not await self._have_changed():
                    continue
            with contextlib.suppress(HboneError):  # `now` has logged it; the next change may mend it
                await self.now()

    async def _have_changed(self) -> bool:
        """Whether a file has changed. If so, returns once they have stopped changing."""
        before, now = self._file.seen, await asyncio.to_thread(self._file.check)
        if now == before:
            return False
        for _ in range(MAX_CHECKS):
            await asyncio.sleep(SETTLE_S)
            before, now = now, await asyncio.to_thread(self._file.check)
            if now == before:
                break
        return True

    def families(self) -> Iterator[Metric]:
        """The metrics about it."""
        yield families.CONFIG_RELOADS.metric([("success", self.succeeded), ("failure", self.failed)])
        yield families.CONFIG_SUCCESSFUL.value(self.last_succeeded)
        yield families.CONFIG_SUCCESS_TIME.value(self.last_success)


@contextlib.contextmanager
def _taking_turns() -> Iterator[None]:
    """Threads give the interpreter up after TURN_S instead of Python's usual time."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def keep_fixed(running: GatewayConfig, wanted: GatewayConfig) -> GatewayConfig:
    """`wanted`, but for what takes effect at the next start only: a change of that is said in the log."""
    kept, changed = _kept(running, wanted, "")
    if changed:
        log.warning("reload: a change of %s takes effect at the next start", ", ".join(changed))
    return kept


def _kept(running: T, wanted: T, prefix: str) -> tuple[T, list[str]]:
    """The settings that count from now on, and the names of those whose change has to wait."""
    kept: dict[str, Any] = {}
    changed: list[str] = []
    for field, one in table_of(wanted).items():
        before, after = getattr(running, field), getattr(wanted, field)
        if before == after:
            continue
        name = prefix + file_name(field, one)
        section = one.kind if isinstance(one.kind, Section) and not one.restart else None
        if section and None not in (before, after):
            kept[field], more = _kept(before, after, f"{name}.")
            changed += more
        elif one.restart or (section and section.opens_port):
            kept[field] = before
            changed.append(name)
    return replace(wanted, **kept), changed  # type: ignore[type-var]  # a dataclass, as table_of says
