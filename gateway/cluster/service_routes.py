"""Routes from objects of the cluster: Services and ServiceEntries that name a service outside of it.

An object is asked for by the annotation `hbone.dev/cloudrun-url` (`shared.cluster.service_annotations`), or
by the original's label `mesh-cloudrun` on a Service whose name is the first label of its URL
(fortio-cr-icq63pqnqq-uc): that is https://NAME.a.run.app.

The rules:

1. An object makes routes for its own names in its own namespace, and for no others.
   With `hbone.dev/ambient-network` each name has a second route, for CONNECTs of ambient clients.
2. Where it leads, and with whose token, the administrator allows (`gateway.rules.cluster_rules`).
3. A route in hgate's file comes first; of two objects that claim one name, the older one has it, and so has
   it of objects that claim more than MAX_ROUTES names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.config.cluster_files import MAX_ROUTES
from gateway.rules.cluster_rules import ClusterRule, NotAllowedError, ServiceRoute
from gateway.rules.routes import Method, RouteTable
from shared.cluster.service_annotations import (
    ACCOUNT,
    AMBIENT_NETWORK,
    AUDIENCE,
    METHOD,
    ORIGINAL_LABEL,
    TARGET_PORT,
    URL,
    check_value,
    inner_tunnel_of,
    origin_of,
    tunnel_of,
)
from shared.credentials.kubernetes.kubernetes_names import is_label

MAX_HOSTS = 256
"""Of a ServiceEntry, as Istio's definition of it has it; older ones have no bound."""

MAX_SHOWN_CHARS = 300
"""Of a host in a refusal."""

_NAMED_BY_URL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?-[a-z0-9]{10}-[a-z]{1,2}")
"""SERVICE-HASH-REGION: the older form of a Cloud Run URL."""

_MADE_OF = (URL, ACCOUNT, TARGET_PORT, METHOD, AUDIENCE)
"""The annotations that a route is made of."""

_NO_ROUTES = RouteTable(())

Object = Mapping[str, Any]


class ObjectError(ValueError):
    """What keeps an object from being a route, for its Event."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """Which object it is."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def name_of(found: Object) -> ObjectName:
    """Of an object as the API server has it."""
    about = found["metadata"]
    return ObjectName(str(found["kind"]), str(about["namespace"]), str(about["name"]))


def is_asked_for(found: Object) -> bool:
    """Whether an object wants routes."""
    about = found["metadata"]
    if URL in (about.get("annotations") or {}):
        return True
    return found["kind"] == "Service" and ORIGINAL_LABEL in (about.get("labels") or {})


def routes_of(found: Object, rules: Sequence[ClusterRule], domain: str) -> list[ServiceRoute]:
    """The routes of an object that is asked for; `domain` is the cluster's, such as cluster.local. Raises
    ObjectError."""
    name = name_of(found)
    told = _annotations(found, name)
    url, account = tunnel_of(told), told.get(ACCOUNT, "")
    audience = told.get(AUDIENCE, f"https://{origin_of(told[URL]).host}")
    method: Method = "CONNECT" if told.get(METHOD) == "CONNECT" else "POST"
    kinds = [(url, "")]
    if _is_ambient(found) and method == "POST":
        kinds.append((inner_tunnel_of(told), "hbone"))
    own = [
        ServiceRoute(host, url, audience, method, account, name.namespace, str(name), inner)
        for host in _own_names(found, name, domain)
        for url, inner in kinds
    ]
    for route in own:
        try:
            route.judged(rules)
        except (NotAllowedError, ValueError) as error:
            raise ObjectError(str(error)) from error
    return own


