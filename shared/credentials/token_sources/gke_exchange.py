"""ID tokens on GKE the original's way: a Kubernetes token becomes a federated access token at Google's STS,
and IAM gives ID tokens for that: of the mesh's data plane account, or of another service account.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from shared.credentials.token_sources.access_tokens import SCOPE, KeptAccessToken
from shared.credentials.token_sources.impersonation import Impersonated, id_token_url
from shared.credentials.token_sources.token_answers import access_token, ask, jwt_for
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.tokens import FileToken
from shared.errors import TokenError, UsageError

SubjectToken = Callable[[str], Awaitable[Minted]]
"""Gives a token that proves to Google's STS who we are, for the audience that is asked for: the `mint` of any
`Minter` of Kubernetes tokens does. Raises TokenError."""

HINTS = {
    400: "is it the right cluster and project, with Workload Identity switched on?",
    401: "it does not take the Kubernetes token",
    403: "is the Security Token Service API switched on in the project?",
}


class FederatedToken(KeptAccessToken):
    """The access token that Google's STS gives for a Kubernetes token (RFC 8693), kept until shortly before
    its end; for everybody in the process who speaks to Google's services as this workload."""

    def __init__(
        self,
        settings: TokenSettings,
        subject_token: SubjectToken,
        *,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Raises UsageError when `settings` do not tell whom the exchange is for."""
        if not settings.exchange_audience:
            raise UsageError(
                "no token exchange: set PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION, or HBONE_STS_AUDIENCE"
            )
        super().__init__(f"the workload in {settings.subject_audience}", self._exchange, now=now)
        self._settings = settings
        self._subject_token = subject_token
        self._tls = tls

    async def _exchange(self) -> Minted:
        settings = self._settings
        try:
            async with asyncio.timeout(settings.step_timeout_s):
                subject = await self._subject_token(settings.subject_audience)
        except TimeoutError as error:
            raise TokenError(
                f"no Kubernetes token within {settings.step_timeout_s:g} s", "unreachable"
            ) from error
        place = "Google's STS"
        answer = await ask(
            place,
            settings.sts_url,
            {
                "grantType": "urn:ietf:params:oauth:grant-type:token-exchange",
                "subjectTokenType": "urn:ietf:params:oauth:token-type:jwt",
                "requestedTokenType": "urn:ietf:params:oauth:token-type:access_token",
                "audience": settings.exchange_audience,
                "subjectToken": subject.token,
                "scope": SCOPE,
            },
            timeout_s=settings.step_timeout_s,
            tls=self._tls,
            hints=HINTS,
        )
        return access_token(answer, place, self._now(), subject.expires_at_s)


class GkeExchange(Impersonated):
    """Mints ID tokens by way of the exchange."""

    def __init__(
        self,
        settings: TokenSettings,
        subject_token: SubjectToken,
        *,
        federated: FederatedToken | None = None,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`federated` is one that is there already. Raises UsageError when `settings` do not tell whom the
        exchange is for, or where it ends."""
        account = settings.exchange_account
        if not account:
            raise UsageError(
                "no token exchange: set PROJECT_NUMBER, for the mesh's data plane account, or "
                "HBONE_TOKEN_ACCOUNT"
            )
        super().__init__(
            federated or FederatedToken(settings, subject_token, tls=tls, now=now),
            account,
            id_token_url(settings.iam_url, account),
            timeout_s=settings.step_timeout_s,
            tls=tls,
            now=now,
        )


class ProjectedToken:
    """The Kubernetes token in a file that the kubelet keeps current."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._file = FileToken(path)
        self._now = now

    async def mint(self, audience: str) -> Minted:
        """The file's present token. Raises TokenError when it is none, for another audience, or expired."""
        return jwt_for(await self._file.token(), audience, f"token file {self._path}", self._now())
