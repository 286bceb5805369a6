"""The tests that take an API server, against a real kube-apiserver and etcd: `make test-kube`, or
`python -m tests.kube.run [PYTEST ARGUMENTS]`, all of them if the arguments name no file or folder.

Not part of `make test`, for the build takes minutes. It finds out whether the local server of
`tests/support/api_server.py`, which all other runs use, answers as Kubernetes does, and whether Kubernetes
accepts what deploy/ has.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from shared.credentials.certificates.authority import Authority
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import HboneError
from tests.kube import build
from tests.kube.build import unavailable
from tests.needs import cache
from tests.support.api_server import (
    API_AUDIENCE,
    MESH_ENV,
    NAMESPACE,
    OBJECTS,
    POD,
    REAL,
    SERVICE_ACCOUNT,
    RealApiServer,
    access,
)
from tests.support.metadata_server import closed_port

ROOT = Path(__file__).parent.parent.parent

TESTS = (
    "tests/shared/credentials/kubernetes/test_kubernetes_tokens.py",
    "tests/agent/identity/test_token_files.py::test_what_settings_come_to",
    "tests/agent/test_app.py::test_kubernetes_tokens_are_there_before_the_app",
    "tests/agent/mesh/test_mesh_env.py",
    "tests/agent/mounts/test_cluster_objects.py",
    "tests/agent/mounts/test_mounts.py",
    "tests/kube",
)
"""Those that take `api_server`, and those of this folder."""

START_S = 60
"""etcd and the API server are there within ten seconds on an idle machine."""

ALLOWED, FORBIDDEN, ADMIN = "allowed-T0ken", "forbidden-T0ken", "admin-T0ken"


def main() -> int:
    if shutil.which("etcd") is None:
        unavailable("no etcd on PATH (Debian: etcd-server)")
    program = build.built(build.folder())
    build.kubectl()
    build.kustomize()
    build.custom_resources()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(running(program, folder))
        server.pod_uid = asyncio.run(furnished(server))
        told = {
            "url": server.url,
            "ca": server.ca_pem.decode(),
            "allowed": ALLOWED,
            "forbidden": FORBIDDEN,
            "admin": ADMIN,
            "pod_uid": server.pod_uid,
        }
        (folder / "running.json").write_text(json.dumps(told))
        # Tests have a home of their own.
        environ = {**os.environ, REAL: str(folder / "running.json"), "HBONE_TEST_CACHE": str(cache())}
        given = sys.argv[1:]
        chosen = [one for one in given if one.startswith("tests")]  # not the value of a flag
        command = [sys.executable, "-m", "pytest", *given, *(() if chosen else TESTS)]
        return subprocess.run(command, cwd=ROOT, env=environ).returncode


@contextmanager
def running(program: Path, folder: Path, host: str = "127.0.0.1") -> Iterator[RealApiServer]:
    """etcd and the API server on free ports, the latter's of address `host`, with their files in `folder`."""
    etcd, peers, port = closed_port(), closed_port(), closed_port()
    authority = Authority.create("cluster.local")
    own = authority.issue(ip_addresses=[host])
    signing = rsa.generate_private_key(65537, 2048)
    (folder / "tls.crt").write_bytes(own.certificate_pem)
    (folder / "tls.key").write_bytes(own.key_pem)
    (folder / "signing.key").write_bytes(
        signing.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    users = f'{ALLOWED},krun,1,""\n{FORBIDDEN},guest,2,""\n{ADMIN},admin,3,"system:masters"\n'
    (folder / "users.csv").write_text(users)
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        url = f"http://127.0.0.1:{etcd}"
        own_url = f"http://127.0.0.1:{peers}"
        stack.enter_context(
            process(
                log,
                *("etcd", "--data-dir", folder / "etcd", "--listen-client-urls", url),
                *("--advertise-client-urls", url, "--listen-peer-urls", own_url),
                *("--initial-advertise-peer-urls", own_url, "--initial-cluster", f"default={own_url}"),
            )
        )
        settings = {
            "etcd-servers": url,
            "bind-address": host,
            "advertise-address": host,
            "secure-port": port,
            "tls-cert-file": folder / "tls.crt",
            "tls-private-key-file": folder / "tls.key",
            "service-account-issuer": API_AUDIENCE,
            "service-account-key-file": folder / "signing.key",
            "service-account-signing-key-file": folder / "signing.key",
            "authorization-mode": "RBAC",
            "token-auth-file": folder / "users.csv",
            "service-cluster-ip-range": "10.0.0.0/24",
        }
        stack.enter_context(process(log, program, *(f"--{name}={value}" for name, value in settings.items())))
        server = RealApiServer(
            f"https://{host}:{port}", authority.root_pem.decode(), ALLOWED, FORBIDDEN, ADMIN, pod_uid=""
        )
        try:
            asyncio.run(ready(server))
        except TimeoutError:
            unavailable(f"no API server after {START_S} s:\n{(folder / 'log').read_text()[-3000:]}")
        yield server


@contextmanager
def process(log: object, *command: object) -> Iterator[None]:
    started = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)  # type: ignore[call-overload]
    try:
        yield
    finally:
        started.kill()
        started.wait()


