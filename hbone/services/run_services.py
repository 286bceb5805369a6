"""Services as Cloud Run's Admin API knows them.

It is asked with an access token of gcloud's login, or of a credentials file; the token goes to this API only.
Where a region is set, one service is asked for (v2). Otherwise the services of all regions are listed: v2
lists no two regions at once, v1 does at its global endpoint (Cloud Run Admin API, namespaces.services.list).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hbone.services.found_service import FoundService
from hbone.services.named_service import ServiceName
from shared.cluster.service_annotations import origin_of
from shared.credentials.token_sources.access_tokens import AccessTokens
from shared.credentials.token_sources.token_answers import said
from shared.errors import StatusError, UnavailableError, UpstreamError
from shared.net.http1 import Response, request
from shared.net.http_proxy import HttpProxy

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 8 << 20
"""A service with all its settings is some KiB."""

PAGE = 200
MAX_PAGES = 5

REGION_LABEL = "cloud.googleapis.com/location"
NAMESPACE_VARIABLE = "WORKLOAD_NAMESPACE"
NAMESPACE_LABEL = "mesh-namespace"
ACCOUNT_PREFIX = "k8s-"
"""Where krun has its namespace from, in this order: a variable, a label of the service, the name of its
account, k8s-NAMESPACE@PROJECT..."""

# What goes into paths of the API.
_PROJECT = re.compile(r"[a-z0-9][a-z0-9.:-]{0,98}")
_REGION = re.compile(r"[a-z][a-z0-9-]{0,62}")

# A namespace's name (RFC 1123 label).
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class _Service:
    """What either version of the API says of one."""

    name: str
    region: str
    url: str
    namespace: str


class RunServices:
    """The services of one project."""

    def __init__(
        self, url: str, project: str, region: str, tokens: AccessTokens, proxy: HttpProxy | None = None
    ) -> None:
        """`url` is the API's, to which `proxy` leads; `region` may be empty. Raises UnavailableError if
        `project` or `region` can be no name of one."""
        self._proxy = proxy
        for what, value, form in (("project", project, _PROJECT), ("region", region or "r", _REGION)):
            if not form.fullmatch(value):
                raise UnavailableError(f"{value[:60]!a} is no name of a Google {what}")
        self._url = url
        self._project = project
        self._region = region
        self._tokens = tokens

    @property
    def place(self) -> str:
        """The project, for people."""
        return f"Cloud Run in project {self._project}{f', {self._region}' if self._region else ''}"

    async def find(self, wanted: ServiceName) -> FoundService:
        """The service that is called so; with a namespace only one whose krun is of it.

        Raises:
            UnavailableError: there is none, or several.
            HboneError: the API cannot be asked, or says no.
        """
        found = await self._named(wanted.name)
        if wanted.namespace:
            if found and not [one for one in found if one.namespace == wanted.namespace]:
                told = found[0].namespace or f"no namespace that its {NAMESPACE_VARIABLE} would name"
                raise UnavailableError(
                    f"{wanted.name} of {self.place} is of {told}; if it is meant, write {wanted.name} alone"
                )
            found = [one for one in found if one.namespace == wanted.namespace]
        if not found:
            raise UnavailableError(f"{self.place} has no service {wanted.name}")
        if len(found) > 1:
            regions = ", ".join(sorted(one.region for one in found))
            raise UnavailableError(
                f"{self.place} has {wanted.name} in several regions, {regions}: name one with --region"
            )
        place = f"{self.place}" if self._region else f"{self.place}, {found[0].region}"
        try:
            return FoundService(f"https://{origin_of(found[0].url)}", place)
        except ValueError as error:
            raise UpstreamError(f"{wanted.name} of {place}: its URL {error}") from error

    async def names(self) -> list[str]:
        """All services; those of a known namespace as SERVICE.NAMESPACE."""
        found = await self._all()
        return sorted({f"{one.name}.{one.namespace}" if one.namespace else one.name for one in found})

    async def _named(self, name: str) -> list[_Service]:
        if not self._region:
            return [one for one in await self._all() if one.name == name]
        path = f"v2/projects/{self._project}/locations/{self._region}/services/{quote(name)}"
        answer = await self._ask(path, missing_ok=True)
        return [_of_v2(answer, name, self._region)] if answer is not None else []

    async def _all(self) -> list[_Service]:
        found: list[_Service] = []
        rest = ""
        for _ in range(MAX_PAGES):
            path = f"apis/serving.knative.dev/v1/namespaces/{self._project}/services?limit={PAGE}{rest}"
            answer = await self._ask(path) or {}
            items = answer.get("items")
            found += [_of_v1(item) for item in items or () if isinstance(item, dict)]
            more = _mapping(answer.get("metadata")).get("continue")
            if not more:
                break
            rest = f"&continue={quote(str(more), safe='')}"
        return [one for one in found if not self._region or one.region == self._region]

    async def _ask(self, path: str, *, missing_ok: bool = False) -> dict[str, Any] | None:
        """The answer, None if it is 404 and that is `missing_ok`. Raises StatusError and UpstreamError."""
        minted = await self._tokens.access_token()
        response = await self._send(path, minted.token)
        if response.status == 401:  # it may have been kept for too long
            self._tokens.drop(minted.token)
            response = await self._send(path, (await self._tokens.access_token()).token)
        if response.status == 404 and missing_ok:
            return None
        if response.status != 200:
            hint = f"; {self._tokens.identity} needs roles/run.viewer" if response.status == 403 else ""
            raise StatusError(response.status, f"{self._url} answered {said(response)}{hint}")
        answer = response.json_object()
        if answer is None:
            raise UpstreamError(f"broken answer from {self._url}: no JSON object")
        return answer

    async def _send(self, path: str, token: str) -> Response:
        return await request(
            "GET",
            f"{self._url}/{path}",
            headers={"authorization": f"Bearer {token}", "accept": "application/json", "user-agent": "hbone"},
            timeout_s=TIMEOUT_S,
            max_bytes=MAX_ANSWER_BYTES,
            proxy=self._proxy,
        )


def _of_v2(answer: Mapping[str, Any], name: str, region: str) -> _Service:
    """projects.locations.services, version 2."""
    template = _mapping(answer.get("template"))
    return _Service(name, region, _text(answer.get("uri")), _namespace(answer.get("labels"), template))


def _of_v1(answer: Mapping[str, Any]) -> _Service:
    """namespaces.services, version 1, as Knative has it."""
    about, spec = _mapping(answer.get("metadata")), _mapping(answer.get("spec"))
    template = _mapping(_mapping(spec.get("template")).get("spec"))
    labels = _mapping(about.get("labels"))
    return _Service(
        _text(about.get("name")),
        _text(labels.get(REGION_LABEL)),
        _text(_mapping(answer.get("status")).get("url")),
        _namespace(labels, template),
    )


def _namespace(labels: object, template: Mapping[str, Any]) -> str:
    """The namespace that the service's krun is of, empty if nothing says it, or it can be none: whoever
    deploys a service writes it, and it is shown to everybody who looks one up."""
    told = _told_namespace(labels, template)
    return told if _LABEL.fullmatch(told) else ""


def _told_namespace(labels: object, template: Mapping[str, Any]) -> str:
    containers = template.get("containers")
    for container in containers if isinstance(containers, list) else ():
        for variable in _mapping(container).get("env") or ():
            if _mapping(variable).get("name") == NAMESPACE_VARIABLE:
                return _text(variable.get("value"))
    if label := _text(_mapping(labels).get(NAMESPACE_LABEL)):
        return label
    account = _text(template.get("serviceAccount") or template.get("serviceAccountName"))
    name = account.partition("@")[0]
    return name.removeprefix(ACCOUNT_PREFIX) if name.startswith(ACCOUNT_PREFIX) else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
