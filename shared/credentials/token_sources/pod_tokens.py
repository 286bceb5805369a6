"""Kubernetes tokens of the pod that we run in: the subject of the exchange on GKE where no token is
projected.

The token that a pod has for the API server tells whose tokens to ask for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shared.credentials.kubernetes import kubernetes_names
from shared.credentials.kubernetes.kubernetes_access import Access
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_discovery import in_cluster
from shared.credentials.kubernetes.kubernetes_tokens import KubernetesTokens
from shared.credentials.token_sources.token_settings import is_there
from shared.credentials.tokens.minting import Minted
from shared.errors import TokenError, UsageError
from shared.trust.token_claims import claims_of

# Kubernetes, "Authenticating", service account tokens.
_SUBJECT = re.compile(r"system:serviceaccount:([^:]+):([^:]+)")


class PodTokens:
    """A `Minter` of tokens of the pod's own service account, which has to be allowed to ask for them."""

    def __init__(self, access: Access, *, timeout_s: float) -> None:
        """`timeout_s` bounds each request to the API server, in seconds."""
        self._api = KubernetesApi(access, timeout_s=timeout_s)

    @property
    def identity(self) -> str:
        return f"the pod's service account at {self._api.server}"

    async def mint(self, audience: str) -> Minted:
        """A new token for `audience`. Raises TokenError, which names the permission if that is missing."""
        namespace, name = account_of(await self._api.access.bearer.token() or "")
        return await KubernetesTokens(self._api, namespace, name).mint(audience)


def account_of(token: str) -> tuple[str, str]:
    """Namespace and name of the service account whose token it is. Raises TokenError."""
    try:
        subject = claims_of(token).get("sub")
        match = _SUBJECT.fullmatch(subject) if isinstance(subject, str) else None
        if match is None:
            raise ValueError("it is not of a service account")
        return kubernetes_names.check_namespace(match[1]), kubernetes_names.check_service_account(match[2])
    except ValueError as error:
        raise TokenError(
            f"the pod's own token does not tell whose pod this is: {error}", "garbled"
        ) from error


def pod_tokens(environ: Mapping[str, str], timeout_s: float) -> PodTokens | None:
    """What the pod can ask for, None if `environ` is not that of a pod.

    Raises:
        UsageError: the pod has no token of its own, so it can ask for none.
        UnavailableError: the address of the API server is malformed.
    """
    host = environ.get("KUBERNETES_SERVICE_HOST", "").strip()
    if not host:
        return None
    folder = kubernetes_names.SERVICE_ACCOUNT_FOLDER
    if not is_there(folder / kubernetes_names.TOKEN_FILE):
        raise UsageError(
            "no token exchange on GKE: set HBONE_SUBJECT_TOKEN (subject_token in hgate's file) to the file "
            f"with a projected token, or let the pod ask for one: there is no token in {folder}, for it has "
            "automountServiceAccountToken: false"
        )
    access = in_cluster(host, environ.get("KUBERNETES_SERVICE_PORT", "").strip(), folder)
    return PodTokens(access, timeout_s=timeout_s)
