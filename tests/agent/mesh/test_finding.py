"""The mesh found by whole kruns: `krun explain` says what was found, and where."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.credentials.certificates.authority import Authority
from tests.support.api_server import SERVICE_ACCOUNT, LocalApiServer, kubeconfig
from tests.support.gke_server import PROJECT, TOKEN, GkeServer, Machine, cluster
from tests.support.metadata_server import closed_port
from tests.support.process import started


async def explained(**environ: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """krun's exit code, value and origin by variable, and what it said."""
    async with started("agent", "explain", environ={**environ, "HBONE_LOG_FORMAT": "text"}) as process:
        code, out, err = await process.ended()
    rows = re.findall(
        r"^  (\S+) +(default|environment|kubeconfig|GKE|mesh-env of \S+|/\S+)  (.*)$", out, re.MULTILINE
    )
    return code, {name: (value.strip(), origin) for name, origin, value in rows}, err


async def test_by_a_kubeconfig_that_gcloud_wrote(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        file = tmp_path / "kubeconfig"
        context = f"gke_{PROJECT}_us-central1_c"
        file.write_text(kubeconfig(server).replace('"test"', f'"{context}"'))
        code, rows, err = await explained(MESH="kubernetes", KUBECONFIG=str(file), HBONE_DRAIN_TIMEOUT="5")
    assert (code, rows["TRUST_DOMAIN"]) == (0, ("demo.example", "mesh-env of demo")), err
    assert rows["PORT_DB"] == ("10.1.2.3:5432", "mesh-env of demo")
    assert rows["HBONE_DRAIN_TIMEOUT"] == ("5", "environment")
    assert rows["CLUSTER_NAME"] == ("c", "kubeconfig")
    assert rows["PROJECT_ID"] == (PROJECT, "kubeconfig")
    assert rows["WORKLOAD_NAMESPACE"] == ("demo", "kubeconfig")
    assert "mesh-env of istio-system: not used: OTHERS" in err


@asynccontextmanager
async def google(tmp_path: Path) -> AsyncIterator[tuple[GkeServer, Machine, LocalApiServer, dict[str, str]]]:
    """A machine of Google's, a cluster, and the variables that lead there."""
    authority = Authority.create("google.example")
    (tmp_path / "trusted.pem").write_bytes(authority.root_pem)
    async with GkeServer(authority) as gke, Machine() as machine, LocalApiServer() as api:
        api.users[TOKEN] = "krun"
        endpoint = api.url.removeprefix("https://")
        gke.clusters = [cluster("istio", "us-central1-b", endpoint=endpoint, ca_pem=api.ca_pem)]
        told = {
            "SSL_CERT_FILE": str(tmp_path / "trusted.pem"),
            "GCE_METADATA_HOST": machine.host,
            "HBONE_GKE_URL": gke.url,
            "HBONE_RUN_URL": gke.url,
            "HBONE_PROJECTS_URL": gke.url,
        }
        yield gke, machine, api, told


async def test_by_nothing_but_the_machine(tmp_path: Path) -> None:
    """As on Cloud Run: project, region, namespace and token are the metadata server's."""
    async with google(tmp_path) as (_, machine, _, told):
        code, rows, err = await explained(MESH="gke://", **told)
        assert (code, rows["TRUST_DOMAIN"]) == (0, ("demo.example", "mesh-env of demo")), err
        assert rows["CLUSTER_NAME"] == ("istio", "GKE")
        assert rows["CLUSTER_LOCATION"] == ("us-central1-b", "GKE")
        assert rows["WORKLOAD_NAMESPACE"] == ("demo", "GKE")
        assert set(machine.requests) == set(machine.told)


async def test_a_label_says_the_namespace_where_the_account_s_name_does_not(tmp_path: Path) -> None:
    service, project = (
        f"/v2/projects/{PROJECT}/locations/us-central1/services/shop",
        f"/v3/projects/{PROJECT}",
    )

    async def found(gke: GkeServer, told: dict[str, str]) -> tuple[str, str]:
        code, rows, err = await explained(MESH="gke://", K_SERVICE="shop", **told)
        assert code == 0, err
        warnings = [line for line in err.splitlines() if "mesh-namespace" in line]
        assert len(warnings) <= 1
        return rows["WORKLOAD_NAMESPACE"][0], "".join(warnings)

    async with google(tmp_path) as (gke, machine, api, told):
        machine.told["instance/service-accounts/default/email"] = "shop@mesh-project.iam.gserviceaccount.com"
        api.mesh_env["istio-system"] = {"TRUST_DOMAIN": "demo.example"}
        gke.labels = {service: {"mesh-namespace": "demo"}, project: {"mesh-namespace": "all"}}
        assert await found(gke, told) == ("demo", "")
        gke.labels[service] = {}
        assert await found(gke, told) == ("all", "")
        del gke.labels[service]
        assert (await found(gke, told))[0] == "all"
        gke.labels[project] = {"mesh-namespace": "No/Name"}
        assert "No/Name" in (await found(gke, told))[1]
        gke.labels = {}
        namespace, warning = await found(gke, told)
        assert namespace == "that of the access to the cluster, else default"
        assert warning.endswith(
            "no namespace by label mesh-namespace: run.services.get is denied; "
            "resourcemanager.projects.get is denied; set WORKLOAD_NAMESPACE"
        )


async def test_krun_runs_by_what_it_has_found(tmp_path: Path) -> None:
    async with google(tmp_path) as (_, _, _, told):
        environ = {
            **told,
            "MESH": f"gke://{PROJECT}/us-central1-b/istio",
            "WORKLOAD_NAMESPACE": "nobody",
            "HBONE_INBOUND": "none",
            "HBONE_LISTEN": "127.0.0.1:0",
            "HBONE_STS_LISTEN": "-",
            "HBONE_LOG_FORMAT": "json",
        }
        async with started("agent", "sh", "-c", "echo $TRUST_DOMAIN.", environ=environ) as process:
            await process.said(r"^MESH: mesh-env of https://127\.0\.0\.1:\d+ for namespace nobody$")
            code, out, _ = await process.ended()
    assert (code, out) == (0, ".\n"), "the app's environment is its own"


@pytest.mark.shows_secret  # `cat` is the app
async def test_tokens_come_from_the_cluster_that_is_found(tmp_path: Path) -> None:
    async with google(tmp_path) as (_, _, api, told):
        environ = {
            **told,
            "MESH": "gke://",
            "WORKLOAD_SERVICE_ACCOUNT": SERVICE_ACCOUNT,
            "HBONE_K8S_TOKENS": f"istio-ca={tmp_path / 'token'}",
            "HBONE_INBOUND": "none",
            "HBONE_LISTEN": "127.0.0.1:0",
            "HBONE_STS_LISTEN": "-",
        }
        async with started("agent", "cat", str(tmp_path / "token"), environ=environ) as process:
            code, out, err = await process.ended()
        assert code == 0, err
        await api.verify(out, "istio-ca")


async def test_a_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    async with google(tmp_path) as (gke, _, _, told):
        gke.refusal = (503, "busy")
        environ = {**told, "MESH": "gke://", "HBONE_LOG_FORMAT": "json"}
        async with started("agent", "explain", environ=environ) as process:
            await process.said(r"^MESH: .* answered 503: busy; again in 0\.5 s$")
            gke.refusal = None
            code, out, _ = await process.ended()
    assert (code, "demo.example" in out) == (0, True)


async def failed(code: int, text: str, **environ: str) -> None:
    found, _, err = await explained(**environ)
    assert found == code, err
    assert err.count("\n") == 1 and "Traceback" not in err, err
    assert re.search(text, err), err


async def test_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    await failed(64, "invalid MESH=gcp:x", MESH="gcp:x")
    await failed(
        64,
        "invalid HBONE_GKE_URL=http://x .*our token",
        MESH="gke://p",
        HBONE_GKE_URL="http://x",
        CLUSTER_LOCATION="a-b",
        WORKLOAD_NAMESPACE="c",
    )
    await failed(64, "invalid GCE_METADATA_HOST=a b", MESH="gke://", GCE_METADATA_HOST="a b")
    for name in ("PROJECT_ID", "CLUSTER_LOCATION", "CLUSTER_NAME", "WORKLOAD_NAMESPACE"):
        known = {"PROJECT_ID": "p", "CLUSTER_LOCATION": "l-1", "WORKLOAD_NAMESPACE": "n", name: "a/../b"}
        await failed(64, f"invalid {name}=a/../b", MESH="gke://", **known)
    nowhere = f"127.0.0.1:{closed_port()}"
    await failed(69, "no metadata server: .*: set PROJECT_ID$", MESH="gke://", GCE_METADATA_HOST=nowhere)
    await failed(69, "no Kubernetes API server: set KUBECONFIG", MESH="kubernetes", HOME=str(tmp_path))
    async with google(tmp_path) as (gke, _, api, told):
        gke.refusal = (403, "denied")
        await failed(77, "container.clusterViewer", MESH="gke://", **told)
        gke.refusal = None
        api.mesh_env["demo"] = {"TRUST_DOMAIN": "A/B"}
        environ = {**told, "HBONE_LOG_LEVEL": "error"}
        await failed(64, "^krun: mesh-env of demo: invalid TRUST_DOMAIN=A", MESH="gke://", **environ)
        api.may_read = set()
        await failed(
            77,
            "a Role has to allow us the verb get on configmaps in namespace demo",
            MESH="gke://",
            **environ,
        )
