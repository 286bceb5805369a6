"""An issuer's server of JSON Web Key Sets on loopback, which tests can make slow, wrong or absent."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.trust.jwt_check import Issuer
from tests.support.http1_server import listening


class KeyServer:
    """A server of key sets, which answers what it is told."""

    def __init__(self, *issuers: Issuer) -> None:
        self.issuers = list(issuers)
        self.asked = 0
        self.answer: bytes | None = None
        """Instead of the keys, head included."""
        self.cache_control = ""
        self.age = ""
        self.gate = asyncio.Event()
        """Answers wait for it."""
        self.gate.set()
        self.url = ""
        self.tls: ssl.SSLContext | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        await self.gate.wait()
        keys = [key for issuer in self.issuers for key in issuer.jwks()["keys"]]
        body = json.dumps({"keys": keys}).encode()
        head = (
            f"HTTP/1.1 200 OK\r\ncache-control: {self.cache_control}\r\nage: {self.age}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(self.answer if self.answer is not None else head.encode() + body)


@asynccontextmanager
async def served(*issuers: Issuer) -> AsyncIterator[KeyServer]:
    keys = KeyServer(*issuers)
    async with listening(keys.serve) as port:
        keys.url = f"http://127.0.0.1:{port}/certs"
        yield keys
