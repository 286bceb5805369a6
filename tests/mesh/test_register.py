"""With what `hbone register --print` prints, and nothing else, a sidecar's request to the Service arrives."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.cluster.registration import Plan, plan
from shared.address import Address
from shared.cluster.service_annotations import HGATE, REGISTER, WORKLOAD_ACCOUNT
from tests.mesh.objects import path_of
from tests.mesh.places import BRIDGE, PLACES, run_in, until
from tests.mesh.registered import EFFECT_S, HOST, URL, printed
from tests.mesh.workloads import SCRIPTS, Answer, Workloads, ask


def istiod_knows(name: str) -> bool | None:
    """Whether istiod has an object of that name, by what its port for debugging tells of all objects."""
    told = run_in(BRIDGE, "curl", "-s", "http://127.0.0.1:8080/debug/configz")
    return True if f'"{name}"' in told.stdout else None


def answered(status: int, host: str = HOST) -> Answer:
    def once() -> Answer | None:
        answer = ask("web", "/registered", service=host)
        return answer if answer.status == status else None

    return until(once, EFFECT_S, f"{host} answers {status}")


@pytest.fixture(scope="module")
def manifests() -> list[dict[str, Any]]:
    return printed("--workload-account", "hello")


@pytest.fixture(scope="module", params=["pilot-agent", "builtin", "envoy"])
def end(mesh: Workloads, manifests: list[dict[str, Any]], request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kind of mTLS end before the app."""
    mesh.plane.objects.apply_as("kubectl", manifests)
    krun = mesh.krun(request.param, {"WORKLOAD_NAME": "registered"})
    try:
        mesh.krun_ready(krun)
        yield request.param
    finally:
        krun.end()
        mesh.plane.objects.delete(reversed(manifests))


def test_a_dry_run_accepts_all_and_writes_nothing(mesh: Workloads, manifests: list[dict[str, Any]]) -> None:
    objects = mesh.plane.objects
    objects.apply_as("kubectl", manifests, dry_run=True)
    objects.apply_as("kubectl", printed("--ambient-network", "cloud"), dry_run=True)
    assert [objects.get(f"{path_of(each)}/{each['metadata']['name']}") for each in manifests] == [None] * 6


def test_a_request_by_the_service_s_name_arrives(end: str) -> None:
    assert answered(200).headers["host"].startswith(HOST)


def test_and_one_to_its_other_port(end: str) -> None:
    def once() -> Answer | None:
        answer = ask("web", "/", "--http2-prior-knowledge", service=HOST, port=8083)
        return answer if answer.status == 200 else None

    until(once, EFFECT_S, f"{HOST}:8083 answers")


def test_a_workload_of_another_account_gets_no_request(end: str, mesh: Workloads) -> None:
    """Clients demand the account that was registered, and so talk to nobody else."""
    answered(200)
    others = [each for each in printed("--workload-account", "echo") if each["kind"] == "WorkloadEntry"]
    mine = [each for each in printed("--workload-account", "hello") if each["kind"] == "WorkloadEntry"]
    mesh.plane.objects.apply_as("kubectl", others)
    answered(503)
    mesh.plane.objects.apply_as("kubectl", mine)
    answered(200)


def test_mtls_does_not_depend_on_the_namespace_s_own_rule(end: str, mesh: Workloads) -> None:
    """The DestinationRule demands it, and the port of the mTLS end has a rule of its own."""
    rule = {
        "apiVersion": "security.istio.io/v1",
        "kind": "PeerAuthentication",
        "metadata": {"name": "plain", "namespace": "demo"},
        "spec": {"mtls": {"mode": "DISABLE"}},
    }
    answered(200)
    mesh.plane.objects.apply([rule])
    try:
        until(lambda: istiod_knows("plain"), EFFECT_S, "istiod has seen it")
        for _ in range(20):
            assert ask("web", service=HOST).status == 200
    finally:
        mesh.plane.objects.delete([rule])


