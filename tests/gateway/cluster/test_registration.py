"""What is registered for a Service as the API server has it, and whose an object is."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cluster.registration import Plan, RegistrationError, _contains, mesh_service, owner_of, plan
from shared.address import Address
from shared.cluster.mesh_objects import manifests
from shared.cluster.service_annotations import AMBIENT_SERVICE, EGRESS, URL, WORKLOAD

GATEWAYS = [Address("10.0.0.5", 15442)]


def service(name: str = "hello", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    about = {
        "name": name,
        "namespace": "demo",
        "uid": "u-1",
        "annotations": {URL: "https://hello.a.run.app"},
        "labels": labels or {},
    }
    ports = [{"name": "http", "port": 80, "targetPort": 80, "protocol": "TCP"}]
    return {"kind": "Service", "metadata": about, "spec": {"type": "ClusterIP", "ports": ports, **spec}}


def test_a_service() -> None:
    found = service()
    found["metadata"]["annotations"][WORKLOAD] = "worker"
    told = mesh_service(found, GATEWAYS, "example.org")
    assert (told.host, told.workload, told.short_name) == ("hello.demo.svc.example.org", "worker", "")
    assert [(one.name, one.number) for one in told.ports] == [("http", 80)]


def test_one_with_the_original_s_label_has_a_short_name() -> None:
    """And the workload has it, too."""
    told = mesh_service(service("fortio-cr-icq63pqnqq-uc", {"mesh-cloudrun": "fortio-cr"}), GATEWAYS)
    assert (told.short_name, told.workload) == ("fortio-cr", "fortio-cr")
    assert mesh_service(service("fortio-cr", {"mesh-cloudrun": "fortio-cr"}), GATEWAYS).short_name == ""


def test_the_selector_of_an_ambient_service_is_ours() -> None:
    assert mesh_service(service(selector={AMBIENT_SERVICE: "hello"}), GATEWAYS).name == "hello"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (service(selector={"app": "hello"}), "it has a selector"),
        (service(selector={AMBIENT_SERVICE: "other"}), "it has a selector"),
        (service(type="ExternalName"), "ExternalName"),
        (service(clusterIP="None"), "headless"),
        (service(ports=[]), "no TCP port"),
        (service(ports=[{"name": "dns", "port": 53, "protocol": "UDP"}]), "no TCP port"),
        (service(ports=[{"port": 80, "protocol": "TCP"}]), "port 80 has no name"),
        (service(ports=[{"name": f"p{one}", "port": one} for one in range(1, 34)]), "33 ports, more than 32"),
        (service(labels={"mesh-cloudrun": "A.b"}), "label mesh-cloudrun"),
    ],
)
def test_nothing_is_registered(found: dict[str, Any], reason: str) -> None:
    with pytest.raises(RegistrationError, match=reason):
        mesh_service(found, GATEWAYS)


def test_nor_with_a_broken_annotation_or_without_a_gateway() -> None:
    broken = service()
    broken["metadata"]["annotations"][EGRESS] = "all"
    with pytest.raises(RegistrationError, match=r"^hbone\.dev/egress has to be"):
        mesh_service(broken, GATEWAYS)
    with pytest.raises(RegistrationError, match="hgate's own address"):
        mesh_service(service(), [])


def as_there(manifest: dict[str, Any]) -> dict[str, Any]:
    """An object as the server has it once it has been applied, with what the server adds."""
    about = {**manifest["metadata"], "uid": "u-9", "resourceVersion": "7", "managedFields": []}
    return {**manifest, "metadata": about, "status": {}}


def names(objects: Any) -> list[str]:
    return [each["metadata"]["name"] for each in objects]


def test_all_is_to_be_made_and_then_nothing() -> None:
    first = plan(service(), [], GATEWAYS)
    assert [each["kind"] for each in first.apply][:2] == ["ServiceEntry", "WorkloadEntry"]
    assert all(each["metadata"]["ownerReferences"][0]["uid"] == "u-1" for each in first.apply)
    assert (first.remove, first.obstacles) == ((), ())
    second = plan(service(), map(as_there, first.apply), GATEWAYS)
    assert second == Plan((), (), ())


def test_another_address_of_the_gateway_s() -> None:
    """The new one is there before the old one is removed."""
    there = [as_there(each) for each in plan(service(), [], GATEWAYS).apply]
    theirs = {"kind": "WorkloadEntry", "metadata": {"name": "vm", "namespace": "demo"}}
    now = plan(service(), [theirs, *there], [Address("10.0.0.6", 15442)])
    assert names(now.apply) == ["hbone-hello-10.0.0.6-15442"]
    assert names(now.remove) == ["hbone-hello-10.0.0.5-15442"]


def test_what_somebody_has_changed_is_written_again() -> None:
    there = [as_there(each) for each in plan(service(), [], GATEWAYS).apply]
    (rule,) = [each for each in there if each["kind"] == "DestinationRule"]
    rule["spec"] = {**rule["spec"], "trafficPolicy": {"tls": {"mode": "DISABLE"}}, "exportTo": ["."]}
    assert names(plan(service(), there, GATEWAYS).apply) == ["hbone-hello"]
    found = service()
    found["spec"]["ports"] = [{"name": "http", "port": 81}]
    assert plan(found, there[:2], GATEWAYS).apply[0]["kind"] == "ServiceEntry"


def test_what_others_have_added_stays() -> None:
    there = [as_there(each) for each in plan(service(), [], GATEWAYS).apply]
    for each in there:
        each["spec"] = {**each["spec"], "exportTo": ["."]}
        each["metadata"]["ownerReferences"] = [{"uid": "u-0"}, *each["metadata"]["ownerReferences"]]
    assert plan(service(), there, GATEWAYS) == Plan((), (), ())


@pytest.mark.parametrize(
    "theirs",
    [
        {"labels": {}},
        {"ownerReferences": []},
        {"ownerReferences": [{"kind": "Service", "name": "hello", "uid": "u-0"}]},
    ],
)
def test_somebody_else_s_object_is_neither_written_nor_removed(theirs: dict[str, Any]) -> None:
    """Also if it looks like ours of a Service of that name that is gone."""
    there = [as_there(each) for each in plan(service(), [], GATEWAYS).apply]
    entry = there[0]
    there[0] = {**entry, "metadata": {**entry["metadata"], **theirs}, "spec": {"hosts": ["theirs.example"]}}
    why = "ServiceEntry demo/hbone-hello is somebody else's, and says something else: rename it, or remove it"
    assert plan(service(), there, GATEWAYS) == Plan((), (), (why,))


def test_a_short_name_that_is_somebody_else_s_is_not_led_here() -> None:
    """A VirtualService would take the requests of a Service that has endpoints."""
    found = service("hello-icq63pqnqq-uc", {"mesh-cloudrun": "hello"})
    theirs = as_there({"kind": "Service", "metadata": {"name": "hello", "namespace": "demo"}, "spec": {}})
    first = plan(found, [theirs], GATEWAYS)
    assert {"Service", "VirtualService"}.isdisjoint(each["kind"] for each in first.apply)
    (why,) = first.obstacles
    assert why.startswith("Service demo/hello is somebody else's")
    made = [as_there(each) for each in plan(found, [], GATEWAYS).apply if each["kind"] != "Service"]
    assert [each["kind"] for each in plan(found, [theirs, *made], GATEWAYS).remove] == ["VirtualService"]


def test_a_set_of_somebody_s_repository_will_do() -> None:
    printed = [as_there(each) for each in manifests(mesh_service(service(), GATEWAYS))]
    assert plan(service(), printed, GATEWAYS) == Plan((), (), ())
    moved = plan(service(), printed, [Address("10.0.0.6", 15442)])
    assert (names(moved.apply), moved.remove) == (["hbone-hello-10.0.0.6-15442"], ())


@pytest.mark.parametrize("there", [None, "x", [], [{}], {"spec": []}, {"spec": {"ports": {}}}])
def test_whatever_is_there_the_plan_is_to_write(there: Any) -> None:
    wanted = {"spec": {"ports": [{"name": "http"}]}}
    assert not _contains(there, wanted)


def test_whoever_has_our_label_is_not_ours() -> None:
    """Somebody who may label an object does not have hgate remove it."""
    made: dict[str, Any] = {
        "kind": "ServiceEntry",
        "metadata": {
            "name": "hbone-hello",
            "namespace": "demo",
            "labels": {"app.kubernetes.io/managed-by": "hgate", "hbone.dev/service": "hello"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": "hello", "uid": "1"}],
        },
    }
    assert owner_of(made) == "1"
    for reference in (
        {"apiVersion": "apps/v1", "kind": "Deployment", "name": "hello", "uid": "2"},
        {"apiVersion": "v1", "kind": "Service", "name": "other", "uid": "2"},
    ):
        made["metadata"]["ownerReferences"] = [reference]
        assert owner_of(made) is None
    made["metadata"]["ownerReferences"] = []
    assert owner_of(made) is None
