"""The ConfigMap `mesh-env` of istio-system, from which krun learns of the mesh: filled, and kept current.

The rules:

1. A key that is not there is filled as soon as its value is known.
2. A key that we have written follows what it is about, such as a load balancer's address. The API server says
   whose a key is (its field manager): one that a user has changed since is the user's from then on.
3. Any other key is the user's, an empty one too, and is left alone. To have ours again, remove the key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from gateway.cluster.api_server import ApiServer
from gateway.cluster.object_watch import Kind
from shared import ports
from shared.address import Address
from shared.credentials.token_sources.metadata import asked
from shared.errors import StatusError, TokenError, UpstreamError

log = logging.getLogger("hbone.cluster")

CONFIG_MAP = Kind("ConfigMap", "v1", "configmaps")

SYSTEM_NAMESPACE = "istio-system"
"""Where krun looks for it, and where Istio has its own."""

NAME = "mesh-env"

MANAGER = "hgate"

LOOK_S = 10.0
"""Seconds between two looks at what is not followed: Istio's root, the metadata server."""

AGAIN_S = 2.0
"""After a failure: as a rule somebody has changed it between our look and our writing."""

METADATA_TIMEOUT_S = 2.0
MAX_METADATA_BYTES = 4096

OUTSIDE, INSIDE, CONTROL_PLANE = SERVICES = ("hgate", "internal-hgate", "hgate-istiod")
"""The original's Services: the gateway for everybody, within the VPC, and istiod behind it."""

_METADATA = {
    "PROJECT_ID": "project/project-id",
    "PROJECT_NUMBER": "project/numeric-project-id",
    "CLUSTER_NAME": "instance/attributes/cluster-name",
    "CLUSTER_LOCATION": "instance/attributes/cluster-location",
}


class MeshEnv:
    """Writes it as long as `may_write` says so."""

    def __init__(
        self,
        api: ApiServer,
        metadata_host: str,
        load_balancer: Callable[[str], str],
        may_write: Callable[[], bool],
    ) -> None:
        """`metadata_host` is HOST or HOST:PORT of Google's metadata server; `load_balancer` gives the address
        of one of the gateway's Services, empty if it has none yet."""
        self.written = 0
        self.failed = 0
        self._api = api
        self._host = metadata_host
        self._load_balancer = load_balancer
        self._may_write = may_write
        self._asked = asyncio.Event()
        self._of_platform: dict[str, str] = {}
        self._has_failed = False

    def wake(self) -> None:
        """We may write now, or a load balancer has another address."""
        self._asked.set()

    async def run(self) -> None:
        """Keeps it for ever."""
        while True:
            if self._may_write():
                await self._look()
            try:
                async with asyncio.timeout(AGAIN_S if self._has_failed else LOOK_S):
                    await self._asked.wait()
            except TimeoutError:
                continue
            self._asked.clear()

    async def _look(self) -> None:
        try:
            if await self._write(await self._values()):
                self.written += 1
            if self._has_failed:
                log.info("%s: kept again", NAME)
            self._has_failed = False
        except UpstreamError as error:
            self.failed += 1
            if not self._has_failed:
                log.warning("%s is not kept: %s", NAME, error)
            self._has_failed = True

    async def _write(self, values: Mapping[str, str]) -> bool:
        """Whether something was to be written."""
        path = CONFIG_MAP.path_of(SYSTEM_NAMESPACE, NAME)
        there = await self._there(path)
        data = dict(there.get("data") or {})
        wanted = ours(data, owned_keys(there, MANAGER), values)
        if wanted == {key: data[key] for key in wanted if key in data} or not wanted:
            return False
        about = {"name": NAME, "namespace": SYSTEM_NAMESPACE}
        body = {"apiVersion": CONFIG_MAP.api, "kind": CONFIG_MAP.name, "metadata": about, "data": wanted}
        await self._api.apply(path, body, MANAGER)
        changed = sorted(key for key, value in wanted.items() if data.get(key) != value)
        log.info("%s of %s: %s", NAME, SYSTEM_NAMESPACE, ", ".join(changed))
        return True

    async def _there(self, path: str) -> dict[str, Any]:
        """An object; empty if it is not there."""
        try:
            return await self._api.get(path)
        except StatusError as error:
            if error.status == 404:
                return {}
            raise

    # What it says.

    async def _values(self) -> dict[str, str]:
        """What is known now, by key."""
        found = {**await self._platform(), **await self._istio()}
        for key, service in (("MCON_ADDR", OUTSIDE), ("IMCON_ADDR", INSIDE)):
            if host := self._load_balancer(service):
                found[key] = host
        if host := self._load_balancer(CONTROL_PLANE):
            found["XDS_ADDR"] = str(Address(host, ports.ISTIOD))
        return found

    async def _istio(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, name, read in _OF_CONFIG_MAPS:
            data = (await self._there(CONFIG_MAP.path_of(SYSTEM_NAMESPACE, name))).get("data") or {}
            if value := read(data):
                found[key] = value
        return found

    async def _platform(self) -> dict[str, str]:
        """What the metadata server says of project and cluster, asked until all is there. Elsewhere than on
        Google's machines there is none."""
        for key in sorted(_METADATA.keys() - self._of_platform.keys()):
            url = f"http://{self._host}/computeMetadata/v1/{_METADATA[key]}"
            try:
                answer = await asked(url, "metadata server", METADATA_TIMEOUT_S, MAX_METADATA_BYTES)
            except TokenError as error:
                log.debug("%s: %s", key, error)
                break
            self._of_platform[key] = answer.body.decode("ascii", "replace").strip()
        return self._of_platform


def ours(data: Mapping[str, str], owned: frozenset[str], values: Mapping[str, str]) -> dict[str, str]:
    """The keys that are ours to say, of a ConfigMap with `data` of which we own `owned`: those we know values
    of, if they are missing or ours; what is ours and not known at the moment stays as it is."""
    wanted = {key: value for key, value in values.items() if key not in data or key in owned}
    return wanted | {key: data[key] for key in owned if key in data and key not in values}


def owned_keys(found: Mapping[str, Any], manager: str) -> frozenset[str]:
    """The keys of a ConfigMap's data that a field manager owns by server-side apply (Kubernetes,
    "Server-Side Apply", managedFields)."""
    keys: set[str] = set()
    for entry in (found.get("metadata") or {}).get("managedFields") or []:
        if entry.get("manager") == manager and entry.get("operation") == "Apply":
            fields = (entry.get("fieldsV1") or {}).get("f:data") or {}
            keys |= {field.removeprefix("f:") for field in fields if field.startswith("f:")}
    return frozenset(keys)


def _root(data: Mapping[str, str]) -> str:
    return data.get("root-cert.pem", "")


def _trust_domain(data: Mapping[str, str]) -> str:
    import yaml

    try:
        mesh = yaml.safe_load(data.get("mesh", ""))
    except (yaml.YAMLError, ValueError):  # a date that is none
        return ""
    return str(mesh.get("trustDomain") or "") if isinstance(mesh, dict) else ""


def _tenant(data: Mapping[str, str]) -> str:
    return data.get("CLOUDRUN_ADDR", "")


_OF_CONFIG_MAPS: tuple[tuple[str, str, Callable[[Mapping[str, str]], str]], ...] = (
    ("CAROOT_ISTIOD", "istio-ca-root-cert", _root),
    ("TRUST_DOMAIN", "istio", _trust_domain),
    ("MESH_TENANT", "env-asm-managed", _tenant),  # of Google's managed control plane
)
