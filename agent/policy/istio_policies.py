"""What the mesh's policies ask of one workload, by Istio's rules. No I/O.

1. A policy applies by its namespace, the workload's or the mesh's root namespace, and by its selector. One
   with targetRefs is for gateways.
2. A PeerAuthentication of the workload goes over the namespace's, this over the mesh's; of several of one
   kind the oldest counts. A mode for a port goes over that of the workload.
3. A RequestAuthentication with jwtRules refuses requests with an invalid JWT. No mTLS end of krun's own
   reads JWTs.
4. Of AuthorizationPolicies, a peer that a DENY is about may not come in. If there is an ALLOW, a peer that
   none of them is about may not either.

A rule about nothing but the peer's name (`principals`, `namespaces`, `serviceAccounts`) is what HBONE_ALLOW
and HBONE_DENY can say. Peers' names have Istio's form, ns/NAMESPACE/sa/ACCOUNT.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.trust.peer_patterns import OF_WORKLOADS, PeerPatterns, TrustDomain, check_pattern
from shared.trust.spiffe import SCHEME, SpiffeId

AUTHORIZATION, AUTHENTICATION = "AuthorizationPolicy", "PeerAuthentication"
REQUEST_AUTHENTICATION = "RequestAuthentication"

DRY_RUN = "istio.io/dry-run"
"""The annotation of an AuthorizationPolicy that only counts what it would do."""

MAX_PATTERNS = 1000
"""Of all policies that apply: each is compared with each peer's name."""

LOCAL = "cluster.local"
"""In a principal of Istio's form the mesh's own trust domain, whatever its name."""

_MTLS_ONLY = "the mTLS end accepts no plain text"

_LITERAL = re.compile(r"[A-Za-z0-9/_-]*")
"""What a regular expression matches as it is written."""

_NAMES = ("principals", "namespaces", "serviceAccounts")


