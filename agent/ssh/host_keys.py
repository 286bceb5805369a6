"""The sshd's own keys: read, or made where none is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.config.public_keys import fingerprint
from shared.errors import UnavailableError

MADE = "made by krun"
"""Instead of the name of a file."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """One, with its certificate."""

    name: str
    """Of its file, or MADE."""

    private: bytes = field(repr=False)
    """In OpenSSH's format, without a passphrase."""

    public: str
    """As a line."""

    fingerprint: str
    certificate: str = ""
    """As a line; empty: none."""

    @property
    def kind(self) -> str:
        """Its type, such as ssh-ed25519."""
        return self.public.partition(" ")[0]


def read(files: Mapping[str, bytes], certificates: Mapping[str, str]) -> tuple[list[HostKey], list[str]]:
    """The keys in `files`, one of each type, and warnings about those that cannot be used. `certificates`
    are by the name of the key."""
    found: dict[str, HostKey] = {}
    warnings = []
    for name, content in sorted(files.items()):
        try:
            key = _read(name, content, certificates.get(name, ""))
        except UnavailableError as error:
            warnings.append(str(error))
            continue
        if key.kind in found:
            warnings.append(f"host key {name} is not used: there is another one of type {key.kind}")
        else:
            found[key.kind] = key
    warnings += [
        f"host certificate {name}-cert.pub is not used: there is no {name}"
        for name in certificates
        if name not in files
    ]
    return list(found.values()), warnings


def make() -> HostKey:
    """A new one, of type ed25519."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _host_key(MADE, Ed25519PrivateKey.generate(), "")


def _read(name: str, content: bytes, certificate: str) -> HostKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    load = load_ssh_private_key if b"BEGIN OPENSSH" in content else load_pem_private_key
    try:
        return _host_key(name, load(content.strip() + b"\n", None), certificate)
    except TypeError:
        reason = "it has a passphrase"
    except (ValueError, UnsupportedAlgorithm):
        reason = "it is no private key of a type that sshd has"
    raise UnavailableError(f"host key {name} is not used: {reason}")


def _host_key(name: str, key: object, certificate: str) -> HostKey:
    import base64

    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    if not isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey):
        raise ValueError("of another type")
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return HostKey(name, private, public, fingerprint(base64.b64decode(public.split()[1])), certificate)
