"""Google's token services on loopback sockets, for minters to be tested against.

TLS by the tests' own authority, for all but the metadata server. Any of them can be told not to answer.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import h11

from shared.credentials.certificates.authority import Authority
from shared.credentials.token_sources.token_settings import TokenSettings
from tests.support.google_services import Asked, GoogleServices, service_of
from tests.support.http1_server import received, server_tls
from tests.support.metadata_server import PATIENCE_S, listening


@dataclass(slots=True)
class Google(GoogleServices):
    """`async with Google() as google:` serves until the block ends."""

    requests: list[Asked] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)
    """Services that read the request and do not answer, until the block ends."""

    authority: Authority = field(default_factory=lambda: Authority.create("google.test"))
    metadata_host: str = ""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _block: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        plain = await self._block.enter_async_context(listening(self._serve))
        self.metadata_host = f"127.0.0.1:{plain}"
        tls = server_tls(self.authority.issue(ip_addresses=["127.0.0.1"]))
        port = await self._block.enter_async_context(listening(self._serve, tls=tls))
        self.url = f"https://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end.set()
        await self._block.aclose()

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

    async def seen(self, count: int) -> None:
        """Returns when `count` requests have come in altogether."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await received(reader)
        url = urlsplit(asked.target)
        request = Asked(service_of(url.path), url.path, asked.headers, asked.body, parse_qs(url.query))
        async with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        if request.service in self.closed:
            await self._end.wait()
            return
        answer = self.answer(request)
        if answer.raw is not None:
            writer.write(answer.raw)
        else:
            fields = [("content-length", str(len(answer.body))), *answer.headers]
            for part in (
                h11.Response(status_code=answer.status, headers=fields),
                h11.Data(data=answer.body),
                h11.EndOfMessage(),
            ):
                writer.write(asked.connection.send(part) or b"")
        await writer.drain()