async def ready(server: RealApiServer) -> None:
    """Returns when what the API server makes for itself is there."""
    api = KubernetesApi(access(server, ADMIN))
    async with asyncio.timeout(START_S):
        while True:
            try:
                await api.ask("GET", "/api/v1/namespaces/default")
                await api.ask("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/cluster-admin")
                return
            except HboneError:
                await asyncio.sleep(0.2)


async def furnished(server: RealApiServer) -> str:
    """Makes what the tests expect; returns the pod's UID."""
    api = KubernetesApi(access(server, ADMIN))
    core, rbac = "/api/v1/namespaces", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    named = {"metadata": {"name": "tokens"}}
    await api.ask("POST", core, {"metadata": {"name": NAMESPACE}})
    await api.ask("POST", f"{core}/{NAMESPACE}/serviceaccounts", {"metadata": {"name": SERVICE_ACCOUNT}})
    rule = {
        "apiGroups": [""],
        "resources": ["serviceaccounts/token"],
        "resourceNames": [SERVICE_ACCOUNT, "gone"],
        "verbs": ["create"],
    }
    await api.ask("POST", f"{rbac}/roles", {**named, "rules": [rule]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "tokens"}
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "krun"}
    await api.ask("POST", f"{rbac}/rolebindings", {**named, "roleRef": role, "subjects": [user]})
    await _allow(api, NAMESPACE, "mounts", {"resources": ["secrets", "configmaps"], "resourceNames": OBJECTS})
    for namespace, data in MESH_ENV.items():
        await _mesh_env(api, namespace, data)
    container = {"name": "app", "image": "example/app"}
    spec = {"serviceAccountName": SERVICE_ACCOUNT, "containers": [container]}
    pod = await api.ask("POST", f"{core}/{NAMESPACE}/pods", {"metadata": {"name": POD}, "spec": spec})
    return str(pod["metadata"]["uid"])


async def _mesh_env(api: KubernetesApi, namespace: str, data: dict[str, str]) -> None:
    """Makes a mesh-env that the user krun may read."""
    core = "/api/v1/namespaces"
    if namespace != NAMESPACE:
        await api.ask("POST", core, {"metadata": {"name": namespace}})
    await api.ask("POST", f"{core}/{namespace}/configmaps", {"metadata": {"name": "mesh-env"}, "data": data})
    what = {"resources": ["configmaps"], "resourceNames": ["mesh-env"]}
    await _allow(api, namespace, "mesh-env", what)


async def _allow(api: KubernetesApi, namespace: str, name: str, what: Mapping[str, Sequence[str]]) -> None:
    """Lets the user krun `get` something."""
    rbac, named = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}", {"metadata": {"name": name}}
    rule = {"apiGroups": [""], "verbs": ["get"], **what}
    await api.ask("POST", f"{rbac}/roles", {**named, "rules": [rule]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "krun"}
    await api.ask("POST", f"{rbac}/rolebindings", {**named, "roleRef": role, "subjects": [user]})


if __name__ == "__main__":
    sys.exit(main())
