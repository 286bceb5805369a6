"""The content of gRPC's xDS bootstrap file (gRFC A27, A29, A36, A65), for istiod and for Traffic Director.

The names in it are those that the control planes' configuration refers to: istiod's of the certificate
provider is `default`, Traffic Director's `google_cloud_private_spiffe`.
"""

from __future__ import annotations

import uuid
from typing import Any

from agent.config.mesh_name import TrafficDirector
from agent.config.pilot_settings import LABELS, PilotSettings, json_object
from shared.address import Address
from shared.net.tls.certificate_folder import CertificatePaths
from shared.trust.spiffe import SpiffeId

REFRESH = "60s"
"""How often gRPC reads the certificate's files again; their links turn at a time that nobody tells it."""

ISTIO_LISTENER = "xds.istio.io/grpc/lds/inbound/%s"
"""The resource that a gRPC server asks istiod for, by its IP:PORT."""

ISTIO_PROVIDER = "default"

TRAFFIC_DIRECTOR = "trafficdirector.googleapis.com:443"
TRAFFIC_DIRECTOR_LISTENER = "grpc/server?xds.resource.listening_address=%s"
TRAFFIC_DIRECTOR_PROVIDER = "google_cloud_private_spiffe"
TRAFFIC_DIRECTOR_AUTHORITY = "traffic-director-global.xds.googleapis.com"

META, META_JSON = "ISTIO_META_", "ISTIO_METAJSON_"
"""How variables begin that are passed in the node's metadata. The rest of the first is the name of a value;
the second have JSON objects, which are added: LABELS to the labels, others to all."""

Bootstrap = dict[str, Any]


def for_istiod(
    istiod: Address,
    workload: PilotSettings,
    identity: SpiffeId | None,
    certificates: CertificatePaths | None,
    *,
    address: str,
    plaintext: bool = False,
) -> Bootstrap:
    """For `istiod`. `identity` is who the certificate says that we are, None: what `workload` says; `address`
    is this machine's. `certificates` may be None with `plaintext`. Raises UsageError if ISTIO_METAJSON_* has
    no JSON."""
    if plaintext or certificates is None:
        credentials: dict[str, Any] = {"type": "insecure"}
    else:
        credentials = {"type": "tls", "config": _files(certificates)}
    found: Bootstrap = {
        "xds_servers": [
            {"server_uri": str(istiod), "channel_creds": [credentials], "server_features": ["xds_v3"]}
        ],
        "node": _istio_node(workload, identity, address),
        "server_listener_resource_name_template": ISTIO_LISTENER,
    }
    if certificates is not None:
        found["certificate_providers"] = _provider(ISTIO_PROVIDER, certificates)
    return found


def for_traffic_director(
    name: TrafficDirector, certificates: CertificatePaths, *, zone: str, address: str
) -> Bootstrap:
    """For Traffic Director; `name` has a project's number. The certificates are used if its policies ask for
    TLS. `zone` may be empty."""
    template = f"{name.project_number}/{name.network}/%s"
    listener = f"xdstp://{TRAFFIC_DIRECTOR_AUTHORITY}/envoy.config.listener.v3.Listener/{template}"
    server = {
        "server_uri": TRAFFIC_DIRECTOR,
        "channel_creds": [{"type": "google_default"}],
        "server_features": ["xds_v3"],
    }
    return {
        "xds_servers": [server],
        "authorities": {TRAFFIC_DIRECTOR_AUTHORITY: {"client_listener_resource_name_template": listener}},
        "client_default_listener_resource_name_template": listener,
        "node": {
            "id": f"projects/{name.project_number}/networks/{name.network}/nodes/{uuid.uuid4()}",
            "cluster": "cluster",
            "locality": {"zone": zone} if zone else {},
            "metadata": {"INSTANCE_IP": address},
        },
        "certificate_providers": _provider(TRAFFIC_DIRECTOR_PROVIDER, certificates),
        "server_listener_resource_name_template": TRAFFIC_DIRECTOR_LISTENER,
    }


def _files(certificates: CertificatePaths) -> dict[str, str]:
    return {
        "certificate_file": str(certificates.certificates.absolute()),
        "private_key_file": str(certificates.private_key.absolute()),
        "ca_certificate_file": str(certificates.roots.absolute()),
        "refresh_interval": REFRESH,
    }


def _provider(name: str, certificates: CertificatePaths) -> dict[str, Any]:
    return {name: {"plugin_name": "file_watcher", "config": _files(certificates)}}


def _istio_node(workload: PilotSettings, identity: SpiffeId | None, address: str) -> dict[str, Any]:
    """As Istio's agent writes it. istiod refuses a namespace or an account that is not the certificate's."""
    namespace = (identity and identity.namespace) or workload.namespace
    account = (identity and identity.service_account) or workload.account
    metadata: dict[str, Any] = {
        "GENERATOR": "grpc",
        "CLUSTER_ID": workload.cluster_id,
        "NAMESPACE": namespace,
        "SERVICE_ACCOUNT": account,
        "NAME": workload.pod,
        "WORKLOAD_NAME": workload.workload,
        "MESH_ID": workload.trust_domain if identity is None else identity.trust_domain,
        "INTERCEPTION_MODE": "NONE",
        "INSTANCE_IPS": address,
        "LABELS": workload.all_labels(),
    }
    for name, value in workload.passed.items():
        if name.startswith(META):
            metadata[name.removeprefix(META)] = value
        elif name.startswith(META_JSON) and name != LABELS:
            metadata |= json_object(name, value)
    node = f"sidecar~{address}~{workload.pod}.{namespace}~{namespace}.svc.cluster.local"
    return {"id": node, "metadata": metadata}
