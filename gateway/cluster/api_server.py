"""Requests to the Kubernetes API server, by its official client: JSON in and out, with deadlines and bounds.

The client has the ways to get in (a pod's token, a kubeconfig with its plugins), TLS and the connections. Its
typed models stay out: they take ten times as long as the JSON that they are made from. It is imported here
only, for it takes 0.4 s and 40 MiB.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from shared.credentials.kubernetes.kubernetes_api import APPLY, JSON, line, refusal
from shared.errors import DialError, StatusError, UnavailableError, UpstreamError

if TYPE_CHECKING:
    from aiohttp import ClientResponse

TIMEOUT_S = 30.0
"""For one request. A list of 500 objects takes a loaded server seconds."""

CONNECT_S = 10.0

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""500 objects of 100 KiB each."""

MAX_ASKED_PAUSE_S = 60.0
"""The longest Retry-After that is followed."""

_AUTH = ["BearerToken"]
"""What the client calls the Authorization header. 36.0 sent none for it, so a test looks at the wire."""


class ApiServer:
    """One API server; made on the event loop, and closed there."""

    def __init__(self, client: Any) -> None:
        """`client` is an ApiClient of the official client's; few of its functions have types."""
        self._client = client
        self.url = str(client.configuration.host)

    @classmethod
    async def connected(cls, environ: Mapping[str, str]) -> ApiServer:
        """The server of the pod that this is, or of KUBECONFIG if `environ` names one. No request is made.
        Raises UnavailableError."""
        try:
            from kubernetes.aio import config as access
            from kubernetes.aio.client.api_client import ApiClient
            from kubernetes.aio.client.configuration import Configuration
        except ImportError as error:
            text = "hgate cluster needs the package kubernetes: pip install 'hbone[cluster]'"
            raise UnavailableError(text) from error
        config: Any = access  # few of its functions have types
        found = Configuration()
        # Python 3.13 demands an extension that many clusters' own roots do not have.
        found.disable_strict_ssl_verification = True
        try:
            if kubeconfig := environ.get("KUBECONFIG"):
                await config.load_kube_config(config_file=kubeconfig, client_configuration=found)
            else:
                config.load_incluster_config(client_configuration=found)
        except (config.ConfigException, OSError, ValueError, KeyError) as error:
            where = environ.get("KUBECONFIG") or "the pod's service account"
            raise UnavailableError(f"no access to the API server by {where}: {line(str(error))}") from error
        return cls(ApiClient(found))

    async def close(self) -> None:
        """Ends its connections."""
        await self._client.close()

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        """The object or list at `path`. Raises as `ask`."""
        return await self.ask("GET", path, query)

    async def apply(self, path: str, body: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Applies the fields in `body` as the field manager `manager`, and owns them then; fields that
        somebody else owns are a StatusError with 409 that names the owner. Raises as `ask`."""
        return await self.ask("PATCH", path, {"fieldManager": manager}, body, APPLY)

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        """What the server answers; `path` is below its URL, with quoted parts.

        Raises:
            StatusError: the server says no; the text has its reason, and what we could do.
            DialError, UpstreamError: it cannot be reached, is late, or answers garbage.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._send(method, path, query, body, content_type, TIMEOUT_S)
                async with response:
                    read = await _read(response)
        except _failures() as error:
            raise self._broken(method, path, error) from error
        found = _object(read)
        if response.status >= 300:
            raise self._refused(response, found, method, path)
        if found is None:
            raise UpstreamError(f"broken answer from {self.url} to {method} {path}: no JSON object")
        return found

    async def watch(
        self,
        path: str,
        query: Mapping[str, str],
        most_s: float,
        opened: Callable[[], None],
        take: Callable[[dict[str, Any]], None],
    ) -> None:
        """Calls `opened` when the server begins a watch, and `take` with each event, until the server ends
        it, for `most_s` seconds at most. Raises as `ask`; a watch that lasts longer is a DialError."""
        try:
            async with asyncio.timeout(most_s):
                response = await self._send("GET", path, {**query, "watch": "true"}, None, "", most_s)
                async with response:
                    if response.status >= 300:
                        found = _object(await _read(response))
                        raise self._refused(response, found, "GET", path)
                    opened()
                    async for read in response.content:
                        event = _object(read)
                        if event is None:
                            raise UpstreamError(f"broken event from {self.url} at {path}: no JSON object")
                        take(event)
        except _failures() as error:
            raise self._broken("GET", path, error) from error

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
        most_s: float,
    ) -> ClientResponse:
        from aiohttp import ClientTimeout

        asked = f"?{urlencode(query)}" if query else ""
        headers = {"Accept": "application/json", "User-Agent": "hgate"}
        if body is not None:
            headers["Content-Type"] = content_type
        await self._client.update_params_for_auth(headers, [], _AUTH, path, method, body)
        answer = await self._client.rest_client.request(
            method,
            f"{self.url}{path}{asked}",
            headers=headers,
            body=body,
            _request_timeout=ClientTimeout(total=most_s, connect=CONNECT_S),
        )
        response: ClientResponse = answer.response
        return response

    def _refused(
        self, response: ClientResponse, found: Mapping[str, Any] | None, method: str, path: str
    ) -> StatusError:
        status = response.status
        text = f"{self.url} answered {status} to {method} {path}{refusal(status, found, method, path)}"
        asked = response.headers.get("Retry-After", "")
        pause_s = min(float(asked), MAX_ASKED_PAUSE_S) if asked.isdecimal() else 0.0
        return StatusError(status, text, pause_s)

    def _broken(self, method: str, path: str, error: Exception) -> UpstreamError:
        if isinstance(error, TimeoutError):
            return DialError(f"{method} {path} at {self.url}: no answer in time")
        return DialError(f"{method} {path} at {self.url}: {line(str(error) or type(error).__name__)}")


async def _read(response: ClientResponse) -> bytes:
    """The body. Raises ValueError if it is longer than MAX_ANSWER_BYTES."""
    read = bytearray()
    async for part in response.content.iter_any():
        read += part
        if len(read) > MAX_ANSWER_BYTES:
            raise ValueError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
    return bytes(read)


def quoted(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe="")


def _failures() -> tuple[type[Exception], ...]:
    """What the client raises for a connection that cannot be had or breaks, and for an event that is longer
    than its buffer."""
    from aiohttp import ClientError
    from aiohttp.http_exceptions import HttpProcessingError

    return OSError, ValueError, ClientError, HttpProcessingError


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
