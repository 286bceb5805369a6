"""The objects of one kind, in all namespaces: listed once, then followed by a watch.

The rules (Kubernetes, "API Concepts", efficient detection of changes):

1. A list is read in pages of PAGE objects; a watch goes on from the list's resourceVersion, and bookmarks
   bring that forward while nothing changes.
2. A watch ends after a minute and is begun again from where it was, so that one whose connection was
   silently lost is noticed soon.
3. When the server has forgotten the version (410), and every RESYNC_S, the list is read anew.
4. Whatever fails is tried again, after pauses that double, or after the pause that the server asks for. What
   is known stays meanwhile. The log has one line when it fails first, and one when it works again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gateway.cluster.api_server import ApiServer
from shared.backoff import doubled_s, half_or_more
from shared.errors import StatusError, UpstreamError

log = logging.getLogger("hbone.cluster")

T = TypeVar("T")

PAGE = 500
"""Objects in one answer."""

MAX_OBJECTS = 100_000
"""Objects of one kind that are kept; an EndpointSlice takes 2 KiB."""

BROKEN, LEFT_OUT = "broken", "left out"
"""Among failures: objects that have not the form of their kind, and those beyond MAX_OBJECTS."""

WATCH_S = 60.0
"""How long a watch lasts; half as long at least, by chance, so that replicas do not ask together."""

LATE_S = 10.0
"""After so many seconds more the connection of a watch is given up."""

RESYNC_S = 1800.0
"""After which a list is read anew: it mends what a watch may have missed."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

ABSENT_PAUSE_S = 60.0
"""Until a kind that the cluster does not have is looked for again."""

SHORT_S = 1.0
"""A watch that ends within this without an event has failed: begun again at once it would be a busy loop."""

