"""A list that the process at the API server hands over, followed by a process with tunnels.

Reading 10,000 entries takes 5 ms, in a thread, and at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from shared.errors import UnavailableError
from shared.tasks import spawn
from shared.watched_file import WatchedFiles

log = logging.getLogger("hbone.gateway")

WATCH_S = 1.0
"""Seconds between two looks at the file."""

T = TypeVar("T")


class FollowedList(Generic[T]):
    """The list as it was handed over last; empty until `follow`."""

    def __init__(self, name: str, read: Callable[[Path], T], empty: T) -> None:
        """`name` is the file's in the folder; `read` reads it there, and raises UnavailableError."""
        self.value = empty
        self._name = name
        self._read = read
        self._empty = empty
        self._folder: Path | None = None
        self._task: asyncio.Task[None] | None = None

    async def follow(self, folder: Path | None) -> None:
        """From now on follows the list in `folder`, which is read first; None: it is empty."""
        if folder == self._folder:
            return
        self.close()
        self._folder, self.value = folder, self._empty
        if folder is not None:
            file = WatchedFiles([folder / self._name])
            await self._look(file, folder)
            self._task = spawn(self._follow(file, folder), name=f"follow {self._name}")

    def close(self) -> None:
        """Follows it no longer."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(self, file: WatchedFiles, folder: Path) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._look(file, folder)

    async def _look(self, file: WatchedFiles, folder: Path) -> None:
        """Reads the list if it has changed."""
        if await asyncio.to_thread(file.changed):
            file.note()
            try:
                self.value = await asyncio.to_thread(self._read, folder)
            except UnavailableError as error:
                log.error("%s; the list stays as it is", error)
