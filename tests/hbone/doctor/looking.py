"""What the tests of `hbone doctor` start from: certificates, servers with a fault each, the walk itself."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hbone import arguments
from hbone.doctor import container_path, gateway_path
from hbone.doctor.gateway_path import MeshClient
from shared.address import Address
from shared.doctor.service_path import Deadlines
from shared.doctor.walk import Report
from shared.net.names import resolver
from shared.net.names.resolver import Resolver
from shared.tasks import spawn
from tests.hbone.cloudrun.world import HOST, URL, Credentials
from tests.support.http2_peer import PeerStream, Service
from tests.support.name_server import NameServer, name_server
from tests.support.network import free_port
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer
from tests.support.world import find_program

PATIENT = Deadlines(20.0, 20.0)
"""For what answers: reached only by a test that fails."""

HASTY = Deadlines(0.5, 0.5)
"""For what never answers."""

NAME = "hello.example"


@dataclass(frozen=True, slots=True)
class Bench:
    """What one look starts from."""

    folder: Path
    credentials: Credentials
    """Of the stand-in: its certificate is for `HOST`."""

    async def look(
        self,
        url: str,
        *flags: object,
        environ: Mapping[str, str] | None = None,
        deadlines: Deadlines = PATIENT,
    ) -> Report:
        """`hbone doctor URL FLAGS` in this process."""
        options = arguments.command_parser("doctor").parse_args([url, *map(str, flags)])
        return await container_path.examine(options.url, options, environ or {}, deadlines)

    async def through(
        self, port: int, sni: str = NAME, deadlines: Deadlines = PATIENT, **client: Path
    ) -> Report:
        """`hbone doctor --gateway` to a loopback port."""
        told = {"certificates": None, "key": None, "roots": None, "peer": None, **client}
        mesh_client = MeshClient(Address("127.0.0.1", port), sni, **told)  # type: ignore[arg-type]
        return await gateway_path.examine(mesh_client, deadlines.hop_s)

    def token(self, audience: str = URL, *, lifetime_s: float = 3600, by: Credentials | None = None) -> Path:
        """A token in a file."""
        file = self.folder / "token"
        file.write_text((by or self.credentials).token(audience, lifetime_s=lifetime_s))
        return file

    async def at_front_end(
        self, port: int, *flags: object, path: str = "/_hbone/22", deadlines: Deadlines = PATIENT
    ) -> Report:
        """A look at the service behind a front end with the stand-in's certificate, with a token."""
        flags = flags or ("--token-file", self.token())
        ca = self.credentials.folder / "ca.pem"
        return await self.look(
            f"{URL}{path}", "--connect", f"127.0.0.1:{port}", "--ca", ca, *flags, deadlines=deadlines
        )


def server_tls(credentials: Credentials, *alpn: str) -> ssl.SSLContext:
    """A server with the stand-in's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.folder / "cert.pem", credentials.folder / "key.pem")
    context.set_alpn_protocols(list(alpn or ("h2",)))
    return context


@asynccontextmanager
async def tls_server(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that says nothing once TLS is done; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(100)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def s_server(credentials: Credentials, *flags: str) -> AsyncIterator[int]:
    """OpenSSL's server with the stand-in's certificate, which says in an alert what it does not like, as the
    event loops' servers do not; its port."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(find_program("openssl"), "s_server", "-accept", f"127.0.0.1:{port}", "-naccept", "1"),
        *("-cert", str(credentials.folder / "cert.pem"), "-key", str(credentials.folder / "key.pem")),
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readuntil(b"ACCEPT")
        yield port
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def odd_certificate(
    folder: Path,
    name: str = HOST,
    *,
    from_days: float = -1,
    to_days: float = 1,
    for_clients: bool = False,
) -> tuple[ssl.SSLContext, Path]:
    """A server's context whose certificate is for `name`, valid in these days from now; and the CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "odd")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    use = ExtendedKeyUsageOID.CLIENT_AUTH if for_clients else ExtendedKeyUsageOID.SERVER_AUTH

    def built(subject: x509.Name, starts: datetime, ends: datetime, *, is_ca: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(starts)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        )
        if not is_ca:
            names = x509.SubjectAlternativeName([x509.DNSName(name)])
            builder = builder.add_extension(names, critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        return builder.sign(key, hashes.SHA256())

    leaf = built(subject, now + timedelta(days=from_days), now + timedelta(days=to_days), is_ca=False)
    root = built(issuer, now - timedelta(days=100), now + timedelta(days=100), is_ca=True)
    files = folder / "odd.pem", folder / "odd-key.pem", folder / "odd-ca.pem"
    pem = serialization.Encoding.PEM
    files[0].write_bytes(leaf.public_bytes(pem))
    files[1].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    files[2].write_bytes(root.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[0], files[1])
    context.set_alpn_protocols(["h2"])
    return context, files[2]


@asynccontextmanager
async def says(*pages: tuple[int, Sequence[tuple[bytes, bytes]], bytes]) -> AsyncIterator[int]:
    """A service without TLS that answers its requests so, one after the other; its port."""
    async with Service.listening() as service:

        async def serve() -> None:
            for status, headers, body in pages:
                stream = await service.request()
                stream.respond(status, headers)
                await stream.send(body)
                stream.end()

        serving = spawn(serve(), name="play")
        try:
            yield service.port
        finally:
            serving.cancel()


HTML = ((b"content-type", b"text/html; charset=UTF-8"), (b"server", b"Google Frontend"))


@asynccontextmanager
async def behind(do: Callable[[PeerStream], None]) -> AsyncIterator[int]:
    """A service without TLS that does so with its first request; its port."""
    async with Service.listening() as service:

        async def serve() -> None:
            do(await service.request())

        serving = spawn(serve(), name="play")
        try:
            yield service.port
        finally:
            serving.cancel()


@asynccontextmanager
async def tcp(do: Callable[[TcpPeer], None]) -> AsyncIterator[int]:
    """A port that does so with its first connection."""
    async with TcpServer.listening() as server:

        async def serve() -> None:
            do(await server.accept())

        serving = spawn(serve(), name="play")
        try:
            yield server.port
        finally:
            serving.cancel()


@asynccontextmanager
async def dns() -> AsyncIterator[NameServer]:
    """The name server of everything that this event loop looks up."""
    async with name_server() as server:
        loop = asyncio.get_running_loop()
        resolver._resolvers[loop] = Resolver([f"127.0.0.1:{server.port}"])
        try:
            yield server
        finally:
            del resolver._resolvers[loop]