def test_a_user_s_own_rule_for_the_host_does_no_harm(
    end: str, mesh: Workloads, manifests: list[dict[str, Any]]
) -> None:
    """Of two rules the older one counts. Where it says nothing of TLS, the endpoint's label does."""
    theirs = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "DestinationRule",
        "metadata": {"name": "a-user-s-own", "namespace": "demo"},
        "spec": {"host": HOST, "trafficPolicy": {"loadBalancer": {"simple": "RANDOM"}}},
    }
    ours = [each for each in manifests if each["kind"] == "DestinationRule"]
    answered(200)
    mesh.plane.objects.delete(ours)
    mesh.plane.objects.apply([theirs])
    mesh.plane.objects.apply_as("kubectl", ours)
    try:
        until(lambda: istiod_knows("a-user-s-own"), EFFECT_S, "istiod has seen it")
        until(lambda: True if policy() == "RANDOM" else None, EFFECT_S, "it is theirs that counts")
        for _ in range(20):
            assert ask("web", service=HOST).status == 200
    finally:
        mesh.plane.objects.delete([theirs])


def policy() -> str:
    """How the client's Envoy chooses endpoints of the service."""
    told = run_in("web", "curl", "-s", "http://127.0.0.1:15000/config_dump?resource=dynamic_active_clusters")
    clusters = [each["cluster"] for each in json.loads(told.stdout)["configs"]]
    (found,) = [each for each in clusters if each["name"] == f"outbound|8080||{HOST}"]
    return str(found.get("lb_policy"))


def test_sidecars_go_on_where_the_service_is_for_ambient_clients_too(end: str, mesh: Workloads) -> None:
    ambient = printed("--workload-account", "hello", "--ambient-network", "cloud")
    mesh.plane.objects.apply_as("kubectl", ambient)
    until(lambda: istiod_knows("hbone-registered-ambient"), EFFECT_S, "istiod has seen the last one")
    for _ in range(20):
        assert ask("web", service=HOST).status == 200
    mesh.plane.objects.delete(each for each in ambient if each["metadata"]["name"].endswith("-ambient"))


def test_a_service_with_the_original_s_labels_is_reached_by_both_of_its_names(
    end: str, mesh: Workloads
) -> None:
    """As hgate registers it: owned by the Service as the cluster has it, and once is enough."""
    objects, name = mesh.plane.objects, "fortio-cr-icq63pqnqq-uc"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "demo",
            "labels": {"mesh-cloudrun": "fortio-cr"},
            "annotations": {WORKLOAD_ACCOUNT: "hello"},
        },
        "spec": {"ports": [{"name": "http", "port": 8080}]},
    }
    objects.apply([service])
    found = {"kind": "Service", **(objects.get(f"{path_of(service)}/{name}") or {})}
    gateways = [Address(PLACES[BRIDGE], 15443)]
    first = plan(found, [], gateways)
    objects.apply_as(HGATE, first.apply)
    try:
        for host in (f"{name}.demo.svc.cluster.local", "fortio-cr.demo.svc.cluster.local"):
            assert answered(200, host=host).headers["host"].startswith(host)
        made = [objects.get(f"{path_of(each)}/{each['metadata']['name']}") for each in first.apply]
        there = [{"kind": each["kind"], **(one or {})} for each, one in zip(first.apply, made, strict=True)]
        assert plan(found, there, gateways) == Plan((), (), ())
    finally:
        objects.delete(reversed([service, *first.apply]))


def test_what_hbone_register_writes_is_the_service_of_the_set(mesh: Workloads) -> None:
    """hgate makes the others."""
    kubeconfig = mesh.folder / "admin.kubeconfig"
    where = ("-n", "demo", "--name", "written", "--no-wait")
    environ = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin"}
    command = [str(SCRIPTS / "hbone"), "register", URL, *where]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"{URL}/_hbone/15003" in ran.stdout
    path = "/api/v1/namespaces/demo/services/written"
    written = mesh.plane.objects.get(path)
    assert written is not None
    assert {one["manager"] for one in written["metadata"]["managedFields"]} == {REGISTER}
    removed = subprocess.run([*command[:2], "--remove", *where], env=environ, capture_output=True, text=True)
    assert (removed.returncode, removed.stderr) == (0, "")
    assert mesh.plane.objects.get(path) is None
