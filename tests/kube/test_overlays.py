"""Every manifest of deploy/k8s, as kustomize renders it: Kubernetes accepts it, and it is what we promise.

The promises are checked by a walk over the objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared import ports
from tests.kube.objects import DEPLOY, OVERLAYS, Cluster, of_kind, rendered
from tests.test_documents import OTHER, Snippet, snippets

every_overlay = pytest.mark.parametrize(
    ("overlay", "with_options"),
    [
        pytest.param(one, more, id=f"{one}{' with its options' * more}")
        for one in OVERLAYS
        for more in (False, True)
    ],
)


def objects(overlay: str, with_options: bool) -> list[dict[str, Any]]:
    return rendered(f"overlays/{overlay}", with_options=with_options)


def pod(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The template of the gateway's pods."""
    (deployment,) = of_kind(found, "Deployment")
    return dict(deployment["spec"]["template"])


def texts(node: Any) -> Iterator[str]:
    """All strings in it."""
    if isinstance(node, dict):
        for value in node.values():
            yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)
    elif isinstance(node, str):
        yield node


# Kubernetes has a say.


@every_overlay
def test_the_api_server_accepts_every_manifest(cluster: Cluster, overlay: str, with_options: bool) -> None:
    found = objects(overlay, with_options)
    answers = {f"{one['kind']} {one['metadata']['name']}": cluster.try_out(one) for one in found}
    assert {name: str(answer) for name, answer in answers.items() if answer.status not in (200, 201)} == {}


def test_the_api_server_accepts_the_binding_of_a_namespace(cluster: Cluster) -> None:
    (binding,) = rendered("namespace")
    assert cluster.try_out(binding).status in (200, 201)


@pytest.mark.parametrize("path", sorted((DEPLOY / "workload").iterdir()), ids=lambda path: path.name)
def test_the_api_server_accepts_what_krun_needs(cluster: Cluster, path: Path) -> None:
    assert cluster.try_out(yaml.safe_load(path.read_text())).status in (200, 201)


@pytest.mark.parametrize("path", sorted((DEPLOY / "cloudrun").iterdir()), ids=lambda path: path.name)
def test_what_is_for_cloud_run_is_a_service_of_knative_s(cluster: Cluster, path: Path) -> None:
    service = yaml.safe_load(path.read_text())
    service["metadata"]["namespace"] = "demo"  # Cloud Run's is the project
    answer = cluster.try_out(service)
    assert answer.status == 201, str(answer)
    (container, *_) = service["spec"]["template"]["spec"]["containers"]
    container["startupprobe"] = {}
    assert "startupprobe" in str(cluster.try_out(service))


@pytest.mark.parametrize("snippet", snippets(OTHER), ids=str)
def test_the_api_server_accepts_what_the_documents_show(cluster: Cluster, snippet: Snippet) -> None:
    for found in yaml.safe_load_all(snippet.text):
        answer = cluster.try_out(found)
        assert answer.status in (200, 201), f"{found['kind']}: {answer}"


def test_a_wrong_manifest_is_refused(cluster: Cluster) -> None:
    deployment = {**of_kind(objects("gke", False), "Deployment")[0]}
    answer = cluster.try_out({**deployment, "spec": {**deployment["spec"], "replica": 2}})
    assert answer.status in (400, 500) and "replica" in str(answer)
    (monitor,) = of_kind(objects("gke", True), "PodMonitor")
    often = {"selector": {}, "podMetricsEndpoints": [{"interval": "often"}]}
    refused = cluster.try_out({**monitor, "spec": often})
    assert refused.status == 422 and "interval" in str(refused)


