"""What servers of HTTP/1.1 have in common when a test plays them: reading a request, and their TLS."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

import h11

from shared.credentials.certificates.authority import KeyPair
from tests.support.metadata_server import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Received:
    """A whole request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: h11.Connection
    """Which the answer may be made with."""


async def received(reader: asyncio.StreamReader) -> Received:
    """The next request, once it is whole. Raises ConnectionError if the client leaves before."""
    connection = h11.Connection(h11.SERVER)
    head: h11.Request | None = None
    body = b""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode(): value.decode() for name, value in head.headers}
                return Received(head.method.decode(), head.target.decode(), headers, body, connection)
            else:
                raise ConnectionError("the client has gone")


def server_tls(own: KeyPair) -> ssl.SSLContext:
    """For a server with this certificate, which asks for none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.pem")
        file.write_bytes(own.certificate_pem + own.key_pem)
        context.load_cert_chain(file)
    return context
