"""What Istio has to be told for each routed Service, written to the cluster and kept there.

Only the leader does it. The objects that it made are followed by their label, so that one that somebody
removes or changes is made again; what it will be is `gateway.cluster.registration`'s to say. The rules:

1. Objects are written by server-side apply, and never forced: a field that somebody else owns is an obstacle,
   which the Service is told. Each OBSTACLE_S it is tried again.
2. Before an object is made, whoever may have one of that name is looked at, for the label is not on theirs.
3. What was made for a Service that is gone, or asks for nothing any more, is removed.
4. In a cluster without Istio nothing is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.cluster import registration
from gateway.cluster.api_server import ApiServer
from gateway.cluster.object_watch import Key, Kind, ObjectWatch
from gateway.cluster.registration import Plan, RegistrationError
from shared.address import Address
from shared.cluster.mesh_objects import KINDS, Manifest, path_of
from shared.cluster.service_annotations import HGATE, MANAGED_BY, SERVICE
from shared.errors import StatusError, UpstreamError
from shared.tasks import spawn

log = logging.getLogger("hbone.cluster")

PAUSE_S = 0.02
"""Between two Services: a new one is some six requests."""

AGAIN_S = 10.0
"""After which what could not be written is tried again."""

OBSTACLE_S = 60.0
"""After which it is looked whether an obstacle is gone: what is not ours is not followed."""

MAX_SAID = 1000
"""Services whose failure is in the log, each once."""

_MADE = f"{MANAGED_BY}={HGATE},{SERVICE}"
"""The labels of what is made (Kubernetes, "Labels and Selectors")."""

Object = Mapping[str, Any]


class Registrar:
    """Registers Services while it is `start`ed."""

    def __init__(
        self,
        api: ApiServer,
        domain: str,
        told: Callable[[], None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`told` is called when the obstacles of a Service have changed, `ended` when a task of ours has."""
        self.obstacles: dict[Key, str] = {}
        """What could not be made for a Service, in words for its owners."""
        self.written = 0
        self.failed = 0
        self._api = api
        self._domain = domain
        self._told = told
        self._ended = ended
        self._services: Mapping[Key, Object] | None = None  # None: not known yet
        self._gateways: Sequence[Address] = ()
        self._dirty: set[Key] = set()
        self._asked = asyncio.Event()
        self._watches: dict[str, ObjectWatch[Object]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._said: set[Key] = set()
        self._waiting: dict[float, set[Key]] = {}  # by the pause after which they are tried again

    def want(self, services: Mapping[Key, Object], gateways: Sequence[Address]) -> None:
        """From now on these Services are to be registered, as the API server has them, and led to `gateways`,
        hgate's own addresses."""
        before, self._services = self._services or {}, services
        if not self._tasks:  # `start` has all looked at
            self._gateways = gateways
            return
        if gateways != self._gateways:
            self._dirty |= services.keys()
        self._gateways = gateways
        self._dirty |= {
            key for key in before.keys() | services.keys() if before.get(key) != services.get(key)
        }
        self._asked.set()

    def start(self) -> None:
        """We may write from now on."""
        for name, (api, plural) in KINDS.items():
            kind = Kind(name, api, plural, is_optional=True)
            watch = ObjectWatch(self._api, kind, _kept, self._changed(name), self._asked.set, selector=_MADE)
            self._watches[name] = watch
            self._tasks.append(spawn(watch.run(), name=f"follow our {plural}"))
        self._dirty |= (self._services or {}).keys()
        self._asked.set()
        self._tasks.append(spawn(self._run(), name="register services"))
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def stop(self) -> None:
        """We may write no longer."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._watches.clear()

    def _changed(self, kind: str) -> Callable[[Key], None]:
        """For a watch of that kind: an object of ours is another than before, or gone."""

        def changed(key: Key) -> None:
            found = self._watches[kind].objects.get(key)
            if found is not None:
                self._dirty.add((key[0], str(found["metadata"]["labels"][SERVICE])))
            else:  # whose it was is in its name, but not for sure
                self._dirty |= {service for service in self._services or () if service[0] == key[0]}
            self._asked.set()

        return changed

    async def _run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            watches = self._watches.values()
            services = self._services
            if services is None or not all(watch.is_complete for watch in watches):
                continue
            if self._watches["ServiceEntry"].is_absent:
                continue
            failed: set[Key] = set()
            await self._remove_orphans(services, failed)
            while self._dirty:
                key = self._dirty.pop()
                found = self._services.get(key) if self._services else None
                if found is not None and (pause_s := await self._register(key, found)):
                    self._try_again({key}, pause_s)
                await asyncio.sleep(PAUSE_S)
            if failed:
                self._try_again(failed, AGAIN_S)

    def _try_again(self, keys: set[Key], pause_s: float) -> None:
        if pause_s not in self._waiting:
            self._waiting[pause_s] = set()
            asyncio.get_running_loop().call_later(pause_s, self._again, pause_s)
        self._waiting[pause_s] |= keys

    def _again(self, pause_s: float) -> None:
        self._dirty |= self._waiting.pop(pause_s)
        self._asked.set()

    async def _register(self, key: Key, found: Object) -> float:
        """Makes what is missing for a Service; returns after how many seconds to try again, 0 for never."""
        obstacles: list[str] = []
        pause_s = 0.0
        try:
            plan = self._plan(found, self._made_in(key[0]))
            strangers = [one for each in plan.apply if (one := await self._stranger(each)) is not None]
            if strangers:
                plan = self._plan(found, [*self._made_in(key[0]), *strangers])
            obstacles += plan.obstacles
            for each in plan.apply:
                try:
                    await self._api.apply(path_of(each), each, HGATE)
                    self.written += 1
                except StatusError as error:
                    if error.status not in (403, 409, 422):
                        raise
                    self.failed += 1
                    obstacles.append(f"{each['kind']} {each['metadata']['name']}: {error}")
            for superfluous in plan.remove:
                await self._remove(superfluous)
            pause_s = OBSTACLE_S if obstacles else 0.0
        except RegistrationError as error:
            obstacles = [str(error)]
        except UpstreamError as error:
            self.failed += 1
            self._say(key, str(error))
            return AGAIN_S
        self._note(key, "; ".join(obstacles))
        return pause_s

    def _plan(self, found: Object, there: Sequence[Object]) -> Plan:
        return registration.plan(found, there, self._gateways, self._domain)

    async def _stranger(self, wanted: Manifest) -> Object | None:
        """What has the place of an object that is to be made, and is not among what we follow."""
        about = wanted["metadata"]
        if (about["namespace"], about["name"]) in self._watches[wanted["kind"]].objects:
            return None
        try:
            there = await self._api.get(path_of(wanted))
        except StatusError as error:
            if error.status == 404:
                return None
            raise
        return {**there, "kind": wanted["kind"]}

    def _made_in(self, namespace: str) -> list[Object]:
        return [
            found
            for watch in self._watches.values()
            for (place, _), found in watch.objects.items()
            if place == namespace
        ]

    async def _remove_orphans(self, services: Mapping[Key, Object], failed: set[Key]) -> None:
        uids = {str(found["metadata"]["uid"]) for found in services.values()}
        for found in list(self._orphans(uids)):
            try:
                await self._remove(found)
            except UpstreamError as error:
                about = found["metadata"]
                key = about["namespace"], about["labels"][SERVICE]
                self.failed += 1
                self._say(key, str(error))
                failed.add(key)
        for key in self.obstacles.keys() - services.keys():
            del self.obstacles[key]

    def _orphans(self, uids: set[str]) -> Iterator[Object]:
        """What we made for Services that are not to be registered any more; without an owner it is of
        somebody's repository."""
        for watch in self._watches.values():
            for found in watch.objects.values():
                owner = registration.owner_of(found)
                if owner is not None and owner not in uids:
                    yield found

    async def _remove(self, found: Object) -> None:
        about = found["metadata"]
        path = path_of(found)
        try:
            await self._api.ask("DELETE", path, body={"preconditions": {"uid": about["uid"]}})
        except StatusError as error:
            if error.status not in (404, 409):  # gone already, or another one
                raise
        else:
            log.info("%s %s/%s is removed", found["kind"], about["namespace"], about["name"])
            self.written += 1

    def _note(self, key: Key, obstacles: str) -> None:
        self._said.discard(key)
        if self.obstacles.get(key, "") == obstacles:
            return
        if obstacles:
            self.obstacles[key] = obstacles
        else:
            del self.obstacles[key]
        self._told()

    def _say(self, key: Key, error: str) -> None:
        if key not in self._said and len(self._said) < MAX_SAID:
            self._said.add(key)
            log.warning("Service %s/%s is not registered: %s", *key, error)


def _kept(found: Object) -> Object:
    """What is compared with what is wanted: not who owns which field, and not what istiod says of it."""
    about = found["metadata"]
    named = ("name", "namespace", "uid", "labels", "ownerReferences")
    return {
        "apiVersion": found.get("apiVersion") or KINDS[found["kind"]][0],
        "kind": found["kind"],
        "metadata": {key: about[key] for key in named if key in about},
        "spec": found.get("spec") or {},
    }
