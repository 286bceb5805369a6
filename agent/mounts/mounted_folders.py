"""Secrets and ConfigMaps in folders, as kubelet mounts them, and compared with the cluster now and then.

All files of a folder turn at once (`shared.atomic_folders`). While an object cannot be read, its files stay;
so they do when it is gone, unless it may be missing. A Secret's files have mode 0600, a ConfigMap's 0644.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent.config.mount_settings import Mount, ObjectName
from agent.mounts.cluster_objects import ClusterObjects, Values
from shared import atomic_folders
from shared.atomic_files import PRIVATE_MODE, PUBLIC_MODE
from shared.atomic_folders import Content
from shared.errors import HboneError, UnavailableError
from shared.ops import families
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.mounts")

MAX_REQUESTS = 4
"""At once: the API server is everybody's."""

JITTER = 0.1
"""By how much of the pause a comparison may come sooner, by chance, so that many instances that started
together do not ask together."""


class MountedFolders:
    """Keeps the folders of `mounts` current from `start` on, until `close`."""

    def __init__(
        self,
        mounts: Sequence[Mount],
        objects: ClusterObjects,
        *,
        refresh_s: float,
        owner: tuple[int, int] | None = None,
    ) -> None:
        """`refresh_s` is the pause in seconds between two comparisons. `owner` is a user and a group id for
        the files, None: ours."""
        self._mounts: dict[ObjectName, list[Mount]] = defaultdict(list)
        for mount in mounts:
            self._mounts[mount.object].append(mount)
        self._objects = objects
        self._refresh_s = refresh_s
        self._owner = owner
        self._written: dict[Path, bytes] = {}  # digests by folder
        self._failing: set[ObjectName] = set()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when all files are there, which are looked after from then on. Raises what
        `ClusterObjects.read` raises, and UnavailableError if an object is missing or a file cannot be
        written."""
        await self._each(self._update)
        self._task = spawn(self._keep(), name="mounted folders")

    def close(self) -> None:
        """Leaves the files as they are."""
        if self._task is not None:
            self._task.cancel()

    def families(self) -> Iterator[Metric]:
        """Metrics."""
        rows = ((mount, result, count) for (mount, result), count in self._counts.items())
        yield families.MOUNT_REFRESHES.metric(rows)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s * (1 - JITTER * random.random()))
            await self._each(self._refresh)

    async def _each(self, work: Callable[[ObjectName], Awaitable[None]]) -> None:
        """Does `work` for each object, MAX_REQUESTS at a time. Raises the first error, and then leaves the
        others undone."""
        slots = asyncio.Semaphore(MAX_REQUESTS)

        async def one(name: ObjectName) -> None:
            async with slots:
                await work(name)

        tasks = [spawn(one(name), name=f"files of {name}") for name in self._mounts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _refresh(self, name: ObjectName) -> None:
        try:
            await self._update(name)
        except HboneError as error:
            self._counts[str(name), "failure"] += 1
            if name not in self._failing:
                self._failing.add(name)
                log.warning("%s: the files stay as they are until it can be read again: %s", name, error)
            return
        self._counts[str(name), "success"] += 1
        if name in self._failing:
            self._failing.remove(name)
            log.info("%s: it can be read again", name)

    async def _update(self, name: ObjectName) -> None:
        """Writes what has changed."""
        values = await self._objects.read(name)
        for mount in self._mounts[name]:
            if values is None and not mount.optional:
                raise self._objects.missing(name)
            self._write(mount, values or Values())

    def _write(self, mount: Mount, values: Values) -> None:
        """In place: small files, in memory where secrets are."""
        digest = values.digest
        if digest == self._written.get(mount.folder):
            return
        mode = PRIVATE_MODE if mount.object.kind == "secret" else PUBLIC_MODE
        files = {key: Content(value, mode) for key, value in values.all.items()}
        try:
            atomic_folders.write(mount.folder, files, self._owner)
        except OSError as error:
            raise UnavailableError(f"cannot write {mount.folder}: {error.strerror or error}") from error
        self._written[mount.folder] = digest
        log.info("%s: written to %s, keys: %d", mount.object, mount.folder, len(files))
