"""Whether certificate, key and roots are what they should be, and belong together: each fault is one line
that names the file and never the key.

Chains are verified by OpenSSL, as it verifies them for our listeners, at any time that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from shared import regular_files
from shared.errors import ConfigError, DeniedError, UnavailableError
from shared.net.tls import private_key
from shared.net.tls.certificate_folder import CertificatePaths
from shared.net.tls.root_files import trust_bundles
from shared.trust import roots
from shared.trust.spiffe import SpiffeId, peer_id
from shared.trust.trust_bundles import TrustBundles

MAX_CHAIN = 10
"""Certificates from the leaf on: OpenSSL's own depth is 100, a mesh has two or three."""

NOT_YET_S = 300
"""How far a clock may lie behind that of the authority: those of containers and laptops differ by seconds."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What three files hold, as far as they could be read."""

    chain: tuple[x509.Certificate, ...] = ()
    """The certificate, then the rest."""

    roots: tuple[x509.Certificate, ...] = ()
    key_kind: str = ""
    """`EC secp256r1`, `RSA 2048`; empty if there is none."""

    key_matches: bool = False
    identity: SpiffeId | None = None
    chain_fault: str = ""
    """Why the chain leads to none of the roots, "" if it does. No fault of the folder: its roots are those of
    our peers, which need not be our own."""

    faults: tuple[str, ...] = ()
    """Each a line that names the file."""

    bundles: TrustBundles = field(default_factory=TrustBundles)
    """Which of the roots are whose, as far as that is told."""


def read(paths: CertificatePaths, now: datetime) -> Findings:
    """Reads the three files and judges them as of `now`. Raises nothing: what cannot be read is a fault."""
    contents: list[bytes | None] = []
    faults: list[str] = []
    for file in paths.all:
        try:
            contents.append(regular_files.read(file, roots.MAX_BYTES))
        except OSError as error:
            contents.append(None)
            faults.append(f"{file}: {error.strerror or type(error).__name__}")
    chain = _certificates(contents[0], load_chain, f"{paths.certificates}: no certificate chain", faults)
    found_roots = _certificates(
        contents[2], load_roots, f"{paths.roots}: no usable root certificates", faults
    )
    kind, public = _key(contents[1], str(paths.private_key), faults)
    matches = bool(chain) and public is not None and public == _public_der(chain[0].public_key())
    if chain and public is not None and not matches:
        faults.append(_other_key(paths, chain, public))
    bundles = TrustBundles()
    try:
        bundles = trust_bundles(paths.bundles)
    except (ConfigError, UnavailableError) as error:
        faults.append(str(error))
    identity = None
    if chain:
        faults += [f"{paths.certificates}: {fault}" for fault in time_faults(chain, now)]
        try:
            identity = identity_of(chain[0])
        except ValueError as error:
            faults.append(f"{paths.certificates}: {error}")
    return Findings(
        chain,
        found_roots,
        kind,
        matches,
        identity,
        chain_fault(chain, found_roots, now) if chain and found_roots else "",
        tuple(faults),
        bundles,
    )


def identity_of(certificate: x509.Certificate) -> SpiffeId:
    """The one SPIFFE ID of a certificate of our own. Raises ValueError when it names no workload."""
    try:
        return peer_id(certificate.public_bytes(serialization.Encoding.DER))
    except DeniedError as error:
        raise ValueError(str(error).removeprefix("peer certificate denied: ")) from error


def time_faults(chain: Sequence[x509.Certificate], now: datetime) -> list[str]:
    """What is not valid at `now`, the certificate or another one of the chain."""
    faults = []
    for depth, certificate in enumerate(chain):
        what = "the certificate" if depth == 0 else f"certificate {depth + 1} of the chain"
        if now >= certificate.not_valid_after_utc:
            faults.append(f"{what} expired at {shown(certificate.not_valid_after_utc)}")
        elif now < certificate.not_valid_before_utc - timedelta(seconds=NOT_YET_S):
            faults.append(f"{what} is not valid before {shown(certificate.not_valid_before_utc)}")
    return faults


