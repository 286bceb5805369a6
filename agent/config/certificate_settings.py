"""What krun is told of the authority that signs its certificate: which one, where, for whom, with what roots.

Owned here: the variables, their defaults and bounds. Reading a variable is `settings.py`'s, what they come to
`certificates_in_use.py`'s. Most names are the original's and Istio's (CA_ADDR, MCON_ADDR, CA_POOL, CAROOT_*,
WORKLOAD_*), which a mesh's `mesh-env` has already; what is new begins with HBONE_.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from agent.config.kubernetes_settings import ISTIO_FILE
from agent.config.variables import (
    Variables,
    none_or,
    number_in,
    one_of,
    owner,
    target,
    words,
)
from shared import ports
from shared.address import Address
from shared.credentials.kubernetes.kubernetes_names import (
    DEFAULT_NAMESPACE,
    DEFAULT_SERVICE_ACCOUNT,
    check_namespace,
    check_service_account,
)
from shared.credentials.token_sources import token_settings
from shared.errors import UsageError
from shared.trust.spiffe import SpiffeId

Ca = Literal["none", "istio", "cas", "dev"]
"""Who signs: nobody (the platform mounts the files), istiod, Google's CA Service, the development CA."""

CasNames = Literal["caller", "request"]
"""Whom a certificate of Google's CA Service names: the SPIFFE ID of whoever asks, which any workload may have
(REFLECTED_SPIFFE), or the one asked for, which takes a role that may ask for anybody."""

KeyKind = Literal["ec", "rsa"]

ENVIRONMENT: dict[str, str] = {
    "HBONE_CA": "who signs krun's certificate into HBONE_CERTS: none, istio, cas (Google's) or dev (none)",
    "CA_ADDR": "HOST:PORT of Istio's CA (XDS_ADDR, else MCON_ADDR)",
    "MCON_ADDR": "address at which the mesh is reached from outside, for Istio's CA on port 15012",
    "HBONE_CA_NAME": "name in the certificate of Istio's CA (istiod.istio-system.svc)",
    "CLUSTER_ID": "cluster that the token is of, for Istio's CA (Kubernetes)",
    "CA_POOL": "projects/P/locations/L/caPools/POOL of Google's CA Service",
    "HBONE_CAS_URL": "Google's CA Service (https://privateca.googleapis.com)",
    "HBONE_CAS_NAMES": "who is in its certificates: caller (of the token) or request, if it may ask (caller)",
    "HBONE_CA_TOKEN_FILE": "token for the CA, - for none (istio: where HBONE_K8S_TOKENS keeps it)",
    "GCE_METADATA_HOST": "metadata server, whose access token Google's CA Service takes (Google's)",
    "HBONE_CA_FOLDER": "folder of the development CA, the user's own (XDG_RUNTIME_DIR/hbone/dev-ca)",
    "HBONE_CA_TIMEOUT": "seconds until krun has to have its first certificate (30)",
    "HBONE_CERT_LIFETIME": "seconds that a certificate is asked for (86400)",
    "HBONE_CERT_RENEW_AT": "part of its life after which it is renewed, 0.2 to 0.9 (0.5)",
    "HBONE_CERT_KEY": "kind of its key: ec or rsa (ec)",
    "HBONE_CERT_OWNER": "USER or USER:GROUP that the files are given to (krun's own)",
    "CAROOT_ISTIOD": "roots in PEM, beside those that the CA names",
    "CAROOT_CAS": "more of them",
    "HBONE_ROOTS": "files with more, separated by commas, beside /var/run/secrets/istio/root-cert.pem (none)",
}

CAS: tuple[Ca, ...] = get_args(Ca)
CAS_NAMES: tuple[CasNames, ...] = get_args(CasNames)
KEY_KINDS: tuple[KeyKind, ...] = get_args(KeyKind)

DEV_CA_FOLDER = "dev-ca"
"""Below what `private_folder.runtime_folder` gives."""

ISTIO_CA_NAME = "istiod.istio-system.svc"
"""What istiod's certificate says, however it is reached."""

MIN_LIFETIME_S = 60.0
MAX_LIFETIME_S = 90 * 86400.0
"""Istio's own bound on what workloads may ask for."""

MIN_SHARE, MAX_SHARE = 0.2, 0.9
MAX_TIMEOUT_S = 3600.0
MAX_FILES = 16