class ServiceRoutes:
    """The routes of all objects. Those of an object that stays as it is are not made again: of 1,000 objects
    that takes 36 ms."""

    def __init__(self) -> None:
        self._known: dict[ObjectName, tuple[object, list[ServiceRoute] | ObjectError]] = {}
        self._by: tuple[Sequence[ClusterRule], str] = ((), "")

    def table(
        self,
        objects: Iterable[Object],
        rules: Sequence[ClusterRule],
        domain: str,
        of_file: RouteTable = _NO_ROUTES,
    ) -> tuple[list[ServiceRoute], dict[ObjectName, str]]:
        """All routes, by host; and why objects that are asked for have none, or not all of theirs. `of_file`
        has the routes of hgate's file, which come first."""
        if (rules, domain) != self._by:
            self._by = rules, domain
            self._known.clear()
        known, self._known = self._known, {}
        routes: dict[tuple[str, str], ServiceRoute] = {}
        refused: dict[ObjectName, str] = {}
        for found in sorted(filter(is_asked_for, objects), key=_age):
            name = name_of(found)
            own = self._routes_of(found, name, known)
            if isinstance(own, ObjectError):
                refused[name] = str(own)
                continue
            for route in own:
                if route.inner and of_file.takes_connect(route.host):
                    continue  # what the file says of ambient clients stands beside the other route
                if not route.inner and (before := of_file.first_for(route.host)) is not None:
                    of_line = f" (line {before.line})" if before.line is not None else ""
                    refused[name] = f"{before.host} in hgate's file{of_line} matches {route.host} first"
                    continue
                key = route.host, route.inner
                if len(routes) >= MAX_ROUTES and key not in routes:
                    refused[name] = f"older objects have all of the {MAX_ROUTES} routes that there may be"
                    continue
                first = routes.setdefault(key, route)
                if first is not route:
                    refused[name] = f"{route.host} is {first.source}'s, which is older"
        return [routes[key] for key in sorted(routes)], refused

    def _routes_of(
        self, found: Object, name: ObjectName, known: Mapping[ObjectName, tuple[object, Any]]
    ) -> list[ServiceRoute] | ObjectError:
        given = found["metadata"].get("annotations") or {}
        hosts = (found.get("spec") or {}).get("hosts")
        made_of = [given.get(key) for key in _MADE_OF], _is_ambient(found), hosts
        before = known.get(name)
        if before is not None and before[0] == made_of:
            self._known[name] = before
            own: list[ServiceRoute] | ObjectError = before[1]
            return own
        rules, domain = self._by
        try:
            own = routes_of(found, rules, domain)
        except ObjectError as error:
            own = error
        self._known[name] = made_of, own
        return own


def _is_ambient(found: Object) -> bool:
    """Whether ambient clients are led to hgate: what network it is concerns the registration only."""
    return AMBIENT_NETWORK in (found["metadata"].get("annotations") or {})


def _age(found: Object) -> tuple[str, str]:
    about = found["metadata"]
    return str(about.get("creationTimestamp") or ""), str(about.get("uid") or "")


def _annotations(found: Object, name: ObjectName) -> dict[str, str]:
    """The annotations that a route is made of, each right, the URL among them. Raises ObjectError."""
    given = found["metadata"].get("annotations") or {}
    told = {key: given[key] for key in _MADE_OF if key in given}
    if URL not in told:
        if not _NAMED_BY_URL.fullmatch(name.name):
            text = f"the label {ORIGINAL_LABEL} is for a Service with the name in its URL: set {URL}"
            raise ObjectError(text)
        told[URL] = f"https://{name.name}.a.run.app"
    for key, value in told.items():
        try:
            told[key] = check_value(key, value)
        except ValueError as error:
            raise ObjectError(f"{key} {error}") from error
    return told


def _own_names(found: Object, name: ObjectName, domain: str) -> list[str]:
    own = f".{name.namespace}.svc.{domain}"
    if name.kind == "Service":
        return [f"{name.name}{own}"]
    hosts = [str(host).lower() for host in (found.get("spec") or {}).get("hosts") or []]
    if len(hosts) > MAX_HOSTS:
        raise ObjectError(f"it has {len(hosts)} hosts, more than {MAX_HOSTS}")
    for host in hosts:
        label = host.removesuffix(own)
        if label == host or not is_label(label):
            raise ObjectError(f"host {host[:MAX_SHOWN_CHARS]} is no SERVICE{own}: a route is for these only")
    return hosts
