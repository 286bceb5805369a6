"""What a real krun gives its app: files and variables of a cluster, which is the real one in `make
test-kube`, and the values that variables refer to."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.credentials.certificates.authority import Authority
from shared.trust.spiffe import SpiffeId
from tests.agent.mounts.test_cluster_objects import APP, DB, b64
from tests.agent.test_app import Krun, krun
from tests.support.api_server import REAL, ApiServer, LocalApiServer, api_server, kubeconfig
from tests.support.gke_server import PROJECT, TOKEN, GkeServer, Machine, cluster
from tests.support.google_secrets import GoogleSecretsServer, error
from tests.support.metadata_server import closed_port
from tests.support.process import run, started

PRINTS = [
    sys.executable,
    "-c",
    """
import json, os, pathlib, stat
def files(folder):
    found = {}
    for file in sorted(pathlib.Path(folder).iterdir()):
        if not file.name.startswith(".."):
            found[file.name] = [file.read_bytes().decode("latin-1"), oct(stat.S_IMODE(file.stat().st_mode))]
    return found
folders = {name: files(name) for name in os.environ.get("FOLDERS", "").split()}
print(json.dumps({"environ": dict(os.environ), "files": folders}))
""",
]
"""An app that prints what it has been given."""

WATCHES = [
    sys.executable,
    "-c",
    """
import os, pathlib, time
folder = pathlib.Path(os.environ["FOLDERS"])
told = None
while True:
    now = os.readlink(folder / "..data")
    if now != told:
        told = now
        print((folder / "password").read_text(), flush=True)
        if (folder / "password").read_text() == "last":
            break
    time.sleep(0.01)
""",
]
"""An app that looks at its file all the time, and prints it after each turn."""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        await server.put("secrets", DB.name, data={"user": b64(b"me"), "password": b64(b"one")})
        await server.put("configmaps", APP.name, data={"mode": "fast"}, binaryData={"logo": b64(b"\x89\0")})
        yield server


@asynccontextmanager
async def krun_with(
    folder: Path, server: ApiServer, *command: str, token: str | None = None, **environ: str
) -> AsyncIterator[Krun]:
    (folder / "kubeconfig").write_text(kubeconfig(server, token))
    async with krun(*command, environ={"KUBECONFIG": str(folder / "kubeconfig"), **environ}) as it:
        yield it


async def printed(it: Krun) -> tuple[dict[str, str], Any, str]:
    """The app's environment and files, and what krun has logged."""
    code, out, err = await it.process.ended()
    assert code == 0, err
    found = json.loads(out)
    return found["environ"], found["files"], err


async def test_the_app_gets_files_and_variables(server: ApiServer, tmp_path: Path) -> None:
    db, app = f"{tmp_path}/db", f"{tmp_path}/app"
    environ = {
        "HBONE_MOUNTS": f"secret/{DB.name}:{db}, configmap/{APP.name}:{app}, secret/absent:{db}-2:optional",
        "HBONE_ENV_FROM": f"DB_=secret/{DB.name}, configmap/{APP.name}, configmap/absent:optional",
        "FOLDERS": f"{db} {app}",
        "DB_user": "the container's own",
    }
    async with krun_with(tmp_path, server, *PRINTS, **environ) as it:
        variables, files, err = await printed(it)
    assert files[db] == {"password": ["one", "0o600"], "user": ["me", "0o600"]}
    assert files[app] == {"logo": ["\x89\0", "0o644"], "mode": ["fast", "0o644"]}
    assert (variables["DB_password"], variables["mode"]) == ("one", "fast")
    assert variables["DB_user"] == "the container's own"
    assert not {"KUBECONFIG", "HBONE_MOUNTS", "logo"} & variables.keys()
    assert re.search(r"started in .*mounts \d|the app has ended", err)


async def test_a_secret_that_changes_is_seen_by_the_app(server: ApiServer, tmp_path: Path) -> None:
    environ = {
        "HBONE_MOUNTS": f"secret/{DB.name}:{tmp_path}/db",
        "HBONE_MOUNT_REFRESH": "0.1",
        "FOLDERS": f"{tmp_path}/db",
    }
    async with krun_with(tmp_path, server, *WATCHES, **environ) as it:
        assert await it.process.stdout.readline() == b"one\n"
        await server.put("secrets", DB.name, data={"password": b64(b"two")})
        assert await it.process.stdout.readline() == b"two\n"
        await server.put("secrets", DB.name, data={"password": b64(b"last")})
        assert await it.process.stdout.readline() == b"last\n"
        code, _, _ = await it.process.ended()
    assert code == 0


async def test_the_mtls_end_finds_its_certificate_in_a_mounted_secret(
    server: ApiServer, tmp_path: Path
) -> None:
    authority = Authority.create("cluster.local")
    own = authority.issue(SpiffeId.of_workload("cluster.local", "demo", "hello"))
    names = {"tls.crt": own.certificate_pem, "tls.key": own.key_pem, "ca.crt": authority.root_pem}
    await server.put("secrets", DB.name, data={name: b64(pem) for name, pem in names.items()})
    environ = {
        "HBONE_MOUNTS": f"secret/{DB.name}:{tmp_path}/certs",
        "HBONE_CERTS": f"{tmp_path}/certs",
        "HBONE_INBOUND": "builtin",
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
    }
    async with krun_with(tmp_path, server, **environ) as it:
        await it.listening()