@dataclass(frozen=True, slots=True)
class Workload:
    """Whom policies are looked for."""

    namespace: str
    labels: Mapping[str, str]
    trust: TrustDomain
    ports: Collection[int]
    """The app's, and the mTLS end's."""
    root_namespace: str
    """Whose policies are the whole mesh's."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.labels.get('app', '')}"


@dataclass(frozen=True, slots=True)
class Policy:
    """One object of the cluster's."""

    kind: str
    namespace: str
    name: str
    created: str
    spec: Mapping[str, Any] = field(repr=False)
    is_dry_run: bool = False

    @classmethod
    def of(cls, kind: str, item: object) -> Policy:
        """An item of the API server's list."""
        content = _mapping(item)
        about = _mapping(content.get("metadata"))
        dry_run = _mapping(about.get("annotations")).get(DRY_RUN)
        return cls(
            kind,
            str(about.get("namespace", "")),
            str(about.get("name", "")),
            str(about.get("creationTimestamp", "")),
            _mapping(content.get("spec")),
            dry_run in ("1", "t", "T", "true", "TRUE", "True"),  # as Go's ParseBool, which Istio calls
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"

    def applies(self, workload: Workload) -> bool:
        """Whether it is about this workload."""
        if self.namespace not in (workload.namespace, workload.root_namespace):
            return False
        if self.spec.get("targetRef") or self.spec.get("targetRefs"):
            return False
        return all(workload.labels.get(name) == value for name, value in self.selected.items())

    @property
    def selected(self) -> Mapping[str, Any]:
        """The labels that it wants; none: those of all workloads."""
        return _mapping(_mapping(self.spec.get("selector")).get("matchLabels"))


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A policy that applies, and why it is not enforced here."""

    policy: Policy
    reason: str


@dataclass(frozen=True, slots=True)
class Demands:
    """What the policies that apply ask for."""

    allow: tuple[str, ...] | None
    """Patterns of the peers that may come in; None: no policy bounds them."""
    deny: tuple[str, ...]
    """Patterns of those that may not."""
    allowing: tuple[Policy, ...]
    denying: tuple[Policy, ...]
    """The policies that the patterns are from."""
    unenforced: tuple[Unenforced, ...]
    """Those that patterns cannot say, or that no mTLS end of krun's can enforce."""


def demands(policies: Iterable[Policy], workload: Workload, others: Collection[str] = ()) -> Demands:
    """What `policies` ask of `workload`. A rule for any trust domain is taken for ours and for `others`."""
    applying = [policy for policy in policies if policy.applies(workload)]
    unenforced = _plain_text_asked_for([one for one in applying if one.kind == AUTHENTICATION], workload)
    unenforced += [
        Unenforced(one, "the mTLS end does not check JWTs")
        for one in applying
        if one.kind == REQUEST_AUTHENTICATION and _list(one.spec.get("jwtRules"))
    ]
    allow: list[str] = []
    deny: list[str] = []
    allowing: list[Policy] = []
    denying: list[Policy] = []
    bounded, everybody = False, False
    for policy in applying:
        action = policy.spec.get("action", "ALLOW")
        if policy.kind != AUTHORIZATION or policy.is_dry_run or action == "AUDIT":
            continue
        try:
            if action not in ("ALLOW", "DENY"):
                raise ValueError(f"its action is {action}")
            peers = _peers(policy, workload.trust, others)
            if len(allow) + len(deny) + len(peers or ()) > MAX_PATTERNS:
                raise ValueError(f"with it they name more than {MAX_PATTERNS} peers")
        except ValueError as error:
            unenforced.append(Unenforced(policy, str(error)))
            continue
        if action == "DENY":
            deny += _everybody(workload.trust, others) if peers is None else peers
            denying += [policy] if peers != [] else []
            continue
        allowing.append(policy)
        bounded = True
        everybody |= peers is None
        allow += peers or []
    bound = tuple(dict.fromkeys(allow)) if bounded and not everybody else None
    return Demands(
        bound,
        tuple(dict.fromkeys(deny)),
        tuple(allowing) if bound is not None else (),
        tuple(denying),
        tuple(unenforced),
    )


def nobody(trust: TrustDomain, others: Collection[str]) -> tuple[str, ...]:
    """Patterns for HBONE_DENY that leave nobody over."""
    return tuple(_everybody(trust, others))


def covered(pattern: str, by: PeerPatterns, trust: TrustDomain) -> bool:
    """Whether `by` certainly matches every peer that `pattern` does."""
    if _short(pattern, trust) in {_short(other, trust) for other in by.patterns}:
        return True
    if "*" in pattern:
        return False
    return by.matches(
        SpiffeId.parse(pattern if pattern.startswith(SCHEME) else f"{SCHEME}{trust.name}/{pattern}")
    )


# Whom an AuthorizationPolicy is about.


def _peers(policy: Policy, trust: TrustDomain, others: Collection[str]) -> list[str] | None:
    """The patterns of the peers that a rule of it matches; None: everybody. Raises ValueError with the
    reason if patterns cannot say it."""
    patterns: list[str] = []
    for number, rule in enumerate(_list(policy.spec.get("rules"))):
        where = f"rules[{number}]"
        content = _mapping(rule)
        if further := sorted(content.keys() - {"from"}):
            raise ValueError(f"{where} is about {' and '.join(further)}, too")
        if not content.get("from"):
            return None
        for at, source in enumerate(_list(content["from"])):
            try:
                patterns += _of_source(
                    _mapping(_mapping(source).get("source")), policy.namespace, trust, others
                )
            except ValueError as error:
                raise ValueError(f"{where}.from[{at}] {error}") from None
    return patterns


def _of_source(
    source: Mapping[str, Any], namespace: str, trust: TrustDomain, others: Collection[str]
) -> list[str]:
    told = {name: value for name, value in source.items() if value}
    if len(told) != 1 or not told.keys() <= set(_NAMES):
        raise ValueError(f"is about {' and '.join(sorted(told)) or 'nothing'}")
    ((name, values),) = told.items()
    read = {"principals": _principal, "namespaces": _namespace, "serviceAccounts": _account}[name]
    found: list[str] = []
    for value in map(str, _list(values)):
        domain, path = read(value, namespace, trust)
        domains = (trust.name, *others) if domain is None else (domain,)
        for one in domains:
            pattern = _short(f"{SCHEME}{one}/{path}", trust)
            try:
                found.append(check_pattern(pattern, trust))
            except ValueError:
                raise ValueError(f"has {name} {value[:60]!r}, which is no pattern of names") from None
    return found


def _principal(value: str, _: str, trust: TrustDomain) -> tuple[str | None, str]:
    """The trust domain, None for any, and the path."""
    if value == "*":
        return None, "**"
    if "*" in value[1:-1] or (value[:1], value[-1:]) == ("*", "*"):
        raise ValueError(
            f"has principals {value[:60]!r}, which is no pattern of names"
        )  # there it is a character
    domain, slash, path = value.partition("/")
    segments = path.split("/")
    whole = len(segments) == 4  # Istio's own form, in which alone it knows aliases
    if domain == "*" and slash:
        if not _LITERAL.fullmatch(path):  # Istio puts it into a regular expression as it is
            raise ValueError(f"has principals {value[:60]!r}, which Istio takes for a regular expression")
        if segments[:1] == ["sa"] and len(segments) == 2:
            path = f"ns/*/{path}"
        elif not whole:
            raise ValueError(f"has principals {value[:60]!r}, which is no pattern of names")
        return None, path
    if not whole and trust.aliases and domain in (trust.name, *trust.aliases):
        raise ValueError(f"has principals {value[:60]!r}, which is not of the aliases")
    if whole and domain == LOCAL:
        domain = trust.name
    if value.endswith("*") and not whole:
        # A prefix of a name: the rest of the segment, and of the path.
        path = f"{path[:-1]}**" if path in ("*",) or path.endswith("/*") else f"{path}/**"
    return domain, path


def _namespace(value: str, _: str, trust: TrustDomain) -> tuple[str | None, str]:
    if not {"s", "a", "sa"}.isdisjoint(value.split("*")[1:]):
        # Istio's star goes on behind the namespace, where it finds these in each name's "sa".
        raise ValueError(f"has namespaces {value[:60]!r}, which is no pattern of names")
    return None, f"{OF_WORKLOADS}{value}/sa/*"


def _account(value: str, namespace: str, trust: TrustDomain) -> tuple[str | None, str]:
    if "*" in value:
        raise ValueError(f"has serviceAccounts {value[:60]!r}, which is no pattern of names")
    there, slash, account = value.rpartition("/")
    return None, f"{OF_WORKLOADS}{there if slash else namespace}/sa/{account}"


def _everybody(trust: TrustDomain, others: Collection[str]) -> list[str]:
    return [f"{SCHEME}{domain}/**" for domain in (trust.name, *others)]


def _short(pattern: str, trust: TrustDomain) -> str:
    """A pattern of our own trust domain without it, if that is possible."""
    for domain in (trust.name, *trust.aliases):
        path = pattern.removeprefix(f"{SCHEME}{domain}/")
        parts = path.split("/")
        if (
            path != pattern
            and len(parts) == 4
            and parts[0] == "ns"
            and parts[2] == "sa"
            and "**" not in parts
        ):
            return path
    return pattern


# What a PeerAuthentication asks for.


def _plain_text_asked_for(policies: list[Policy], workload: Workload) -> list[Unenforced]:
    """Those by which the workload is reached without mTLS, which no mTLS end accepts. All other modes are
    enforced: STRICT refuses who has no certificate, and PERMISSIVE opens no other way in."""
    by_scope: dict[str, Policy] = {}
    for policy in sorted(policies, key=lambda one: one.created):
        if policy.selected:
            scope = "workload" if policy.namespace != workload.root_namespace else ""
        else:
            scope = "mesh" if policy.namespace == workload.root_namespace else "namespace"
        if scope:
            by_scope.setdefault(scope, policy)
    effective: Policy | None = None
    for scope in ("mesh", "namespace", "workload"):
        if scope in by_scope and _mode(by_scope[scope].spec.get("mtls")):
            effective = by_scope[scope]
    if (own := by_scope.get("workload")) is not None:
        told = {port: _mode(mode) for port, mode in _mapping(own.spec.get("portLevelMtls")).items()}
        modes = {port: told[port] for port in map(str, workload.ports) if told.get(port)}
        for port, mode in modes.items():
            if mode == "DISABLE":
                return [Unenforced(own, f"the mode of port {port} is DISABLE, and {_MTLS_ONLY}")]
        if modes:
            return []
    if effective is not None and _mode(effective.spec.get("mtls")) == "DISABLE":
        return [Unenforced(effective, f"its mode is DISABLE, and {_MTLS_ONLY}")]
    return []


def _mode(told: object) -> str:
    mode = _mapping(told).get("mode", "")
    return "" if mode == "UNSET" else str(mode)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
