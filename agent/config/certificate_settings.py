"""Settings of krun about the authority that signs its certificate: which one, where, for whom, which roots.

Most names are the original's and Istio's (CA_ADDR, MCON_ADDR, CA_POOL, CAROOT_*, WORKLOAD_*), which a mesh's
`mesh-env` has already; what is new begins with HBONE_.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from agent.config.kubernetes_settings import ISTIO_FILE, KubernetesSettings
from agent.config.variables import OWNER
from shared import ports
from shared.address import Address
from shared.config.fields import Environment, Setting, setting, table_of
from shared.config.kinds import (
    TARGET,
    Choice,
    Duration,
    FilePath,
    FolderPath,
    List,
    Number,
    OrNone,
    Parsed,
    Text,
    target,
)
from shared.credentials.kubernetes.kubernetes_names import DEFAULT_NAMESPACE, DEFAULT_SERVICE_ACCOUNT
from shared.credentials.token_sources import token_settings
from shared.credentials.token_sources.token_settings import ENDPOINT, METADATA_HOST
from shared.errors import UsageError
from shared.trust.spiffe import SpiffeId

Ca = Literal["none", "istio", "cas", "dev"]
"""Who signs: nobody (the platform mounts the files), istiod, Google's CA Service, the development CA."""

CasNames = Literal["caller", "request"]
"""Whom a certificate of Google's CA Service names: the SPIFFE ID of whoever asks, which any workload may have
(REFLECTED_SPIFFE), or the one asked for, which takes a role that may ask for anybody."""

KeyKind = Literal["ec", "rsa"]

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


def _mesh_address(text: str) -> Address:
    """A host alone, as the original has it, or with a port."""
    return target(text, ports.ISTIOD)


CA_ADDR: Setting[Address | None] = Setting(
    TARGET, None, "HOST:PORT of Istio's CA", unset="XDS_ADDR, else MCON_ADDR", variable="CA_ADDR"
)
MCON_ADDR: Setting[Address | None] = Setting(
    Parsed(_mesh_address, "HOST or HOST:PORT"),
    None,
    f"address at which the mesh is reached from outside, for Istio's CA on port {ports.ISTIOD}",
    variable="MCON_ADDR",
)
ROOTS: tuple[Setting[str], ...] = (
    Setting(Text(), "", "roots in PEM, beside those that the CA names", variable="CAROOT_ISTIOD"),
    Setting(Text(), "", "more of them", variable="CAROOT_CAS"),
)