async def test_without_the_permission_the_app_is_not_started(server: ApiServer, tmp_path: Path) -> None:
    mounts = {"HBONE_MOUNTS": f"secret/{DB.name}:{tmp_path}/db"}
    async with krun_with(tmp_path, server, *PRINTS, token=server.forbidden, **mounts) as it:
        code, out, err = await it.process.ended()
    assert (code, out) == (77, "")
    assert re.search(
        r"^krun: HBONE_MOUNTS: https://.* answered 403 .* has to allow us the verb get on secrets", err, re.M
    )
    assert not (tmp_path / "db").exists()


async def test_an_object_that_is_missing(server: ApiServer, tmp_path: Path) -> None:
    async with krun_with(tmp_path, server, *PRINTS, HBONE_ENV_FROM="secret/absent") as it:
        code, out, err = await it.process.ended()
    assert (code, out) == (69, "")
    assert re.search(
        r"^krun: HBONE_ENV_FROM: there is no secret/absent of namespace demo on https://\S+: create it$",
        err,
        re.M,
    )


local = pytest.mark.skipif(REAL in os.environ, reason="about servers that a real one cannot be brought to be")


@local
async def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        server.gate.clear()
        mounts = {"HBONE_MOUNTS": f"secret/{DB.name}:{tmp_path}/db", "HBONE_MOUNT_TIMEOUT": "0.3"}
        async with krun_with(tmp_path, server, *PRINTS, **mounts) as it:
            code, out, err = await it.process.ended()
    assert (code, out) == (69, "")
    assert "krun: HBONE_MOUNTS: no answer within 0.3 s" in err


