"""Which of krun's environment variables the app gets.

1. The app does not get the variables that begin with HBONE_, which are krun's, except those in `FOR_THE_APP`.
2. It does not get KUBECONFIG where krun uses it: the file has a credential that makes tokens, or reads
   Secrets, and the app has the tokens and the values themselves.
3. It does not get the variables that HBONE_HIDE_FROM_APP names.
4. It gets the variables that HBONE_PASS_TO_APP names, whatever the rules before say.

5. Where krun makes the bootstrap file for its gRPC, it gets that file's name, and what switches on the use of
   certificates and policies in old versions of gRPC.

It gets all others: those of the platform (K_SERVICE, PROJECT_ID, KUBERNETES_SERVICE_HOST), the secrets that
the platform mounts as variables for the app, and PORT, which the launcher sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from agent.config.grpc_settings import VARIABLE as GRPC_BOOTSTRAP
from agent.config.settings import Settings

OWN_PREFIX = "HBONE_"

FOR_THE_APP = frozenset({"HBONE_CERTS", "HBONE_STS_LISTEN"})
"""Where the app finds its certificate, and where it can exchange its token."""


OLD_GRPC = {"GRPC_XDS_EXPERIMENTAL_SECURITY_SUPPORT": "true", "GRPC_XDS_EXPERIMENTAL_RBAC": "true"}
"""As Istio's injector and the original set them; newer versions of gRPC do not look at them."""


def app_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The variables of `environ`, krun's own, that the app gets."""

    def is_hidden(name: str) -> bool:
        if _names(settings.passed_to_app, name):
            return False
        if name == "KUBECONFIG" and (settings.kubernetes is not None or settings.mounts.asks_cluster):
            return True
        own = name.startswith(OWN_PREFIX) and name not in FOR_THE_APP
        return own or _names(settings.hidden_from_app, name)

    return {name: value for name, value in environ.items() if not is_hidden(name)}


def with_grpc(environ: Mapping[str, str], bootstrap: Path) -> dict[str, str]:
    """The app's `environ`, with the file that krun has made for its gRPC."""
    return {**OLD_GRPC, **environ, GRPC_BOOTSTRAP: str(bootstrap)}


def _names(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
