"""Who a verified chain of certificates proves to be: a name, vouched for by the right authority.

TLS verifies a chain against all roots together; with roots of several trust domains that alone would let each
of them name the workloads of all others (SPIFFE Trust Domain and Bundle: an authority stands for its own
domain only).

The rules:

1. A root that is in `trust_bundles.json`, by its key, vouches for names of the domains that list it. Nobody
   else vouches for a domain with a list there.
2. Any other root that names a trust domain in its URI vouches for names of that domain.
3. An intermediate that names a trust domain in its URI vouches for names of that domain, whatever its root.
4. A root of neither kind vouches for any name that is left, for nothing tells whose it is. Istio's own and
   cert-manager's are so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import DeniedError
from shared.trust.spiffe import SpiffeId, peer_id

if TYPE_CHECKING:
    from cryptography import x509

MAX_AUTHORITIES = 1024
"""Certificates of authorities that are known by heart; beyond it they are read anew."""

MAX_LEAVES = 4096
"""Leaves that were vouched for, some 0.1 KiB each; a session of TLS 1.2 that is resumed beyond it begins anew
after a refusal."""


@dataclass(frozen=True, slots=True)
class _Authority:
    named: str
    """The trust domain in its URI, or empty."""

    listed: frozenset[str]
    """The trust domains that list its key."""


class TrustBundles:
    """What is told of whose roots are whose; without `bundles` only what the certificates say themselves.
    Raises ValueError if a key in them cannot be read."""

    def __init__(self, bundles: Mapping[str, Sequence[x509.Certificate]] | None = None) -> None:
        bundles = bundles or {}
        self._domains = frozenset(bundles)
        self._listed: dict[bytes, frozenset[str]] = {}  # by the key
        for domain, roots in bundles.items():
            for root in roots:
                key = _key(root)
                self._listed[key] = self._listed.get(key, frozenset()) | {domain}
        self._known: dict[bytes, _Authority] = {}  # by the certificate's hash
        self._leaves: dict[bytes, None] = {}  # hashes, the oldest first

    def domains_of(self, root: x509.Certificate) -> frozenset[str]:
        """The trust domains that a root vouches for; empty: nothing tells."""
        authority = self._read(root)
        return authority.listed or frozenset({authority.named} - {""})

    def proved(self, chain: Sequence[bytes]) -> SpiffeId:
        """The identity that a verified `chain` in DER proves, the leaf first and its root last. A leaf alone,
        as resumed sessions have it, has to have been here with its chain.

        Raises DeniedError if it proves none: see `spiffe.peer_id`, and the rules above.
        """
        identity = peer_id(chain[0])
        leaf = hashlib.sha256(chain[0]).digest()
        if len(chain) > 1:
            self._check(identity, chain)
            if len(self._leaves) >= MAX_LEAVES:
                del self._leaves[next(iter(self._leaves))]
            self._leaves[leaf] = None
        elif leaf not in self._leaves:
            raise DeniedError(
                f"peer certificate denied: the chain that vouches for {identity} is not known here"
            )
        return identity

    def _check(self, identity: SpiffeId, chain: Sequence[bytes]) -> None:
        domain = identity.trust_domain
        for der in chain[1:-1]:
            named = self._authority(der).named
            if named and named != domain:
                raise _denied(identity, f"an authority of {named}")
        root = self._authority(chain[-1])
        if root.listed or domain in self._domains:
            if domain not in root.listed:
                raise _denied(identity, f"a root of {', '.join(sorted(root.listed)) or 'nobody known'}")
        elif root.named and root.named != domain:
            raise _denied(identity, f"a root of {root.named}")

    def _authority(self, der: bytes) -> _Authority:
        digest = hashlib.sha256(der).digest()
        known = self._known.get(digest)
        if known is not None:
            return known
        from cryptography import x509

        try:
            found = self._read(x509.load_der_x509_certificate(der))
        except (ValueError, x509.InvalidVersion) as error:
            raise DeniedError(f"peer certificate denied: its chain cannot be read: {error}") from error
        if len(self._known) >= MAX_AUTHORITIES:
            self._known.clear()
        self._known[digest] = found
        return found

    def _read(self, authority: x509.Certificate) -> _Authority:
        from shared.trust.roots import trust_domain

        try:
            listed = self._listed.get(_key(authority), frozenset())
        except ValueError:
            listed = frozenset()  # a key that no list can have either
        return _Authority(trust_domain(authority), listed)


def _denied(identity: SpiffeId, whose: str) -> DeniedError:
    return DeniedError(f"peer certificate denied: {whose} may not vouch for {identity}")


def _key(certificate: x509.Certificate) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("a root whose key cannot be read") from error