@local
async def test_a_signal_while_files_are_awaited(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        server.gate.clear()
        health = f"127.0.0.1:{closed_port()}"
        mounts = {"HBONE_MOUNTS": f"secret/a:{tmp_path}/db", "HBONE_HEALTH": health}
        async with krun_with(tmp_path, server, *PRINTS, **mounts) as it:
            await server.seen(1)
            _, page, _ = await run("curl", "-s", f"http://{health}/healthz/ready")
            assert page.startswith(b"not ready, pending: mounts, identity, ")
            it.process.send(signal.SIGTERM)
            code, out, _ = await it.process.ended()
    assert (code, out) == (143, "")


@local
async def test_beside_an_app_there_are_files_only(server: LocalApiServer, tmp_path: Path) -> None:
    told = {
        "HBONE_MOUNTS": f"secret/{DB.name}:{tmp_path}/db",
        "HBONE_ENV_FROM": f"secret/{DB.name}",
        "A": "sm://p",
    }
    metrics = f"127.0.0.1:{closed_port()}"
    async with krun_with(tmp_path, server, HBONE_METRICS=metrics, HBONE_MOUNT_REFRESH="0.1", **told) as it:
        await it.process.said("^HBONE_ENV_FROM is not used: krun starts no app$")
        await it.listening()
        assert (tmp_path / "db" / "password").read_text() == "one"
        await server.seen(3)
        _, page, _ = await run("curl", "-s", f"http://{metrics}/metrics")
    assert re.search(
        rb'^hbone_mount_refreshes_total{mount="secret/db-credentials",result="success"} \d', page, re.M
    )
    assert re.search(rb'^hbone_start_seconds{step="mounts"} \d', page, re.M)


# References, and the cluster that MESH names.


@asynccontextmanager
async def google(folder: Path) -> AsyncIterator[tuple[GoogleSecretsServer, LocalApiServer, dict[str, str]]]:
    """Google's services and a cluster, and the variables that lead there."""
    authority = Authority.create("google.example")
    (folder / "trusted.pem").write_bytes(authority.root_pem)
    async with (
        GoogleSecretsServer(authority) as secrets,
        GkeServer(authority) as gke,
        Machine() as machine,
        LocalApiServer() as api,
    ):
        api.users[TOKEN] = "krun"
        endpoint = api.url.removeprefix("https://")
        gke.clusters = [cluster("istio", "us-central1-b", endpoint=endpoint, ca_pem=api.ca_pem)]
        await api.put("secrets", DB.name, data={"password": b64(b"one")})
        secrets.secrets["proj", "db", "latest"] = b"hunter2"
        secrets.berglas("bucket", "key.json", b"berglas' own")
        told = {
            "SSL_CERT_FILE": str(folder / "trusted.pem"),
            "GCE_METADATA_HOST": machine.host,
            "HBONE_GKE_URL": gke.url,
            **secrets.settings(),
        }
        yield secrets, api, told


SECRET_KEY = (
    f"$SecretKeyRef:/projects/{PROJECT}/zones/us-central1-b/clusters/istio/namespaces/demo/secrets/{DB.name}"
)
REFERENCES = {
    "DB_PASSWORD": "sm://proj/db",
    "KEY_FILE": "berglas://bucket/key.json?destination=tempfile",
    "OF_CLUSTER": f"{SECRET_KEY}/keys/password",
}


async def test_the_app_gets_what_its_variables_refer_to(tmp_path: Path) -> None:
    shows = "import os, json; print(json.dumps([dict(os.environ), open(os.environ['KEY_FILE']).read()]))"
    async with (
        google(tmp_path) as (_, _, told),
        krun(sys.executable, "-c", shows, environ={**told, **REFERENCES, "TMPDIR": str(tmp_path)}) as it,
    ):
        code, out, err = await it.process.ended()
    assert code == 0, err
    variables, content = json.loads(out)
    assert (variables["DB_PASSWORD"], variables["OF_CLUSTER"], content) == ("hunter2", "one", "berglas' own")
    assert "hunter2" not in err and "berglas' own" not in err
    assert Path(variables["KEY_FILE"]).name not in os.listdir(tmp_path), "it goes with the app"


async def test_values_of_the_cluster_may_be_references(tmp_path: Path) -> None:
    async with google(tmp_path) as (_, api, told):
        await api.put("configmaps", APP.name, data={"DB": "sm://proj/db", "OWN": "sm://proj/nobody"})
        environ = {**told, "MESH": "gke://", "HBONE_STS_LISTEN": "-", "OWN": "the container's"}
        async with krun(*PRINTS, environ={**environ, "HBONE_ENV_FROM": f"configmap/{APP.name}"}) as it:
            variables, _, _ = await printed(it)
    assert (variables["DB"], variables["OWN"]) == ("hunter2", "the container's")


async def test_krun_itself_does_not_get_the_values(tmp_path: Path) -> None:
    shows = "import os; print(open(f'/proc/{os.getppid()}/environ').read().split(chr(0)).count('DB_PASSWORD=sm://proj/db'))"
    async with google(tmp_path) as (_, _, told):
        environ = {**told, **REFERENCES, "HBONE_CORE_DUMPS": "1"}
        async with krun(sys.executable, "-c", shows, environ=environ) as it:
            code, out, err = await it.process.ended()
    assert (code, out) == (0, "1\n"), err


async def test_the_app_gets_values_of_the_cluster_that_mesh_names(tmp_path: Path) -> None:
    environ = {
        "MESH": "gke://",
        "HBONE_MOUNTS": f"secret/{DB.name}:{tmp_path}/db",
        "HBONE_ENV_FROM": f"secret/{DB.name}",
        "HBONE_STS_LISTEN": "-",
        "FOLDERS": f"{tmp_path}/db",
    }
    async with google(tmp_path) as (_, _, told), krun(*PRINTS, environ={**told, **environ}) as it:
        variables, files, _ = await printed(it)
    assert variables["password"] == "one"
    assert files == {f"{tmp_path}/db": {"password": ["one", "0o600"]}}


async def test_one_that_cannot_be_resolved_stops_the_start(tmp_path: Path) -> None:
    async with google(tmp_path) as (secrets, _, told):
        secrets.answer = lambda _: error(403, "PERMISSION_DENIED")
        async with krun(*PRINTS, environ={**told, "DB_PASSWORD": "sm://proj/db"}) as it:
            code, out, err = await it.process.ended()
    assert (code, out) == (77, "")
    assert (
        "krun: DB_PASSWORD is not resolved: Secret Manager answered 403 (PERMISSION_DENIED); the account"
        in err
    )
    assert "Traceback" not in err and "hunter2" not in err


async def ended(**environ: str) -> tuple[int, str, str]:
    settings: Mapping[str, str] = {"HBONE_INBOUND": "none", "HBONE_LISTEN": "127.0.0.1:0", **environ}
    async with started("agent", *PRINTS, environ=settings) as process:
        return await process.ended()


async def test_what_is_malformed_is_one_line() -> None:
    code, out, err = await ended(DB_PASSWORD="sm://hunter2", HBONE_LOG_LEVEL="error")
    assert (code, out) == (78, "")
    assert err == "krun: environment: DB_PASSWORD: malformed reference: it has to be sm://PROJECT/NAME\n"
    code, out, err = await ended(HBONE_ALLOW="sm://proj/db")
    assert (code, out) == (64, "")
    assert err == "krun: invalid HBONE_ALLOW (only the app's variables may be references, not krun's own)\n"


async def test_references_may_be_left_to_the_app() -> None:
    code, out, err = await ended(DB_PASSWORD="sm://proj/db", HBONE_REFERENCES="0")
    assert code == 0, err
    assert json.loads(out)["environ"]["DB_PASSWORD"] == "sm://proj/db"


async def test_explain_says_which_variables_are_references() -> None:
    environ = {"DB_PASSWORD": "sm://proj/hunter2", "HBONE_SECRET_MANAGER_URL": "https://private.example"}
    async with started("agent", "explain", environ=environ) as process:
        code, out, _ = await process.ended()
    assert code == 0
    assert re.search(r"^  DB_PASSWORD +environment +reference to Secret Manager$", out, re.M)
    assert "hunter2" not in out
