"""Whether a certificate of a verified chain is on a revocation list (RFC 5280 section 6.3). No I/O and no
clock.

The rules:

1. A list counts against the certificates of the very key that has signed it: several trust domains may have
   roots of the same name. Keys are known from the roots, and from the intermediates of chains that have come.
2. A list that bears a root's name without its signature makes the whole file wrong. One of an issuer that is
   not known (yet) waits for an intermediate of that name.
3. A list counts however old it is: what was revoked stays so, and a gateway without a newer list must not let
   revoked peers in. OpenSSL and Envoy refuse everybody then; here it is a warning and a metric.
4. Several lists of one issuer count together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shared.errors import DeniedError, RevokedError
from shared.trust.revocation_lists import RevocationList, key_hash
from shared.trust.spiffe import shown

if TYPE_CHECKING:
    from cryptography import x509

MAX_ISSUERS = 1024
"""Known keys that may have signed a list, beside the roots; beyond it the intermediate that was seen first is
forgotten, so its next list does not count against connections that are open by then."""

MAX_CHAIN = 16
"""Certificates of one chain; OpenSSL itself accepts 100."""

Proof = tuple[tuple[bytes, int], ...]
"""What is remembered of a chain: for each certificate below the root its issuer's key, as a short hash that
all connections share, and its serial number."""


class Revocations:
    """What is revoked: lists, and the keys that may have signed them."""

    def __init__(self) -> None:
        self.lists: tuple[RevocationList, ...] = ()
        self._roots: dict[bytes, x509.Certificate] = {}  # by the hash of their key
        self._intermediates: dict[bytes, x509.Certificate] = {}  # likewise
        self._revoked: dict[bytes, frozenset[int]] = {}  # likewise
        self._read: dict[bytes, tuple[bytes, int]] = {}  # of issuers in DER: hash of the key, serial number

    def use(self, lists: Iterable[RevocationList], roots: Iterable[x509.Certificate]) -> None:
        """From now on these count, by signatures of `roots` and of intermediates that have come before. Takes
        long for long lists, unless each has been asked already whether those have signed it.

        Raises ValueError with the reason, and changes nothing, if a list bears a root's name but not its
        signature.
        """
        found, roots = tuple(lists), tuple(roots)
        for one in found:
            namesakes = [root for root in roots if root.subject == one.issuer_name]
            if namesakes and not any(one.signed_by(root) for root in namesakes):
                raise ValueError(f"the list of {one.issuer} is not signed by the root of that name")
        self.lists, self._revoked = found, {}
        self._roots = {key_hash(root): root for root in roots}
        for key, issuer in (self._intermediates | self._roots).items():
            self._learn(key, issuer)

    @property
    def intermediates(self) -> tuple[x509.Certificate, ...]:
        """Those that have come, whose lists count as well."""
        return tuple(self._intermediates.values())

    @property
    def uncovered(self) -> list[str]:
        """Names of roots that have signed no list."""
        return [
            shown(root.subject.rfc4514_string())
            for key, root in self._roots.items()
            if key not in self._revoked
        ]

    def check(self, chain: Sequence[bytes]) -> Proof:
        """What to remember of a verified `chain` in DER, the leaf first, its root last.

        Raises RevokedError if a certificate of it is revoked, DeniedError if one cannot be read.
        """
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm

        if len(chain) > MAX_CHAIN:
            raise DeniedError(f"peer certificate denied: its chain has more than {MAX_CHAIN} certificates")
        proof: list[tuple[bytes, int]] = []
        try:
            serial = x509.load_der_x509_certificate(chain[0]).serial_number
            for der in chain[1:]:
                key, above = self._issuer(der)
                proof.append((key, serial))
                serial = above
        except (ValueError, UnsupportedAlgorithm) as error:
            raise DeniedError(f"peer certificate denied: its chain cannot be read: {error}") from error
        self.look_up(tuple(proof))
        return tuple(proof)

    def complete(self, leaf: bytes) -> list[bytes]:
        """The chain of a `leaf` whose handshake did not bring one: a session that TLS 1.2 has resumed, whose
        first handshake was here. Raises DeniedError if its issuer is not known any more."""
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import Encoding

        try:
            chain, certificate = [leaf], x509.load_der_x509_certificate(leaf)
            is_root = key_hash(certificate) in self._roots
        except (ValueError, UnsupportedAlgorithm) as error:
            raise DeniedError(f"peer certificate denied: it cannot be read: {error}") from error
        known = (self._intermediates | self._roots).values()
        while len(chain) < MAX_CHAIN:
            issuer = next((one for one in known if _has_issued(one, certificate)), None)
            if issuer is None or issuer == certificate:
                break
            chain.append(issuer.public_bytes(Encoding.DER))
            certificate = issuer
        if len(chain) == 1 and not is_root:
            raise DeniedError(
                "peer certificate denied: its issuer, who may have revoked it, is not known here"
            )
        return chain

    def look_up(self, proof: Proof) -> None:
        """Raises RevokedError if a certificate that is remembered in `proof` is revoked."""
        for place, (key, serial) in enumerate(proof):
            if serial in self._revoked.get(key, ()):
                what = "it" if place == 0 else f"the certificate {place} above it"
                known = self._roots.get(key) or self._intermediates.get(key)
                issuer = "its issuer" if known is None else shown(known.subject.rfc4514_string())
                raise RevokedError(
                    f"peer certificate denied: {what} is revoked: serial number {serial:x} of {issuer}"
                )

    def _issuer(self, der: bytes) -> tuple[bytes, int]:
        """The hash of an issuer's key, which is learnt if it is new, and the issuer's own serial number."""
        from cryptography import x509

        known = self._read.get(der)
        if known is not None and (known[0] in self._roots or known[0] in self._intermediates):
            return known
        issuer = x509.load_der_x509_certificate(der)
        key = key_hash(issuer)
        if len(self._read) >= 2 * MAX_ISSUERS:
            self._read.clear()
        self._read[der] = key, issuer.serial_number
        if key not in self._roots and key not in self._intermediates:
            if len(self._intermediates) >= MAX_ISSUERS:
                oldest = next(iter(self._intermediates))
                del self._intermediates[oldest]
                self._revoked.pop(oldest, None)
            self._intermediates[key] = issuer
            self._learn(key, issuer)
        return self._read[der]

    def _learn(self, key: bytes, issuer: x509.Certificate) -> None:
        serials = [
            one.serials for one in self.lists if one.issuer_name == issuer.subject and one.signed_by(issuer)
        ]
        if serials:
            self._revoked[key] = serials[0] if len(serials) == 1 else frozenset().union(*serials)


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