@dataclass(frozen=True, slots=True)
class CertificateSettings:
    """All about the authority; there is one only if HBONE_CA is another than none."""

    ca: Ca = setting(
        Choice(CAS),
        "none",
        "who signs krun's certificate into HBONE_CERTS: none, istio, cas (Google's) or dev",
        variable="HBONE_CA",
    )
    identity: SpiffeId = SpiffeId.of_workload("cluster.local", DEFAULT_NAMESPACE, DEFAULT_SERVICE_ACCOUNT)
    """The name that is asked for: TRUST_DOMAIN, WORKLOAD_NAMESPACE and WORKLOAD_SERVICE_ACCOUNT."""

    address: Address | None = None
    """Of Istio's CA: CA_ADDR, XDS_ADDR or MCON_ADDR."""

    server_name: str = setting(
        Text(),
        ISTIO_CA_NAME,
        "name in the certificate of Istio's CA",
        "Its certificate has this name, however it is reached.",
        variable="HBONE_CA_NAME",
    )
    cluster_id: str = setting(
        Text(),
        "Kubernetes",
        "cluster that the token is of, for Istio's CA",
        "istiod asks this cluster about the token.",
        variable="CLUSTER_ID",
    )
    pool: str = setting(
        Text(), "", "projects/P/locations/L/caPools/POOL of Google's CA Service", variable="CA_POOL"
    )
    cas_url: str = setting(
        ENDPOINT,
        "https://privateca.googleapis.com",
        "Google's CA Service",
        variable="HBONE_CAS_URL",
        secret=True,
    )
    cas_names: CasNames = setting(
        Choice(CAS_NAMES),
        "caller",
        "who is in its certificates: caller (of the token) or request, if it may ask",
        variable="HBONE_CAS_NAMES",
    )
    token_file: Path | None = setting(
        OrNone(FilePath()),
        None,
        "token for the CA, - for none",
        "Without a token krun shows Istio's CA the certificate that is to be renewed. Google's CA Service "
        "then gets an access token of the metadata server.",
        unset="istio: where HBONE_K8S_TOKENS keeps it",
        variable="HBONE_CA_TOKEN_FILE",
        secret=True,
    )
    metadata_host: str = setting(
        METADATA_HOST,
        token_settings.DEFAULT_METADATA_HOST,
        "metadata server, whose access token Google's CA Service accepts",
        variable="GCE_METADATA_HOST",
    )
    folder: Path | None = setting(
        FolderPath(),
        None,
        "folder of the development CA, the user's own",
        unset="XDG_RUNTIME_DIR/hbone/dev-ca",
        variable="HBONE_CA_FOLDER",
    )
    start_timeout_s: float = setting(
        Duration(1, MAX_TIMEOUT_S),
        30.0,
        "time until krun has to have its first certificate",
        "Without one krun does not start, and whoever started it tries again.",
        variable="HBONE_CA_TIMEOUT",
    )
    lifetime_s: float = setting(
        Duration(MIN_LIFETIME_S, MAX_LIFETIME_S),
        86400.0,
        "life that a certificate is asked for with",
        "The authority decides.",
        variable="HBONE_CERT_LIFETIME",
    )
    renew_at: float = setting(
        Number(MIN_SHARE, MAX_SHARE),
        0.5,
        "part of its life after which it is renewed, 0.2 to 0.9",
        "Less a random tenth.",
        variable="HBONE_CERT_RENEW_AT",
    )
    key_kind: KeyKind = setting(
        Choice(KEY_KINDS), "ec", "kind of its key: ec or rsa", variable="HBONE_CERT_KEY"
    )
    owner: tuple[int, int] | None = setting(
        OWNER,
        None,
        "USER or USER:GROUP that the files are given to",
        "For an app that reads them and is not krun's user.",
        unset="krun's own",
        variable="HBONE_CERT_OWNER",
    )
    roots: Mapping[str, str] = field(default_factory=dict)
    """PEM by the variable that has it, of ROOTS."""

    root_files: tuple[Path, ...] = setting(
        List(Path, MAX_FILES, "paths"),
        (),
        "files with more roots, separated by commas",
        "They are used beside /var/run/secrets/istio/root-cert.pem.",
        unset="none",
        variable="HBONE_ROOTS",
    )


SETTINGS: tuple[Setting[Any], ...] = (*table_of(CertificateSettings).values(), CA_ADDR, MCON_ADDR, *ROOTS)


def read(
    read: Environment, trust_domain: str, xds: Address | None, token_file: Path | None
) -> CertificateSettings | None:
    """The settings that `read` finds; None if the files come from elsewhere. `token_file` has the token for
    Istio's CA if krun keeps one itself. Raises UsageError."""
    given = read.given(CertificateSettings)
    ca: Ca = given.get("ca", "none")
    if ca == "istio":
        given.setdefault("token_file", token_file or ISTIO_FILE)
    if ca == "dev" and "folder" not in given:
        given["folder"] = _own_folder(read)
    mesh = read(MCON_ADDR)
    settings = CertificateSettings(
        identity=_identity(read, trust_domain, ca),
        address=read(CA_ADDR) or xds or mesh,
        roots={one.variable: text for one in ROOTS if (text := read(one))},
        **given,
    )
    if ca == "none":
        return None
    if ca == "istio" and settings.address is None:
        raise UsageError("HBONE_CA=istio, but none of CA_ADDR, XDS_ADDR and MCON_ADDR is set: where is it?")
    if ca == "cas":
        from shared.credentials.certificates.google_cas import is_pool  # imported for its authority anyway

        if not is_pool(settings.pool):
            raise UsageError("HBONE_CA=cas, but CA_POOL is no projects/P/locations/L/caPools/POOL")
    return settings


def _own_folder(read: Environment) -> Path:
    """The development CA's, if nobody names one: all programs of this user share it."""
    from shared.private_folder import runtime_folder

    folder = read.text("XDG_RUNTIME_DIR")
    return runtime_folder(Path(folder) if folder else None) / DEV_CA_FOLDER


def _identity(read: Environment, trust_domain: str, ca: Ca) -> SpiffeId:
    workload = table_of(KubernetesSettings)
    namespace = read(workload["namespace"]) or DEFAULT_NAMESPACE
    if ca != "none" and not trust_domain:
        raise UsageError(f"HBONE_CA={ca}, but TRUST_DOMAIN is not set: whose certificate is it to be?")
    return SpiffeId.of_workload(trust_domain or "cluster.local", namespace, read(workload["service_account"]))
