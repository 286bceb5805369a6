"""Which of krun's environment variables the app gets.

1. The app does not get the variables that begin with HBONE_, which are krun's, except those in `FOR_THE_APP`.
2. It does not get KUBECONFIG where krun uses it: the file has a credential that makes tokens, or reads
   Secrets, and the app has the tokens and the values themselves.
3. It does not get the variables that HBONE_HIDE_FROM_APP names.
4. It gets the variables that HBONE_PASS_TO_APP names, whatever the rules before say.
5. Where a proxy leads into the mesh it gets HTTP_PROXY, unless it has one of its own. NO_PROXY keeps what is
   none of the mesh's business away from it.
6. Where krun makes the bootstrap file for its gRPC, it gets that file's name, and what switches on the use of
   certificates and policies in old versions of gRPC.

It gets all others: those of the platform (K_SERVICE, PROJECT_ID, KUBERNETES_SERVICE_HOST), the secrets that
the platform mounts as variables for the app, and PORT, which the launcher sets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from agent.config.grpc_settings import VARIABLE as GRPC_BOOTSTRAP
from agent.config.settings import Settings
from shared.address import Address

OWN_PREFIX = "HBONE_"

FOR_THE_APP = frozenset({"HBONE_CERTS", "HBONE_STS_LISTEN"})
"""Where the app finds its certificate, and where it can exchange its token."""


PROXY_NAMES = ("HTTP_PROXY", "http_proxy")
"""Programs read the one or the other: curl only the second."""

NO_PROXY_NAMES = ("NO_PROXY", "no_proxy")

DIRECT = (
    *("localhost", "127.0.0.1", "::1"),
    *("metadata.google.internal", "metadata", "169.254.169.254"),
    ".googleapis.com",
)
"""What is not reached by way of the proxy. The last because gRPC asks a proxy for a tunnel to each of its
servers, those with TLS too (grpc.io, core's environment variables), which none of ours gives."""


OLD_GRPC = {"GRPC_XDS_EXPERIMENTAL_SECURITY_SUPPORT": "true", "GRPC_XDS_EXPERIMENTAL_RBAC": "true"}
"""As Istio's injector and the original set them; newer versions of gRPC do not look at them."""


def app_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The variables of `environ`, krun's own, that the app gets."""

    def is_hidden(name: str) -> bool:
        if _names(settings.passed_to_app, name):
            return False
        if name == "KUBECONFIG" and _uses_kubeconfig(environ, settings):
            return True
        own = name.startswith(OWN_PREFIX) and name not in FOR_THE_APP
        return own or _names(settings.hidden_from_app, name)

    return {name: value for name, value in environ.items() if not is_hidden(name)}


def of_process(pid: int) -> dict[str, str]:
    """The variables that a running app was started with, as the kernel keeps them; empty if it does not tell
    them, or the app has written over them (proc(5), environ)."""
    try:
        told = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = [os.fsdecode(variable).partition("=") for variable in told.split(b"\0") if variable]
    found = {name: value for name, equals, value in pairs if name and equals}
    return found if len(found) == len(pairs) and "PORT" in found else {}


def _uses_kubeconfig(environ: Mapping[str, str], settings: Settings) -> bool:
    asks_cluster = settings.kubernetes is not None or settings.mounts.asks_cluster
    return asks_cluster or environ.get("MESH", "").strip() == "kubernetes"


def with_proxy(environ: Mapping[str, str], proxy: Address) -> dict[str, str]:
    """The app's `environ`, with a proxy into the mesh, unless it has one."""
    if any(name in environ for name in PROXY_NAMES):
        return dict(environ)
    direct = dict.fromkeys((*_no_proxy(environ), *DIRECT, *_metadata_host(environ)))
    # gRPC that asks the control plane itself would ask a proxy for a tunnel to it. It reads the second only.
    names = PROXY_NAMES[:1] if GRPC_BOOTSTRAP in environ else PROXY_NAMES
    return {
        **environ,
        **dict.fromkeys(names, f"http://{proxy}"),
        **dict.fromkeys(NO_PROXY_NAMES, ",".join(direct)),
    }


def _no_proxy(environ: Mapping[str, str]) -> list[str]:
    """What the app has said itself."""
    told = ",".join(environ.get(name, "") for name in NO_PROXY_NAMES)
    return [word.strip() for word in told.split(",") if word.strip()]


def _metadata_host(environ: Mapping[str, str]) -> list[str]:
    host = environ.get("GCE_METADATA_HOST", "").strip().partition(":")[0]
    return [host] if host else []


def with_grpc(environ: Mapping[str, str], bootstrap: Path) -> dict[str, str]:
    """The app's `environ`, with the file that krun has made for its gRPC."""
    return {**OLD_GRPC, **environ, GRPC_BOOTSTRAP: str(bootstrap)}


def _names(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
