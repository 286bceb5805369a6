"""Settings of krun about Kubernetes: which tokens it keeps in which files, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.config.variables import OWNER
from shared.config.fields import Environment, Setting, setting
from shared.config.kinds import Duration, Parsed, words
from shared.credentials.kubernetes.kubernetes_names import (
    DEFAULT_SERVICE_ACCOUNT,
    LIFETIME_S,
    MAX_LIFETIME_S,
    MIN_LIFETIME_S,
    SERVICE_ACCOUNT_FOLDER,
    TOKEN_FILE,
    check_namespace,
    check_service_account,
)

POD = "pod"
"""Short for what each container of a pod has: token, ca.crt and namespace in a folder of their own."""

ISTIO_AUDIENCE = "istio-ca"
ISTIO_FILE = Path("/var/run/secrets/tokens/istio-token")
"""Where Istio's agent reads its token (volume istio-token of its injection template)."""

MAX_FILES = 16
"""Tokens that one krun keeps: a pod has two or three."""

MAX_AUDIENCE_CHARS = 512

START_TIMEOUT_S = 30.0
"""Cloud Run gives a container four minutes in all, and the app may need most of them."""

MIN_START_TIMEOUT_S, MAX_START_TIMEOUT_S = 0.1, 3600.0


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token to be kept in a file."""

    audience: str
    """Empty: whoever the API server accepts tokens for, which is itself."""

    path: Path
    """The file; with `is_folder` the folder that gets `token`, `ca.crt` and `namespace`."""

    is_folder: bool = False

    @property
    def token_path(self) -> Path:
        """Where the token itself is."""
        return self.path / TOKEN_FILE if self.is_folder else self.path


def _access(text: str) -> str:
    if "\n" in text or text.startswith("{"):
        raise ValueError("has to be the paths of files; this looks like what should be in them")
    return text


def _files(text: str) -> tuple[TokenFile, ...]:
    files = [_file(word) for word in words(text, MAX_FILES)]
    if len({file.token_path for file in files}) < len(files):
        raise ValueError("one path for two tokens")
    return tuple(files)


def _file(word: str) -> TokenFile:
    if word == POD:
        return TokenFile("", SERVICE_ACCOUNT_FOLDER, is_folder=True)
    if word == ISTIO_AUDIENCE:
        return TokenFile(ISTIO_AUDIENCE, ISTIO_FILE)
    audience, found, path = word.rpartition("=")
    if not found or not path.startswith("/"):
        raise ValueError(f"{word[:60]!r} is not {POD}, {ISTIO_AUDIENCE} or AUDIENCE=/PATH")
    if len(audience) > MAX_AUDIENCE_CHARS or not audience.isprintable() or " " in audience:
        raise ValueError(f"an audience has no blanks and at most {MAX_AUDIENCE_CHARS} characters")
    return TokenFile(audience, Path(path), is_folder=path.endswith("/"))


ACCESS: tuple[Setting[str], ...] = (
    Setting(
        Parsed(_access, "paths, with colons between them"),
        "",
        "kubeconfig files, separated by colons",
        unset="a pod's own access, then ~/.kube/config",
        variable="KUBECONFIG",
        secret=True,
    ),
    Setting(
        Parsed(_access, "host"),
        "",
        "address of the API server, which Kubernetes sets in a pod",
        variable="KUBERNETES_SERVICE_HOST",
    ),
    Setting(Parsed(_access, "port"), "", "its port", unset="443", variable="KUBERNETES_SERVICE_PORT"),
)
"""How the API server is reached; the variables are everybody's."""


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """All about Kubernetes."""

    files: tuple[TokenFile, ...] = setting(
        Parsed(_files, "pod, istio-ca or AUDIENCE=/PATH, with commas between them"),
        (),
        "Kubernetes tokens to keep in files: pod, istio-ca, AUDIENCE=/PATH",
        f"pod is a pod's own folder, {SERVICE_ACCOUNT_FOLDER}, with token, ca.crt and namespace. istio-ca is "
        f"the token for Istio's CA, in {ISTIO_FILE}. A /PATH that ends with / is a folder like a pod's.",
        unset="none",
        variable="HBONE_K8S_TOKENS",
    )
    access: Mapping[str, str] = field(default_factory=dict)
    """How the API server is reached: the values of ACCESS by variable."""

    namespace: str = setting(
        Parsed(check_namespace, "name"),
        "",
        "the workload's namespace",
        unset="that of the access to the cluster, else default",
        variable="WORKLOAD_NAMESPACE",
    )
    service_account: str = setting(
        Parsed(check_service_account, "name"),
        DEFAULT_SERVICE_ACCOUNT,
        "its service account there",
        variable="WORKLOAD_SERVICE_ACCOUNT",
    )
    lifetime_s: float = setting(
        Duration(MIN_LIFETIME_S, MAX_LIFETIME_S),
        LIFETIME_S,
        "life that they are asked for with",
        "The API server may give less.",
        variable="HBONE_K8S_TOKEN_LIFETIME",
    )
    owner: tuple[int, int] | None = setting(
        OWNER,
        None,
        "USER or USER:GROUP that the files are given to",
        "The app is krun's own user unless its image says otherwise.",
        unset="krun's own",
        variable="HBONE_K8S_TOKEN_OWNER",
    )
    start_timeout_s: float = setting(
        Duration(MIN_START_TIMEOUT_S, MAX_START_TIMEOUT_S),
        START_TIMEOUT_S,
        "time that the first tokens may take, before the app is started",
        variable="HBONE_K8S_START_TIMEOUT",
    )

    @property
    def istio_file(self) -> Path | None:
        """The token that Istio's CA accepts, if it is one of them."""
        return next((file.token_path for file in self.files if file.audience == ISTIO_AUDIENCE), None)


def access(read: Environment) -> dict[str, str]:
    """How the API server is reached: the values of ACCESS that are set, by variable. Raises UsageError."""
    return {one.variable: text for one in ACCESS if (text := read(one))}


def read(read: Environment) -> KubernetesSettings | None:
    """The settings that `read` finds; None if no token is asked for. Raises UsageError."""
    settings = KubernetesSettings(access=access(read), **read.given(KubernetesSettings))
    return settings if settings.files else None
