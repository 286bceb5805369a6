"""Which peers may come in, and which servers we talk to: the one verdict on a SPIFFE ID, with the texts of
refusals. Deny lists come before allow lists; the default is no."""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import DeniedError
from shared.trust.peer_patterns import PeerPatterns, TrustDomain
from shared.trust.spiffe import SpiffeId


class PeerPolicy:
    """The rules, compiled: a peer that a `deny` pattern matches is refused, else one that an `allow` pattern
    matches may come in, else nobody. Raises ValueError if a pattern is malformed."""

    def __init__(
        self, allow: Iterable[str], deny: Iterable[str] = (), trust: TrustDomain | None = None
    ) -> None:
        """`trust` is our own domain, with its aliases."""
        self.allow = PeerPatterns(allow, trust)
        self.deny = PeerPatterns(deny, trust)

    def __str__(self) -> str:
        allowed = ", ".join(self.allow.patterns) or "nobody"
        return f"{allowed} but not {', '.join(self.deny.patterns)}" if self.deny else allowed

    def check(self, identity: SpiffeId) -> None:
        """Raises DeniedError, which names the identity and the rule, unless it may come in."""
        if self.deny.matches(identity):
            raise DeniedError(f"peer {identity} denied: {self.deny.first(identity)} is denied")
        if not self.allow.matches(identity):
            raise DeniedError(f"peer {identity} denied: no rule allows it")