@every_overlay
def test_its_pods_are_let_into_a_namespace_of_restricted_pods(
    cluster: Cluster, overlay: str, with_options: bool
) -> None:
    found = objects(overlay, with_options)
    template = pod(found)
    (namespace,) = of_kind(found, "Namespace")
    path = f"/api/v1/namespaces/{namespace['metadata']['name']}/pods?dryRun=All&fieldValidation=Strict"
    one = {
        "metadata": {"name": "hgate-1", "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    }
    assert str(cluster.admin.ask("POST", path, one)) == "201 "
    root = {**one, "spec": {**one["spec"], "securityContext": {"runAsUser": 0}}}
    refused = cluster.admin.ask("POST", path, root)
    assert refused.status == 403 and "restricted" in str(refused)


# The pods.


@every_overlay
def test_no_container_has_more_than_it_needs(overlay: str, with_options: bool) -> None:
    spec = pod(objects(overlay, with_options))["spec"]
    about = spec["securityContext"]
    assert about["runAsNonRoot"] is True and about["runAsUser"] > 0 and about["fsGroup"] > 0
    assert about["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
    assert [volume for volume in spec["volumes"] if "hostPath" in volume] == []
    assert [one["name"] for one in spec["containers"]] == ["hgate", *(["cluster"] if with_options else [])]
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert [port for port in container["ports"] if "hostPort" in port] == []


@every_overlay
def test_every_container_says_what_it_uses_and_how_it_is(overlay: str, with_options: bool) -> None:
    for container in pod(objects(overlay, with_options))["spec"]["containers"]:
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        # No bound of CPU: throttling is latency on every tunnel.
        assert set(container["resources"]["limits"]) == {"memory"}
        declared = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in declared


@every_overlay
def test_images_are_named_by_digest(overlay: str, with_options: bool) -> None:
    for container in pod(objects(overlay, with_options))["spec"]["containers"]:
        name, _, digest = container["image"].partition("@sha256:")
        assert name.endswith("/hgate") and len(digest) == 64, container["image"]


@every_overlay
def test_no_container_of_the_tunnels_has_a_token_for_the_cluster(overlay: str, with_options: bool) -> None:
    found = objects(overlay, with_options)
    spec = pod(found)["spec"]
    (account,) = of_kind(found, "ServiceAccount")
    assert spec["serviceAccountName"] == account["metadata"]["name"]
    assert spec["automountServiceAccountToken"] is account["automountServiceAccountToken"] is False
    opening = {
        volume["name"]
        for volume in spec["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        if "serviceAccountToken" in source and "audience" not in source["serviceAccountToken"]
    }
    holding = {
        container["name"]
        for container in spec["containers"]
        for mount in container["volumeMounts"]
        if mount["name"] in opening
    }
    assert holding == ({"cluster"} if with_options else set())


@every_overlay
def test_what_containers_share_only_one_writes(overlay: str, with_options: bool) -> None:
    containers = pod(objects(overlay, with_options))["spec"]["containers"]
    writing = [
        (container["name"], mount["mountPath"])
        for container in containers
        for mount in container["volumeMounts"]
        if not mount.get("readOnly")
    ]
    assert writing == ([("cluster", "/run/hgate")] if with_options else [])
    assert [m["mountPath"] for m in containers[0]["volumeMounts"] if m["name"] == "run"] == (
        ["/run/hgate"] if with_options else []
    )


@every_overlay
def test_every_volume_is_there_and_used(overlay: str, with_options: bool) -> None:
    found = objects(overlay, with_options)
    spec = pod(found)["spec"]
    mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    (config,) = of_kind(found, "ConfigMap")
    named = [volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume]
    assert named == [config["metadata"]["name"]]
    assert config["metadata"]["name"].startswith("hgate-file-"), "with a hash: a change rolls the pods out"


# What is around them.


@every_overlay
def test_all_is_about_the_same_pods(overlay: str, with_options: bool) -> None:
    found = objects(overlay, with_options)
    labels = pod(found)["metadata"]["labels"].items()
    (deployment,) = of_kind(found, "Deployment")
    selectors = [
        *(one["spec"]["selector"] for one in of_kind(found, "Service")),
        *(
            one["spec"]["selector"]["matchLabels"]
            for one in of_kind(found, "PodDisruptionBudget", "PodMonitor")
        ),
        *(one["spec"]["podSelector"]["matchLabels"] for one in of_kind(found, "NetworkPolicy")),
        *(one["labelSelector"]["matchLabels"] for one in pod(found)["spec"]["topologySpreadConstraints"]),
        deployment["spec"]["selector"]["matchLabels"],
    ]
    assert len(selectors) >= 8
    assert [one for one in selectors if not one or not one.items() <= labels] == []


@every_overlay
def test_services_lead_to_ports_that_the_policy_opens(overlay: str, with_options: bool) -> None:
    found = objects(overlay, with_options)
    declared = {
        port["name"]: port["containerPort"]
        for container in pod(found)["spec"]["containers"]
        for port in container["ports"]
    }
    (policy,) = of_kind(found, "NetworkPolicy")
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    reached = {port["targetPort"] for one in of_kind(found, "Service") for port in one["spec"]["ports"]}
    assert {declared[name] for name in reached} <= opened
    operators = {ports.METRICS, *({ports.CLUSTER_OPS} if with_options else set())}
    assert opened == {declared[name] for name in reached} | operators


@every_overlay
def test_the_services_have_the_original_s_ports(overlay: str, with_options: bool) -> None:
    services = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for one in of_kind(objects(overlay, with_options), "Service")
    }
    hbone = {ports.HBONE} if with_options or overlay == "ambient" else set()
    more = {ports.REVERSE, 80, 443} if with_options else set()
    sni = {ports.SNI_ISTIO, ports.SNI}
    front_end = {"hgate-front-end": {ports.HBONE_H2C}} if with_options else {}
    assert services == {
        "hgate": sni | hbone,
        "internal-hgate": sni | hbone | more,
        "hgate-istiod": {ports.ISTIOD},
        **front_end,
    }


@every_overlay
def test_the_policy_is_for_both_ways_and_names_everybody(overlay: str, with_options: bool) -> None:
    (policy,) = of_kind(objects(overlay, with_options), "NetworkPolicy")
    spec = policy["spec"]
    assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    assert [rule for rule in spec["ingress"] if not rule.get("from") or not rule.get("ports")] == []
    # All ports only of namespaces that somebody has marked.
    assert [rule["to"] for rule in spec["egress"] if not rule.get("ports")] == [
        [{"namespaceSelector": {"matchLabels": {"hbone-target": "allowed"}}}]
    ]
    assert all(rule.get("to") for rule in spec["egress"])
    for rule in spec["egress"]:
        wide = [one["ipBlock"] for one in rule["to"] if one.get("ipBlock", {}).get("cidr") == "0.0.0.0/0"]
        assert [one for one in wide if "169.254.0.0/16" not in one["except"]] == []


@every_overlay
def test_an_address_outside_of_the_cluster_is_never_public(overlay: str, with_options: bool) -> None:
    balanced = [
        one
        for one in of_kind(objects(overlay, with_options), "Service")
        if one["spec"]["type"] == "LoadBalancer"
    ]
    assert {one["metadata"]["name"] for one in balanced} == (
        {"internal-hgate", "hgate-istiod"} if overlay == "gke" or with_options else set()
    )
    for service in balanced:
        (mark,) = (
            value for key, value in service["metadata"]["annotations"].items() if "global-access" not in key
        )
        assert mark.lower() == "internal"
        assert service["spec"]["externalTrafficPolicy"] == "Local"


@every_overlay
def test_there_are_two_or_more_and_one_may_go(overlay: str, with_options: bool) -> None:
    found = objects(overlay, with_options)
    (deployment,) = of_kind(found, "Deployment")
    (scaler,) = of_kind(found, "HorizontalPodAutoscaler")
    (budget,) = of_kind(found, "PodDisruptionBudget")
    assert "replicas" not in deployment["spec"], "an apply would undo what the scaler has done"
    metrics = ["ContainerResource", *(["Pods"] if with_options else [])]
    assert [metric["type"] for metric in scaler["spec"]["metrics"]] == metrics
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert 2 <= scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]
    assert budget["spec"]["maxUnavailable"] == 1 < scaler["spec"]["minReplicas"]
    spread = {one["topologyKey"] for one in pod(found)["spec"]["topologySpreadConstraints"]}
    assert spread == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}


@every_overlay
def test_rights_are_named_one_by_one(overlay: str, with_options: bool) -> None:
    found = objects(overlay, with_options)
    roles = of_kind(found, "Role", "ClusterRole")
    bindings = of_kind(found, "RoleBinding", "ClusterRoleBinding")
    if not with_options:
        assert roles + bindings == []
        return
    granted = [text for role in roles for text in texts(role["rules"])]
    assert not {"*", "secrets", "pods", "pods/exec", "serviceaccounts/token", "escalate", "bind"} & set(
        granted
    )
    for role in of_kind(found, "Role"):
        assert [rule for rule in role["rules"] if not rule["resourceNames"]] == []
    (account,) = of_kind(found, "ServiceAccount")
    about = account["metadata"]
    subject = {"kind": "ServiceAccount", "name": about["name"], "namespace": about["namespace"]}
    assert [one["subjects"] for one in bindings] == [[subject]] * len(bindings)
    (guard,) = of_kind(found, "ValidatingAdmissionPolicy")
    (condition,) = guard["spec"]["matchConditions"]
    assert f"'system:serviceaccount:{about['namespace']}:{about['name']}'" in condition["expression"]
    # Who may write is for an administrator to say, namespace by namespace.
    bound = {one["roleRef"]["name"] for one in bindings}
    assert {one["metadata"]["name"] for one in roles} - bound == {"hgate-registering"}
    (binding,) = rendered("namespace")
    assert binding["subjects"] == [subject]
    assert binding["roleRef"]["name"] == "hgate-registering"
