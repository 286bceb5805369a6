"""Which of krun's environment variables the app gets.

1. The app does not get the variables that begin with HBONE_, which are krun's, except those in `FOR_THE_APP`.
2. It does not get KUBECONFIG where krun uses it: the file has a credential that makes tokens, and the app has
   the tokens themselves in files.
3. It does not get the variables that HBONE_HIDE_FROM_APP names.
4. It gets the variables that HBONE_PASS_TO_APP names, whatever the rules before say.
5. Where a proxy leads into the mesh it gets HTTP_PROXY, unless it has one of its own. NO_PROXY keeps what is
   none of the mesh's business away from it.

It gets all others: those of the platform (K_SERVICE, PROJECT_ID, KUBERNETES_SERVICE_HOST), the secrets that
the platform mounts as variables for the app, and PORT, which the launcher sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

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


def app_environment(
    environ: Mapping[str, str], settings: Settings, proxy: Address | None = None
) -> dict[str, str]:
    """The variables of `environ`, krun's own, that the app gets; `proxy` leads into the mesh."""

    def is_hidden(name: str) -> bool:
        if _names(settings.passed_to_app, name):
            return False
        if name == "KUBECONFIG" and settings.kubernetes is not None:
            return True
        own = name.startswith(OWN_PREFIX) and name not in FOR_THE_APP
        return own or _names(settings.hidden_from_app, name)

    told = {name: value for name, value in environ.items() if not is_hidden(name)}
    if proxy is None or any(name in told for name in PROXY_NAMES):
        return told
    direct = dict.fromkeys((*_no_proxy(told), *DIRECT, *_metadata_host(environ)))
    told.update(dict.fromkeys(PROXY_NAMES, f"http://{proxy}"))
    told.update(dict.fromkeys(NO_PROXY_NAMES, ",".join(direct)))
    return told


def _no_proxy(environ: Mapping[str, str]) -> list[str]:
    """What the app has said itself."""
    told = ",".join(environ.get(name, "") for name in NO_PROXY_NAMES)
    return [word.strip() for word in told.split(",") if word.strip()]


def _metadata_host(environ: Mapping[str, str]) -> list[str]:
    host = environ.get("GCE_METADATA_HOST", "").strip().partition(":")[0]
    return [host] if host else []


def _names(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
