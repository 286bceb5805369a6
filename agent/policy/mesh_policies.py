"""Whether the mTLS end enforces the mesh's policies: at the start, and later by looking again.

1. The policies are read if a mesh is configured and there is access to its API server. Nothing is asked
   without.
2. Those that apply and that HBONE_ALLOW and HBONE_DENY do not enforce end the start (`check`), or become part
   of the two as far as these can say it (`apply`).
3. With `check`, what cannot be read is warned of: such a start does not depend on the API server. With
   `apply` it does: an end that is to have the mesh's policies does not open without.
4. While krun serves it looks every 30 to 60 s. A policy that is not enforced is then a warning and a metric.
   It does not end krun, for one object in the cluster would end all instances at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from agent.config.own_identity import own_identity
from agent.config.settings import Settings
from agent.policy.istio_policies import (
    Policy,
    Unenforced,
    Workload,
    covered,
    demands,
    nobody,
)
from agent.policy.policy_warning import policy_warning, sign_of_a_mesh
from shared.address import Address
from shared.backoff import half_or_more
from shared.blame import about
from shared.credentials.kubernetes.kubernetes_names import DEFAULT_NAMESPACE
from shared.errors import (
    DeniedError,
    HboneError,
    UnavailableError,
)
from shared.patience import patiently
from shared.tasks import report, spawn
from shared.trust.peer_patterns import PeerPatterns, TrustDomain
from shared.trust.spiffe import SCHEME

if TYPE_CHECKING:
    from agent.policy.cluster_policies import ClusterPolicies, Source
    from shared.credentials.kubernetes.kubernetes_access import Access

log = logging.getLogger("hbone.policy")

LOOK_S = 60.0
"""Between two looks, less a random part of half of it."""

START_S = 30.0
"""For a start that needs them, if the API server is away."""

SHOWN = 5
"""Policies that a line names."""

SHOWN_CHARS = 400
"""Of the patterns that a line proposes; longer ones are better applied than copied."""


class MeshPolicies:
    """Those of one workload."""

    def __init__(self, settings: Settings, access: Access | None, kind: str) -> None:
        """`access` is that of the cluster that MESH names. `kind` is the mTLS end, a value of
        HBONE_INBOUND."""
        self._settings = settings
        self._access = access
        self._kind = kind
        self._policies: ClusterPolicies | None = None
        self._workload: Workload
        self._known = False  # all of them
        self._found: dict[Source, list[Policy]] = {}  # as last read
        self._refused: Collection[Source] = ()
        self._unenforced: list[Unenforced] = []
        self._watch: asyncio.Task[None] | None = None

    @property
    def unenforced(self) -> Sequence[str]:
        """The policies that apply and are not enforced, as far as that is known."""
        return [str(one.policy) for one in self._unenforced]

    async def start(self) -> Settings:
        """The settings that the mTLS end is to have.

        Raises UnavailableError if policies apply that it would not enforce, or are to be applied and cannot
        be read; DeniedError if no trust domain is known, without which policies mean nothing.
        """
        settings = self._settings
        applies = settings.policy == "apply"
        if settings.policy == "ignore" or not (applies or sign_of_a_mesh(settings)):
            return settings
        try:
            policies = await self._read(START_S if applies else 0)
        except DeniedError:
            raise
        except HboneError as error:
            if applies:
                raise about("HBONE_POLICY=apply: the mesh's policies are not known", error) from error
            log.warning("HBONE_POLICY=%s: the mesh's policies are not known: %s", settings.policy, error)
            return settings
        if policies is None:
            if applies:
                raise UnavailableError(
                    "HBONE_POLICY=apply, but no API server is known: set MESH or KUBECONFIG"
                )
            return settings
        if applies:
            self._settings = settings = _applied(settings, policies, self._workload)
        self._unenforced, cure = _unenforced(settings, policies, self._workload)
        if self._unenforced:
            raise UnavailableError(
                f"{self._workload} is under {self._told()}, which the {self._kind} mTLS end does not "
                f"enforce: {cure}, or set HBONE_POLICY=ignore"
            )
        applying = [str(policy) for policy in policies if policy.applies(self._workload)]
        if self._known:
            log.info(
                "policies of the mesh for %s, all enforced: %s", self._workload, _some(applying) or "none"
            )
        return settings

    def warning(self, mtls_end: Address) -> str | None:
        """What is open, if nothing else is known to keep workloads apart."""
        return None if self._known else policy_warning(self._settings, mtls_end)

    def watch(self) -> None:
        """Looks at them again from now on."""
        if self._policies is not None:
            self._watch = spawn(self._look_again(self._policies), name="watch policies")

    async def close(self) -> None:
        """Looks no more."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})

    async def _read(self, patience_s: float) -> list[Policy] | None:
        """Those that can be read; None: there is no access to an API server. One that is away is asked again
        for `patience_s` seconds. Where all have to be known, a refusal is raised."""
        access = self._access or _own_access(self._settings)
        if access is None:
            return None
        from agent.policy.cluster_policies import ClusterPolicies

        self._workload = _workload(self._settings, access)
        namespaces = list(dict.fromkeys((self._workload.namespace, self._settings.root_namespace)))
        policies = ClusterPolicies(access, namespaces)
        self._policies = policies
        self._found, refusals = await patiently(policies.read, "HBONE_POLICY", log, patience_s)
        self._known = not refusals
        self._refused = refusals.keys()
        if refusals:
            first = next(iter(refusals.values()))
            if patience_s:
                raise first
            more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
            log.warning("HBONE_POLICY=check: not all policies of the mesh are known: %s%s", first, more)
        return self._read_last

    @property
    def _read_last(self) -> list[Policy]:
        return [policy for those in self._found.values() for policy in those]

    async def _look_again(self, policies: ClusterPolicies) -> None:
        failed = False
        while True:
            await asyncio.sleep(half_or_more(LOOK_S, random.random()))
            try:
                found, refusals = await policies.read()
                self._found |= found  # what is refused now stays as it was last read
                lost = [error for source, error in refusals.items() if source not in self._refused]
                self._judge_again(self._read_last)
                if lost:
                    raise lost[0]
                self._refused = refusals.keys()
                failed = False
            except HboneError as error:
                if not failed:
                    log.warning("the mesh's policies cannot be read again: %s", error)
                failed = True
            except Exception as error:  # of an object that nobody has thought of: the watch goes on
                if not failed:
                    report("watch policies", error)
                failed = True

    def _judge_again(self, policies: Sequence[Policy]) -> None:
        before, self._unenforced = self._unenforced, _unenforced(self._settings, policies, self._workload)[0]
        if [one for one in self._unenforced if one not in before]:
            log.warning(
                "policies of the mesh for %s: the %s mTLS end does not enforce %s. This krun "
                "keeps running. New instances will %s",
                self._workload,
                self._kind,
                self._told(),
                "apply them, or not start" if self._settings.policy == "apply" else "not start",
            )
        elif before and not self._unenforced:
            log.info("policies of the mesh for %s: all are enforced again", self._workload)

    def _told(self) -> str:
        found = self._unenforced
        reasons = [f"{one.policy} ({one.reason})" if one.reason else str(one.policy) for one in found]
        return _some(reasons)


