"""Services as a cluster knows them: Services and ServiceEntries that lead out of it, by their annotations.

The API server is asked with the kubeconfig's credentials, and only it. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from hbone.services.found_service import FoundService
from hbone.services.named_service import ServiceName
from shared.cluster.service_annotations import AUDIENCE, ORIGINAL_LABEL, URL, check_value
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import StatusError, UnavailableError
from shared.trust.token_claims import shown_claim

TIMEOUT_S = 3.0
"""For one answer: somebody waits for a shell, and a cluster that is gone does not answer."""

MAX_ANSWER_BYTES = 4 << 20
MAX_PAGES = 8
PAGE = 500
"""Objects in one answer; what many more clusters have than pages is not completed."""

SERVICES, ENTRIES = "api/v1", "apis/networking.istio.io/v1"
KINDS = {SERVICES: ("Service", "services"), ENTRIES: ("ServiceEntry", "serviceentries")}

# SERVICE-HASH-REGION: the first label of an older Cloud Run URL, and the name of a Service with the
# original's label.
_NAMED_BY_URL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?-[a-z0-9]{10}-[a-z]{1,2}")

Object = Mapping[str, Any]


class ClusterServices:
    """The services of one cluster."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    @property
    def place(self) -> str:
        """The cluster, for people."""
        context = self._api.access.context
        return f"context {context}" if context else self._api.server

    async def find(self, wanted: ServiceName) -> FoundService:
        """The service that is called so.

        Raises:
            UnavailableError: there is none, or it leads nowhere outside of the cluster.
            HboneError: the cluster cannot be asked, or says no.
        """
        namespace = wanted.namespace or self._api.access.namespace
        without = ""
        for group, (kind, resource) in KINDS.items():
            found = await self._get(f"/{group}/namespaces/{quote(namespace)}/{resource}/{quote(wanted.name)}")
            if found is None:
                continue
            what = f"{kind} {namespace}/{wanted.name} of {self.place}"
            if (service := _service(found, what)) is not None:
                return service
            without = f"{what} has no annotation {URL}"
        if not wanted.namespace and (service := await self._by_label(namespace, wanted.name)) is not None:
            return service
        raise UnavailableError(without or f"{self.place} has no Service {namespace}/{wanted.name}")

    async def names(self) -> list[str]:
        """All services that lead out of the cluster, as SERVICE.NAMESPACE."""
        found = set()
        for group, (kind, resource) in KINDS.items():
            for one in await self._listed(f"/{group}/{resource}", kind):
                about = one.get("metadata") or {}
                if _url(about):
                    found.add(f"{about.get('name')}.{about.get('namespace')}")
        return sorted(found)

    async def _by_label(self, namespace: str, name: str) -> FoundService | None:
        """The original's objects have the service's own name in a label."""
        selector = quote(f"{ORIGINAL_LABEL}={name}", safe="")
        path = f"/{SERVICES}/namespaces/{quote(namespace)}/services?labelSelector={selector}&limit=2"
        found = (await self._api.ask("GET", path)).get("items")
        if not isinstance(found, list) or len(found) != 1:
            return None
        about = found[0].get("metadata") or {}
        return _service(found[0], f"Service {namespace}/{about.get('name')} of {self.place}")

    async def _get(self, path: str) -> Object | None:
        try:
            return await self._api.ask("GET", path)
        except StatusError as error:
            if error.status == 404:
                return None
            raise

    async def _listed(self, path: str, kind: str) -> list[Object]:
        listed: list[Object] = []
        rest = ""
        for _ in range(MAX_PAGES):
            try:
                page = await self._api.ask("GET", f"{path}?limit={PAGE}{rest}")
            except StatusError as error:
                if error.status == 404 and kind != "Service":
                    return []  # a cluster without Istio
                raise
            items = page.get("items")
            listed += [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                break
            rest = f"&continue={quote(str(more), safe='')}"
        return listed


def _url(about: Mapping[str, Any]) -> str:
    """Where the annotations lead, empty if nowhere outside."""
    annotations, labels = about.get("annotations") or {}, about.get("labels") or {}
    if url := annotations.get(URL):
        return str(url)
    name = str(about.get("name"))
    return f"https://{name}.a.run.app" if ORIGINAL_LABEL in labels and _NAMED_BY_URL.fullmatch(name) else ""


def _service(found: Object, what: str) -> FoundService | None:
    about = found.get("metadata") or {}
    told = {URL: _url(about)}
    if not told[URL]:
        return None
    if audience := (about.get("annotations") or {}).get(AUDIENCE):
        told[AUDIENCE] = str(audience)
    for key, value in told.items():
        try:
            told[key] = check_value(key, value)
        except ValueError as error:
            raise UnavailableError(f"{what}: {key} {shown_claim(value)} {error}") from error
    return FoundService(told[URL], what, told.get(AUDIENCE, ""))
