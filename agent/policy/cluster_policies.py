"""The mesh's policies, read from the API server: those of the workload's namespace and of the root
namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from agent.policy.istio_policies import AUTHENTICATION, AUTHORIZATION, REQUEST_AUTHENTICATION, Policy
from shared.credentials.kubernetes.kubernetes_access import Access
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import DialError, StatusError, UpstreamError

GROUP = "security.istio.io"

VERSIONS = ("v1", "v1beta1")
"""Istio has v1 since 1.22."""

RESOURCES = {
    AUTHORIZATION: "authorizationpolicies",
    AUTHENTICATION: "peerauthentications",
    REQUEST_AUTHENTICATION: "requestauthentications",
}

PAGE = 100
"""Objects in one answer."""

MAX_BYTES = 8 << 20
"""Of an answer. One object holds up to 1.5 MiB; those of a page have 80 KiB each, some take 2."""

MAX_PAGES = 20

TIMEOUT_S = 10.0
"""For all of them, which take an API server some milliseconds."""

Source = tuple[str, str]
"""Kind and namespace: what RBAC allows or refuses as a whole."""


class ClusterPolicies:
    """Those of some namespaces."""

    def __init__(self, access: Access, namespaces: Sequence[str]) -> None:
        self._api = KubernetesApi(access, max_bytes=MAX_BYTES)
        self._namespaces = namespaces

    async def read(self) -> tuple[dict[Source, list[Policy]], dict[Source, StatusError]]:
        """All that we may read, and the refusals of those that we may not. A cluster without Istio has none.

        Raises DialError, UpstreamError, TokenError, UnavailableError: the API server cannot be asked.
        """
        found: dict[Source, list[Policy]] = {}
        refusals: dict[Source, StatusError] = {}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for kind in RESOURCES:
                    for namespace in self._namespaces:
                        try:
                            found[kind, namespace] = await self._listed(kind, namespace)
                        except StatusError as error:
                            if error.status != 403:
                                raise
                            refusals[kind, namespace] = error
        except TimeoutError as error:
            raise DialError(
                f"{self._api.server} has not listed the policies within {TIMEOUT_S:g} s"
            ) from error
        return found, refusals

    async def _listed(self, kind: str, namespace: str) -> list[Policy]:
        missing: StatusError | None = None
        for version in VERSIONS:
            path = f"/apis/{GROUP}/{version}/namespaces/{namespace}/{RESOURCES[kind]}"
            try:
                return [Policy.of(kind, item) for item in await self._items(path)]
            except StatusError as error:
                if error.status != 404:
                    raise
                missing = missing or error
        if missing is not None and not await self._is_without_istio():
            raise StatusError(
                404, f"{missing}; {path} is not there: check the server's URL, and Istio's CRDs"
            )
        return []

    async def _is_without_istio(self) -> bool:
        """Whether an API server says so: something else at a wrong URL answers 404, too."""
        try:
            answer = await self._api.ask("GET", "/apis")
        except StatusError as error:
            if error.status >= 500:
                raise
            return False
        groups = answer.get("groups")
        if answer.get("kind") != "APIGroupList" or not isinstance(groups, list):
            return False
        return GROUP not in [group.get("name") for group in groups if isinstance(group, dict)]

    async def _items(self, path: str) -> list[Any]:
        items: list[Any] = []
        rest = ""
        for _ in range(MAX_PAGES):
            answer = await self._api.ask("GET", f"{path}?limit={PAGE}{rest}")
            page, about = answer.get("items"), answer.get("metadata")
            items += page if isinstance(page, list) else []
            token = about.get("continue") if isinstance(about, dict) else None
            if not isinstance(token, str) or not token:
                return items
            rest = f"&continue={quote(token, safe='')}"
        raise UpstreamError(f"{self._api.server} has more than {MAX_PAGES * PAGE} objects in {path}")
