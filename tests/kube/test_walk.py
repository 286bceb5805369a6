"""The walk of docs/first-mesh.md, command by command, as the page has them.

For real: kubectl (with its kustomize) and sed against an API server and etcd of their own, with Istio's
custom resources, and `hbone register` against a running `hgate cluster`, which has the file, the account, the
Roles and the guard that the walk has applied.

Only recorded, by stand-ins that check subcommands and flags (cloud_programs.py): all of gcloud, `docker
build` and `istioctl install`. Not run: the installation into a venv. There are no nodes: `kubectl run` of the
client is a dry run by the server, and `hgate explain`, which the page runs in the gateway's pod, runs here.
The test does what others do: load balancers' addresses, the account `default`, what Istio's installation
leaves behind.

That a request then arrives, through sidecars, hgate and krun, tests/mesh/test_cluster.py holds (`make mesh`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.credentials.certificates.authority import Authority
from tests.kube import build
from tests.kube.cloud_programs import NUMBER, RECORD, Call, calls, put_on_path
from tests.kube.objects import MERGE, Client, Cluster
from tests.kube.run import running
from tests.support.api_server import kubeconfig
from tests.support.process import started

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-mesh.md").read_text()

SCRIPT_S = 120.0
BALANCERS = {"internal-hgate": "10.132.0.8", "hgate-istiod": "10.132.0.9"}
NAME = "hello.demo.svc.cluster.local"
URL = f"https://hello-{NUMBER}.europe-west1.run.app"
SYSTEM, DEMO = "/api/v1/namespaces/hbone-system", "/api/v1/namespaces/demo"

CAPITALS = r"\b(PROJECT|PROJECT_NUMBER|REGION|CLUSTER|NETWORK|SUBNET)\b"
"""What is to be filled in."""


def blocks(text: str) -> list[str]:
    """What is to be typed, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


_BEFORE, _, _REST = PAGE.partition("## The ten commands")
_COMMANDS, _, _REST = _REST.partition("## When it does not answer")
_WRONG, _, _REMOVAL = _REST.partition("## Remove it all")

BEFORE, COMMANDS = blocks(_BEFORE), blocks(_COMMANDS)
(LOOK,), (REMOVE,) = blocks(_WRONG), blocks(_REMOVAL)
LOOK_AT = [line + "\n" for line in LOOK.replace("\\\n", " ").splitlines()]


@dataclass
class Walk:
    """A person's shell, on a machine of its own, and the cluster that kubectl knows."""

    cluster: Cluster
    folder: Path

    async def types(self, *commands: str) -> str:
        """What they print; each has to succeed."""
        return await asyncio.to_thread(self._types, "".join(commands))

    def _types(self, commands: str) -> str:
        variables, _, environment = BEFORE
        environ = {
            **os.environ,
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "PATH": f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            RECORD: str(self.folder / "record"),
        }
        ran = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", variables + environment + commands],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
        )
        assert ran.returncode == 0, f"{commands}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def calls(self, program: str, command: str = "") -> list[Call]:
        """Those that were recorded."""
        found = calls(self.folder / "record")
        return [call for call in found if call.program == program and call.command.startswith(command)]

    def get(self, path: str) -> dict[str, Any]:
        answer = self.cluster.admin.ask("GET", path)
        assert answer.status == 200, str(answer)
        return answer.body

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[Path]:
        """`hgate cluster`, as the applied objects have it, but for the folder and port; its file."""
        (found,) = (
            each for each in self.get(f"{SYSTEM}/configmaps")["items"] if "hgate.yaml" in each.get("data", {})
        )
        written = found["data"]["hgate.yaml"]
        config = yaml.safe_load(written)
        config["cluster"] |= {"folder": str(self.folder), "ops": "127.0.0.1:0"}
        file, access = self.folder / "hgate.yaml", self.folder / "hgate.kubeconfig"
        file.write_text(yaml.safe_dump(config))
        account = self.cluster.client("hbone-system", "hgate")
        access.write_text(kubeconfig(account.server, account.token))
        environ = {"KUBECONFIG": str(access), "POD_NAME": "hgate-0", "POD_NAMESPACE": "hbone-system"}
        async with started("gateway", "cluster", "--config", str(file), environ=environ) as process:
            await process.said(r"^cluster on ")
            yield file


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    """In an empty cluster with Istio."""
    with running(build.built(build.folder()), tmp_path) as server:
        cluster = Cluster(Client(server, server.admin))
        definitions = (yaml.safe_load_all(path.read_text()) for path in build.custom_resources())
        cluster.define([each for found in definitions for each in found if each])
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "istio-system"}})
        root = Authority.create("cluster.local").root_pem.decode()
        of_istio = {
            "istio-ca-root-cert": {"root-cert.pem": root},
            "istio": {"mesh": "rootNamespace: istio-system\ntrustDomain: cluster.local\n"},
        }
        for name, data in of_istio.items():
            about = {"name": name, "namespace": "istio-system"}
            cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data})
        (tmp_path / "kubeconfig").write_text(kubeconfig(server, server.admin, "default"))
        (tmp_path / "kubectl").symlink_to(build.kubectl())
        put_on_path(tmp_path)
        yield Walk(cluster, tmp_path)


def test_there_are_ten_commands() -> None:
    numbers = re.findall(r"^\*\*(\d+)\. ", _COMMANDS, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 11)]
    assert len(COMMANDS) == 10
    assert len(LOOK_AT) == 3


