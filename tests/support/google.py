"""Google's token services on loopback sockets, for minters to be tested against.

TLS by the tests' own authority, for all but the metadata server. Any of them can be told not to answer.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from shared.credentials.certificates.authority import Authority
from shared.credentials.token_sources.token_settings import TokenSettings
from tests.support.google_services import Asked, GoogleServices, service_of
from tests.support.http1_server import NotingServer, received, server_tls


@dataclass(slots=True)
class Google(GoogleServices, NotingServer[Asked]):
    """`async with Google() as google:` serves until the block ends."""

    closed: set[str] = field(default_factory=set)
    """Services that read the request and do not answer, until the block ends."""

    authority: Authority = field(default_factory=lambda: Authority.create("google.test"))
    metadata_host: str = ""
    _end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self.metadata_host = f"127.0.0.1:{await self._listen(self._serve)}"
        tls = server_tls(self.authority.issue(ip_addresses=["127.0.0.1"]))
        self.url = f"https://127.0.0.1:{await self._listen(self._serve, tls=tls)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end.set()
        await NotingServer.__aexit__(self)

    @property
    def tls(self) -> ssl.SSLContext:
        """Trusts the services."""
        return ssl.create_default_context(cadata=self.authority.root_pem.decode())

    @property
    def plain_url(self) -> str:
        """The same services without TLS, for programs that cannot be told whom to trust."""
        return f"http://{self.metadata_host}"

    def settings(self, **changes: Any) -> TokenSettings:
        """Settings that lead to these services, as the GKE cluster `clu` has them."""
        given: dict[str, Any] = {
            "metadata_host": self.metadata_host,
            "sts_url": f"{self.url}/v1/token",
            "iam_url": self.url,
            "oauth_url": f"{self.url}/token",
            "project_id": "proj",
            "project_number": "42",
            "cluster_name": "clu",
            "cluster_location": "loc",
        }
        return TokenSettings(**(given | changes))

    def asked(self, service: str) -> list[Asked]:
        """The requests that a service has had."""
        return [request for request in self.requests if request.service == service]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await received(reader)
        url = urlsplit(asked.target)
        request = Asked(service_of(url.path), url.path, asked.headers, asked.body, parse_qs(url.query))
        await self._note(request)
        if request.service in self.closed:
            await self._end.wait()
            return
        answer = self.answer(request)
        raw = answer.raw
        writer.write(raw if raw is not None else asked.answer(answer.status, answer.body, *answer.headers))
        await writer.drain()
