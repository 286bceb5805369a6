"""Tokens of Kubernetes service accounts for an audience: the API server's `TokenRequest`.

A `Minter`, so the token cache can keep its tokens, and its `mint` is a subject token for Google's STS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_names import (
    DEFAULT_SERVICE_ACCOUNT,
    LIFETIME_S,
    MAX_LIFETIME_S,
    MIN_LIFETIME_S,
    check_namespace,
    check_service_account,
)
from shared.credentials.tokens.minting import Minted
from shared.errors import HboneError, StatusError, TokenDeniedError, TokenError, UpstreamError
from shared.trust.token_claims import MAX_TOKEN_BYTES, claims_of, shown_claim

TRANSIENT = (429, 500, 502, 503, 504)
"""Answers that may be others a moment later."""


@dataclass(frozen=True, slots=True)
class BoundObject:
    """The object with which the token ends: a Pod, a Secret or a Node."""

    kind: str
    name: str
    uid: str = ""
    api_version: str = "v1"


class KubernetesTokens:
    """Tokens of one service account."""

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        service_account: str = DEFAULT_SERVICE_ACCOUNT,
        *,
        lifetime_s: int = LIFETIME_S,
        bound_to: BoundObject | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`lifetime_s` is asked for, in seconds; the API server may give another. `now` is the wall clock in
        seconds since 1970. Raises ValueError for a name that Kubernetes does not allow, or a lifetime."""
        if not MIN_LIFETIME_S <= lifetime_s <= MAX_LIFETIME_S:
            raise ValueError(f"a token's lifetime has to be {MIN_LIFETIME_S}..{MAX_LIFETIME_S} seconds")
        self._api = api
        self._name = f"{check_namespace(namespace)}/{check_service_account(service_account)}"
        self._path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        self._lifetime_s = lifetime_s
        self._bound_to = bound_to
        self._now = now

    @property
    def identity(self) -> str:
        return f"service account {self._name} at {self._api.server}"

    async def mint(self, audience: str) -> Minted:
        """A new token for `audience`; empty: for the API server itself.

        Raises TokenDeniedError when the answer is no, TokenError when there is none, or a broken one.
        """
        try:
            answer = await self._api.ask("POST", self._path, self._request(audience))
        except StatusError as error:
            kind = TokenError if error.status in TRANSIENT else TokenDeniedError
            raise kind(f"no token of service account {self._name}: {error}", "refused") from error
        except TokenError as error:  # of our own, for the API server
            raise TokenError(f"no token of service account {self._name}: {error}", error.reason) from error
        except HboneError as error:
            reason = "unreachable" if isinstance(error, UpstreamError) else "file"
            raise TokenError(f"no token of service account {self._name}: {error}", reason) from error
        minted = self._read(answer)
        late_s = self._now() - minted.expires_at_s
        if late_s >= 0:
            raise self._unfit(f"a token that expired {late_s:.0f} s ago; is the clock right?", "expired")
        meant_for = claims_of(minted.token).get("aud")
        if audience and audience not in (meant_for if isinstance(meant_for, list) else [meant_for]):
            told = f"a token for audience {shown_claim(meant_for)} instead of {audience!r}"
            raise self._unfit(told, "audience")
        return minted

    def _request(self, audience: str) -> dict[str, Any]:
        spec: dict[str, Any] = {"expirationSeconds": self._lifetime_s}
        if audience:
            spec["audiences"] = [audience]
        if (bound := self._bound_to) is not None:
            spec["boundObjectRef"] = {"kind": bound.kind, "apiVersion": bound.api_version, "name": bound.name}
            if bound.uid:
                spec["boundObjectRef"]["uid"] = bound.uid
        return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}

    def _read(self, answer: dict[str, Any]) -> Minted:
        told = answer.get("status")
        status: dict[str, Any] = told if isinstance(told, dict) else {}
        token = status.get("token")
        if not isinstance(token, str) or not token:
            raise self._unfit("no TokenRequest with a token", "garbled")
        if len(token) > MAX_TOKEN_BYTES:
            raise self._unfit(f"a token of more than {MAX_TOKEN_BYTES} bytes", "garbled")
        try:
            return Minted(token, _expiry(claims_of(token), status.get("expirationTimestamp")))
        except ValueError as error:
            raise self._unfit(str(error), "garbled") from error

    def _unfit(self, what: str, reason: str) -> TokenError:
        return TokenError(f"no token of {self.identity}: its answer is {what}", reason)


def _expiry(claims: dict[str, Any], stated: object) -> float:
    """The end, in seconds since 1970: the earlier one of what the token says and what the answer states.

    They differ on purpose where the server extends tokens that a pod has by default, to a year: whoever still
    uses an old one is to be found, and the kubelet renews by the answer.
    """
    ends = []
    expires = claims.get("exp")
    if isinstance(expires, (int, float)) and not isinstance(expires, bool) and 0 <= expires < 2**53:
        ends.append(float(expires))
    if isinstance(stated, str):
        try:
            ends.append(datetime.fromisoformat(stated).timestamp())
        except (ValueError, OverflowError):
            raise ValueError("a token with an unreadable expirationTimestamp") from None
    if not ends:
        raise ValueError("a token without an expiry")
    return min(ends)
