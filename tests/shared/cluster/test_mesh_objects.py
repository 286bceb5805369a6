"""What is made for a Service."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import Address
from shared.cluster.mesh_objects import (
    Manifest,
    MeshService,
    ServicePort,
    manifests,
    of_annotations,
    path_of,
)
from shared.cluster.service_annotations import (
    AMBIENT_NETWORK,
    AMBIENT_SERVICE,
    EGRESS,
    ENDPOINT_OF,
    WORKLOAD,
    WORKLOAD_ACCOUNT,
)

GATEWAY = Address("10.0.0.5", 15442)
PORTS = (ServicePort("http", 80), ServicePort("grpc-api", 8083))


def of(told: dict[str, str] | None = None, **more: Any) -> MeshService:
    return of_annotations(told or {}, "hello", "demo", more.pop("ports", PORTS), [GATEWAY], **more)


def by_kind(made: list[Manifest]) -> dict[str, Manifest]:
    assert len({each["kind"] for each in made}) == len(made)
    return {each["kind"]: each for each in made}


def test_a_plain_service() -> None:
    made = by_kind(manifests(of()))
    kinds = ["ServiceEntry", "WorkloadEntry", "DestinationRule", "PeerAuthentication", "Sidecar"]
    assert list(made) == kinds
    entry, endpoint = made["ServiceEntry"]["spec"], made["WorkloadEntry"]["spec"]
    assert entry["hosts"] == ["hello.demo.svc.cluster.local"]
    assert entry["ports"] == [
        {"name": "http", "number": 80, "protocol": "HTTP"},
        {"name": "grpc-api", "number": 8083, "protocol": "GRPC"},
    ]
    assert entry["workloadSelector"]["labels"].items() <= endpoint["labels"].items()
    assert (endpoint["address"], endpoint["ports"]) == ("10.0.0.5", {"http": 15442, "grpc-api": 15442})
    assert endpoint["serviceAccount"] == "default"
    assert made["DestinationRule"]["spec"]["trafficPolicy"]["tls"] == {"mode": "ISTIO_MUTUAL"}
    workload = {"app": "hello"}
    assert made["PeerAuthentication"]["spec"]["selector"] == {"matchLabels": workload}
    assert made["Sidecar"]["spec"]["workloadSelector"] == {"labels": workload}
    assert made["Sidecar"]["spec"]["egress"] == [{"hosts": ["~/*"]}]


def test_all_are_labelled_and_in_the_service_s_namespace_and_of_names_that_nobody_else_has() -> None:
    for each in manifests(of({AMBIENT_NETWORK: "cloud"})):
        about = each["metadata"]
        assert about["labels"] == {"app.kubernetes.io/managed-by": "hgate", "hbone.dev/service": "hello"}
        assert about["namespace"] == "demo"
        assert about["name"].startswith("hbone-hello")
        assert "ownerReferences" not in about
        assert path_of(each).startswith("/apis/") and path_of(each).endswith(about["name"])


def test_the_owner_is_the_service() -> None:
    owner = {"apiVersion": "v1", "kind": "Service", "name": "hello", "uid": "u-1"}
    assert all(each["metadata"]["ownerReferences"] == [owner] for each in manifests(of(), "u-1"))


def test_what_annotations_change() -> None:
    told = {WORKLOAD: "worker", WORKLOAD_ACCOUNT: "account", EGRESS: "./*,istio-system/*"}
    made = by_kind(manifests(of(told)))
    assert made["WorkloadEntry"]["spec"]["serviceAccount"] == "account"
    assert made["PeerAuthentication"]["spec"]["selector"] == {"matchLabels": {"app": "worker"}}
    assert made["Sidecar"]["spec"]["egress"] == [{"hosts": ["./*", "istio-system/*"]}]
    assert "Sidecar" not in by_kind(manifests(of({EGRESS: "none"})))
    with pytest.raises(ValueError, match=r"^hbone\.dev/egress has to be hosts of a Sidecar's egress"):
        of({EGRESS: "*"})


def test_an_endpoint_for_each_gateway() -> None:
    gateways = [GATEWAY, Address("10.0.0.5", 15443), Address("fd00::", 15443)]
    made = manifests(of_annotations({}, "hello", "demo", PORTS, gateways))
    names = [each["metadata"]["name"] for each in made if each["kind"] == "WorkloadEntry"]
    assert names == [
        "hbone-hello-10.0.0.5-15442",
        "hbone-hello-10.0.0.5-15443",
        "hbone-hello-fd00-0000-0000-0000-0000-0000-0000-0000-15443",
    ]


def test_ambient_clients_get_an_endpoint_that_sidecars_do_not() -> None:
    made = manifests(of({AMBIENT_NETWORK: "cloud", WORKLOAD_ACCOUNT: "hello"}))
    ambient = made[-1]
    assert ambient["spec"] == {
        "network": "cloud",
        "labels": {AMBIENT_SERVICE: "hello", "networking.istio.io/tunnel": "http"},
        "serviceAccount": "hello",
    }
    # Istio adds the object's own labels to the workload's.
    assert ENDPOINT_OF not in ambient["metadata"]["labels"]


def test_a_short_name_is_a_service_and_a_route_for_http() -> None:
    ports = (ServicePort("http", 80, "kubernetes.io/h2c"), ServicePort("db", 5432, "tcp"))
    *_, short, route = manifests(of(ports=ports, short_name="short"))
    assert short["spec"] == {
        "ports": [{"name": "http", "port": 80, "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"}]
    }
    assert path_of(short) == "/api/v1/namespaces/demo/services/short"
    assert route["spec"]["hosts"] == ["short.demo.svc.cluster.local"]
    destination = {"destination": {"host": "hello.demo.svc.cluster.local"}}
    assert route["spec"]["http"] == [{"route": [destination]}]
    kinds = [each["kind"] for each in manifests(of(ports=ports[1:], short_name="short"))]
    assert "VirtualService" not in kinds and "Service" not in kinds


@pytest.mark.parametrize(
    ("name", "app_protocol", "protocol"),
    [
        ("http", "", "HTTP"),
        ("http2-x", "", "HTTP2"),
        ("grpc-web", "", "GRPC-Web"),
        ("grpc-webby", "", "GRPC"),
        ("HTTP", "", "HTTP"),
        ("httpx", "", ""),
        ("web", "", ""),
        ("web", "grpc", "GRPC"),
        ("http", "example.com/own", ""),
    ],
)
def test_what_is_spoken_at_a_port(name: str, app_protocol: str, protocol: str) -> None:
    assert ServicePort(name, 80, app_protocol).protocol == protocol


@pytest.mark.parametrize(
    ("names", "protocol"),
    [
        (("http", "grpc"), "HTTP"),
        (("grpc", "http2"), "HTTP2"),
        (("tcp", "tls"), "TCP"),
        (("x",), None),
        (("http", "tcp"), None),
    ],
)
def test_what_the_workload_s_envoy_serves(names: tuple[str, ...], protocol: str | None) -> None:
    ports = tuple(ServicePort(name, number) for number, name in enumerate(names, 80))
    (ingress,) = by_kind(manifests(of(ports=ports)))["Sidecar"]["spec"]["ingress"]
    assert ingress["port"].get("protocol") == protocol


@given(st.ip_addresses(), st.integers(1, 65535))
def test_any_gateway_makes_a_name_that_the_cluster_accepts(address: Any, port: int) -> None:
    made = manifests(of_annotations({}, "h", "demo", PORTS, [Address(str(address), port)]))
    name = made[1]["metadata"]["name"]
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    assert ".-" not in name and "-." not in name and len(name) < 253
