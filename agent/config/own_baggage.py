"""What the workload says of itself to others of the mesh, beside its certificate."""

from __future__ import annotations

from contextlib import suppress

from agent.config.own_identity import own_identity
from agent.config.settings import Settings
from shared.errors import DeniedError
from shared.tunnel.request_context import workload_baggage


def own_namespace(settings: Settings) -> str:
    """The namespace in our certificate, or else the one that is set. Raises what `own_identity` does, but for
    a certificate that names no workload."""
    namespace = None
    with suppress(DeniedError):
        namespace = own_identity(settings.certificates).namespace
    return namespace or settings.pilot.namespace


def own_baggage(settings: Settings, namespace: str) -> bytes:
    """The header that ztunnel sends with requests and answers, of what is known; `namespace` is ours."""
    pilot = settings.pilot
    labels = pilot.all_labels()
    return workload_baggage(
        pilot.cluster_id,
        namespace,
        pilot.workload,
        str(labels.get("service.istio.io/canonical-name", pilot.workload)),
        str(labels.get("service.istio.io/canonical-revision", "")),
    )
