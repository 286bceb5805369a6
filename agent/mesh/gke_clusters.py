"""Finds a GKE cluster and the way to its API server (GKE API, v1, projects.locations.clusters).

Of several clusters the first of this order is taken: in the workload's own region, with a name that begins
with `istio`, with a label `mesh_id`; then by name. The API server is asked by its own address; if that cannot
be reached from here, and the cluster is a member of a fleet, through the fleet's Connect gateway.
"""

from __future__ import annotations

import base64
import logging
import ssl
from collections.abc import Mapping
from typing import Any

from agent.config.mesh_name import GkeName
from agent.config.mesh_settings import GKE_URL
from agent.mesh.google_api import MAX_BYTES, TIMEOUT_S, GoogleApi
from shared.credentials.kubernetes.kubernetes_access import Access, Bearer, Pem
from shared.errors import DialError, UnavailableError, UpstreamError
from shared.net.http1 import get

log = logging.getLogger("hbone.mesh")

CONNECT_GATEWAY_URL = "https://connectgateway.googleapis.com"

FAVOURED = "istio"
MESH_LABEL = "mesh_id"

Cluster = Mapping[str, Any]


class GkeClusters:
    """The clusters that an account may see."""

    def __init__(
        self,
        bearer: Bearer,
        *,
        url: str = GKE_URL.default,
        quota_project: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`url` is the GKE API's; the others are as `GoogleApi` has them."""
        self._api = GoogleApi(bearer, quota_project, tls)
        self._url = url

    async def find(self, name: GkeName, region: str = "") -> Cluster:
        """The cluster of that name, which has a project; else the first by the order above. `region` is the
        workload's own.

        Raises:
            UnavailableError: there is none.
            StatusError: the API says no.
            DialError, UpstreamError, TokenError: it cannot be asked.
        """
        parent = f"projects/{name.project}/locations/{name.location or '-'}"
        if name.cluster and name.location:
            return await self._ask(f"/v1/{parent}/clusters/{name.cluster}")
        answer = await self._ask(f"/v1/{parent}/clusters")
        listed = answer.get("clusters", [])
        clusters = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        fitting = [one for one in clusters if name.cluster in ("", one.get("name"))]
        if not fitting:
            what = f"cluster {name.cluster}" if name.cluster else "GKE cluster"
            raise UnavailableError(f"no {what} in {parent.replace('/locations/-', '')}: set MESH to another")
        return min(fitting, key=lambda one: _rank(one, region))

    def access(self, cluster: Cluster, namespace: str) -> Access:
        """Its API server, by its address. Raises UpstreamError if the answer has none."""
        authority = _text(_mapping(cluster.get("masterAuth")).get("clusterCaCertificate"))
        endpoint = _text(cluster.get("endpoint"))
        try:
            pem = base64.b64decode(authority, validate=True)
        except ValueError:
            pem = b""
        if not endpoint or not pem:
            raise UpstreamError(
                f"cluster {cluster.get('name')}: the GKE API tells no endpoint, or no authority"
            )
        place = f"the GKE API's authority of {cluster.get('name')}"
        return Access(f"https://{endpoint}", self._api.bearer, namespace, Pem(place, given=pem))

    def by_connect_gateway(self, cluster: Cluster, namespace: str) -> Access | None:
        """Its API server through its fleet's Connect gateway; None if it is in no fleet."""
        membership = _text(_mapping(cluster.get("fleet")).get("membership"))
        _, found, resource = membership.partition("//gkehub.googleapis.com/")
        if not found:
            return None
        path = resource.replace("/memberships/", "/gkeMemberships/")
        return Access(f"{CONNECT_GATEWAY_URL}/v1/{path}", self._api.bearer, namespace)

    async def _ask(self, path: str) -> dict[str, Any]:
        return await self._api.ask(f"{self._url}{path}", _hint)


async def reachable(access: Access, other: Access | None) -> Access:
    """`access` if its server accepts connections, else `other`, if there is one."""
    if other is None:
        return access
    try:
        await get(
            f"{access.server}/version", headers={}, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES, tls=access.tls()
        )
    except DialError as error:
        log.info("%s cannot be reached (%s), so the Connect gateway is asked", access.server, error)
        return other
    except UpstreamError:
        pass  # it is there, and its answer does not matter
    return access


def region_of(location: str) -> str:
    """The region of a zone (`us-central1-b`), or of a region."""
    return location.rpartition("-")[0] if location.count("-") > 1 else location


def _rank(cluster: Cluster, region: str) -> tuple[bool, bool, bool, str]:
    name = _text(cluster.get("name"))
    return (
        region_of(_text(cluster.get("location"))) != region,
        not name.startswith(FAVOURED),
        MESH_LABEL not in _mapping(cluster.get("resourceLabels")),
        name,
    )


def _hint(status: int) -> str:
    if status == 403:
        return "; the account needs the role container.clusterViewer, and the project the API container"
    if status == 404:
        return "; is its name in MESH right?"
    return ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
