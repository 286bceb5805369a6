"""What a start says where a mesh is configured, and nothing keeps its workloads apart.

In the mesh an AuthorizationPolicy says which workload may call which. Where krun cannot read these policies,
or is told to ignore them, who may come in is HBONE_ALLOW's to say, and without it that is every workload of
the trust domain.
"""

from __future__ import annotations

from agent.config.own_identity import own_identity
from agent.config.settings import Settings
from shared.address import Address
from shared.errors import DeniedError
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId


def policy_warning(settings: Settings, mtls_end: Address) -> str | None:
    """What is open to whom, and which setting closes it; None where HBONE_ALLOW is set, or no mesh is
    configured. `mtls_end` is where the mTLS ends. Raises UnavailableError if there is no certificate."""
    mesh = sign_of_a_mesh(settings)
    if settings.allow or mesh is None:
        return None
    try:
        own = own_identity(settings.certificates)
    except DeniedError:  # the certificate names no workload, so TRUST_DOMAIN is set
        own = SpiffeId(settings.trust_domain, "")
    domains = ", ".join((settings.trust_domain or own.trust_domain, *settings.trust_domain_aliases))
    denied = f", but for {', '.join(settings.deny)} (HBONE_DENY)" if settings.deny else ""
    namespace = own.path.split("/")[2] if own.path.startswith("/ns/") else "NAMESPACE"
    return (
        f"HBONE_ALLOW is not set, and krun does not enforce the mesh's AuthorizationPolicy ({mesh}): every "
        f"workload of trust domain {domains}{denied} may reach the app on {settings.app} through the mTLS "
        f"end on {mtls_end}; name those that may, such as HBONE_ALLOW=ns/{namespace}/sa/*"
    )


def sign_of_a_mesh(settings: Settings) -> str | None:
    """The setting that shows that there is a mesh. The development CA shows none."""
    if settings.xds is not None:
        return "XDS_ADDR is set"
    if settings.mesh:
        return "MESH is set"
    if settings.authority is not None:
        ca = settings.authority.ca
        return f"HBONE_CA={ca}" if ca in ("istio", "cas") else None
    if settings.certificates in certificate_folder.FOLDERS:
        return f"the mesh's certificates are in {settings.certificates}"
    return None
