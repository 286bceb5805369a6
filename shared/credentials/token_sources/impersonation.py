"""ID tokens of a Google service account, with an access token that has the role to speak for that account.

IAM's `generateIdToken` is the last step of every source but the metadata server and a key.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence

from shared.credentials.token_sources.access_tokens import AccessTokens
from shared.credentials.token_sources.token_answers import ask, jwt_for
from shared.credentials.tokens.minting import Minted
from shared.errors import TokenRefusedError

HINTS = {
    401: "it does not take the access token",
    403: "{} needs the role roles/iam.serviceAccountOpenIdTokenCreator, or on GKE "
    "roles/iam.workloadIdentityUser, on the service account {}, which has to exist",
    404: "is there a service account {1}?",
}


def id_token_url(iam_url: str, account: str) -> str:
    """Where IAM gives ID tokens of `account`; `-` stands for its project, which the account tells."""
    return f"{iam_url}/v1/projects/-/serviceAccounts/{account}:generateIdToken"


class Impersonated:
    """Mints ID tokens of `account` with the access tokens of somebody else.

    https://cloud.google.com/iam/docs/reference/credentials/rest/v1/projects.serviceAccounts/generateIdToken
    """

    def __init__(
        self,
        access: AccessTokens,
        account: str,
        url: str,
        *,
        delegates: Sequence[str] = (),
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`url` is `id_token_url`'s, or that of another place of the same kind; `delegates` are the accounts
        between, as IAM names them (`projects/-/serviceAccounts/...`). `timeout_s` bounds the request to IAM
        in seconds, `now` gives seconds since 1970."""
        self._access = access
        self._account = account
        self._url = url
        self._delegates = list(delegates)
        self._timeout_s = timeout_s
        self._tls = tls
        self._now = now

    @property
    def identity(self) -> str:
        return f"{self._account} by {self._access.identity}"

    async def mint(self, audience: str) -> Minted:
        """A new ID token, with the account's e-mail address in it. Raises TokenError."""
        access = await self._access.access_token()
        try:
            return await self._ask(access, audience)
        except TokenRefusedError as error:
            if error.status != 401:
                raise
        # One that was kept may have been revoked meanwhile.
        self._access.drop(access.token)
        return await self._ask(await self._access.access_token(), audience)

    async def _ask(self, access: Minted, audience: str) -> Minted:
        place = "Google's IAM"
        answer = await ask(
            place,
            self._url,
            {"audience": audience, "includeEmail": True, "delegates": self._delegates},
            headers={"authorization": f"Bearer {access.token}"},
            timeout_s=self._timeout_s,
            tls=self._tls,
            hints={
                status: hint.format(self._access.identity, self._account) for status, hint in HINTS.items()
            },
        )
        return jwt_for(answer.get("token"), audience, place, self._now())
