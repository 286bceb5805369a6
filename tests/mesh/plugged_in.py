"""A CA of the operator's own in istiod: a root that the mesh gets beside its old one, and an intermediate.

As Istio's task "Plug in CA Certificates" has it: ca-cert.pem, ca-key.pem, cert-chain.pem and root-cert.pem in
a folder, read at istiod's start.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from tests.mesh.control_plane import ControlPlane
from tests.mesh.places import until

PUBLISHED_S = 30.0
"""For istiod's controller of the namespaces' ConfigMaps."""


@contextmanager
def plugged_in(plane: ControlPlane) -> Iterator[x509.Certificate]:
    """istiod with such a CA, then with its own again. Gives the new root."""
    old_root = plane.root
    root_key, key = rsa.generate_private_key(65537, 2048), rsa.generate_private_key(65537, 2048)
    root = _certificate("the operator's root", root_key, None, root_key)
    intermediate = _certificate("the mesh's intermediate", key, root, root_key)
    folder = plane.folder / "istiod" / "etc" / "cacerts"
    folder.mkdir(parents=True)
    pem, root_pem = _pem(intermediate), _pem(root)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "ca-key.pem").write_bytes(private)
    (folder / "ca-cert.pem").write_text(pem)
    (folder / "cert-chain.pem").write_text(pem + root_pem)
    (folder / "root-cert.pem").write_text(root_pem + old_root)
    try:
        _restart(plane, root_pem + old_root)
        yield root
    finally:
        shutil.rmtree(folder)
        _restart(plane, old_root)


def _restart(plane: ControlPlane, roots: str) -> None:
    """Another istiod, which has told the workloads of its roots."""
    plane.istiod.end()
    plane.start_istiod()
    until(lambda: True if plane.root.strip() == roots.strip() else None, PUBLISHED_S, "istiod's roots")


def _certificate(
    name: str, key: rsa.RSAPrivateKey, issuer: x509.Certificate | None, issuer_key: rsa.RSAPrivateKey
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