def chain_fault(chain: Sequence[x509.Certificate], trusted: Sequence[x509.Certificate], now: datetime) -> str:
    """Why `chain` leads to none of the roots `trusted` at `now`, "" if it does."""
    from OpenSSL import crypto  # 1 MiB that who only shows certificates does not need

    from shared.net.tls.contexts import MESH_FLAGS

    store = crypto.X509Store()
    store.set_flags(MESH_FLAGS)
    others = [crypto.X509.from_cryptography(certificate) for certificate in chain[1:]]
    try:
        for root in trusted:
            store.add_cert(crypto.X509.from_cryptography(root))
        store.set_time(now)
        leaf = crypto.X509.from_cryptography(chain[0])
        crypto.X509StoreContext(store, leaf, others).verify_certificate()
    except crypto.X509StoreContextError as error:
        return str(error)
    except crypto.Error:
        return "a certificate that OpenSSL cannot use"
    return ""


class OtherIdentityError(ValueError):
    """A certificate is for somebody else, who is `found`."""

    def __init__(self, found: SpiffeId, wanted: SpiffeId) -> None:
        super().__init__(f"the certificate is for {found}, not for {wanted}")
        self.found = found


def check_answer(
    chain: Sequence[x509.Certificate],
    public_key: bytes,
    identity: SpiffeId,
    trusted: Sequence[x509.Certificate],
    now: datetime,
) -> None:
    """Raises ValueError unless `chain` is what was asked for: a certificate for the key with this
    SubjectPublicKeyInfo, for `identity` alone (else OtherIdentityError), valid now, that leads to one of the
    roots `trusted`."""
    leaf = chain[0]
    if public_key_der(leaf) != public_key:
        raise ValueError("the certificate is not for the key that was sent")
    found = identity_of(leaf)
    if found != identity:
        raise OtherIdentityError(found, identity)
    for fault in time_faults(chain, now):
        raise ValueError(fault)
    # An authority whose clock is ahead of ours by seconds is no fault.
    fault = chain_fault(chain, trusted, max(now, *(one.not_valid_before_utc for one in chain)))
    if fault:
        raise ValueError(f"the chain leads to none of the roots: {fault}")


def load_chain(pem: bytes) -> tuple[x509.Certificate, ...]:
    """A certificate and the rest of its chain. Raises ValueError, with nothing of the text in the reason."""
    chain = tuple(roots.parse(pem))
    if len(chain) > MAX_CHAIN:
        raise ValueError(f"{len(chain)} certificates, more than {MAX_CHAIN}")
    for certificate in chain:
        try:
            # Parsed on first access: what they hold has to be readable before it is asked for.
            _ = certificate.extensions, certificate.public_key()
        except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm):
            raise ValueError("a certificate that cannot be read") from None
    return chain


def load_roots(pem: bytes) -> tuple[x509.Certificate, ...]:
    """Roots. Raises ValueError likewise."""
    return tuple(roots.parse(pem))


def public_key_der(certificate: x509.Certificate) -> bytes:
    """Its SubjectPublicKeyInfo."""
    return _public_der(certificate.public_key())


def shown(moment: datetime) -> str:
    """A time as log lines have it: UTC, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def kind_of(key: object) -> str:
    """What kind of key, in a word and a size."""
    if isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey):
        return f"RSA {key.key_size}"
    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return f"EC {key.curve.name}"
    return ""


def _certificates(
    pem: bytes | None,
    load: Callable[[bytes], tuple[x509.Certificate, ...]],
    complaint: str,
    faults: list[str],
) -> tuple[x509.Certificate, ...]:
    if pem is None:
        return ()
    try:
        return load(pem)
    except ValueError as error:
        faults.append(f"{complaint}: {error}")
        return ()


def _other_key(paths: CertificatePaths, chain: Sequence[x509.Certificate], public: bytes) -> str:
    """The fault of a key that is not that of the first certificate."""
    for number, certificate in enumerate(chain, 1):
        if public_key_der(certificate) == public:
            return f"{paths.certificates}: the key's certificate is number {number}, and has to be the first"
    return f"{paths.private_key}: not the key of the certificate in {paths.certificates}"


def _key(pem: bytes | None, name: str, faults: list[str]) -> tuple[str, bytes | None]:
    """Kind and public half of a private key."""
    if pem is None:
        return "", None
    try:
        key = private_key.parse(pem)
    except ValueError as error:
        faults.append(f"{name}: {error}")
        return "", None
    return kind_of(key), _public_der(key.public_key())


def _public_der(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
