"""What deploy/ promises, held against the code: ports, names of settings, deadlines, versions, file names.

Nothing here needs a cluster, a registry or a network. Whether Kubernetes accepts what kustomize renders,
`make test-kube` finds out (tests/kube); whether Cloud Run does, is for it to say.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.config.settings import ENVIRONMENT, ROOT_NAMESPACE, from_env
from agent.policy.cluster_policies import RESOURCES
from gateway.config.config import GatewayConfig, parse
from gateway.config.limit_settings import Limits
from gateway.drain import NOTICE_S
from gateway.rules.routes import RouteTable
from shared import ports
from shared.credentials.kubernetes.kubernetes_api import rbac_rule
from shared.net.names.resolv_conf import search_list
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.tls import istio_sni
from shared.tunnel.tunnel_request import TUNNEL_PREFIX

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
K8S = DEPLOY / "k8s"
BASE = K8S / "base"
OVERLAYS = sorted((K8S / "overlays").iterdir())
KUSTOMIZATIONS = sorted(K8S.rglob("kustomization.yaml"))
MANIFESTS = sorted(DEPLOY.rglob("*.yaml"))
CLOUD_RUN = sorted((DEPLOY / "cloudrun").glob("*.yaml"))
DOCKERFILES = sorted(DEPLOY.rglob("Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

GATEWAY_PORTS = {
    "tls-istio": ports.SNI_ISTIO,
    "tls-sni": ports.SNI,
    "tls-istiod": ports.ISTIOD,
    "http-metrics": ports.METRICS,
    "http-health": ports.HEALTH,
}

every_manifest = pytest.mark.parametrize(
    "path", MANIFESTS, ids=lambda path: path.relative_to(DEPLOY).as_posix()
)
every_cloud_run = pytest.mark.parametrize(
    "service", [yaml.safe_load(path.read_text()) for path in CLOUD_RUN], ids=[path.name for path in CLOUD_RUN]
)
MOUNTING = [path for path in CLOUD_RUN if path.name != "mesh.yaml"]
every_mounting = pytest.mark.parametrize(
    "service", [yaml.safe_load(path.read_text()) for path in MOUNTING], ids=[path.name for path in MOUNTING]
)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
every_kustomization = pytest.mark.parametrize(
    "path", KUSTOMIZATIONS, ids=lambda path: path.parent.relative_to(K8S).as_posix()
)
every_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)


def base(name: str) -> Any:
    return yaml.safe_load((BASE / name).read_text())


def services() -> dict[str, Any]:
    """The gateway's Services, by name."""
    found = yaml.safe_load_all((BASE / "services.yaml").read_text())
    return {service["metadata"]["name"]: service["spec"] for service in found}


def gateway_pod() -> Any:
    return base("deployment.yaml")["spec"]["template"]["spec"]


def gateway_config(overlay: str = "gke") -> GatewayConfig:
    path = K8S / "overlays" / overlay / "hgate.yaml"
    return parse(path.read_text(), str(path))


