"""What the gateway's ServiceAccount may ask of the API server with the Roles of deploy/k8s, and what not."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import pytest
import yaml

from tests.kube.objects import APPLY, DEPLOY, MERGE, PATIENCE_S, Client, Cluster, Object, of_kind, rendered

API = "/api/v1"
ISTIO = "/apis/networking.istio.io/v1"
DRY = "dryRun=All&fieldManager=hgate"

FORBIDDEN = 403


class Call(NamedTuple):
    """A request, and whether it is allowed."""

    method: str
    path: str
    body: Object | None = None
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path.partition('?')[0]}"


def applied(kind: str, group: str, plural: str, namespace: str, name: str = "hello", **content: Any) -> Call:
    """Server-side apply of an object, tried out."""
    base = f"/apis/{group}" if "/" in group else f"/api/{group}"
    body = {"apiVersion": group, "kind": kind, "metadata": {"name": name}, **content}
    return Call("PATCH", f"{base}/namespaces/{namespace}/{plural}/{name}?{DRY}", body, APPLY)


def event(namespace: str) -> Call:
    about = {"kind": "Service", "namespace": namespace, "name": "hello"}
    body = {"metadata": {"name": "hello.1"}, "involvedObject": about, "reason": "Refused", "type": "Warning"}
    return Call("POST", f"{API}/namespaces/{namespace}/events?{DRY}", body)


def status(namespace: str, name: str = "hello") -> Call:
    body = {"metadata": {"annotations": {"hbone.dev/status": "routed"}}}
    return Call("PATCH", f"{API}/namespaces/{namespace}/services/{name}?{DRY}", body, MERGE)


def of_service(namespace: str) -> Call:
    spec = {"ports": [{"name": "http", "port": 8080}]}
    return applied("Service", "v1", "services", namespace, "registered", spec=spec)


def entry(namespace: str) -> Call:
    spec = {"address": "10.1.2.3"}
    return applied("WorkloadEntry", "networking.istio.io/v1", "workloadentries", namespace, spec=spec)


def mesh_env(namespace: str = "istio-system", name: str = "mesh-env") -> Call:
    return applied("ConfigMap", "v1", "configmaps", namespace, name, data={"PROJECT_ID": "p"})


LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"

ALLOWED = (
    Call("GET", f"{API}/services"),
    Call("GET", f"{API}/services?watch=1&timeoutSeconds=1&allowWatchBookmarks=true"),
    Call("GET", "/apis/discovery.k8s.io/v1/endpointslices"),
    Call("GET", f"{ISTIO}/serviceentries"),
    Call("GET", f"{ISTIO}/workloadentries?labelSelector=app.kubernetes.io%2Fmanaged-by%3Dhgate"),
    Call("GET", "/apis/security.istio.io/v1/peerauthentications"),
    status("demo"),
    of_service("demo"),
    event("demo"),
    entry("demo"),
    applied(
        *("ServiceEntry", "networking.istio.io/v1", "serviceentries", "demo"),
        spec={
            "hosts": ["hello.demo.svc.cluster.local"],
            "ports": [{"number": 8080, "name": "http", "protocol": "HTTP"}],
            "resolution": "STATIC",
        },
    ),
    applied(
        *("DestinationRule", "networking.istio.io/v1", "destinationrules", "demo"),
        spec={"host": "hello", "trafficPolicy": {"tls": {"mode": "ISTIO_MUTUAL"}}},
    ),
    applied(
        *("VirtualService", "networking.istio.io/v1", "virtualservices", "demo"),
        spec={"hosts": ["hello"], "tcp": [{"route": [{"destination": {"host": "hello"}}]}]},
    ),
    applied(
        *("Sidecar", "networking.istio.io/v1", "sidecars", "demo"),
        spec={"egress": [{"hosts": ["~/*"]}]},
    ),
    applied(
        *("PeerAuthentication", "security.istio.io/v1", "peerauthentications", "demo"),
        spec={"mtls": {"mode": "STRICT"}},
    ),
    Call("DELETE", f"{API}/namespaces/demo/services/made?dryRun=All"),
    Call("GET", f"{LEASES.format('hbone-system')}/hgate"),
    mesh_env(),
    *(
        Call("GET", f"{API}/namespaces/istio-system/configmaps/{name}")
        for name in ("istio-ca-root-cert", "istio", "env-asm-managed")
    ),
)

REFUSED = (
    # Secrets, pods and what is in them.
    *(
        Call("GET", f"{API}/namespaces/{namespace}/secrets")
        for namespace in ("hbone-system", "istio-system", "demo")
    ),
    Call("GET", f"{API}/secrets"),
    Call("GET", f"{API}/namespaces/hbone-system/secrets/hgate-mesh"),
    Call("GET", f"{API}/pods"),
    Call("GET", f"{API}/nodes"),
    Call("GET", f"{API}/namespaces"),
    Call("POST", f"{API}/namespaces/hbone-system/pods/hgate-1/exec?command=sh"),
    Call("POST", f"{API}/namespaces/demo/pods?{DRY}", {"metadata": {"name": "p"}}),
    Call("POST", f"{API}/namespaces/hbone-system/serviceaccounts/hgate/token", {"spec": {}}),
    # Where no administrator has bound it.
    status("other"),
    of_service("other"),
    event("other"),
    entry("other"),
    Call("PATCH", f"{API}/namespaces/other/services/hello?{DRY}", {"spec": {"externalName": "a.b"}}, MERGE),
    Call("DELETE", f"{API}/namespaces/other/services/hello?dryRun=All"),
    Call("DELETE", f"{ISTIO}/namespaces/other/workloadentries/hello?dryRun=All"),
    Call("GET", f"{ISTIO}/gateways"),
    # Where one has, but they are somebody else's and do not ask for hgate.
    status("demo", "plain"),
    Call("PATCH", f"{API}/namespaces/demo/services/plain?{DRY}", {"spec": {"selector": {"a": "b"}}}, MERGE),
    Call("DELETE", f"{API}/namespaces/demo/services/plain?dryRun=All"),
    Call("DELETE", f"{API}/namespaces/demo/services/hello?dryRun=All"),
    Call("PATCH", f"{ISTIO}/namespaces/demo/sidecars/plain?{DRY}", {"spec": {"egress": []}}, MERGE),
    Call("DELETE", f"{ISTIO}/namespaces/demo/sidecars/plain?dryRun=All"),
    # Beside the objects by name.
    Call("GET", f"{API}/namespaces/istio-system/configmaps"),
    Call("GET", f"{API}/namespaces/istio-system/configmaps/others"),
    Call("GET", f"{API}/namespaces/demo/configmaps/istio-ca-root-cert"),
    mesh_env(name="istio"),
    mesh_env("demo"),
    Call("POST", f"{API}/namespaces/istio-system/configmaps?{DRY}", {"metadata": {"name": "mesh-env"}}),
    Call("DELETE", f"{API}/namespaces/istio-system/configmaps/mesh-env?dryRun=All"),
    Call("GET", f"{LEASES.format('hbone-system')}/other"),
    Call("GET", f"{LEASES.format('kube-system')}/hgate"),
    Call("POST", f"{LEASES.format('hbone-system')}?{DRY}", {"metadata": {"name": "mine"}}),
    # Its own rights, its own program, and who else may what.
    Call("PATCH", f"/apis/apps/v1/namespaces/hbone-system/deployments/hgate?{DRY}", {"spec": {}}, MERGE),
    Call("PATCH", f"/apis/rbac.authorization.k8s.io/v1/clusterroles/hgate-reading?{DRY}", {}, MERGE),
    Call("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/demo/rolebindings?{DRY}", {"metadata": {}}),
    Call("GET", "/apis/security.istio.io/v1/namespaces/demo/authorizationpolicies"),
    Call("DELETE", "/apis/security.istio.io/v1/namespaces/demo/authorizationpolicies/a?dryRun=All"),
)


@pytest.fixture(scope="module")
def deployed(cluster: Cluster) -> Cluster:
    """With the account, Roles and Lease as shipped, and the namespace `demo` bound."""
    shipped = of_kind(
        rendered("overlays/gke", with_options=True),
        *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Lease"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    )
    for each in [*shipped, *rendered("namespace")]:
        cluster.apply(each)
    asks = {"annotations": {"hbone.dev/cloudrun-url": "https://hello-1.a.run.app"}}
    ours = {"labels": {"app.kubernetes.io/managed-by": "hgate"}}
    spec = {"ports": [{"name": "http", "port": 8080}]}
    for namespace in ("demo", "other"):
        for name, more in (("hello", asks), ("made", ours), ("plain", {})):
            about = {"name": name, "namespace": namespace, **more}
            cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec})
    sidecar = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "Sidecar",
        "spec": {"egress": [{"hosts": ["~/*"]}]},
    }
    cluster.apply({**sidecar, "metadata": {"name": "plain", "namespace": "demo"}})
    for name in ("istio-ca-root-cert", "istio", "env-asm-managed"):
        about = {"name": name, "namespace": "istio-system"}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about})
    _until_the_guard_counts(cluster)
    return cluster


def _until_the_guard_counts(cluster: Cluster) -> None:
    """An API server learns of new policies by a watch, and compiles them."""
    hgate, call = cluster.client("hbone-system", "hgate"), status("demo", "plain")
    deadline = time.monotonic() + PATIENCE_S
    while hgate.ask(*call).status != FORBIDDEN:
        assert time.monotonic() < deadline, "the guard never counted"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def hgate(deployed: Cluster) -> Client:
    """Who has the token of the container `cluster`."""
    return deployed.client("hbone-system", "hgate")


@pytest.mark.parametrize("call", ALLOWED, ids=str)
def test_what_it_does_is_allowed(hgate: Client, call: Call) -> None:
    answer = hgate.ask(*call)
    assert answer.status in (200, 201), str(answer)


def test_it_takes_the_lease_that_is_there(hgate: Client) -> None:
    path = f"{LEASES.format('hbone-system')}/hgate"
    lease = hgate.ask("GET", path).body
    assert "holderIdentity" not in lease.get("spec", {})
    held = {"holderIdentity": "hgate-1", "leaseDurationSeconds": 15}
    assert str(hgate.ask("PUT", path, {**lease, "spec": held})) == "200 "
    # Whoever applies the manifests once more takes it from nobody.
    (shipped,) = of_kind(rendered("overlays/gke", with_options=True), "Lease")
    answer = Cluster(Client(hgate.server, hgate.server.admin)).try_out(shipped)
    assert answer.body["spec"] == held
    assert hgate.ask("PUT", path, {**answer.body, "spec": {}}).status == 200


@pytest.mark.parametrize("call", REFUSED, ids=str)
def test_what_it_does_not_do_is_refused(hgate: Client, call: Call) -> None:
    answer = hgate.ask(*call)
    assert answer.status == FORBIDDEN, str(answer)
    assert re.search("system:serviceaccount:hbone-system:hgate|hgate did not make it", str(answer))


def test_the_guard_is_about_nobody_else(deployed: Cluster) -> None:
    assert str(deployed.admin.ask(*status("demo", "plain"))) == "200 "


def test_where_nothing_is_bound_it_only_reads(deployed: Cluster, hgate: Client) -> None:
    review = {"spec": {"namespace": "other"}}
    told = hgate.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)
    rules = told.body["status"]["resourceRules"]
    # Everybody may ask who he is and what he may.
    own = [one for one in rules if not one["resources"][0].startswith("selfsubject")]
    assert {verb for one in own for verb in one["verbs"]} == {"get", "list", "watch"}
    assert {resource for one in own for resource in one["resources"]} == {
        *("services", "endpointslices", "serviceentries", "workloadentries", "destinationrules"),
        *("virtualservices", "sidecars", "peerauthentications"),
    }


@pytest.mark.parametrize("call", ALLOWED, ids=str)
def test_no_other_account_of_the_namespace_has_its_rights(deployed: Cluster, call: Call) -> None:
    about = {"name": "somebody", "namespace": "hbone-system"}
    deployed.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about})
    assert deployed.client("hbone-system", "somebody").ask(*call).status == FORBIDDEN


def test_the_token_for_google_opens_nothing_here(deployed: Cluster) -> None:
    """That of the container `hgate`, which has no other (components/federation)."""
    template = of_kind(rendered("overlays/plain"), "Deployment")[0]["spec"]["template"]["spec"]
    (audience,) = (
        source["serviceAccountToken"]["audience"]
        for volume in template["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
    )
    client = deployed.client("hbone-system", "hgate", audience)
    assert client.ask("GET", f"{API}/services").status == 401


def test_without_a_token_nothing_is_to_be_had(deployed: Cluster) -> None:
    nobody = Client(deployed.admin.server, None)
    assert nobody.ask("GET", f"{API}/services").status in (401, FORBIDDEN)


# krun, outside of the cluster.


CORE = f"{API}/namespaces"
POLICIES = "/apis/security.istio.io/v1/namespaces"
SUBJECT_TOKEN = {"spec": {"audiences": ["istio-ca"], "expirationSeconds": 600}}

KRUN_ALLOWED = (
    Call("GET", f"{CORE}/demo/configmaps/app-config"),
    Call("GET", f"{CORE}/demo/secrets/db-credentials"),
    Call("GET", f"{CORE}/istio-system/configmaps/mesh-env"),
    Call("GET", f"{POLICIES}/demo/authorizationpolicies"),
    Call("GET", f"{POLICIES}/istio-system/peerauthentications"),
    Call("POST", f"{CORE}/demo/serviceaccounts/hello/token", SUBJECT_TOKEN),
)

KRUN_REFUSED = (
    Call("GET", f"{CORE}/demo/secrets"),
    Call("GET", f"{CORE}/demo/secrets/other"),
    Call("GET", f"{CORE}/demo/configmaps"),
    Call("GET", f"{CORE}/istio-system/secrets/istio-ca-secret"),
    Call("GET", f"{CORE}/istio-system/configmaps/istio"),
    Call("GET", f"{CORE}/other/secrets/db-credentials"),
    Call("GET", f"{POLICIES}/other/authorizationpolicies"),
    Call("GET", f"{API}/services"),
    Call("POST", f"{CORE}/demo/serviceaccounts/default/token", SUBJECT_TOKEN),
    Call("POST", f"{CORE}/hbone-system/serviceaccounts/hgate/token", SUBJECT_TOKEN),
    Call("DELETE", f"{POLICIES}/demo/authorizationpolicies/a?dryRun=All"),
    applied("ConfigMap", "v1", "configmaps", "istio-system", "mesh-env", data={"MCON_ADDR": "10.6.6.6"}),
)


@pytest.fixture(scope="module")
def krun(cluster: Cluster) -> Client:
    """Who the Cloud Run service runs as, with the Roles of deploy/workload."""
    shipped = [yaml.safe_load(path.read_text()) for path in (DEPLOY / "workload").iterdir()]
    about = [("mesh-env", "istio-system"), ("app-config", "demo")]
    made = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}
        for name, namespace in about
    ]
    secret = {"name": "db-credentials", "namespace": "demo"}
    for each in [*shipped, *made, {"apiVersion": "v1", "kind": "Secret", "metadata": secret}]:
        cluster.apply(each)
    (user,) = {one["subjects"][0]["name"] for one in of_kind(shipped, "RoleBinding")}
    return Client(cluster.admin.server, cluster.admin.token, acts_as=user)


@pytest.mark.parametrize("call", KRUN_ALLOWED, ids=str)
def test_what_krun_asks_for_is_allowed(krun: Client, call: Call) -> None:
    answer = krun.ask(*call)
    assert answer.status in (200, 201), str(answer)


@pytest.mark.parametrize("call", KRUN_REFUSED, ids=str)
def test_what_krun_does_not_ask_for_is_refused(krun: Client, call: Call) -> None:
    answer = krun.ask(*call)
    assert answer.status == FORBIDDEN, str(answer)
    assert krun.acts_as in str(answer)
