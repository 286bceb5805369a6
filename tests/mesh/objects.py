"""Objects of the cluster, by an administrator's hand: a kubectl of four verbs, on our own client."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import StatusError
from tests.support.api_server import RealApiServer, access

MANIFESTS = Path(__file__).parent / "manifests"

CLUSTERED = {"Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
"""Kinds that are in no namespace."""

ATTEMPTS = 5
"""To replace an object that others write, too."""

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one API server."""

    server: RealApiServer
    admin: str
    """The administrator's token."""

    def apply(self, objects: Iterable[Object]) -> None:
        """Makes them, or makes them so. Raises StatusError if the server refuses one."""
        asyncio.run(self._each(objects, self._applied))

    def apply_as(self, manager: str, objects: Iterable[Object], *, dry_run: bool = False) -> None:
        """Server-side apply, as `kubectl apply --server-side` does it, and with `--dry-run=server`. Raises
        StatusError if the server refuses one."""

        async def applied(api: KubernetesApi, each: Object) -> None:
            path = f"{path_of(each)}/{each['metadata']['name']}"
            await api.apply(path, each, manager, dry_run=dry_run)

        asyncio.run(self._each(objects, applied))

    def delete(self, objects: Iterable[Object]) -> None:
        """Raises StatusError if one is not there."""

        async def deleted(api: KubernetesApi, each: Object) -> None:
            await api.ask("DELETE", f"{path_of(each)}/{each['metadata']['name']}")

        asyncio.run(self._each(objects, deleted))

    def status(self, objects: Iterable[Object]) -> None:
        """Gives them their status. Raises StatusError if one is not there."""

        async def given(api: KubernetesApi, each: Object) -> None:
            path = f"{path_of(each)}/{each['metadata']['name']}"
            there = await api.ask("GET", path)
            await api.ask("PUT", f"{path}/status", {**there, "status": each["status"]})

        asyncio.run(self._each(objects, given))

    def get(self, path: str) -> dict[str, Any] | None:
        """An object by its path; None if it is not there."""
        try:
            return asyncio.run(KubernetesApi(access(self.server, self.admin)).ask("GET", path))
        except StatusError as error:
            if error.status == 404:
                return None
            raise

    def token(self, namespace: str, account: str, audience: str) -> str:
        """A token of a service account, for an hour."""
        asked = {"spec": {"audiences": [audience], "expirationSeconds": 3600}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        told = asyncio.run(KubernetesApi(access(self.server, self.admin)).ask("POST", path, asked))
        return str(told["status"]["token"])

    async def _each(self, objects: Iterable[Object], act: Any) -> None:
        api = KubernetesApi(access(self.server, self.admin))
        for each in objects:
            await act(api, each)

    async def _applied(self, api: KubernetesApi, each: Object) -> None:
        path, name = path_of(each), each["metadata"]["name"]
        try:
            await api.ask("POST", path, each)
        except StatusError as error:
            if error.status != 409:
                raise
            # Somebody else, hgate among them, may write it at the same time.
            for left in reversed(range(ATTEMPTS)):
                there = await api.ask("GET", f"{path}/{name}")
                version = {"resourceVersion": there["metadata"]["resourceVersion"]}
                try:
                    await api.ask(
                        "PUT", f"{path}/{name}", {**each, "metadata": {**each["metadata"], **version}}
                    )
                    return
                except StatusError as error:
                    if error.status != 409 or not left:
                        raise


def path_of(each: Object) -> str:
    """Where objects of its kind are, below the server's URL."""
    version, kind = str(each["apiVersion"]), str(each["kind"])
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = kind.lower()
    plural = re.sub(r"(?<![aeo])y$", "ie", plural) + "s"
    if kind in CLUSTERED:
        return f"{base}/{plural}"
    return f"{base}/namespaces/{each['metadata'].get('namespace', 'default')}/{plural}"


def manifest(name: str) -> list[Object]:
    """The objects of a file in `manifests`."""
    return read(MANIFESTS / f"{name}.yaml")


def read(path: Path) -> list[Object]:
    """The objects of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def kubeconfig(server: RealApiServer, token: str, namespace: str) -> str:
    """A kubeconfig file, as JSON, which is YAML."""
    authority = base64.b64encode(server.ca_pem).decode()
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "mesh",
            "contexts": [{"name": "mesh", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "clusters": [
                {"name": "c", "cluster": {"server": server.url, "certificate-authority-data": authority}}
            ],
            "users": [{"name": "u", "user": {"token": token}}],
        }
    )
