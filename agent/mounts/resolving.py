"""Resolves the references in the app's variables: all at once, before the app starts, or it does not start.

Each value is asked for once, however many variables refer to it, and MAX_REQUESTS at a time. What fails for
a while is tried again within the time that there is. Errors name the variable, and never its value.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Container, Hashable, Mapping
from typing import Any, TypeVar

from agent.config.layers import PROCESS
from agent.config.mount_settings import MountSettings, is_reference
from agent.config.references import ClusterKey, Reference, SecretVersion, Source, parse
from agent.mesh.gke_clusters import GkeClusters, reachable
from agent.mounts.cluster_objects import ClusterObjects, Values
from agent.mounts.env_from import MAX_VARIABLE_BYTES
from agent.mounts.google_secrets import GoogleSecrets
from agent.mounts.value_files import ValueFiles
from shared.blame import about
from shared.credentials.kubernetes.kubernetes_access import Access, Bearer
from shared.errors import ConfigError, HboneError, UnavailableError
from shared.patience import patiently
from shared.tasks import spawn

T = TypeVar("T")

log = logging.getLogger("hbone.mounts")

MAX_REQUESTS = 8

MAX_REFERENCES = 500
"""In one environment."""

MOMENT_S = 1.0
"""For the other answers when one value cannot be had: their variables are named, too."""

MAX_NAMED = 5
"""Variables that an error names behind the first."""


class Resolver:
    """Asks as the account that krun runs as."""

    def __init__(self, settings: MountSettings, bearer: Bearer, files: ValueFiles) -> None:
        self._settings = settings
        self._google = GoogleSecrets(bearer, settings)
        self._clusters = GkeClusters(bearer, url=settings.gke_url, quota_project=settings.quota_project)
        self._files = files
        self._timeout_s = settings.start_timeout_s
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._flights: dict[Hashable, asyncio.Task[Any]] = {}

    async def resolve(
        self, environ: Mapping[str, str], timeout_s: float, *, own: Container[str]
    ) -> dict[str, str]:
        """The values of those variables of `environ` that are references, within `timeout_s` seconds. `own`
        are the container's: others, which an object of the cluster says, may name no file. krun may be root,
        and whoever edits the object is not.

        Raises:
            ConfigError: one is malformed.
            UnavailableError: one cannot be resolved; the exit code is that of the reason.
        """
        found = {name: _parsed(name, value) for name, value in environ.items() if is_reference(value)}
        if len(found) > MAX_REFERENCES:
            raise ConfigError(PROCESS, None, "", f"{len(found)} references are more than {MAX_REFERENCES}")
        _demand_own_files(found)
        _refuse_files_of_others(found, own)
        self._timeout_s = timeout_s
        values = await self._values(found)
        resolved = {}
        for name, reference in found.items():
            try:
                resolved[name] = self._placed(name, reference, values[reference.source])
            except HboneError as error:
                raise about(f"{name} is not resolved", error) from error
        log.info("references resolved: %s", ", ".join(found))
        return resolved

    async def _values(self, references: Mapping[str, Reference]) -> dict[Source, bytes]:
        """By source. Raises UnavailableError about the first variable that has none."""
        sources = dict.fromkeys(reference.source for reference in references.values())
        tasks = {one: spawn(self._value(one), name=f"value in {one.place}") for one in sources}
        try:
            await self._wait(tasks.values())
        finally:
            for task in (*tasks.values(), *self._flights.values()):
                task.cancel()
        outcomes = {name: _failure(tasks[reference.source]) for name, reference in references.items()}
        failed = {name: error for name, error in outcomes.items() if error is not None}
        late = [name for name, reference in references.items() if not tasks[reference.source].done()]
        if late and not failed:
            failed = dict.fromkeys(late, UnavailableError(f"no answer within {self._timeout_s:.1f} s"))
        if failed:
            raise _blamed(failed)
        return {source: task.result() for source, task in tasks.items()}

    async def _wait(self, tasks: Collection[asyncio.Task[bytes]]) -> None:
        """Returns when all are done, or time is over, or one has failed and the others had a moment, too."""
        done, pending = await asyncio.wait(
            tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if pending and any(_failure(task) for task in done):
            await asyncio.wait(pending, timeout=MOMENT_S)

    async def _value(self, source: Source) -> bytes:
        if isinstance(source, ClusterKey):
            return await self._of_cluster(source)
        if isinstance(source, SecretVersion):
            return await self._asked(source.place, lambda: self._google.secret(source))
        return await self._asked(source.place, lambda: self._google.stored(source))

    async def _of_cluster(self, source: ClusterKey) -> bytes:
        async def access() -> Access:
            cluster = await self._clusters.find(source.cluster)
            own = self._clusters.access(cluster, source.namespace)
            return await reachable(own, self._clusters.by_connect_gateway(cluster, source.namespace))

        async def values() -> Values:
            way = await self._once((source.cluster, source.namespace), lambda: self._asked("GKE", access))
            objects = ClusterObjects(way, source.namespace)
            return await self._asked("GKE", lambda: objects.need(source.object))

        found = await self._once((source.cluster, source.namespace, source.object), values)
        value = found.all.get(source.key)
        if value is None:
            raise UnavailableError(f"the {_title(source)} has no such key")
        return value

    async def _asked(self, place: str, attempt: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            return await patiently(attempt, f"a reference to {place}", log, self._timeout_s)

    async def _once(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` gives, which is done once for each `key`."""
        if key not in self._flights:
            self._flights[key] = spawn(_awaited(work), name="value in a GKE cluster")
        # Shielded: who gives up must not take it from the others.
        found: T = await asyncio.shield(self._flights[key])
        return found

    def _placed(self, name: str, reference: Reference, value: bytes) -> str:
        """The text for the variable `name`: the value, or the path of the file that now has it."""
        if reference.temporary:
            return str(self._files.temporary(value, reference.suffix))
        if reference.path is not None:
            return str(self._files.at(reference.path, value))
        hint = "add ?destination=tempfile, or ?tempFile=true, for a file"
        if b"\0" in value:
            raise ConfigError(reference.source.place, None, "", f"it has a NUL byte: {hint}")
        if len(os.fsencode(name)) + len(value) + 2 > MAX_VARIABLE_BYTES:
            raise ConfigError(reference.source.place, None, "", f"it is too long for a variable: {hint}")
        return os.fsdecode(value)


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _parsed(name: str, value: str) -> Reference:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(PROCESS, None, name, f"malformed reference: {error}") from None


