"""What the Secret `sshdebug`, a folder with the same names, and SSH_AUTH say: who may log in, and the sshd's
own keys.

| name | what it has |
|---|---|
| authorized_keys, authorized_key_* | public keys, one a line |
| trusted_user_ca_keys | public keys of authorities that sign users' certificates |
| id_ecdsa, id_ed25519, id_rsa, ssh_host_*_key | the sshd's private key |
| the same with -cert.pub | its certificate |
| sshd_config | of OpenSSH's sshd, as it is |
| SSHCA_ADDR | the original's authority; krun asks none |

A mistake in one of them is a warning, and the rest counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.config.public_keys import AUTHORITY, CERTIFICATE, AuthorizedKey, parse_lines
from shared import regular_files
from shared.errors import UnavailableError

MAX_FILE_BYTES = 1 << 20
"""As much as a Secret can hold."""

MAX_FILES = 100

AUTHORIZED = re.compile(r"authorized_keys|authorized_key_.+")
AUTHORITIES = "trusted_user_ca_keys"
HOST_KEY = re.compile(r"id_(?:ecdsa|ed25519|rsa)|ssh_host_\w+_key")
HOST_CERTIFICATE = re.compile(rf"(?P<key>{HOST_KEY.pattern})-cert\.pub")
CONFIG = "sshd_config"
AUTHORITY_ADDRESS = "SSHCA_ADDR"
_IGNORED = re.compile(rf"(?:{HOST_KEY.pattern})\.pub|\..*")
"""What lies beside private keys, and how Kubernetes and Cloud Run mount."""


@dataclass(frozen=True, slots=True)
class KeyMaterial:
    """From one place, or from all."""

    keys: tuple[AuthorizedKey, ...] = ()
    """Authorities among them."""

    host_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """By name, as they are in their files."""

    host_certificates: Mapping[str, str] = field(default_factory=dict)
    """By the name of the key that each belongs to; as lines."""

    config: str = field(default="", repr=False)
    """A user's own sshd_config."""

    origins: tuple[str, ...] = ()
    """Where it is from, for people."""

    warnings: tuple[str, ...] = ()

    @property
    def enables(self) -> bool:
        """Whether anybody could log in."""
        return bool(self.keys or self.config)

    @property
    def digest(self) -> bytes:
        """Another one after each change."""
        told = (self.keys, sorted(self.host_keys.items()), sorted(self.host_certificates.items()))
        return hashlib.sha256(repr((told, self.config, self.origins)).encode()).digest()

    def beside(self, other: KeyMaterial) -> KeyMaterial:
        """With what `other` has; where both have something that there is once, ours counts."""
        return KeyMaterial(
            tuple(dict.fromkeys((*self.keys, *other.keys))),
            self.host_keys or other.host_keys,
            self.host_certificates if self.host_keys else other.host_certificates,
            self.config or other.config,
            (*self.origins, *other.origins),
            (*self.warnings, *other.warnings),
        )


def of_variable(text: str) -> KeyMaterial:
    """What SSH_AUTH says; empty: nothing. The settings have checked it."""
    return KeyMaterial(parse_lines(text), origins=("SSH_AUTH",)) if text else KeyMaterial()


def of_folder(folder: Path) -> KeyMaterial:
    """What the files in `folder` say; a folder that is missing says nothing. Raises UnavailableError if one
    cannot be read."""
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    except FileNotFoundError:
        return KeyMaterial()
    except OSError as error:
        raise UnavailableError(f"cannot read {folder}: {error.strerror}") from error
    files = {}
    for name in names[:MAX_FILES]:
        if not _IGNORED.fullmatch(name):
            try:
                files[name] = regular_files.read(folder / name, MAX_FILE_BYTES)
            except OSError as error:
                raise UnavailableError(f"cannot read {folder / name}: {error.strerror}") from error
    return of_files(files, str(folder))


def of_files(files: Mapping[str, bytes], origin: str) -> KeyMaterial:
    """What `files` say, by name; `origin` is where they are, for people."""
    keys: list[AuthorizedKey] = []
    host_keys: dict[str, bytes] = {}
    certificates: dict[str, str] = {}
    warnings: list[str] = []
    config = ""
    for name, content in sorted(files.items()):
        place = f"{name} of {origin}"
        try:
            if AUTHORIZED.fullmatch(name):
                keys += parse_lines(_text(content))
            elif name == AUTHORITIES:
                keys += [_authority(key) for key in parse_lines(_text(content))]
            elif match := HOST_CERTIFICATE.fullmatch(name):
                certificates[match["key"]] = _certificate(_text(content))
            elif HOST_KEY.fullmatch(name):
                host_keys[name] = content
            elif name == CONFIG:
                config = _text(content)
            elif name == AUTHORITY_ADDRESS:
                warnings.append(
                    f"{place} is not used, for krun asks no authority: put the authority's public key into "
                    f"{AUTHORITIES}, and a certificate of `ssh-keygen -s` into id_ecdsa-cert.pub"
                )
            elif not _IGNORED.fullmatch(name):
                warnings.append(f"{place} is not used: no name that an sshd's files have")
        except ValueError as error:
            warnings.append(f"{place} is not used: {error}")
    return KeyMaterial(
        tuple(keys), host_keys, certificates, config, (origin,) if files else (), tuple(warnings)
    )


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None


def _authority(key: AuthorizedKey) -> AuthorizedKey:
    if key.is_authority:
        return key
    return AuthorizedKey(((AUTHORITY, None), *key.options), key.kind, key.blob, key.comment)


def _certificate(text: str) -> str:
    line = text.strip()
    if "\n" in line or not line.partition(" ")[0].endswith(CERTIFICATE):
        raise ValueError("it is no certificate of ssh-keygen -s -h")
    return line
