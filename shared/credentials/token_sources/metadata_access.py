"""Access tokens from Google's metadata server, for impersonating another service account."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.credentials.token_sources.access_tokens import KeptAccessToken
from shared.credentials.token_sources.metadata import asked
from shared.credentials.token_sources.token_answers import MAX_ANSWER_BYTES, access_token
from shared.credentials.token_sources.token_settings import DEFAULT_METADATA_HOST, METADATA_TIMEOUT_S
from shared.credentials.tokens.minting import Minted
from shared.errors import TokenError
from shared.net.http1 import Target

PATH = "/computeMetadata/v1/instance/service-accounts/default/token"


class MetadataAccess(KeptAccessToken):
    """The access token of the account that the machine, pod or service runs as."""

    def __init__(
        self,
        host: str = DEFAULT_METADATA_HOST,
        *,
        timeout_s: float = METADATA_TIMEOUT_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`host` is HOST or HOST:PORT, `timeout_s` bounds one request in seconds."""
        self._url = f"http://{host}{PATH}"
        self._timeout_s = timeout_s
        super().__init__(f"metadata server at {Target.parse(self._url)}", self._asked, now=now)

    async def _asked(self) -> Minted:
        response = await asked(self._url, self.identity, self._timeout_s, MAX_ANSWER_BYTES)
        place, now_s = f"the {self.identity}", self._now()
        answer = response.json_object()
        if answer is None:
            raise TokenError(f"no token from {place}: its answer is no JSON object", "garbled")
        return access_token(answer, place, now_s, now_s)