async def test_the_walk(walk: Walk) -> None:
    # On Google's side.
    await walk.types(*(line for line in BEFORE[1].splitlines(keepends=True) if "venv" not in line))
    await walk.types(*COMMANDS[:5])
    assert {call.project for call in walk.calls("gcloud", "iam")} == {"my-project"}
    granted = [
        call.arguments[call.arguments.index("--role") + 1]
        for call in walk.calls("gcloud")
        if call.command.endswith("add-iam-policy-binding")
    ]
    assert granted == ["roles/run.invoker", "roles/container.clusterViewer", "roles/iam.workloadIdentityUser"]
    pushed = [call.arguments[call.arguments.index("-t") + 1] for call in walk.calls("docker", "build")]
    for call in walk.calls("docker", "build"):
        assert (ROOT / call.arguments[call.arguments.index("-f") + 1]).is_file()

    # In the cluster.
    applied = await walk.types(COMMANDS[5])
    assert "deployment.apps/hgate created" in applied and "unchanged" not in applied
    assert "unchanged" in await walk.types(COMMANDS[5]), "it can be repeated"
    (deployment,) = walk.get("/apis/apps/v1/namespaces/hbone-system/deployments")["items"]
    containers = deployment["spec"]["template"]["spec"]["containers"]
    assert [one["name"] for one in containers] == ["hgate", "cluster"]
    assert {one["image"] for one in containers} == {pushed[0]}
    account = walk.get(f"{SYSTEM}/serviceaccounts/hgate")["metadata"]["annotations"]
    assert account["iam.gke.io/gcp-service-account"] == "hgate@my-project.iam.gserviceaccount.com"
    everything = await walk.types("kubectl get -A -o yaml configmap,deployment,rolebinding,networkpolicy\n")
    assert re.findall(CAPITALS, re.sub(r'"[^"]*\\n[^"]*"', "", everything)) == []
    await _controllers(walk)

    async with walk.gateway() as file:
        assert await walk.types(COMMANDS[6]) == f"{BALANCERS['hgate-istiod']}:15012\n"

        # The service.
        await walk.types(COMMANDS[7])
        (replaced,) = walk.calls("gcloud", "run services replace")
        service = yaml.safe_load(replaced.read)
        assert re.findall(CAPITALS, re.sub(r"^ *#.*$", "", replaced.read, flags=re.MULTILINE)) == []
        assert service["metadata"]["annotations"]["run.googleapis.com/ingress"] == "all"
        template = service["spec"]["template"]
        user = template["spec"]["serviceAccountName"]
        (container,) = template["spec"]["containers"]
        assert container["image"] == pushed[1]
        assert {"name": "MESH", "value": "gke://my-project/europe-west1/mesh"} in container["env"]
        # It may do in the cluster what its settings ask of it.
        krun = Client(walk.cluster.admin.server, walk.cluster.admin.token, acts_as=user)
        mesh_env = krun.ask("GET", "/api/v1/namespaces/istio-system/configmaps/mesh-env")
        assert mesh_env.status == 200 and mesh_env.body["data"]["TRUST_DOMAIN"] == "cluster.local"
        token = krun.ask("POST", f"{DEMO}/serviceaccounts/hello/token", {"spec": {"audiences": ["istio-ca"]}})
        assert token.status == 201, str(token)

        # Its name.
        said = await walk.types(COMMANDS[8])
        assert re.search(r"^status +routed", said.splitlines()[-1]), said
        handed = json.loads((walk.folder / "routes.json").read_text())["routes"]
        assert [(route["host"], route["url"]) for route in handed] == [(NAME, f"{URL}/_hbone/15003")]
        of_istio = "/apis/networking.istio.io/v1/namespaces/demo"
        entries = walk.get(f"{of_istio}/workloadentries")["items"]
        assert {entry["spec"]["address"] for entry in entries} == {BALANCERS["internal-hgate"]}
        assert {entry["spec"]["serviceAccount"] for entry in entries} == {"hello"}
        (rule,) = walk.get(f"{of_istio}/destinationrules")["items"]
        assert rule["spec"]["host"] == NAME

        # The request.
        run = COMMANDS[9].replace(" --rm -i ", " --dry-run=server ")
        assert "pod/client created (server dry run)" in await walk.types(run)
        (asked,) = re.findall(r"http://(\S+)/", run)
        assert f"{asked}.demo.svc.cluster.local" == NAME

        # When it does not answer.
        service_yaml, explain, logs = LOOK_AT
        assert "hbone.dev/status: routed" in await walk.types(service_yaml)
        inside = explain.partition(" -- ")[2].replace("/etc/hgate/hgate.yaml", str(file))
        assert f"{URL}/_hbone/15003" in await walk.types(inside)
        await walk.types(logs)

        # And the end.
        await walk.types(REMOVE)
        assert walk.get(f"{DEMO}/services")["items"] == []
        assert walk.get(f"{SYSTEM}/services")["items"] == []
    made = {call.arguments[0].partition("@")[0] for call in walk.calls("gcloud") if "create" in call.command}
    gone = {call.arguments[0].partition("@")[0] for call in walk.calls("gcloud") if "delete" in call.command}
    assert made == {"mesh", "hbone", "hgate", "hello"} == gone


async def _controllers(walk: Walk) -> None:
    """What Kubernetes and Google make of what is there."""
    for name, address in BALANCERS.items():
        status = {"status": {"loadBalancer": {"ingress": [{"ip": address}]}}}
        answer = walk.cluster.admin.ask("PATCH", f"{SYSTEM}/services/{name}/status", status, MERGE)
        assert answer.status == 200, str(answer)
    about = {"name": "default", "namespace": "demo"}
    walk.cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about})
