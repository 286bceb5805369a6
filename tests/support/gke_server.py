"""Google's APIs of GKE, Cloud Run and projects, and the metadata server, on loopback, as far as krun asks
them for its cluster and its namespace."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
from dataclasses import dataclass, field
from typing import Any, Self

from shared.credentials.certificates.authority import Authority
from tests.support.http1_server import NotingServer, received, server_tls

PROJECT = "mesh-project"
TOKEN = "ya29.access-token"

_CLUSTERS = re.compile(r"/v1/projects/([^/]+)/locations/([^/]+)/clusters(?:/([^/]+))?")


def cluster(
    name: str,
    location: str = "us-central1",
    *,
    endpoint: str = "192.0.2.1",
    ca_pem: bytes = b"none",
    **more: Any,
) -> dict[str, Any]:
    """One in a list (GKE API v1, Cluster)."""
    authority = base64.b64encode(ca_pem).decode()
    return {
        "name": name,
        "location": location,
        "endpoint": endpoint,
        "masterAuth": {"clusterCaCertificate": authority},
        **more,
    }


@dataclass(slots=True)
class GkeServer(NotingServer[str]):
    """`async with GkeServer(authority) as server:` listens at `server.url` until the block ends; it notes the
    paths that it is asked for."""

    authority: Authority
    clusters: list[dict[str, Any]] = field(default_factory=list)
    """Those of PROJECT."""
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of projects and Cloud Run services, by the path that they are asked for at; others may not be read."""
    refusal: tuple[int, str] | None = None
    """Status and message of each answer instead."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the last request."""
    url: str = ""

    def tls(self) -> ssl.SSLContext:
        """What a client needs to trust it."""
        return ssl.create_default_context(cadata=self.authority.root_pem.decode())

    async def __aenter__(self) -> Self:
        pair = self.authority.issue(ip_addresses=["127.0.0.1"])
        self.url = f"https://127.0.0.1:{await self._listen(self._serve, tls=server_tls(pair))}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await received(reader)
        self.headers = request.headers
        await self._note(request.target)
        status, content = self._answer(request.target)
        writer.write(
            request.answer(status, json.dumps(content).encode(), ("content-type", "application/json"))
        )
        await writer.drain()

    def _answer(self, path: str) -> tuple[int, dict[str, Any]]:
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return _error(401, "Request had invalid authentication credentials.")
        if self.refusal is not None:
            return _error(*self.refusal)
        if path in self.labels:
            return 200, {"name": path, "labels": self.labels[path]}
        if _CLUSTERS.fullmatch(path) is None and path.startswith(("/v2/", "/v3/")):
            return _error(403, "The caller does not have permission")
        found = _CLUSTERS.fullmatch(path)
        if found is None or found[1] != PROJECT:
            return _error(404, "Requested entity was not found.")
        here = [one for one in self.clusters if found[2] in ("-", one["location"])]
        if not found[3]:
            return 200, {"clusters": here} if here else {}
        named = [one for one in here if one["name"] == found[3]]
        return (200, named[0]) if named else _error(404, f"Not found: clusters/{found[3]}.")


def _error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"code": status, "message": message}}


@dataclass(slots=True)
class Machine(NotingServer[str]):
    """The metadata server of a machine: `async with Machine() as machine:` listens on `machine.host`."""

    told: dict[str, str] = field(
        default_factory=lambda: {
            "project/project-id": PROJECT,
            "instance/region": "projects/123/regions/us-central1",
            "instance/service-accounts/default/email": f"k8s-demo@{PROJECT}.iam.gserviceaccount.com",
            "instance/service-accounts/default/token": json.dumps(
                {"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"}
            ),
        }
    )
    """Answers by what is asked for."""
    host: str = ""

    async def __aenter__(self) -> Self:
        self.host = f"127.0.0.1:{await self._listen(self._serve)}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await received(reader)
        what = request.target.removeprefix("/computeMetadata/v1/").partition("?")[0]
        await self._note(what)
        said = self.told.get(what) if request.headers.get("metadata-flavor") == "Google" else None
        status, body = (404, b"not found") if said is None else (200, said.encode())
        writer.write(request.answer(status, body, ("metadata-flavor", "Google")))
        await writer.drain()
