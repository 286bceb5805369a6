"""A throw-away certificate authority for the demo, the tests and local development.

It makes X509-SVIDs: a root in memory or in a folder, and leaves that it signs, valid for days. Not for
production, where the mesh has its own authority: nothing here guards, rotates or revokes a key.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.atomic_files import PRIVATE_MODE, PUBLIC_MODE, write_atomically
from shared.errors import UnavailableError
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.private_folder import PrivateFolder
from shared.trust.spiffe import SpiffeId

BACKDATED_S = 300
"""How far `not_before` lies back: clocks of containers and laptops differ by seconds, seldom by minutes."""

ROOT_LIFETIME_S = 7 * 24 * 3600
"""A root that outlives a week of local work, and no more."""

LEAF_LIFETIME_S = 24 * 3600
"""What Istio gives a workload certificate by default."""

# File names of an authority itself, in a folder of its own: those of Istio's plug-in CA (secret `cacerts`).
CA_CERTIFICATE_FILE = "ca-cert.pem"
CA_KEY_FILE = "ca-key.pem"

MAX_CA_FILE_BYTES = 64 << 10
"""One certificate or key takes less than 4 KiB."""

MIN_RSA_BITS = 2048
"""The least that Istio's authority signs, too."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and the key it belongs to, both in PEM; the key is kept out of `repr`."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Authority:
    """The root of one trust domain, with its key."""

    trust_domain: str
    root: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def create(cls, trust_domain: str, *, lifetime_s: float = ROOT_LIFETIME_S) -> Authority:
        """Makes a new root (EC P-256) for `trust_domain`, valid for `lifetime_s` seconds from now.

        Raises ValueError when `trust_domain` is not a valid one.
        """
        identity = SpiffeId(trust_domain, "")
        key = ec.generate_private_key(ec.SECP256R1())
        # The attribute's limit is 64 characters (X.520), a trust domain's 255.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"throw-away CA of {trust_domain}"[:64])])
        now = datetime.now(UTC)
        root = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=BACKDATED_S))
            .not_valid_after(now + timedelta(seconds=lifetime_s))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(_alternative_names([identity], (), ()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(trust_domain, root, key)

    @property
    def root_pem(self) -> bytes:
        """The root certificate in PEM: what peers have to trust."""
        return self.root.public_bytes(serialization.Encoding.PEM)

    # Leaves.

    def issue(
        self,
        spiffe_id: SpiffeId | None = None,
        *,
        dns_names: Iterable[str] = (),
        ip_addresses: Iterable[str] = (),
        lifetime_s: float = LEAF_LIFETIME_S,
        server: bool = True,
        client: bool = True,
    ) -> KeyPair:
        """Issues a leaf (EC P-256) for these names, valid for `lifetime_s` seconds from now, never longer
        than the root; down to minus 300 it is one that has expired already.

        Raises ValueError when there is no name, no use (`server`, `client`), or a malformed IP address.
        """
        identities = [] if spiffe_id is None else [spiffe_id]
        names = _alternative_names(identities, dns_names, ip_addresses)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] * server + [ExtendedKeyUsageOID.CLIENT_AUTH] * client
        if not uses:
            raise ValueError("certificate for nothing: neither for servers nor for clients")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._leaf(key.public_key(), names, uses, lifetime_s)
        return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))

    def sign(
        self, request_pem: bytes, spiffe_id: SpiffeId, *, lifetime_s: float = LEAF_LIFETIME_S
    ) -> x509.Certificate:
        """A leaf for servers and clients with the key of a certificate request (PKCS #10) and the name
        `spiffe_id`, valid for `lifetime_s` seconds from now, never longer than the root. Nothing else is
        taken from the request.

        Raises ValueError, with nothing of the request's text, when it cannot be read, its own signature is
        wrong, its key too weak, or it asks for another name.
        """
        try:
            request = x509.load_pem_x509_csr(request_pem)
            key, proven = request.public_key(), request.is_signature_valid
            asked = _asked_names(request)
        except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension):
            raise ValueError("certificate request cannot be read") from None
        if not proven:
            raise ValueError("certificate request is not signed with the key that is in it")
        if asked not in ([], [x509.UniformResourceIdentifier(str(spiffe_id))]):
            raise ValueError(f"certificate request asks for another name than {spiffe_id}")
        return self.certify(key, spiffe_id, lifetime_s=lifetime_s)

    def certify(
        self, key: CertificatePublicKeyTypes, spiffe_id: SpiffeId, *, lifetime_s: float = LEAF_LIFETIME_S
    ) -> x509.Certificate:
        """A leaf for servers and clients with `key` and the name `spiffe_id`, for a caller who knows whose
        key it is. Raises ValueError when the key is too weak or of a kind that the mesh does not use."""
        if not isinstance(key, (rsa.RSAPublicKey, ec.EllipticCurvePublicKey)):
            raise ValueError("key to be certified is neither RSA nor EC")
        if isinstance(key, rsa.RSAPublicKey) and key.key_size < MIN_RSA_BITS:
            raise ValueError(f"RSA key to be certified has less than {MIN_RSA_BITS} bits")
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._leaf(key, _alternative_names([spiffe_id], (), ()), uses, lifetime_s)

    def _leaf(
        self,
        key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey,
        names: x509.SubjectAlternativeName,
        uses: list[x509.ObjectIdentifier],
        lifetime_s: float,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.root.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=BACKDATED_S))
            .not_valid_after(min(now + timedelta(seconds=lifetime_s), self.root.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            # Critical, because the subject is empty (RFC 5280 section 4.1.2.6).
            .add_extension(names, critical=True)
            .sign(self.key, hashes.SHA256())
        )

    # Files.

    def write(self, folder: str | os.PathLike[str], key_pair: KeyPair) -> None:
        """Writes `key_pair` and the root into `folder` under the names that Istio's proxy expects, making
        the folder when it is missing. Each file appears whole or not at all; the certificate comes last, so
        whoever watches it finds the other two in place.

        Raises OSError when the folder cannot be made or written.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        write_atomically(target / ROOTS_FILE, self.root_pem, PUBLIC_MODE)
        write_atomically(target / PRIVATE_KEY_FILE, key_pair.key_pem, PRIVATE_MODE)
        write_atomically(target / CERTIFICATES_FILE, key_pair.certificate_pem, PUBLIC_MODE)

    def save(self, folder: PrivateFolder) -> None:
        """Writes the root and, readable for the owner only, its key into `folder`; each file appears whole or
        not at all, the root last. Raises OSError when the folder cannot be written."""
        folder.write(CA_KEY_FILE, _key_pem(self.key), PRIVATE_MODE)
        folder.write(CA_CERTIFICATE_FILE, self.root_pem, PUBLIC_MODE)

    @classmethod
    def load(cls, folder: PrivateFolder) -> Authority:
        """What `save` has written into `folder`. Raises UnavailableError, which names the file, when one is
        missing, cannot be read, is not ours alone, is not what it should be, or does not belong to the other.
        """
        certificate_file, key_file = folder.path / CA_CERTIFICATE_FILE, folder.path / CA_KEY_FILE
        certificate_pem = folder.read(CA_CERTIFICATE_FILE, MAX_CA_FILE_BYTES, secret=False)
        key_pem = folder.read(CA_KEY_FILE, MAX_CA_FILE_BYTES, secret=True)
        try:
            root = x509.load_pem_x509_certificate(certificate_pem)
            trust_domain = _trust_domain(root)
        except (ValueError, x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
            raise UnavailableError(f"{certificate_file} is no certificate of ours") from error
        try:
            key = serialization.load_pem_private_key(key_pem, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # Without the original, whose text may have something of the file.
            raise UnavailableError(f"{key_file} is no private key in PEM") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != root.public_key():
            raise UnavailableError(f"{key_file} is not the key of {certificate_file}")
        return cls(trust_domain, root, key)


def _trust_domain(root: x509.Certificate) -> str:
    names = root.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    return SpiffeId.parse(uri).trust_domain


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _asked_names(request: x509.CertificateSigningRequest) -> list[x509.GeneralName]:
    """The alternative names in a request, of any kind."""
    try:
        return list(request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _alternative_names(
    identities: Iterable[SpiffeId], dns_names: Iterable[str], ip_addresses: Iterable[str]
) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity)) for identity in identities]
    names += [x509.DNSName(name) for name in dns_names]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ip_addresses]
    if not names:
        raise ValueError("certificate for nobody: it needs a SPIFFE ID, a DNS name or an IP address")
    return x509.SubjectAlternativeName(names)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """X509-SVID section 4.3: roots sign certificates, leaves sign handshakes, neither does the other."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
