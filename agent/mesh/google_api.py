"""A question to one of Google's REST APIs, as the account that krun runs as."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.credentials.kubernetes.kubernetes_access import Bearer
from shared.errors import StatusError, UpstreamError
from shared.net.http1 import get
from shared.ops.log import one_line, redact

TIMEOUT_S = 10.0
"""For one answer."""

MAX_BYTES = 16 << 20
"""Of a list of clusters: each has some 20 KiB."""

MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class GoogleApi:
    """Google's APIs."""

    bearer: Bearer
    """Has access tokens of Google's."""

    quota_project: str = ""
    """Is charged for the requests; empty: the one that they are about."""

    tls: ssl.SSLContext | None = None
    """None: the system's trust."""

    async def ask(
        self, url: str, hint: Callable[[int], str] = lambda _: "", timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """The JSON object at `url`; `hint` is told the status of another answer than 200, and may add to the
        error's text.

        Raises:
            StatusError: the API says no.
            DialError, UpstreamError, TokenError: it cannot be asked.
        """
        headers = {"authorization": f"Bearer {await self.bearer.token()}", "accept": "application/json"}
        if self.quota_project:
            headers["x-goog-user-project"] = self.quota_project
        response = await get(url, headers=headers, timeout_s=timeout_s, max_bytes=MAX_BYTES, tls=self.tls)
        answer = response.json_object()
        if response.status != 200:
            error = (answer or {}).get("error")
            message = error.get("message") if isinstance(error, dict) else None
            told = f": {one_line(redact(message[:MAX_MESSAGE_CHARS]))}" if isinstance(message, str) else ""
            raise StatusError(
                response.status, f"{url} answered {response.status}{told}{hint(response.status)}"
            )
        if answer is None:
            raise UpstreamError(f"broken answer from {url}: no JSON object")
        return answer
