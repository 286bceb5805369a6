"""What the objects of a cluster's namespaces may have the gateway do, as an administrator allows it. No I/O.

Whoever may edit objects of a namespace says nothing more than these rules allow: the gateway's identity is
not theirs. The process that reads the cluster judges by them, and the process that carries tunnels again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gateway.rules.host_globs import ANY_LABEL, check_glob, compile_glob
from gateway.rules.routes import Method, Route, TokenRule
from gateway.rules.templates import Template, TunnelUrl
from shared import globs
from shared.cluster.service_annotations import CloudOrigin, origin_of
from shared.ports import HTTPS

_OF_PROJECT = r"[a-z](?:[a-z0-9-]*[a-z0-9])?-{number}\.[a-z0-9-]+\.run\.app"
"""SERVICE-PROJECTNUMBER.REGION.run.app (Cloud Run, "URLs")."""


class NotAllowedError(Exception):
    """No rule allows it; the text says what is missing where."""


@dataclass(frozen=True, slots=True)
class ClusterRule:
    """What the objects of some namespaces may do."""

    namespace: str
    """A glob of one label."""

    hosts: tuple[str, ...] = ()
    """Globs on the hosts that they may lead to; with `:PORT` behind for another port than 443."""

    projects: tuple[str, ...] = ()
    """Numbers of projects, to all of whose Cloud Run services they may lead by the URLs with the number."""

    service_accounts: tuple[str, ...] = ()
    """Accounts that an object may ask for the token of, beside the gateway's own."""

    services: tuple[str, ...] = ()
    """Globs on the names of Services that clients from outside of the cluster may reach."""

    audiences: tuple[str, ...] = ()
    """Globs on audiences that an object may ask for tokens of, beside the hosts that it may lead to. Whoever
    gets a token can show it wherever its audience is expected."""

    ca: Path | None = None
    """PEM file with the certificates to trust at `hosts`; None: the system's."""

    def matches(self, namespace: str) -> bool:
        """Whether it is about objects of this namespace."""
        return _pattern(self.namespace).fullmatch(namespace) is not None

    def allows(self, origin: CloudOrigin) -> bool:
        """Whether they may lead there."""
        for glob in self.hosts:
            host, _, port = glob.partition(":")
            if int(port or HTTPS) == origin.port and _pattern(host).fullmatch(origin.host):
                return True
        return origin.port == HTTPS and any(
            re.fullmatch(_OF_PROJECT.format(number=number), origin.host) for number in self.projects
        )

    def allows_audience(self, audience: str) -> bool:
        """Whether they may be sent tokens for it: a URL that they may lead to, or what `audiences` says."""
        if any(re.fullmatch(globs.pattern(glob, ".+"), audience) for glob in self.audiences):
            return True
        try:
            return self.allows(origin_of(audience))
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class ServiceRoute:
    """A route that an object of the cluster asks for."""

    host: str
    """The name that it is for, in lower case."""

    url: str
    """Of the tunnel request."""

    audience: str
    method: Method
    service_account: str
    namespace: str
    source: str
    """Which object it is: KIND NAMESPACE/NAME."""

    inner: str = ""
    """`hbone`: it takes CONNECTs of ambient clients (`Route.inner`); empty: names in ClientHellos."""

    def judged(self, rules: Sequence[ClusterRule]) -> Route:
        """The route as the table has it. Raises NotAllowedError if the rules do not allow it, ValueError if
        it is none."""
        parse = TunnelUrl.parse_origin if self.method == "CONNECT" else TunnelUrl.parse
        if ANY_LABEL in check_glob(self.host):  # one wrong host would keep the whole table from being made
            raise ValueError("is for one name")
        url = parse(self.url)
        audience = Template.parse(self.audience)
        if self.inner not in ("", "hbone") or (self.inner and self.method == "CONNECT"):
            raise ValueError("carries nothing that the HBONE port's CONNECTs have inside")
        if not (url.host.is_fixed and url.port.is_fixed and url.path.is_fixed and audience.is_fixed):
            raise ValueError("has a placeholder, which only hgate's file may have")
        origin = CloudOrigin(url.host.text, int(url.port.text))
        rule = allowing(rules, self.namespace, origin, self.service_account, self.audience)
        return Route(
            self.host,
            tunnel=url,
            ca=rule.ca,
            token=TokenRule(audience, service_account=self.service_account),
            method=self.method,
            inner="hbone" if self.inner else None,
            source=self.source,
        )


def allowing(
    rules: Sequence[ClusterRule], namespace: str, origin: CloudOrigin, account: str, audience: str
) -> ClusterRule:
    """The first rule by which objects of a namespace may lead to `origin` with the token of `account` (empty:
    the gateway's own) for `audience`. Raises NotAllowedError."""
    own = [rule for rule in rules if rule.matches(namespace)]
    where = "cluster.allow in hgate's file"
    if not own:
        raise NotAllowedError(f"{where} has no entry for namespace {namespace}")
    leading = [rule for rule in own if rule.allows(origin)]
    if not leading:
        raise NotAllowedError(f"{where} does not let namespace {namespace} lead to {origin}")
    using = [rule for rule in leading if not account or account in rule.service_accounts]
    if not using:
        raise NotAllowedError(f"{where} does not let namespace {namespace} use the account {account}")
    for rule in using:
        if audience == f"https://{origin.host}" or rule.allows_audience(audience):
            return rule
    raise NotAllowedError(f"{where} does not let namespace {namespace} use the audience {audience}")


class JudgedRoutes:
    """The routes that rules allow. A route that stays as it is is not judged again: of 1,000 that takes
    14 ms."""

    def __init__(self) -> None:
        self._known: dict[ServiceRoute, Route | None] = {}
        self._rules: Sequence[ClusterRule] = ()

    def of(
        self, wanted: Iterable[ServiceRoute], rules: Sequence[ClusterRule], domain: str
    ) -> tuple[Route, ...]:
        """Those of the `wanted` ones that `rules` allow; then those to Services of the cluster, whose names
        end with svc and its `domain`."""
        known = self._known if rules == self._rules else {}
        self._rules, self._known = rules, {}
        for route in wanted:
            self._known[route] = known[route] if route in known else _judged(route, rules)
        found = [route for route in self._known.values() if route is not None]
        found += [
            Route(f"{service}.{rule.namespace}.svc.{domain}", to_service=True, source="cluster.allow")
            for rule in rules
            for service in rule.services
        ]
        return tuple(found)


def _judged(route: ServiceRoute, rules: Sequence[ClusterRule]) -> Route | None:
    try:
        return route.judged(rules)
    except (NotAllowedError, ValueError):
        return None  # the process that reads the cluster tells the object so


Endpoints = Mapping[str, Mapping[str, Sequence[str]]]
"""Of each Service's name, and each of its ports, the endpoints that are ready, as IP:PORT."""


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    return compile_glob(glob)