def _demand_own_files(references: Mapping[str, Reference]) -> None:
    """Raises ConfigError if two values are to be in one file."""
    paths = Counter(path for path, _ in {(one.path, one.source) for one in references.values()} if path)
    for name, reference in references.items():
        if reference.path is not None and paths[reference.path] > 1:
            raise ConfigError(PROCESS, None, name, "another variable's reference has the same destination")


def _refuse_files_of_others(references: Mapping[str, Reference], own: Container[str]) -> None:
    """Raises ConfigError if a value that is not the container's own is to be in a file that it names."""
    for name, reference in references.items():
        if reference.path is not None and name not in own:
            reason = "only the container's own variables may have destination=/PATH: use destination=tempfile"
            raise ConfigError("HBONE_ENV_FROM", None, name, reason)


def _failure(task: asyncio.Task[bytes]) -> HboneError | None:
    """Why there is no value; None: there is one, or none yet. Raises what is a fault of ours."""
    error = task.exception() if task.done() and not task.cancelled() else None
    if error is not None and not isinstance(error, HboneError):
        raise error
    return error


def _blamed(failed: Mapping[str, HboneError]) -> UnavailableError:
    """The error of the first variable, with the names of the others."""
    first, *others = failed
    unnamed = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
    more = f"; not resolved either: {', '.join(others[:MAX_NAMED])}{unnamed}" if others else ""
    return about(f"{first} is not resolved", failed[first], more)


def _title(source: ClusterKey) -> str:
    return "Secret" if source.object.kind == "secret" else "ConfigMap"
