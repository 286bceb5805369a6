"""What krun is told of Kubernetes: which tokens it keeps in which files, and whose they are.

Owned here: the names, their defaults and what a wrong value says. Reading a variable is `settings.py`'s, what
is done with them `token_files.py`'s. WORKLOAD_* are the original's names, KUBE* everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.config.variables import (
    Variables,
    number_in,
    owner,
    whole_in,
    words,
)
from shared.credentials.kubernetes.kubernetes_names import (
    ACCESS_ENVIRONMENT,
    DEFAULT_SERVICE_ACCOUNT,
    LIFETIME_S,
    MAX_LIFETIME_S,
    MIN_LIFETIME_S,
    SERVICE_ACCOUNT_FOLDER,
    TOKEN_FILE,
    check_namespace,
    check_service_account,
)

ENVIRONMENT: dict[str, str] = {
    "HBONE_K8S_TOKENS": "Kubernetes tokens to keep in files: pod, istio-ca, AUDIENCE=/PATH (none)",
    "HBONE_K8S_TOKEN_LIFETIME": "seconds of life that they are asked for with (3600)",
    "HBONE_K8S_TOKEN_OWNER": "USER or USER:GROUP that the files are given to (krun's own)",
    "HBONE_K8S_START_TIMEOUT": "seconds the first tokens may take, before the app is started (30)",
    "WORKLOAD_NAMESPACE": "the workload's namespace (that of the access to the cluster, else default)",
    "WORKLOAD_SERVICE_ACCOUNT": "its service account there (default)",
    **ACCESS_ENVIRONMENT,
}

POD = "pod"
"""Short for what each container of a pod has: token, ca.crt and namespace in a folder of their own."""

ISTIO_AUDIENCE = "istio-ca"
ISTIO_FILE = Path("/var/run/secrets/tokens/istio-token")
"""Where Istio's agent looks for its token (volume istio-token of its injection template)."""

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
    """Empty: whoever the API server takes tokens for, which is itself."""

    path: Path
    """The file; with `is_folder` the folder that gets `token`, `ca.crt` and `namespace`."""

    is_folder: bool = False

    @property
    def token_path(self) -> Path:
        """Where the token itself is."""
        return self.path / TOKEN_FILE if self.is_folder else self.path


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """All that krun is told of Kubernetes."""

    files: tuple[TokenFile, ...]
    """What to keep; never empty."""

    access: Mapping[str, str] = field(default_factory=dict)
    """The variables that `find_access` reads."""

    namespace: str = ""
    """Empty: what the access says."""

    service_account: str = DEFAULT_SERVICE_ACCOUNT

    lifetime_s: int = LIFETIME_S
    """The kubelet's default. The API server may give less."""

    owner: tuple[int, int] | None = None
    """User and group ids; None: krun's own, which the app has as well unless its image says otherwise."""

    start_timeout_s: float = START_TIMEOUT_S
    """For the first tokens, before the app starts. 0 is not possible: without them it would find no file."""

    @property
    def istio_file(self) -> Path | None:
        """The token that Istio's CA takes, if it is one of them."""
        return next((file.token_path for file in self.files if file.audience == ISTIO_AUDIENCE), None)


def read(read: Variables) -> KubernetesSettings | None:
    """The settings that `read` finds; None if no token is asked for. Raises UsageError."""
    files: tuple[TokenFile, ...] = read("HBONE_K8S_TOKENS", _files, ())
    settings = KubernetesSettings(
        files,
        access={name: read(name, _access, "") for name in ACCESS_ENVIRONMENT},
        namespace=read("WORKLOAD_NAMESPACE", check_namespace, ""),
        service_account=read("WORKLOAD_SERVICE_ACCOUNT", check_service_account, DEFAULT_SERVICE_ACCOUNT),
        lifetime_s=read(
            "HBONE_K8S_TOKEN_LIFETIME", whole_in(MIN_LIFETIME_S, MAX_LIFETIME_S, "seconds"), LIFETIME_S
        ),
        owner=read("HBONE_K8S_TOKEN_OWNER", owner, None),
        start_timeout_s=read(
            "HBONE_K8S_START_TIMEOUT", number_in(MIN_START_TIMEOUT_S, MAX_START_TIMEOUT_S), START_TIMEOUT_S
        ),
    )
    return settings if files else None


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