def readme_yaml() -> dict[str, Any]:
    """The documents of the README's YAML example, by kind."""
    (example,) = re.findall(
        r"^```yaml\n(.*?)^```$", (DEPLOY / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return {document["kind"]: document for document in yaml.safe_load_all(example)}


def ingress_container(service: Any) -> Any:
    """The one container that Cloud Run sends requests to: only it may have a port."""
    (container,) = [c for c in service["spec"]["template"]["spec"]["containers"] if "ports" in c]
    return container


def values_of(key: str, node: Any) -> Iterator[Any]:
    """All values that stand under `key`, at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from values_of(key, value)
    elif isinstance(node, list):
        for item in node:
            yield from values_of(key, item)


def instructions(dockerfile: Path) -> list[list[str]]:
    """The instructions of a Dockerfile as words, continued lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    return [line.split() for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


# All files.


@every_manifest
def test_what_a_user_has_to_replace_has_a_comment_above(path: Path) -> None:
    lines = path.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if re.search(
            r"\b(PROJECT|PROJECT_NUMBER|REGION|CLUSTER|NETWORK|SUBNET|POOL|PROVIDER)\b|sha256:0", line
        ) and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith("#"), f"{path.name}: {line.strip()}"


@every_manifest
def test_images_have_a_fixed_version_and_ours_is_the_project_s(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    for image in values_of("image", documents):
        if K8S in path.parents:
            assert image == "hgate", "the overlay's kustomization names it"
            continue
        name, _, tag = image.rpartition(":")
        assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", tag), image
        if "/hbone/" in name:
            assert tag == PROJECT["version"], image
    for version in values_of("app.kubernetes.io/version", documents):
        assert version == PROJECT["version"]


def test_versions_in_the_texts_are_the_project_s() -> None:
    named = [
        (path.name, version)
        for path in (DEPLOY / "README.md", *DOCKERFILES, *MANIFESTS)
        for version in re.findall(r"\b(?:hgate|krun):([0-9][0-9.]*[0-9])", path.read_text())
    ]
    assert named
    assert {version for _, version in named} == {PROJECT["version"]}, named


# The workload's Role.


def test_the_role_allows_what_krun_asks_for_and_nothing_else() -> None:
    namespace = "/api/v1/namespaces/demo"
    policies = [f"/apis/security.istio.io/v1/namespaces/demo/{kind}" for kind in RESOURCES.values()]
    asked = {
        *(rbac_rule("GET", path) for path in policies),
        rbac_rule("GET", f"{namespace}/configmaps/app-config"),
        rbac_rule("GET", f"{namespace}/secrets/db-credentials"),
        rbac_rule("POST", f"{namespace}/serviceaccounts/hello/token"),
    }
    role = yaml.safe_load((DEPLOY / "workload" / "role.yaml").read_text())
    allowed = {
        f"verb {verb} on {resource}{of} in namespace {role['metadata']['namespace']}"
        for rule in role["rules"]
        for of in [f" of {rule['apiGroups'][0]}" if rule["apiGroups"] != [""] else ""]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert allowed == asked
    named = [rule for rule in role["rules"] if rule["verbs"] != ["list"]]
    assert all(rule["resourceNames"] for rule in named), "one by one"
    names = ("policies-role.yaml", "policies-rolebinding.yaml")
    of_mesh, to_mesh = (yaml.safe_load((DEPLOY / "workload" / name).read_text()) for name in names)
    about = {"name": "krun-policies", "namespace": ROOT_NAMESPACE}
    assert of_mesh["metadata"] == to_mesh["metadata"] == about
    settings, *policies_ = of_mesh["rules"]
    assert policies_ == [rule for rule in role["rules"] if rule["verbs"] == ["list"]]
    assert (settings["resources"], settings["resourceNames"]) == (["configmaps"], ["mesh-env"])
    assert to_mesh["roleRef"]["name"] == of_mesh["metadata"]["name"]
    binding = yaml.safe_load((DEPLOY / "workload" / "rolebinding.yaml").read_text())
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


# The gateway on Kubernetes.


@every_kustomization
def test_a_kustomization_takes_every_file_beside_it(path: Path) -> None:
    kustomization = yaml.safe_load(path.read_text())
    named = {
        *kustomization.get("resources", []),
        *(patch["path"] for patch in kustomization.get("patches", []) if "path" in patch),
        *(file for one in kustomization.get("configMapGenerator", []) for file in one["files"]),
        # Those that a user may add.
        *re.findall(r"^ *# - (\S+\.yaml)$", path.read_text(), re.MULTILINE),
    }
    beside = {file.name for file in path.parent.iterdir() if file.is_file()} - {path.name}
    assert {name for name in named if "/" not in name} == beside


@every_overlay
def test_an_overlay_offers_every_component(overlay: Path) -> None:
    text = (overlay / "kustomization.yaml").read_text()
    offered = set(re.findall(r"^  (?:# )?- \.\./\.\./components/(\S+)$", text, re.MULTILINE))
    # On GKE the metadata server knows the pod.
    assert {path.name for path in (K8S / "components").iterdir()} - offered == (
        {"federation"} if overlay.name == "gke" else set()
    )


def test_ambient_is_plain_with_one_component_more() -> None:
    one, other = (
        yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
        for name in ("plain", "ambient")
    )
    assert other["components"] == [*one["components"], "../../components/hbone"]
    assert {**other, "components": one["components"]} == one
    plain, ambient = gateway_config("plain"), gateway_config("ambient")
    assert ambient.hbone is not None
    assert (ambient.routes, ambient.tokens, ambient.listen) == (plain.routes, plain.tokens, plain.listen)


@every_overlay
def test_an_overlay_names_the_image_by_its_digest(overlay: Path) -> None:
    (image,) = yaml.safe_load((overlay / "kustomization.yaml").read_text())["images"]
    assert image["name"] == gateway_pod()["containers"][0]["image"]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", image["digest"])
    assert "newTag" not in image


@every_overlay
def test_the_file_of_an_overlay_is_good(overlay: Path) -> None:
    config = gateway_config(overlay.name)
    assert config.routes
    # What a user has to replace, and what only the pod has: nothing else is doubtful.
    assert [
        one for one in config.warnings if "placeholder of an example" not in one and "/var/run/" not in one
    ] == []


def test_selectors_find_the_pods() -> None:
    labels = base("deployment.yaml")["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        base("deployment.yaml")["spec"]["selector"]["matchLabels"],
        *(service["selector"] for service in services().values()),
        base("pdb.yaml")["spec"]["selector"]["matchLabels"],
        base("networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"],
        *(rule["labelSelector"]["matchLabels"] for rule in gateway_pod()["topologySpreadConstraints"]),
    ]
    assert all(selector and selector.items() <= labels for selector in selectors)


@every_overlay
def test_names_hold_together(overlay: Path) -> None:
    pod = gateway_pod()
    (config_map,) = yaml.safe_load((overlay / "kustomization.yaml").read_text())["configMapGenerator"]
    assert pod["serviceAccountName"] == base("serviceaccount.yaml")["metadata"]["name"]
    assert pod["volumes"] == [{"name": "config", "configMap": {"name": config_map["name"]}}]
    assert config_map["namespace"] == yaml.safe_load((BASE / "kustomization.yaml").read_text())["namespace"]


@every_overlay
def test_the_pod_starts_with_the_file_of_the_config_map(overlay: Path) -> None:
    (container,) = gateway_pod()["containers"]
    (mount,) = container["volumeMounts"]
    (config_map,) = yaml.safe_load((overlay / "kustomization.yaml").read_text())["configMapGenerator"]
    (file,) = config_map["files"]
    assert container["args"] == ["run", "--config", f"{mount['mountPath']}/{file}"]


@every_overlay
def test_the_pod_declares_the_ports_that_the_gateway_listens_on(overlay: Path) -> None:
    (container,) = gateway_pod()["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == GATEWAY_PORTS
    config = gateway_config(overlay.name)
    assert [address.port for address in config.listen] == [ports.SNI_ISTIO, ports.SNI, ports.ISTIOD]
    assert config.metrics is not None and config.metrics.port == ports.METRICS
    assert config.health is not None and config.health.port == ports.HEALTH


@every_overlay
def test_admin_stays_on_loopback(overlay: Path) -> None:
    admin = gateway_config(overlay.name).admin
    assert admin is not None
    assert (admin.host, admin.port) == ("127.0.0.1", ports.ADMIN)


@every_overlay
def test_istiod_is_asked_through_the_gateway(overlay: Path) -> None:
    (service,) = (port["port"] for port in services()["hgate-istiod"]["ports"])
    route = RouteTable(gateway_config(overlay.name).routes).match(istio_sni.parse("istiod.istio-system.svc"))
    assert (route.kind, str(route.dial)) == ("forward", f"istiod.istio-system.svc:{service}")


def test_services_and_policy_open_the_tls_ports() -> None:
    tls_ports = {name: port for name, port in GATEWAY_PORTS.items() if name.startswith("tls-")}
    reached = {
        port["targetPort"]: port["port"] for service in services().values() for port in service["ports"]
    }
    assert reached == tls_ports
    clients, scrapers = base("networkpolicy.yaml")["spec"]["ingress"]
    assert sorted(port["port"] for port in clients["ports"]) == sorted(tls_ports.values())
    assert [port["port"] for port in scrapers["ports"]] == [ports.METRICS]
    # A rule without `from` would let everybody in.
    assert clients["from"] and scrapers["from"]


def test_probes_ask_a_declared_port() -> None:
    (container,) = gateway_pod()["containers"]
    probes = {
        name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    declared = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {declared[probe["port"]] for probe in probes.values()} == {ports.HEALTH}
    assert probes["readinessProbe"]["path"] == "/healthz/ready"
    assert probes["livenessProbe"]["path"] == probes["startupProbe"]["path"] == "/healthz/live"


def test_names_are_asked_as_they_are_first(tmp_path: Path) -> None:
    """A cluster's resolv.conf, with the pod's options in it as the kubelet puts them."""
    spec = gateway_pod()
    (option,) = spec["dnsConfig"]["options"]
    assert option == {"name": "ndots", "value": "1"}
    assert spec.get("dnsPolicy", "ClusterFirst") == "ClusterFirst"
    file = tmp_path / "resolv.conf"
    domains = "hbone-system.svc.cluster.local svc.cluster.local cluster.local"
    file.write_text(f"search {domains}\nnameserver 10.96.0.10\noptions ndots:{option['value']}\n")
    assert search_list(file).candidates("hello-1.europe-west1.run.app")[0] == "hello-1.europe-west1.run.app."
    assert "istiod.istio-system.svc.cluster.local." in search_list(file).candidates("istiod.istio-system.svc")


@every_overlay
def test_the_drain_ends_before_the_pod_is_killed(overlay: Path) -> None:
    limits = gateway_config(overlay.name).limits
    assert limits.drain_delay_s, "there are Services in front of it"
    assert limits.drain_delay_s + limits.drain_timeout_s < gateway_pod()["terminationGracePeriodSeconds"]


def test_the_drain_fits_into_kubernetes_default_as_well() -> None:
    assert NOTICE_S + Limits().drain_timeout_s < 30


def test_the_pod_has_no_rights_it_does_not_need() -> None:
    pod = gateway_pod()
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


# Members that speak HBONE, and workloads that cannot be dialled: what is commented out holds together, too.


def uncommented(path: Path, beginning: str) -> str:
    """The file with the comments from the line `# BEGINNING` to the next line that is none taken away."""
    lines = path.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == f"# {beginning}")
    for number in range(start, len(lines)):
        if not lines[number].lstrip().startswith("# "):
            break
        lines[number] = lines[number].replace("# ", "", 1)
    return "\n".join(lines)


def with_section(path: Path, section: str) -> str:
    """The gateway's file with a section that may be a comment in it."""
    text = path.read_text()
    return uncommented(path, f"{section}:") if f"\n# {section}:" in text else text


@every_overlay
@pytest.mark.parametrize(("section", "port"), [("hbone", ports.HBONE), ("reverse", ports.REVERSE)])
def test_the_gateways_file_with_a_port_for_members(overlay: Path, section: str, port: int) -> None:
    path = overlay / "hgate.yaml"
    found = getattr(parse(with_section(path, section), str(path)), section)
    assert found is not None
    assert [address.port for address in found.listen] == [port]
    patch = yaml.safe_load((K8S / "components" / section / "certificates.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [str(found.certificates)]
    assert f"containerPort: {port}" in (K8S / "components" / section / "kustomization.yaml").read_text()


@every_overlay
def test_the_gateways_file_with_a_port_for_front_ends(overlay: Path) -> None:
    path = overlay / "hgate.yaml"
    text = with_section(path, "hbone").replace("# tunnel_listen:", "tunnel_listen:")
    found = parse(text, str(path)).hbone
    assert found is not None
    assert [address.port for address in found.tunnel_listen] == [ports.HBONE_H2C]
    folder = K8S / "components" / "front-end"
    assert f"containerPort: {ports.HBONE_H2C}" in (folder / "kustomization.yaml").read_text()
    (port,) = yaml.safe_load((folder / "service.yaml").read_text())["spec"]["ports"]
    assert (port["port"], port["appProtocol"]) == (ports.HBONE_H2C, "kubernetes.io/h2c")
    (rule,) = yaml.safe_load((folder / "route.yaml").read_text())["spec"]["rules"]
    assert [match["path"] for match in rule["matches"]] == [
        {"type": "Exact", "value": f"{TUNNEL_PREFIX}{ports.HBONE}"}
    ]


def test_both_components_mount_the_same_certificate() -> None:
    one, other = (K8S / "components" / name / "certificates.yaml" for name in ("hbone", "reverse"))
    assert one.read_text() == other.read_text()


@every_overlay
def test_the_gateways_file_with_the_cluster(overlay: Path) -> None:
    path = overlay / "hgate.yaml"
    cluster = parse(uncommented(path, "cluster:"), str(path)).cluster
    assert cluster is not None
    assert [rule.namespace for rule in cluster.allow] == ["demo"]
    patch = yaml.safe_load((K8S / "components" / "cluster" / "container.yaml").read_text())
    hgate, process = patch["spec"]["template"]["spec"]["containers"]
    for container in (hgate, process):
        assert str(cluster.folder) in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert [port["containerPort"] for port in process["ports"]] == [cluster.ops.port]


@pytest.mark.parametrize("overlay", ["plain", "ambient"])
def test_the_cluster_s_token_is_what_the_exchange_wants(overlay: str) -> None:
    tokens = gateway_config(overlay).tokens
    kustomization = yaml.safe_load((K8S / "overlays" / overlay / "kustomization.yaml").read_text())
    ((added,),) = (
        yaml.safe_load(patch["patch"])
        for patch in kustomization["patches"]
        if patch["target"]["kind"] == "Deployment"
    )
    (source,) = added["value"]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == tokens.subject_audience
    mounted = yaml.safe_load((K8S / "components" / "federation" / "token.yaml").read_text())
    ((mount,),) = (
        container["volumeMounts"] for container in mounted["spec"]["template"]["spec"]["containers"]
    )
    assert mount["name"] == added["value"]["name"]
    assert f"{mount['mountPath']}/{source['serviceAccountToken']['path']}" == str(tokens.subject_token)


def test_cloud_run_with_reverse_tunnels() -> None:
    path = DEPLOY / "cloudrun" / "service.yaml"
    text = re.sub(r"# (- name: HBONE_REVERSE\w*|  value: )", r"\1", path.read_text())
    environment = {entry["name"]: entry["value"] for entry in ingress_container(yaml.safe_load(text))["env"]}
    reverse = from_env(environment).reverse
    assert reverse is not None
    assert (reverse.gateways[0].port, reverse.behind_each) == (ports.REVERSE, 2)
    component = yaml.safe_load((K8S / "components" / "reverse" / "kustomization.yaml").read_text())
    (fixed,) = (
        yaml.safe_load(patch["patch"])
        for patch in component["patches"]
        if patch.get("target", {}).get("kind") == "HorizontalPodAutoscaler"
    )
    assert {one["path"]: one["value"] for one in fixed} == {
        "/spec/minReplicas": reverse.behind_each,
        "/spec/maxReplicas": reverse.behind_each,
    }


# The way of a mesh Service through the gateway to Cloud Run.


def test_the_example_service_is_routed_to_the_example_on_cloud_run() -> None:
    objects = readme_yaml()
    named = objects["Service"]["metadata"]
    (port,) = objects["Service"]["spec"]["ports"]
    host = objects["DestinationRule"]["spec"]["host"]
    destination = istio_sni.parse(f"outbound_.{port['port']}_._.{host}")
    target = RouteTable(gateway_config().routes).match(destination)
    service = yaml.safe_load((DEPLOY / "cloudrun" / "service.yaml").read_text())
    assert host.startswith(f"{named['name']}.{named['namespace']}.")
    assert target.host.startswith(f"{service['metadata']['name']}-")
    assert target.path == f"/_hbone/{ports.INBOUND_MTLS}"
    assert (target.method, target.token.kind) == ("POST", "audience")
    assert target.token.value.lower() == f"https://{target.host}"


def test_the_example_entry_leads_to_the_gateway() -> None:
    objects = readme_yaml()
    entry = objects["WorkloadEntry"]["spec"]
    (port,) = objects["Service"]["spec"]["ports"]
    assert entry["ports"] == {port["name"]: ports.SNI_ISTIO}
    assert entry["labels"] == objects["Service"]["spec"]["selector"]


@every_cloud_run
def test_clients_leave_before_cloud_run_ends_the_tunnel(service: Any) -> None:
    policy = readme_yaml()["DestinationRule"]["spec"]["trafficPolicy"]
    spec = service["spec"]["template"]["spec"]
    assert policy["tls"] == {"mode": "ISTIO_MUTUAL"}
    assert (
        int(policy["connectionPool"]["tcp"]["maxConnectionDuration"].removesuffix("s"))
        < spec["timeoutSeconds"]
    )


# Cloud Run.


@every_cloud_run
def test_krun_takes_the_requests_as_h2c(service: Any) -> None:
    container = ingress_container(service)
    assert container["command"] == ["krun"]
    assert container["ports"] == [{"name": "h2c", "containerPort": ports.HBONE_H2C}]
    assert container["startupProbe"]["tcpSocket"] == {"port": ports.HBONE_H2C}


@every_mounting
def test_krun_understands_its_environment(service: Any) -> None:
    container = ingress_container(service)
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    for name in environment:
        assert any(fnmatch(name, known) for known in ENVIRONMENT), name
    settings = from_env(environment)
    assert settings.listen is not None and settings.listen.port == ports.HBONE_H2C
    assert settings.inbound_listen.port == ports.INBOUND_MTLS
    assert settings.xds is None
    assert settings.allow
    assert [str(settings.certificates)] == [mount["mountPath"] for mount in container["volumeMounts"]]


def test_in_the_mesh_krun_has_all_else_from_mesh_env() -> None:
    service = yaml.safe_load((DEPLOY / "cloudrun" / "mesh.yaml").read_text())
    said = {entry["name"]: entry["value"] for entry in ingress_container(service)["env"]}
    assert [name for name in said if not any(fnmatch(name, known) for known in ENVIRONMENT)] == []
    # As the ConfigMap would have it: hgate-istiod's address, the mesh's domain and root.
    mesh_env = {"MCON_ADDR": "10.128.0.51", "TRUST_DOMAIN": "cluster.local", "CAROOT_ISTIOD": "PEM"}
    settings = from_env({**said, **mesh_env})
    assert settings.authority is not None and settings.kubernetes is not None
    assert str(settings.authority.address) == f"10.128.0.51:{ports.ISTIOD}"
    # The name in istiod's certificate is the one that the gateway passes on.
    assert gateway_config().routes[0].host == settings.authority.server_name
    assert str(settings.authority.identity) == "spiffe://cluster.local/ns/demo/sa/hello"
    assert settings.authority.token_file == settings.kubernetes.istio_file
    account = settings.kubernetes.service_account
    workload = yaml.safe_load((DEPLOY / "workload" / "serviceaccount.yaml").read_text())["metadata"]
    assert workload == {"name": account, "namespace": settings.kubernetes.namespace}
    (subject,) = yaml.safe_load((DEPLOY / "workload" / "rolebinding.yaml").read_text())["subjects"]
    assert subject["name"] == service["spec"]["template"]["spec"]["serviceAccountName"]


@every_mounting
def test_the_secret_has_the_files_that_krun_reads(service: Any) -> None:
    (volume,) = service["spec"]["template"]["spec"]["volumes"]
    files = [item["path"] for item in volume["secret"]["items"]]
    assert files == [CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE]
    # The README adds the secret's versions in the order in which the manifest numbers them.
    assert re.findall(r"--data-file (\S+)", (DEPLOY / "README.md").read_text()) == files
    assert [item["key"] for item in volume["secret"]["items"]] == ["1", "2", "3"]


@every_cloud_run
def test_only_invited_callers_come_in(service: Any) -> None:
    assert service["metadata"]["annotations"] == {"run.googleapis.com/ingress": "internal"}


@every_cloud_run
def test_startup_probes_fit_into_cloud_run_s_four_minutes(service: Any) -> None:
    probes = list(values_of("startupProbe", service))
    assert probes
    assert all(probe["periodSeconds"] * probe["failureThreshold"] <= 240 for probe in probes)


def test_the_sidecar_starts_after_the_app() -> None:
    service = yaml.safe_load((DEPLOY / "cloudrun" / "sidecar.yaml").read_text())
    template = service["spec"]["template"]
    krun, app = template["spec"]["containers"]
    order = yaml.safe_load(template["metadata"]["annotations"]["run.googleapis.com/container-dependencies"])
    assert order == {krun["name"]: [app["name"]]}
    # Where krun looks for the app without being told, and where the probe that it waits for knocks.
    assert app["env"] == [{"name": "PORT", "value": str(ports.APP)}]
    assert app["startupProbe"]["tcpSocket"] == {"port": ports.APP}


# Images.


@every_dockerfile
def test_the_image_starts_the_command_of_its_folder(path: Path) -> None:
    command = path.parent.name
    assert instructions(path)[-1] == ["ENTRYPOINT", f'["{command}"]']
    assert command in PROJECT["scripts"]
    assert ["USER", "65532:65532"] in instructions(path)


@every_dockerfile
def test_the_base_image_is_one_fixed_version(path: Path) -> None:
    words = instructions(path)
    (base,) = [
        word for name, *rest in words if name == "ARG" for word in rest if word.startswith("PYTHON_IMAGE=")
    ]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.13\.[0-9]+-slim-[a-z]+", base)
    assert [name for instruction, name, *_ in words if instruction == "FROM"] == ["${PYTHON_IMAGE}"] * 2


@every_dockerfile
def test_no_start_has_to_compile_python_s_own_modules(path: Path) -> None:
    words = instructions(path)
    final = words[[name for name, *_ in words].index("FROM", 2) :]
    (run,) = [line for line in final if line[0] == "RUN"]
    assert run[1:4] == ["python", "-m", "compileall"]
    assert final.index(run) < final.index(["USER", "65532:65532"])  # who may not write into /usr/local


@every_dockerfile
def test_no_file_says_when_it_was_installed(path: Path) -> None:
    """So that two builds of the same sources have the same files."""
    words = instructions(path)
    build = words[: [name for name, *_ in words].index("FROM", 2)]
    assert any(line[0] == "ENV" and "PIP_NO_COMPILE=1" in line for line in build)
    names = [line[:1] + line[1].split("=")[:1] for line in build if line[0] == "ARG"]
    assert ["ARG", "SOURCE_DATE_EPOCH"] in names
    (built,) = [" ".join(line) for line in build if line[0] == "RUN" and "wheel" in line]
    *_, compiled = built.split(" && ")
    assert compiled == "python -m compileall -q --invalidation-mode unchecked-hash /opt/hbone/lib"


@every_dockerfile
def test_everything_copied_is_there_and_reaches_the_build(path: Path) -> None:
    ignore = (ROOT / ".dockerignore").read_text().split("\n")
    copied = [
        source
        for name, *arguments in instructions(path)
        if name == "COPY" and not arguments[0].startswith("--from=")
        for source in arguments[:-1]
    ]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert [source for source in copied if f"!{source}" not in ignore] == []
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {name.removesuffix("*") for name in packages["include"]} <= set(copied)
    assert {"pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)


@every_dockerfile
def test_only_what_is_locked_is_installed(path: Path) -> None:
    (whole,) = [" ".join(line) for line in instructions(path) if line[0] == "RUN" and "venv" in line]
    (built,) = [" ".join(line) for line in instructions(path) if line[0] == "RUN" and "wheel" in line]
    installs = [step for step in re.split(r"&&|;;", whole + " && " + built) if " install " in step]
    assert len(installs) == 3
    assert [one for one in installs if "--require-hashes" not in one and "--no-deps" not in one] == []
    assert "--no-build-isolation" in built


def test_envoy_is_an_extra_that_krun_s_image_can_leave_out() -> None:
    words = instructions(DEPLOY / "krun" / "Dockerfile")
    assert ["ARG", "ENVOY=1"] in words
    (run,) = [" ".join(line) for line in words if line[0] == "RUN" and "venv" in line]
    locks = set(re.findall(r"what=(\w+)", run))
    assert locks == {"envoy", "runtime"}
    assert [lock for lock in locks if not (ROOT / "requirements" / f"{lock}.txt").exists()] == []
