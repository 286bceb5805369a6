"""What krun is told of Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config.kubernetes_settings import ISTIO_FILE, KubernetesSettings, TokenFile
from agent.config.settings import from_env
from shared.errors import UsageError

POD_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def read(**environ: str) -> KubernetesSettings | None:
    return from_env(environ).kubernetes


def test_nothing_is_done_unless_asked_for() -> None:
    assert read() is None
    assert read(HBONE_K8S_TOKENS=" ", WORKLOAD_NAMESPACE="demo", KUBECONFIG="/k") is None


def test_what_can_be_asked_for() -> None:
    settings = read(
        HBONE_K8S_TOKENS="pod, istio-ca ,vault=/a/vault,https://x.example/?y=z=/b,=/own/folder/",
        HBONE_K8S_TOKEN_LIFETIME="7200",
        HBONE_K8S_TOKEN_OWNER="1000:2000",
        HBONE_K8S_START_TIMEOUT="2.5",
        WORKLOAD_NAMESPACE="demo",
        WORKLOAD_SERVICE_ACCOUNT="hello",
        KUBECONFIG="/k",
        KUBERNETES_SERVICE_HOST="10.0.0.1",
        KUBERNETES_SERVICE_PORT="443",
    )
    assert settings == KubernetesSettings(
        files=(
            TokenFile("", POD_FOLDER, is_folder=True),
            TokenFile("istio-ca", ISTIO_FILE),
            TokenFile("vault", Path("/a/vault")),
            TokenFile("https://x.example/?y=z", Path("/b")),
            TokenFile("", Path("/own/folder"), is_folder=True),
        ),
        access={
            "KUBECONFIG": "/k",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
        },
        namespace="demo",
        service_account="hello",
        lifetime_s=7200,
        owner=(1000, 2000),
        start_timeout_s=2.5,
    )


def test_the_defaults() -> None:
    settings = read(HBONE_K8S_TOKENS="istio-ca")
    assert settings is not None
    assert (settings.namespace, settings.service_account) == ("", "default")
    assert (settings.lifetime_s, settings.owner, settings.start_timeout_s) == (3600, None, 30.0)
    assert Path("/var/run/secrets/tokens/istio-token") == ISTIO_FILE


@pytest.mark.parametrize("content", ['{"users": []}', "apiVersion: v1\nusers: []"])
def test_a_kubeconfig_in_place_of_its_path_is_not_repeated(content: str) -> None:
    with pytest.raises(UsageError, match=r"^invalid KUBECONFIG \(has to be the paths of files; .*\)$"):
        read(KUBECONFIG=content)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("HBONE_K8S_TOKENS", ",", "nothing but commas"),
        ("HBONE_K8S_TOKENS", "vault", "'vault' is not pod, istio-ca or AUDIENCE=/PATH"),
        ("HBONE_K8S_TOKENS", "vault=relative", "is not pod"),
        ("HBONE_K8S_TOKENS", "a b=/x", "an audience has no blanks"),
        ("HBONE_K8S_TOKENS", f"{'a' * 513}=/x", "at most 512 characters"),
        ("HBONE_K8S_TOKENS", "a=/x,b=/x", "one path for two tokens"),
        ("HBONE_K8S_TOKENS", "a=/x/,b=/x/token", "one path for two tokens"),
        ("HBONE_K8S_TOKENS", ",".join(f"a=/{i}" for i in range(17)), "17 are more than 16"),
        ("HBONE_K8S_TOKEN_LIFETIME", "599", "must be between 600s and 4294967296s"),
        ("HBONE_K8S_TOKEN_OWNER", "nobody-of-that-name", "no such user or group"),
        ("HBONE_K8S_START_TIMEOUT", "0", "must be between 0.1s and 3600s"),
        ("WORKLOAD_NAMESPACE", "Demo", "no name of a namespace"),
        ("WORKLOAD_SERVICE_ACCOUNT", "a/b", "no name of a service account"),
    ],
)
def test_mistakes(name: str, value: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"invalid {name}=.*{reason}"):
        from_env({"HBONE_K8S_TOKENS": "istio-ca", name: value})
