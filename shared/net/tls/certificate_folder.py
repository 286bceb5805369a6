"""Where a workload's certificate, key and roots are: the only list of the customary folders, and of the
file names in them.

It imports next to nothing, for every command that may show a certificate needs it at its start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# What we write ourselves: the names of GKE's and Istio's workload certificates.
CERTIFICATES_FILE = "certificates.pem"
PRIVATE_KEY_FILE = "private_key.pem"
ROOTS_FILE = "ca_certificates.pem"

BUNDLES_FILE = "trust_bundles.json"
"""GKE's, beside any names of the others: which roots are whose. There may be none."""

NAMES: tuple[tuple[str, str, str], ...] = (
    (CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE),
    ("cert-chain.pem", "key.pem", "root-cert.pem"),
    ("tls.crt", "tls.key", "ca.crt"),
)
"""Certificate chain, key and roots, as they are called by GKE and Istio's workload-spiffe-credentials, by
Istio's old /etc/certs, and by Kubernetes' TLS secrets, cert-manager's and its CSI drivers'. In a folder with
several complete sets the first one counts."""

FOLDERS = (
    Path("/var/run/secrets/workload-spiffe-credentials"),
    Path("/etc/certs"),
    Path("/var/run/secrets/spiffe.io"),
)
"""Where platforms mount them: GKE and Istio, Istio of old, cert-manager's CSI driver for SPIFFE."""


@dataclass(frozen=True, slots=True)
class CertificatePaths:
    """The three files of one folder, whether they are there or not."""

    certificates: Path
    """The certificate, then the rest of its chain, in PEM."""

    private_key: Path
    """Its key, in PEM, not encrypted."""

    roots: Path
    """What peers' certificates have to lead to, in PEM; roots of several trust domains may stand together."""

    @property
    def all(self) -> tuple[Path, Path, Path]:
        """The three, in this order."""
        return self.certificates, self.private_key, self.roots

    @property
    def bundles(self) -> Path:
        """Which roots are whose; often it is not there."""
        return self.roots.parent / BUNDLES_FILE

    @property
    def followed(self) -> tuple[Path, ...]:
        """All that a TLS context is made of, the chain first and the roots last."""
        return self.certificates, self.private_key, self.bundles, self.roots

    @property
    def count(self) -> int:
        """How many of them are files."""
        # Not Path.is_file, which raises where a folder may not be looked into.
        return sum(os.path.isfile(file) for file in self.all)

    @property
    def complete(self) -> bool:
        """Whether all three are files; what is in them is not checked."""
        return self.count == len(self.all)


def find(folder: Path) -> CertificatePaths:
    """The files of `folder` by those names of which most are there; the first names where none is, so that an
    error about a missing file names a customary one."""
    sets = [CertificatePaths(*(folder / name for name in names)) for names in NAMES]
    return max(sets, key=lambda paths: paths.count)


def written(folder: Path) -> CertificatePaths:
    """The files of `folder` by the names that we write."""
    return CertificatePaths(*(folder / name for name in NAMES[0]))


def customary_folder() -> Path:
    """The first of `FOLDERS` with all three files, else the first of all."""
    return next((folder for folder in FOLDERS if find(folder).complete), FOLDERS[0])
