"""Which of several replicas writes: the one that holds a Lease (Kubernetes, "Leases", leader election).

The rules, those of client-go's leader election:

1. The holder renews the Lease every RENEW_S. If it could not for LEASE_S minus a margin, it stops writing,
   so that there are never two.
2. Others take the Lease once it has not changed for LEASE_S by their own steady clock: clocks of machines
   differ. A Lease that its holder has let go of is taken at the next look.
3. Each write says which version it changes; of two that take it at once the API server refuses one.

The official client has an election, too; it goes by the wall clock, and cannot let go of a Lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gateway.cluster.api_server import ApiServer
from gateway.cluster.object_watch import Kind
from shared.errors import StatusError, UpstreamError

log = logging.getLogger("hbone.cluster")

LEASE = Kind("Lease", "coordination.k8s.io/v1", "leases")

LEASE_S = 15
RENEW_S = 5.0
LOOK_S = 2.0
"""Seconds between two looks of those that wait."""

MARGIN_S = 3.0
"""A holder that could not renew stops so much earlier than others may take over."""

RELEASE_S = 2.0
"""For letting go of it at the end."""


class Leadership:
    """Seeks the Lease, and keeps it."""

    def __init__(
        self, api: ApiServer, namespace: str, name: str, identity: str, changed: Callable[[bool], None]
    ) -> None:
        """`changed` is called with whether we are the holder."""
        self.is_held = False
        self.holder = ""
        """As last seen."""
        self._api = api
        self._path = LEASE.path_of(namespace)
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._changed = changed
        self._renewed_at = 0.0
        self._seen: tuple[str, float] = ("", 0.0)  # its version, and when that was new, by the steady clock
        self._failed = False

    async def run(self) -> None:
        """Seeks the Lease for ever."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                async with asyncio.timeout(min(RENEW_S, self._left_s(started))):
                    held = await self._seek()
                if self._failed:
                    log.info("lease %s: asked for again", self._name)
                self._failed = False
            except (UpstreamError, TimeoutError) as error:
                if not self._failed:
                    log.warning("lease %s: %s", self._name, str(error) or "no answer in time")
                self._failed = True
                held = self.is_held and self._left_s(loop.time()) > 0
            else:
                if held:
                    self._renewed_at = started
            self._hold(held)
            pause_s = RENEW_S if held and not self._failed else LOOK_S
            await asyncio.sleep(min(pause_s * random.uniform(0.9, 1.0), self._left_s(loop.time())))

    async def release(self) -> None:
        """Lets go of the Lease, if we have it, for others to take it at once."""
        if not self.is_held:
            return
        self._hold(False)
        try:
            async with asyncio.timeout(RELEASE_S):
                lease = await self._api.get(f"{self._path}/{self._name}")
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._api.ask("PUT", f"{self._path}/{self._name}", body=lease)
        except (UpstreamError, TimeoutError) as error:
            log.debug("lease %s is not released: %s", self._name, error)

    def _left_s(self, now: float) -> float:
        """For how long we may go on writing without having renewed it; without end if we do not write."""
        return self._renewed_at + LEASE_S - MARGIN_S - now if self.is_held else math.inf

    def _hold(self, held: bool) -> None:
        if held != self.is_held:
            self.is_held = held
            log.info("lease %s: %s", self._name, "we write from now on" if held else "we write no longer")
            self._changed(held)

    async def _seek(self) -> bool:
        """Whether we have the Lease now."""
        try:
            lease = await self._api.get(f"{self._path}/{self._name}")
        except StatusError as error:
            if error.status != 404:
                raise
            return await self._write("POST", self._path, {"metadata": self._about(), "spec": self._spec({})})
        spec = lease.get("spec") or {}
        self.holder = str(spec.get("holderIdentity") or "")
        now = asyncio.get_running_loop().time()
        version = str(lease["metadata"].get("resourceVersion"))
        if version != self._seen[0]:
            self._seen = version, now
        lasts_s = float(spec.get("leaseDurationSeconds") or LEASE_S)
        is_ours = self.holder == self._identity
        if self.holder and not is_ours and now - self._seen[1] < lasts_s:
            return False
        return await self._write("PUT", f"{self._path}/{self._name}", {**lease, "spec": self._spec(spec)})

    async def _write(self, method: str, path: str, lease: dict[str, Any]) -> bool:
        body = {"apiVersion": LEASE.api, "kind": LEASE.name, **lease}
        try:
            written = await self._api.ask(method, path, body=body)
        except StatusError as error:
            if error.status == 409:  # somebody was faster
                return False
            raise
        self.holder = self._identity
        self._seen = str(written["metadata"].get("resourceVersion")), asyncio.get_running_loop().time()
        return True

    def _about(self) -> dict[str, str]:
        return {"name": self._name, "namespace": self._namespace}

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        kept = before.get("holderIdentity") == self._identity
        transitions = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_S,
            "acquireTime": before.get("acquireTime") if kept else now,
            "renewTime": now,
            "leaseTransitions": transitions if kept or not before else transitions + 1,
        }
