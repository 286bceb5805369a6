"""One JSON request to the Kubernetes API server: its deadline and bounds, and what a refusal means for people
(`Status` objects, the RBAC rule that is missing). It watches nothing and keeps no connection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shared.credentials.kubernetes.kubernetes_access import Access
from shared.errors import StatusError, UpstreamError
from shared.net.http1 import Response, request
from shared.ops.log import one_line, redact

TIMEOUT_S = 10.0
"""For one request, name lookup and TLS included: an API server takes milliseconds, a busy one seconds."""

MAX_ANSWER_BYTES = 1024 * 1024
"""A token is 1 KiB, mesh-env some more."""

MAX_MESSAGE_CHARS = 300
"""How much of a `Status` message is repeated: admission webhooks can write a page."""

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
"""RBAC's verbs (Kubernetes, "Authorization Overview", request verbs)."""


class KubernetesApi:
    """One API server."""

    def __init__(
        self, access: Access, *, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        """`timeout_s` bounds each request, in seconds, and `max_bytes` each answer."""
        self.access = access
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes

    @property
    def server(self) -> str:
        """Its URL."""
        return self.access.server

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The object that the server answers; `path` is below the server's URL, quoted where necessary.

        When our token is rejected, and there is a new one to be had, it is sent once more.

        Raises:
            StatusError: the server says no; the text has its reason, and what we could do.
            DialError, UpstreamError: it cannot be reached, is late, or answers garbage.
            TokenError, UnavailableError: our own token, certificate or its roots cannot be had.
        """
        token = await self.access.bearer.token()
        response = await self._send(method, path, body, token)
        if response.status == 401 and token is not None:
            self.access.bearer.invalidate(token)
            renewed = await self.access.bearer.token()
            if renewed != token:
                response = await self._send(method, path, body, renewed)
        if not 200 <= response.status < 300:
            hint = _hint(response.status, method, path)
            text = f"{self.server} answered {response.status}{_told(response)}{hint}"
            raise StatusError(response.status, text)
        answer = response.json_object()
        if answer is None:
            raise UpstreamError(f"broken answer from {self.server}: no JSON object")
        return answer

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, token: str | None
    ) -> Response:
        headers = {"accept": "application/json", "user-agent": "hbone"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            return await request(
                method,
                self.server + path,
                headers=headers,
                body=b"" if body is None else json.dumps(body).encode(),
                timeout_s=self._timeout_s,
                max_bytes=self._max_bytes,
                tls=self.access.tls(),
            )
        except ValueError as error:
            raise UpstreamError(f"cannot ask {self.server}: {error}") from error


def rbac_rule(method: str, path: str) -> str:
    """The permission that a request takes, as RBAC names it: verb, resource and namespace."""
    parts = [part for part in path.partition("?")[0].split("/") if part]
    # /api/v1/... of the core group, /apis/GROUP/VERSION/... of all others.
    group, parts = (
        ("", parts[2:]) if parts[:1] == ["api"] else (parts[1] if len(parts) > 1 else "", parts[3:])
    )
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces":
        namespace, parts = parts[1], parts[2:]
    resource = f"{parts[0]}/{parts[2]}" if len(parts) > 2 else "".join(parts[:1])
    verb = "list" if method == "GET" and len(parts) == 1 else _VERBS.get(method, method.lower())
    where = f" in namespace {namespace}" if namespace else ""
    return f"verb {verb} on {resource}{f' of {group}' if group else ''}{where}"


def _hint(status: int, method: str, path: str) -> str:
    if status == 401:
        return "; it does not know our token or certificate: expired, or another cluster's?"
    if status == 403:
        return f"; a Role has to allow us the {rbac_rule(method, path)}"
    return ""


def _told(response: Response) -> str:
    """Reason and message of a `Status` (Kubernetes API conventions, "Response Status Kind"), in one line."""
    status = response.json_object()
    if status is None or status.get("kind") != "Status":
        return ""
    reason, message = status.get("reason"), status.get("message")
    told = f" {_line(reason, 64)}" if isinstance(reason, str) and reason else ""
    if isinstance(message, str) and message and message != reason:
        told += f": {_line(message, MAX_MESSAGE_CHARS)}"
    return told


def _line(text: str, most: int) -> str:
    line = one_line(redact(text[: 8 * most]))
    return line if len(line) <= most else f"{line[:most]}..."