def _own_access(settings: Settings) -> Access | None:
    """That of KUBECONFIG or of the pod; None without them: a user's own kubeconfig is for other things."""
    told = settings.cluster_access
    if not (told.get("KUBECONFIG") or told.get("KUBERNETES_SERVICE_HOST")):
        return None
    from shared.credentials.kubernetes.kubernetes_discovery import find_access

    return find_access(told)


def _workload(settings: Settings, access: Access) -> Workload:
    namespace, domain = None, settings.trust_domain
    try:
        own = own_identity(settings.certificates)
        namespace, domain = own.namespace, domain or own.trust_domain
    except DeniedError as error:  # it names no workload
        if not domain:
            raise DeniedError(f"own certificate: {error}: set TRUST_DOMAIN") from error
    told = settings.pilot.namespace
    return Workload(
        namespace or (told if told != DEFAULT_NAMESPACE else access.namespace),
        settings.pilot.all_labels(),
        TrustDomain(domain, settings.trust_domain_aliases),
        (settings.app.port, settings.inbound_listen.port),
        settings.root_namespace,
    )


def _unenforced(
    settings: Settings, policies: Sequence[Policy], workload: Workload
) -> tuple[list[Unenforced], str]:
    """The policies that apply and are not enforced with these settings, and what would change that."""
    trust, others = workload.trust, _others(settings, workload.trust)
    asked = demands(policies, workload, others)
    found = list(asked.unenforced)
    if _lacking(settings.deny, asked.deny, trust):
        found += [Unenforced(policy, "") for policy in asked.denying]
    replaced = settings
    if asked.allow is not None and _more_than(settings, asked.allow, trust, others):
        found += [Unenforced(policy, "") for policy in asked.allowing]
        replaced = dataclasses.replace(settings, allow=()) if asked.allow else settings
    if asked.unenforced:
        return found, "set HBONE_INBOUND=pilot-agent"
    if settings.policy == "apply":
        return found, "HBONE_ALLOW lets in more than the policies: unset it"
    proposed = _applied(replaced, policies, workload)
    lists = {
        "HBONE_ALLOW": (settings.allow, proposed.allow),
        "HBONE_DENY": (settings.deny, proposed.deny),
    }
    cure = " and ".join(
        f"{name}={','.join(new)}" for name, (old, new) in lists.items() if new not in ((), old)
    )
    return found, f"set {f'{cure}, or ' if len(cure) <= SHOWN_CHARS else ''}HBONE_POLICY=apply"


def _applied(settings: Settings, policies: Sequence[Policy], workload: Workload) -> Settings:
    """The settings with what the policies ask for, as far as patterns can say it. An HBONE_ALLOW that is set
    stays as it is."""
    trust = workload.trust
    asked = demands(policies, workload, _others(settings, trust))
    settings = dataclasses.replace(settings, allow=settings.allow or asked.allow or ())
    others = _others(settings, trust)  # whom those that are allowed now bring with them
    asked = demands(policies, workload, others)
    deny = (*asked.deny, *(nobody(trust, others) if asked.allow == () else ()))
    return dataclasses.replace(settings, deny=(*settings.deny, *_lacking(settings.deny, deny, trust)))


def _others(settings: Settings, trust: TrustDomain) -> list[str]:
    """The trust domains beside ours that HBONE_ALLOW lets in."""
    named = [one.removeprefix(SCHEME).partition("/")[0] for one in settings.allow if one.startswith(SCHEME)]
    return [one for one in dict.fromkeys(named) if one not in (trust.name, *trust.aliases)]


def _lacking(patterns: Iterable[str], asked: Iterable[str], trust: TrustDomain) -> list[str]:
    """Those of `asked` that `patterns` do not cover."""
    by = PeerPatterns(patterns, trust)
    return [one for one in asked if not covered(one, by, trust)]


def _more_than(
    settings: Settings, allow: tuple[str, ...], trust: TrustDomain, others: Collection[str]
) -> bool:
    """Whether peers may come in that `allow` does not let in."""
    if not _lacking(settings.deny, nobody(trust, others), trust):
        return False
    return bool(_lacking(allow, settings.allow or nobody(trust, ()), trust))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
