"""What became of each object that asks for a route, told to its owners: an annotation and an Event.

Only the leader writes, and only a text that differs from the one that the object has, so that a restart
writes nothing. One object is written after the other, PAUSE_S apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.cluster.api_server import ApiServer, quoted
from gateway.cluster.object_watch import Kind
from gateway.cluster.service_routes import ObjectName
from shared.cluster.service_annotations import STATUS
from shared.errors import StatusError, UpstreamError

log = logging.getLogger("hbone.cluster")

MANAGER = "hgate-status"
"""The field manager of the annotation."""

PAUSE_S = 0.05
"""Between two objects: 20 a second are two requests each, which an API server does not feel."""

AGAIN_S = 10.0
"""After which what could not be written is tried again."""

MOST_TOLD, TOLD_S = 5, 60.0
"""An object is told so often in so many seconds at most. One that changes to and fro, or that somebody else
tells something else, would else have Events without end, which etcd keeps for an hour."""

ROUTED, NOT_ROUTED = "Routed", "NotRouted"
"""Reasons of Events."""


class Status(NamedTuple):
    """What an object is to be told."""

    text: str
    """Empty: nothing any more."""

    is_routed: bool
    uid: str
    version: str
    """Its resourceVersion."""


class ObjectStatus:
    """Writes what objects are told, as long as `may_write` says so."""

    def __init__(
        self, api: ApiServer, kinds: Mapping[str, Kind], may_write: Callable[[], bool], reporter: str
    ) -> None:
        """`kinds` by their names; `reporter` is which of the replicas we are."""
        self.written = 0
        self.failed = 0
        self._api = api
        self._kinds = kinds
        self._may_write = may_write
        self._reporter = reporter
        self._wanted: dict[ObjectName, Status] = {}
        self._asked = asyncio.Event()
        self._tried: dict[ObjectName, deque[float]] = {}  # when, of those within TOLD_S
        self._said: set[ObjectName] = set()  # whose failure is in the log

    def want(self, statuses: Mapping[ObjectName, Status]) -> None:
        """From now on these objects, each of which has another text, are to be told this."""
        self._wanted = dict(statuses)
        self._asked.set()

    async def run(self) -> None:
        """Writes for ever."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self._wanted else None):
                    await self._asked.wait()
            self._asked.clear()
            if not self._may_write():
                continue
            pause_s, now = 0.0, loop.time()
            self._tried = {name: times for name, times in self._tried.items() if now - times[-1] < TOLD_S}
            for name, status in list(self._wanted.items()):
                if not self._may_write() or self._wanted.get(name) != status:
                    continue  # it has changed meanwhile
                times = self._tried.setdefault(name, deque(maxlen=MOST_TOLD))
                if len(times) == MOST_TOLD and loop.time() - times[0] < TOLD_S:
                    continue
                times.append(loop.time())
                try:
                    await self._tell(name, status)
                    self._wanted.pop(name, None)
                    self._said.discard(name)
                    self.written += 1
                except UpstreamError as error:
                    self.failed += 1
                    if isinstance(error, StatusError):
                        pause_s = max(pause_s, error.pause_s)
                        if error.status in (404, 409):  # it is gone, or another one, or the text is not ours
                            self._wanted.pop(name, None)
                    if name not in self._said and len(self._said) < 1000:
                        log.warning("%s is not told that it is %r: %s", name, status.text, error)
                        self._said.add(name)
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _tell(self, name: ObjectName, status: Status) -> None:
        kind = self._kinds[name.kind]
        about = {"name": name.name, "namespace": name.namespace, "uid": status.uid}
        told = {"annotations": {STATUS: status.text}} if status.text else {}
        body = {"apiVersion": kind.api, "kind": kind.name, "metadata": {**about, **told}}
        path = kind.path_of(quoted(name.namespace), quoted(name.name))
        await self._api.apply(path, body, MANAGER)
        if not status.text:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name.name[:200]}.", "namespace": name.namespace},
            "involvedObject": {
                "apiVersion": kind.api,
                "kind": kind.name,
                "resourceVersion": status.version,
                **about,
            },
            "type": "Normal" if status.is_routed else "Warning",
            "reason": ROUTED if status.is_routed else NOT_ROUTED,
            "message": status.text,
            "source": {"component": "hgate", "host": self._reporter},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        path = f"/api/v1/namespaces/{quoted(name.namespace)}/events"
        await self._api.ask("POST", path, body=event)
