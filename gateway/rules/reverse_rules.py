"""Who may register which names: the rules of `reverse:`, and their verdict. No I/O.

1. The first rule that matches identity and name decides. If none matches, the registration is denied.
2. A name pattern is a glob, as a route's host. `{namespace}` and `{service_account}` in it stand for those of
   the identity (`/ns/NAMESPACE/sa/SERVICE_ACCOUNT`), so one rule gives every workload its own name. Such a
   pattern does not match an identity of another form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.rules.templates import shown
from shared.errors import DeniedError
from shared.name_globs import ANY_LABELS, compile_glob
from shared.trust.peer_patterns import PeerPatterns, TrustDomain
from shared.trust.spiffe import SpiffeId

PLACEHOLDERS = ("namespace", "service_account")
"""What a name pattern may take from the identity."""

# One DNS label: an account such as a.b must not become two labels of a name.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ReverseRule:
    """One rule as the file has it."""

    identities: tuple[str, ...]
    """`from`: patterns of SPIFFE IDs; `*` is everybody."""

    names: tuple[str, ...]
    """`names`: globs on host names, with the identity's `{namespace}` and `{service_account}`."""

    deny: bool = False
    """Whether it denies what it matches."""


class ReverseRules:
    """The rules, compiled. Raises ValueError with the reason if a pattern is wrong."""

    def __init__(self, rules: Iterable[ReverseRule], trust: TrustDomain | None = None) -> None:
        """`trust` is our own domain, with its aliases."""
        self._rules = tuple(_CompiledRule(rule, trust) for rule in rules)

    def may_be_registered(self, name: str) -> bool:
        """Whether a rule may allow somebody to register `name`, in lower case."""
        return any(not rule.deny and rule.may_match(name) for rule in self._rules)

    def check(self, identity: SpiffeId, name: str) -> None:
        """Raises DeniedError unless `identity` may register `name`, in lower case."""
        for index, rule in enumerate(self._rules):
            if rule.matches(identity, name):
                if rule.deny:
                    raise _denied(identity, name, f"rules[{index}] denies it")
                return
        raise _denied(identity, name, "no rule allows it")


def check_name_pattern(text: str) -> str:
    """Returns `text`, a pattern for `ReverseRule.names`. Raises ValueError with the reason if it is none."""
    _Name(text)
    return text


def _denied(identity: SpiffeId, name: str, why: str) -> DeniedError:
    return DeniedError(f"peer {identity} may not register {shown(name)}: {why}")


class _CompiledRule:
    __slots__ = ("_names", "_peers", "deny")

    def __init__(self, rule: ReverseRule, trust: TrustDomain | None) -> None:
        self.deny = rule.deny
        self._peers = PeerPatterns(rule.identities, trust, anybody=True)
        self._names = tuple(_Name(text) for text in rule.names)

    def may_match(self, name: str) -> bool:
        return any(pattern.may_match(name) for pattern in self._names)

    def matches(self, identity: SpiffeId, name: str) -> bool:
        if not self._peers.matches(identity):
            return False
        return any(pattern.matches(identity, name) for pattern in self._names)


class _Name:
    """One pattern of `names`."""

    __slots__ = ("_glob", "_pieces")

    def __init__(self, text: str) -> None:
        # Literal text at even places, placeholders at odd ones.
        self._pieces = re.split(r"\{([^{}]*)\}", text)
        for place, piece in enumerate(self._pieces):
            if place % 2 and piece not in PLACEHOLDERS:
                known = " and ".join(f"{{{name}}}" for name in PLACEHOLDERS)
                raise ValueError(f"unknown placeholder {{{shown(piece)}}}, known are {known}")
        # Filled as for any identity; this also checks that what surrounds the placeholders is a glob.
        filled = self._filled(dict.fromkeys(PLACEHOLDERS, "*"))
        if filled.count(ANY_LABELS) > text.count(ANY_LABELS):
            raise ValueError("a placeholder beside another or beside *: what each of them is cannot be told")
        self._glob = compile_glob(filled)

    def may_match(self, name: str) -> bool:
        return self._glob.fullmatch(name) is not None

    def matches(self, identity: SpiffeId, name: str) -> bool:
        if not self.may_match(name):
            return False
        if len(self._pieces) == 1:
            return True
        values = {"namespace": identity.namespace or "", "service_account": identity.service_account or ""}
        if not all(_LABEL.fullmatch(values[piece]) for piece in self._pieces[1::2]):
            return False
        return compile_glob(self._filled(values)).fullmatch(name) is not None

    def _filled(self, values: dict[str, str]) -> str:
        return "".join(values[piece] if place % 2 else piece for place, piece in enumerate(self._pieces))
