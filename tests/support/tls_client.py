"""A TLS client that can do what a mesh client may and what it should not: end one direction, cut off, send
nonsense.

pyOpenSSL, because Python's own ssl module cannot end one direction of a connection. Every wait has a deadline
that only a failing test reaches.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from OpenSSL import SSL
from OpenSSL.crypto import X509

from shared.address import Address
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.legs.tcp_end import reset
from tests.support.tcp_peer import PATIENCE_S as PATIENCE_S

T = TypeVar("T")

VERSIONS = {"tls12": SSL.TLS1_2_VERSION, "tls13": SSL.TLS1_3_VERSION}
"""What the mesh speaks, by a name for test IDs."""


def client_context(
    authority: Authority,
    certificate: KeyPair | None,
    *,
    version: int = SSL.TLS1_3_VERSION,
    suites: str = "",
    alpn: tuple[bytes, ...] = (),
) -> SSL.Context:
    """For a client that shows `certificate`, if any, and trusts `authority`."""
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(version)
    context.set_max_proto_version(version)
    if suites:
        context.set_tls13_ciphersuites(suites.encode())
    if alpn:
        context.set_alpn_protos(list(alpn))
    if certificate is not None:
        key = serialization.load_pem_private_key(certificate.key_pem, None)
        context.use_certificate(x509.load_pem_x509_certificate(certificate.certificate_pem))
        context.use_privatekey(key)  # type: ignore[arg-type]  # an EC key, as the authority makes them
    store = context.get_cert_store()
    assert store is not None
    store.add_cert(X509.from_cryptography(authority.root))
    context.set_verify(SSL.VERIFY_PEER)
    return context


@contextmanager
def blocking(
    context: SSL.Context, address: Address, server_name: str = "", *, patience_s: int = PATIENCE_S
) -> Iterator[SSL.Connection]:
    """A connection for a thread, its handshake done; every read and write ends after `patience_s` seconds."""
    with socket.create_connection((address.host, address.port)) as plain:
        plain.settimeout(None)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            plain.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", patience_s, 0))
        connection = SSL.Connection(context, plain)
        if server_name:
            connection.set_tlsext_host_name(server_name.encode())
        connection.set_connect_state()
        connection.do_handshake()
        yield connection


def read_to_the_end(connection: SSL.Connection) -> bytes:
    """All that the peer of a `blocking` connection sends up to its close_notify."""
    received = bytearray()
    while True:
        try:
            received += connection.recv(READ_BYTES)
        except SSL.ZeroReturnError:
            return bytes(received)


def reason(error: SSL.Error) -> str:
    """Why OpenSSL failed; of an alert by the peer it contains the name."""
    return str(error.args[0][0][-1])


class TlsClient:
    """A TLS connection over asyncio's streams."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: SSL.Context
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.tls = SSL.Connection(context, None)
        self.tls.set_connect_state()
        self._stuck = asyncio.Event()

    @classmethod
    async def connect(cls, port: int, context: SSL.Context) -> TlsClient:
        """Connects to a loopback port and says nothing yet."""
        async with asyncio.timeout(PATIENCE_S):
            return cls(*await asyncio.open_connection("127.0.0.1", port), context)

    async def shake(self) -> None:
        """Completes the handshake, as far as the client can tell."""
        await self._until_done(self.tls.do_handshake)

    # What goes out.

    def send(self, data: bytes) -> None:
        """Sends `data` as the other end takes it."""
        self.tls.sendall(data)
        self.flush()

    async def send_all(self, data: bytes) -> None:
        """Sends `data`, and waits while the other end does not read."""
        for start in range(0, len(data), READ_BYTES):
            self.send(data[start : start + READ_BYTES])
            await asyncio.sleep(0)  # uvloop may write at the end of the loop's turn only
            if self.writer.transport.get_write_buffer_size():
                self._stuck.set()
            await self.writer.drain()

    async def until_stuck(self) -> None:
        """Waits until `send_all` finds the kernel's buffers full."""
        async with asyncio.timeout(PATIENCE_S):
            await self._stuck.wait()

    def end(self) -> None:
        """Sends close_notify, without FIN."""
        self.tls.shutdown()
        self.flush()

    def cut(self) -> None:
        """Sends FIN, without close_notify."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Sends RST."""
        reset(cast(asyncio.Transport, self.writer.transport))

    def flush(self) -> None:
        """Sends what OpenSSL has written."""
        try:
            while True:
                self.writer.write(self.tls.bio_read(READ_BYTES))
        except SSL.WantReadError:
            pass

    # What comes in.

    async def receive(self) -> bytes:
        """Some plaintext; b"" is close_notify. Raises EOFError for FIN alone, SSL.Error for an alert."""
        try:
            return await self._until_done(lambda: self.tls.recv(READ_BYTES))
        except SSL.ZeroReturnError:
            return b""

    async def receive_all(self) -> bytes:
        """All plaintext up to close_notify."""
        data = bytearray()
        while piece := await self.receive():
            data += piece
        return bytes(data)

    async def fin(self) -> None:
        """Waits for FIN. The server's end knows by then that the connection is gone."""
        async with asyncio.timeout(PATIENCE_S):
            assert await self.reader.read() == b""

    async def _until_done(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except SSL.WantReadError:
                self.flush()
                async with asyncio.timeout(PATIENCE_S):
                    data = await self.reader.read(READ_BYTES)
                if not data:
                    raise EOFError("FIN without close_notify") from None
                self.tls.bio_write(data)
            else:
                self.flush()
                return result
