"""A metadata server on loopback that tests can make slow, silent, wrong or absent.

Speaks real HTTP/1.1 through h11, checks what Google's checks (path, `Metadata-Flavor`) and keeps a list of
the requests that it saw.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qs, urlsplit

from tests.support.http1_server import PATIENCE_S as PATIENCE_S
from tests.support.http1_server import NotingServer, received
from tests.support.http1_server import listening as listening
from tests.support.network import closed_port as closed_port

IDENTITY_PATH = "/computeMetadata/v1/instance/service-accounts/default/identity"


def unsigned_token(**claims: object) -> str:
    """A JWT with these claims and a signature that nobody can verify."""
    header, payload = ({"alg": "RS256", "typ": "JWT"}, claims)
    parts = [json.dumps(part).encode() for part in (header, payload)] + [b"no real signature"]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says: an HTTP answer, or with `raw` just these bytes and the end."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What the server was asked."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]

    @property
    def audience(self) -> str:
        return self.query["audience"][0]


@dataclass(slots=True)
class MetadataServer(NotingServer[Request]):
    """`async with MetadataServer(answer) as server:` listens on `server.host` until the block ends."""

    answer: Callable[[Request], Answer]
    """Called for each request that the real server would serve; may be exchanged at any time."""

    host: str = ""
    """`127.0.0.1:PORT`, known once the block has begun."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """What it says of project and machine, by the path below /computeMetadata/v1/."""

    async def __aenter__(self) -> Self:
        self.host = f"127.0.0.1:{await self._listen(self._serve)}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await received(reader)
        url = urlsplit(asked.target)
        request = Request(url.path, parse_qs(url.query), asked.headers)
        await self._note(request)
        await self.gate.wait()
        answer = self._answer(request)
        if answer.raw is not None:
            writer.write(answer.raw)
        else:
            flavor = ("metadata-flavor", "Google")
            writer.write(asked.answer(answer.status, answer.body, flavor, *answer.headers))
        await writer.drain()

    def _answer(self, request: Request) -> Answer:
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(b"Missing Metadata-Flavor:Google header.", 403)
        if (text := self.texts.get(request.path.removeprefix("/computeMetadata/v1/"))) is not None:
            return Answer(text.encode())
        if request.path != IDENTITY_PATH:
            return Answer(b"not found", 404)
        return self.answer(request)