@dataclass(frozen=True, slots=True)
class CertificateSettings:
    """All that is told of the authority; there is one only if HBONE_CA is another than none."""

    ca: Ca
    identity: SpiffeId
    """The name that is asked for."""

    address: Address | None = None
    """Of Istio's CA."""

    server_name: str = ISTIO_CA_NAME
    cluster_id: str = "Kubernetes"
    """What istiod calls the cluster whose tokens it is to ask about ours; this is Istio's default."""

    pool: str = ""
    """Of Google's CA Service."""

    cas_url: str = "https://privateca.googleapis.com"
    """Where that is."""

    cas_names: CasNames = "caller"

    token_file: Path | None = None
    """What proves us to the authority. None: to Istio's the certificate that is to be renewed, to Google's an
    access token of the metadata server."""

    metadata_host: str = token_settings.DEFAULT_METADATA_HOST
    """HOST or HOST:PORT of that."""

    folder: Path | None = None
    """The development CA's; only that has one."""

    start_timeout_s: float = 30.0
    """For the first certificate: without one krun does not start, and whoever started it tries again."""

    lifetime_s: float = 86400.0
    """A day, which is Istio's default; the authority decides."""

    renew_at: float = 0.5
    """Part of a certificate's life, less a random tenth."""

    key_kind: KeyKind = "ec"
    owner: tuple[int, int] | None = None
    """User and group id of the files, for an app that reads them and is not krun's user."""

    roots: Mapping[str, str] = field(default_factory=dict)
    """PEM by the variable that has it."""

    root_files: tuple[Path, ...] = ()


def read(
    read: Variables, trust_domain: str, xds: Address | None, token_file: Path | None
) -> CertificateSettings | None:
    """The settings that `read` finds; None if the files come from elsewhere. `token_file` has the token for
    Istio's CA if krun keeps one itself. Raises UsageError."""
    ca: Ca = read("HBONE_CA", one_of(CAS), "none")
    identity = _identity(read, trust_domain, ca)
    default = CertificateSettings(ca, identity)
    mesh = read("MCON_ADDR", _mesh_address, None)
    address = read("CA_ADDR", target, None) or xds or mesh
    texts = {name: read(name, str, "") for name in ("CAROOT_ISTIOD", "CAROOT_CAS")}
    settings = CertificateSettings(
        ca,
        identity,
        address=address,
        server_name=read("HBONE_CA_NAME", str, default.server_name),
        cluster_id=read("CLUSTER_ID", str, default.cluster_id),
        pool=read("CA_POOL", str, default.pool),
        cas_url=read("HBONE_CAS_URL", token_settings.endpoint, default.cas_url),
        cas_names=read("HBONE_CAS_NAMES", one_of(CAS_NAMES), default.cas_names),
        token_file=read(
            "HBONE_CA_TOKEN_FILE",
            none_or(token_settings.file_path),
            token_file or ISTIO_FILE if ca == "istio" else None,
        ),
        metadata_host=read("GCE_METADATA_HOST", token_settings.metadata_host, default.metadata_host),
        folder=read("HBONE_CA_FOLDER", Path, None) or (_own_folder(read) if ca == "dev" else None),
        start_timeout_s=read("HBONE_CA_TIMEOUT", number_in(1, MAX_TIMEOUT_S), default.start_timeout_s),
        lifetime_s=read("HBONE_CERT_LIFETIME", number_in(MIN_LIFETIME_S, MAX_LIFETIME_S), default.lifetime_s),
        renew_at=read("HBONE_CERT_RENEW_AT", number_in(MIN_SHARE, MAX_SHARE, "of a life"), default.renew_at),
        key_kind=read("HBONE_CERT_KEY", one_of(KEY_KINDS), default.key_kind),
        owner=read("HBONE_CERT_OWNER", owner, None),
        roots={name: text for name, text in texts.items() if text},
        root_files=read("HBONE_ROOTS", _files, ()),
    )
    if ca == "none":
        return None
    if ca == "istio" and address is None:
        raise UsageError("HBONE_CA=istio, but none of CA_ADDR, XDS_ADDR and MCON_ADDR is set: where is it?")
    if ca == "cas":
        from shared.credentials.certificates.google_cas import (
            is_pool,  # it is imported for its authority anyway
        )

        if not is_pool(settings.pool):
            raise UsageError("HBONE_CA=cas, but CA_POOL is no projects/P/locations/L/caPools/POOL")
    return settings


def _own_folder(read: Variables) -> Path:
    """The development CA's, if nobody names one: all programs of this user share it."""
    from shared.private_folder import runtime_folder

    return runtime_folder(read("XDG_RUNTIME_DIR", Path, None)) / DEV_CA_FOLDER


def _identity(read: Variables, trust_domain: str, ca: Ca) -> SpiffeId:
    namespace = read("WORKLOAD_NAMESPACE", check_namespace, DEFAULT_NAMESPACE)
    service_account = read("WORKLOAD_SERVICE_ACCOUNT", check_service_account, DEFAULT_SERVICE_ACCOUNT)
    if ca != "none" and not trust_domain:
        raise UsageError(f"HBONE_CA={ca}, but TRUST_DOMAIN is not set: whose certificate is it to be?")
    return SpiffeId.of_workload(trust_domain or "cluster.local", namespace, service_account)


def _mesh_address(text: str) -> Address:
    """A host alone, as the original has it, or with a port."""
    return target(text, ports.ISTIOD)


def _files(text: str) -> tuple[Path, ...]:
    return tuple(map(Path, words(text, MAX_FILES)))
