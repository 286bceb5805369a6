"""One JSON request to the Kubernetes API server: its deadline and bounds, and what a refusal means for people
(`Status` objects, the RBAC rule that is missing, the owner of a field). It watches nothing and keeps no
connection."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.credentials.kubernetes.kubernetes_access import Access
from shared.errors import ConflictError, StatusError, UpstreamError
from shared.net.http1 import Response, request
from shared.ops.log import one_line, redact

if TYPE_CHECKING:
    from shared.net.http_proxy import HttpProxy

TIMEOUT_S = 10.0
"""For one request, name lookup and TLS included: an API server takes milliseconds, a busy one seconds."""

MAX_ANSWER_BYTES = 1024 * 1024
"""A token is 1 KiB, mesh-env some more."""

MAX_MESSAGE_CHARS = 300
"""How much of a `Status` message is repeated: admission webhooks can write a page."""

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML (Kubernetes, "Server-Side Apply")."""

CONFLICT = "FieldManagerConflict"
"""The cause of a conflict of server-side apply, one for each field."""

_OWNER = re.compile('conflict with "([^"]{1,200})"')
"""In the message of such a cause."""

MAX_CONFLICTS = 5
"""Fields that an error names."""

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
"""RBAC's verbs (Kubernetes, "Authorization Overview", request verbs)."""


class KubernetesApi:
    """One API server."""

    def __init__(
        self,
        access: Access,
        *,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_ANSWER_BYTES,
        proxy: HttpProxy | None = None,
    ) -> None:
        """`timeout_s` bounds each request, in seconds, and `max_bytes` each answer; `proxy` leads to the
        server."""
        self._proxy = proxy
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
        response = await self._exchange(method, path, body, JSON)
        return self._judge(response, method, path)

    async def apply(
        self, path: str, manifest: Mapping[str, Any], manager: str, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Server-side apply: makes the object at `path`, or gives it the manifest's fields, as their owner
        `manager`. If a field has another owner and another value, nothing is written; with `dry_run` nothing
        ever is. Returns the object as it is, or would be, then.

        Raises ConflictError for such a field, else as `ask`.
        """
        asked = f"{path}?fieldManager={manager}&force=false{'&dryRun=All' if dry_run else ''}"
        response = await self._exchange("PATCH", asked, manifest, APPLY)
        if response.status == 409 and (fields := _conflicts(response)):
            about = manifest["metadata"]
            what = f"{manifest['kind']} {about['namespace']}/{about['name']}"
            raise ConflictError(f"{what} is not written, for others own fields of it: {fields}")
        return self._judge(response, "PATCH", path)

    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, content_type: str
    ) -> Response:
        token = await self.access.bearer.token()
        response = await self._send(method, path, body, content_type, token)
        if response.status == 401 and token is not None:
            self.access.bearer.invalidate(token)
            renewed = await self.access.bearer.token()
            if renewed != token:
                response = await self._send(method, path, body, content_type, renewed)
        return response

    def _judge(self, response: Response, method: str, path: str) -> dict[str, Any]:
        if not 200 <= response.status < 300:
            told = refusal(response.status, response.json_object(), method, path)
            raise StatusError(response.status, f"{self.server} answered {response.status}{told}")
        answer = response.json_object()
        if answer is None:
            raise UpstreamError(f"broken answer from {self.server}: no JSON object")
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        content_type: str,
        token: str | None,
    ) -> Response:
        headers = {"accept": "application/json", "user-agent": "hbone"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        if body is not None:
            headers["content-type"] = content_type
        try:
            return await request(
                method,
                self.server + path,
                headers=headers,
                body=b"" if body is None else json.dumps(body).encode(),
                timeout_s=self._timeout_s,
                max_bytes=self._max_bytes,
                tls=self.access.tls(),
                proxy=self._proxy,
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


def refusal(status: int, answer: Mapping[str, Any] | None, method: str, path: str) -> str:
    """What follows "answered STATUS" in an error: what the answer says of it, and what we could do."""
    return _told(answer) + _hint(status, method, path)


def line(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """Somebody else's text in one line of at most `most` characters, without secrets."""
    found = one_line(redact(text[: 8 * most]))
    return found if len(found) <= most else f"{found[:most]}..."


def _hint(status: int, method: str, path: str) -> str:
    if status == 401:
        return "; it does not know our token or certificate: expired, or another cluster's?"
    if status == 403:
        return f"; a Role has to allow us the {rbac_rule(method, path)}"
    return ""


def _conflicts(response: Response) -> str:
    """Which fields have which owner, as the causes in a `Status` say; empty: no field has another one."""
    details = (response.json_object() or {}).get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    fields = []
    for cause in causes if isinstance(causes, list) else ():
        if isinstance(cause, dict) and cause.get("reason") == CONFLICT:
            found = _OWNER.match(str(cause.get("message")))
            owner = found[1] if found else "somebody"
            fields.append(f"{line(str(cause.get('field')), 100)} is {line(owner, 64)}'s")
    more = len(fields) - MAX_CONFLICTS
    return ", ".join(fields[:MAX_CONFLICTS]) + (f", and {more} more" if more > 0 else "")


def _told(status: Mapping[str, Any] | None) -> str:
    """Reason and message of a `Status` (Kubernetes API conventions, "Response Status Kind"), in one line."""
    if status is None or status.get("kind") != "Status":
        return ""
    reason, message = status.get("reason"), status.get("message")
    told = f" {line(reason, 64)}" if isinstance(reason, str) and reason else ""
    if isinstance(message, str) and message and message != reason:
        told += f": {line(message)}"
    return told
