"""The content of gRPC's bootstrap file. With istiod: tests/mesh."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent.config.mesh_name import TrafficDirector
from agent.config.pilot_settings import PilotSettings
from agent.config.settings import from_env
from agent.proxyless.bootstrap import for_istiod, for_traffic_director
from shared.address import Address
from shared.errors import UsageError
from shared.net.tls.certificate_folder import CertificatePaths
from shared.trust.spiffe import SpiffeId

ISTIOD = Address("istiod.istio-system.svc", 15012)

HELLO = SpiffeId.of_workload("mesh.local", "demo", "hello")

FILES = CertificatePaths(Path("/certs/c.pem"), Path("/certs/k.pem"), Path("/certs/r.pem"))

CONFIG = {
    "certificate_file": "/certs/c.pem",
    "private_key_file": "/certs/k.pem",
    "ca_certificate_file": "/certs/r.pem",
    "refresh_interval": "60s",
}


def workload(**environ: str) -> PilotSettings:
    return from_env({"WORKLOAD_NAME": "shop", "CLUSTER_ID": "east", **environ}).pilot


def test_istiod_with_the_workload_s_certificate() -> None:
    made = for_istiod(ISTIOD, workload(), HELLO, FILES, address="10.1.2.3")
    assert made == {
        "xds_servers": [
            {
                "server_uri": "istiod.istio-system.svc:15012",
                "channel_creds": [{"type": "tls", "config": CONFIG}],
                "server_features": ["xds_v3"],
            }
        ],
        "certificate_providers": {"default": {"plugin_name": "file_watcher", "config": CONFIG}},
        "server_listener_resource_name_template": "xds.istio.io/grpc/lds/inbound/%s",
        "node": {
            "id": "sidecar~10.1.2.3~shop.demo~demo.svc.cluster.local",
            "metadata": {
                "GENERATOR": "grpc",
                "CLUSTER_ID": "east",
                "NAMESPACE": "demo",
                "SERVICE_ACCOUNT": "hello",
                "NAME": "shop",
                "WORKLOAD_NAME": "shop",
                "MESH_ID": "mesh.local",
                "INTERCEPTION_MODE": "NONE",
                "INSTANCE_IPS": "10.1.2.3",
                "LABELS": {"app": "shop", "service.istio.io/canonical-name": "shop"},
            },
        },
    }


def test_without_certificates_it_is_who_the_settings_say() -> None:
    told = workload(WORKLOAD_NAMESPACE="other", WORKLOAD_SERVICE_ACCOUNT="me", TRUST_DOMAIN="mesh.test")
    made = for_istiod(ISTIOD, told, None, None, address="::1", plaintext=True)
    assert made["xds_servers"][0]["channel_creds"] == [{"type": "insecure"}]
    assert "certificate_providers" not in made
    metadata = made["node"]["metadata"]
    assert [metadata[name] for name in ("NAMESPACE", "SERVICE_ACCOUNT", "MESH_ID")] == [
        "other",
        "me",
        "mesh.test",
    ]


def test_a_revision_names_the_instance() -> None:
    node = for_istiod(ISTIOD, workload(K_REVISION="shop-7"), HELLO, FILES, address="10.1.2.3")["node"]
    assert re.fullmatch(r"sidecar~10\.1\.2\.3~shop-7-[0-9a-f]{8}\.demo~demo\.svc\.cluster\.local", node["id"])
    assert node["metadata"]["LABELS"]["service.istio.io/canonical-revision"] == "shop-7"


def test_metadata_as_istio_s_agent_takes_it() -> None:
    told = workload(
        ISTIO_META_NETWORK="east",
        ISTIO_METAJSON_LABELS='{"app": "mine", "version": "v2"}',
        ISTIO_METAJSON_MORE='{"OWNER": "us"}',
    )
    metadata = for_istiod(ISTIOD, told, HELLO, FILES, address="10.1.2.3")["node"]["metadata"]
    assert (metadata["NETWORK"], metadata["OWNER"]) == ("east", "us")
    assert (metadata["LABELS"]["app"], metadata["LABELS"]["version"]) == ("mine", "v2")
    for text in ("{", "[1]", "1"):
        with pytest.raises(UsageError, match=r"invalid ISTIO_METAJSON_LABELS \(has to be a JSON object\)"):
            for_istiod(ISTIOD, workload(ISTIO_METAJSON_LABELS=text), HELLO, FILES, address="10.1.2.3")


def test_traffic_director() -> None:
    made = for_traffic_director(
        TrafficDirector("123", "mesh:shop"), FILES, zone="us-central1-1", address="10.1.2.3"
    )
    (server,) = made["xds_servers"]
    assert server["server_uri"] == "trafficdirector.googleapis.com:443"
    assert server["channel_creds"] == [{"type": "google_default"}]
    assert re.fullmatch(r"projects/123/networks/mesh:shop/nodes/[0-9a-f-]{36}", made["node"]["id"])
    assert made["node"]["locality"] == {"zone": "us-central1-1"}
    assert made["certificate_providers"]["google_cloud_private_spiffe"]["config"] == CONFIG
    name = made["client_default_listener_resource_name_template"]
    assert name.endswith("/envoy.config.listener.v3.Listener/123/mesh:shop/%s")
    assert made["authorities"][name.split("/")[2]] == {"client_listener_resource_name_template": name}
    assert json.loads(json.dumps(made)) == made