Key = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects."""

    name: str
    """As objects have it: Service."""

    api: str
    """Its API version: v1, networking.istio.io/v1."""

    plural: str
    """As paths have it: services."""

    is_optional: bool = False
    """A cluster may be without it."""

    @property
    def path(self) -> str:
        """Of all its objects."""
        return f"{self._root}/{self.plural}"

    def path_of(self, namespace: str, name: str = "") -> str:
        """Of the objects of a namespace, or of one of them."""
        of_one = f"/{name}" if name else ""
        return f"{self._root}/namespaces/{namespace}/{self.plural}{of_one}"

    @property
    def _root(self) -> str:
        return f"/apis/{self.api}" if "/" in self.api else f"/api/{self.api}"


class ObjectWatch(Generic[T]):
    """Follows one kind."""

    def __init__(
        self,
        api: ApiServer,
        kind: Kind,
        keep: Callable[[Mapping[str, Any]], T | None],
        changed: Callable[[Key], None],
        listed: Callable[[], None],
        selector: str = "",
    ) -> None:
        """`keep` makes of an object what is kept of it, None if nothing is. `changed` is called for each of
        which that is another than before, `listed` after each whole list. With `selector` only objects with
        such labels are followed."""
        self.kind = kind
        self.objects: dict[Key, T] = {}
        self.is_complete = False
        """Whether the list was whole once."""
        self.is_absent = False
        """Whether the cluster does not have the kind."""
        self.is_followed = False
        """Whether what is known is current, as far as the server says."""
        self.failures: Counter[str] = Counter()
        """By HTTP status, "connection", BROKEN or LEFT_OUT."""
        self.events = 0
        self.lists = 0
        self._api = api
        self._keep = keep
        self._changed = changed
        self._listed = listed
        self._selected = {"labelSelector": selector} if selector else {}
        self._version: str | None = None
        self._listed_at = 0.0
        self._failed_in_row = 0
        self._has_said_so = False

    async def run(self) -> None:
        """Follows the kind for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                if self._version is None or loop.time() - self._listed_at > RESYNC_S:
                    await self._list()
                    self._listed_at = loop.time()
                await self._watch()
            except UpstreamError as error:
                await self._failed(error)
            except (KeyError, TypeError, AttributeError) as error:
                text = f"broken object from {self._api.url}: {type(error).__name__} {error}"
                await self._failed(UpstreamError(text))

    async def _failed(self, error: UpstreamError) -> None:
        """After a failure: says so once, and waits."""
        status = error.status if isinstance(error, StatusError) else None
        if status == 404 and self.kind.is_optional:
            self._is_absent()
            await asyncio.sleep(ABSENT_PAUSE_S)
            return
        self.failures[str(status or "connection")] += 1
        self.is_followed = False
        pause_s = half_or_more(
            doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._failed_in_row), random.random()
        )
        if isinstance(error, StatusError):
            pause_s = max(pause_s, error.pause_s)
        if status == 410:
            self._version = None
        # A version that was forgotten, or a connection that broke, once: that is customary.
        is_customary = status in (410, None) and self.is_complete and not self._failed_in_row
        if is_customary:
            pause_s = 0.0
        elif not self._has_said_so:
            log.warning("%s: %s; what is known stays until it works again", self.kind.plural, error)
            self._has_said_so = True
        self._failed_in_row += 1
        await asyncio.sleep(pause_s)

    def _works(self) -> None:
        """A list is whole, or a watch has begun. That ends no row of failures, as an event does, or a watch
        that lasts: one that fails each time as soon as it has begun would be a busy loop."""
        self.is_followed = True
        if self._has_said_so:
            log.info("%s: followed again, %d objects", self.kind.plural, len(self.objects))
            self._has_said_so = False

    def _is_absent(self) -> None:
        if not self.is_absent:
            log.info("the cluster has no %s of %s", self.kind.plural, self.kind.api)
        self.is_absent = True
        self._version = None
        self._replace({})

    async def _list(self) -> None:
        found: dict[Key, T] = {}
        query = {"limit": str(PAGE), **self._selected}
        while True:
            page = await self._api.get(self.kind.path, **query)
            for one in page.get("items") or []:
                self._take(found, one)
            about = page.get("metadata") or {}
            if not about.get("continue"):
                break
            query["continue"] = str(about["continue"])
        self.lists += 1
        self.is_absent = False
        self._version = str(about.get("resourceVersion") or "")
        self._works()
        self._replace(found)

    def _replace(self, found: dict[Key, T]) -> None:
        before, self.objects = self.objects, found
        self.is_complete = True
        for key in before.keys() | found.keys():
            if before.get(key) != found.get(key):
                self._changed(key)
        self._listed()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        started, seen = loop.time(), self.events
        asked_s = int(half_or_more(WATCH_S, random.random()))
        query = {
            "resourceVersion": self._version or "",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(asked_s),
            **self._selected,
        }
        try:
            await self._api.watch(self.kind.path, query, asked_s + LATE_S, self._works, self._event)
        finally:
            if loop.time() - started >= SHORT_S:
                self._failed_in_row = 0
        if loop.time() - started < SHORT_S and self.events == seen:
            raise UpstreamError(f"the watch of {self.kind.plural} at {self._api.url} ended at once")

    def _event(self, event: Mapping[str, Any]) -> None:
        self.events += 1
        kind, found = event.get("type"), event.get("object")
        if not isinstance(found, dict):
            raise UpstreamError(f"broken event from {self._api.url}: no object")
        if kind == "ERROR":
            text = f"{self._api.url} ended the watch: {found.get('message') or found.get('reason')}"
            code = found.get("code")
            raise StatusError(code if isinstance(code, int) else 500, text)
        if kind != "BOOKMARK":
            key = _key(found)
            before = self.objects.pop(key, None)
            if kind != "DELETED":
                self._take(self.objects, found)
            if before != self.objects.get(key):
                self._changed(key)
        self._version = str(found["metadata"]["resourceVersion"])
        self._failed_in_row = 0

    def _take(self, into: dict[Key, T], found: Mapping[str, Any]) -> None:
        key = _key(found)
        try:
            kept = self._keep({"kind": self.kind.name, **found})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self.failures[BROKEN] += 1
            log.debug("%s %s/%s is broken: %s %s", self.kind.name, *key, type(error).__name__, error)
            return  # one object does not keep the others from being followed
        if kept is None:
            return
        if len(into) < MAX_OBJECTS:
            into[key] = kept
        else:
            self.failures[LEFT_OUT] += 1


def _key(found: Mapping[str, Any]) -> Key:
    about = found["metadata"]
    return str(about.get("namespace") or ""), str(about["name"])
