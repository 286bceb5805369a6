"""The mTLS ends of apps that speak HTTP, Envoy (the real binary) and the built-in one, held to the same: who
comes in, what the app is told of its clients, and what clients are told when krun stops. The clients are
curl, gRPC's and Python's own."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import grpc
import hpack
import pytest
import websockets.asyncio.client
import websockets.asyncio.server
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from hyperframe.frame import Frame, HeadersFrame

from agent.config.settings import AppProtocol, Settings
from agent.mtls.client_certificate import forwarded
from agent.mtls.envoy import EnvoyProcess
from agent.mtls.envoy_bootstrap import bootstrap, secrets
from agent.mtls.envoy_http import HttpSettings
from agent.mtls.inbound import Inbound, InboundSettings
from agent.proxy.request_record import Record, RequestRecord
from agent.tunnels.request_bounds import BoundedRequests
from shared.address import Address
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.net.tls import certificate_folder
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId
from tests.agent.mtls.test_envoy import MOVED, NAMES, POLICIES, lets_in
from tests.support.attack_frames import PREFACE, settings
from tests.support.tcp_peer import PATIENCE_S, TcpServer
from tests.support.world import find_envoy, find_program

WORKLOAD = SpiffeId.of_workload("demo.local", "demo", "hello")
CALLER = SpiffeId.of_workload("demo.local", "demo", "client")
GUEST = SpiffeId.of_workload("demo.local", "demo", "guest")
STRANGER = SpiffeId.of_workload("demo.local", "other", "client")
FOREIGNER = SpiffeId.of_workload("other.local", "demo", "client")
ALLOWED = PeerPolicy(["spiffe://demo.local/ns/demo/sa/*"], [str(GUEST)])
FORGED = f"URI={WORKLOAD}"
PYTHON = ("http/1.1",)

Kind = Literal["envoy", "builtin"]
ENDS: tuple[Kind, ...] = ("envoy", "builtin")


@dataclass(slots=True)
class End:
    """An mTLS end, its clients' files, and what it has told."""

    kind: Kind
    address: Address
    authority: Authority
    folder: Path
    records: asyncio.Queue[Record]
    drain: Callable[[], Awaitable[None]]

    def files_of(self, identity: SpiffeId) -> Path:
        """A folder with certificate, key and roots of a client."""
        folder = self.folder / identity.path[1:].replace("/", "_") / identity.trust_domain
        self.authority.write(folder, self.authority.issue(identity))
        return folder

    def context(self, identity: SpiffeId = CALLER, alpn: Sequence[str] = PYTHON) -> ssl.SSLContext:
        """For a client of Python's own."""
        files = self.files_of(identity)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(files / "ca_certificates.pem")
        context.load_cert_chain(files / "certificates.pem", files / "private_key.pem")
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    async def curl(self, *arguments: str, identity: SpiffeId = CALLER, path: str = "/") -> str:
        """What curl prints."""
        return await self.curl_of(self.files_of(identity), *arguments, path=path)

    async def curl_of(self, files: Path, *arguments: str, path: str = "/") -> str:
        """Likewise, with the certificate in the folder `files`."""
        process = await asyncio.create_subprocess_exec(
            find_program("curl"),
            *("--silent", "--show-error", "--insecure", "--max-time", str(PATIENCE_S)),
            *("--cert", str(files / "certificates.pem"), "--key", str(files / "private_key.pem")),
            *arguments,
            f"https://{self.address}{path}",
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        return said.decode()

    async def record(self) -> Record:
        """The next."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.records.get()

    async def request_record(self) -> RequestRecord:
        """The next, which is of a request."""
        record = await self.record()
        assert isinstance(record, RequestRecord), record
        return record


@asynccontextmanager
async def end_for(
    kind: Kind, folder: Path, app: Address, protocol: AppProtocol, policy: PeerPolicy = ALLOWED
) -> AsyncIterator[End]:
    authority = Authority.create("demo.local")
    authority.write(folder / "certificates", authority.issue(WORKLOAD))
    records: asyncio.Queue[Record] = asyncio.Queue()
    running = envoy_for if kind == "envoy" else builtin_for
    async with running(folder, app, protocol, policy, records) as (address, drain):
        yield End(kind, address, authority, folder / "clients", records, drain)


Running = tuple[Address, Callable[[], Awaitable[None]]]


@asynccontextmanager
async def builtin_for(
    folder: Path, app: Address, protocol: AppProtocol, policy: PeerPolicy, records: asyncio.Queue[Record]
) -> AsyncIterator[Running]:
    files = certificate_folder.find(folder / "certificates")
    requests = BoundedRequests(
        Settings(app=app, app_protocol=protocol, request_log="all"), 1000, finished=records.put_nowait
    )
    inbound = Inbound(
        InboundSettings(
            listen=Address("127.0.0.1", 0),
            app=app,
            protocol=protocol,
            certificates=files.certificates,
            private_key=files.private_key,
            roots=files.roots,
            look_every_s=0,
        ),
        policy,
        records.put_nowait,
        serve=requests.serve,
    )
    await inbound.start()

    async def drain() -> None:
        inbound.drain()

    try:
        yield inbound.address, drain
    finally:
        requests.close()
        await inbound.close(0)


@asynccontextmanager
async def envoy_for(
    folder: Path, app: Address, protocol: AppProtocol, policy: PeerPolicy, records: asyncio.Queue[Record]
) -> AsyncIterator[Running]:
    binary = Path(find_envoy())
    told = bootstrap(
        listen=Address("127.0.0.1", 0),
        app=app,
        policy=policy,
        secrets_folder=folder / "envoy",
        connect_timeout_s=PATIENCE_S,
        http=HttpSettings(protocol, 0, "all"),
    )
    envoy = await EnvoyProcess.start(
        binary, told, secrets(folder / "certificates"), folder / "envoy", finished=records.put_nowait
    )
    try:
        await envoy.ready(PATIENCE_S)
        assert envoy.inbound is not None
        yield envoy.inbound, envoy.drain
    finally:
        await envoy.stop(PATIENCE_S)


async def _tell_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each request with its head, as JSON lines."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        body = json.dumps(head.decode("latin-1").split("\r\n")[:-2]).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nX-App: 1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    writer.close()


@pytest.fixture
async def app() -> AsyncIterator[Address]:
    server = await asyncio.start_server(_tell_headers, "127.0.0.1", 0)
    async with server:
        yield Address(*server.sockets[0].getsockname())


@pytest.fixture(params=ENDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Which end."""
    kind: Kind = request.param
    return kind


@pytest.fixture(params=["http1", "auto"])
async def inbound(
    request: pytest.FixtureRequest, kind: Kind, tmp_path: Path, app: Address
) -> AsyncIterator[End]:
    async with end_for(kind, tmp_path, app, request.param) as inbound:
        yield inbound


def told(answer: str, name: str) -> list[str]:
    """The values of a field that the app got."""
    fields = (line.partition(": ") for line in json.loads(answer)[1:])
    return [value for key, _, value in fields if key.lower() == name]


# What an app that speaks HTTP/1.1 gets.


async def test_the_app_is_told_who_calls_whatever_the_caller_says(inbound: End) -> None:
    header = ("--header", f"X-Forwarded-Client-Cert: {FORGED}")
    (certificate,) = told(await inbound.curl(*header), "x-forwarded-client-cert")
    assert f"URI={CALLER}" in certificate
    assert FORGED not in certificate
    assert f"By={WORKLOAD}" in certificate


async def test_fields_arrive_as_they_were_spelt_and_nothing_of_envoy_s(inbound: End) -> None:
    lines = json.loads(await inbound.curl("--http1.1", "--header", "X-Spelt-So: 1", path="/a%2Fb?c=d"))
    assert lines[0] == "GET /a%2Fb?c=d HTTP/1.1"
    # The built-in end has HTTP/2's names only, which are in lower case.
    assert ("X-Spelt-So: 1" if inbound.kind == "envoy" else "x-spelt-so: 1") in lines
    assert not [line for line in lines if line.lower().startswith(("x-envoy", "x-forwarded-for"))]


async def test_http2_of_a_client_becomes_the_app_s_http1(kind: Kind, tmp_path: Path, app: Address) -> None:
    async with end_for(kind, tmp_path, app, "http1") as inbound:
        _, writer = await asyncio.open_connection(*_host_port(inbound), ssl=inbound.context(alpn=["h2"]))
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()
        # Without ALPN it is the first bytes that tell.
        said = await inbound.curl("--no-alpn", "--http2-prior-knowledge", "--write-out", " %{http_version}")
        assert said.startswith('["GET / HTTP/1.1"') and said.endswith(" 2")


def _host_port(inbound: End) -> tuple[str, int]:
    return inbound.address.host, inbound.address.port


async def test_a_request_has_a_record_without_its_query(inbound: End) -> None:
    await inbound.curl("--data", "12345", "--header", "X-Request-Id: 4711", path="/a?secret=1")
    record = await inbound.request_record()
    assert (record.method, record.path, record.status, record.error) == ("POST", "/a", 200, None)
    assert (record.identity, record.authority) == (str(CALLER), str(inbound.address))
    assert (record.request_id, record.sent_bytes, record.flag) == ("4711", 5, "-")


@pytest.mark.parametrize("identity", [GUEST, STRANGER, FOREIGNER], ids=str)
async def test_a_peer_that_may_not_come_in_does_not(inbound: End, identity: SpiffeId) -> None:
    said = await inbound.curl("--write-out", " %{http_code}", identity=identity)
    if inbound.kind == "envoy":
        assert said == "RBAC: access denied 403"
        record: Record = await inbound.request_record()
    else:
        assert said == " 000"
        record = await inbound.record()
    assert record.flag == "DENY"
    assert str(identity) in str(record.error)


@pytest.mark.parametrize(("allow", "deny"), POLICIES, ids=["glob", "deny", "both"])
async def test_its_verdicts_are_ours(
    tmp_path: Path, app: Address, allow: tuple[str, ...], deny: tuple[str, ...]
) -> None:
    policy = PeerPolicy(allow, deny, MOVED)
    async with end_for("envoy", tmp_path, app, "http1", policy) as inbound:
        for identity in NAMES:
            client = http.client.HTTPSConnection(*_host_port(inbound), context=inbound.context(identity))

            def status(client: http.client.HTTPSConnection = client) -> int:
                client.request("GET", "/")
                return client.getresponse().status

            found = await asyncio.to_thread(status)
            client.close()
            assert found == (200 if lets_in(policy, identity) else 403), identity


async def test_strangers_do_not_come_so_far(inbound: End, tmp_path: Path) -> None:
    """Without a certificate, or with one of another authority, the handshake fails."""
    inbound.authority = Authority.create("demo.local")
    said = await inbound.curl("--write-out", "%{http_code}")
    assert said == "000"
    record = await inbound.record()
    assert not isinstance(record, RequestRecord)
    assert (record.flag, record.identity) == ("TLS_FAILURE", "")


async def test_an_app_that_is_away_is_named(kind: Kind, tmp_path: Path) -> None:
    async with end_for(kind, tmp_path, Address("127.0.0.1", 9), "http1") as inbound:
        assert (await inbound.curl("--output", "/dev/null", "--write-out", "%{http_code}")) == "503"
        record = await inbound.request_record()
        assert record.flag == "CONNECT"
        reason = "the app cannot be connected: " if kind == "envoy" else "app at 127.0.0.1:9: "
        assert str(record.error).startswith(reason)


async def test_a_websocket(kind: Kind, tmp_path: Path) -> None:
    async def echo(connection: websockets.asyncio.server.ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async with websockets.asyncio.server.serve(echo, "127.0.0.1", 0) as server:
        app = Address(*next(iter(server.sockets)).getsockname()[:2])
        async with (
            end_for(kind, tmp_path, app, "auto") as inbound,
            websockets.asyncio.client.connect(
                f"wss://{inbound.address}/", ssl=inbound.context(), proxy=None
            ) as client,
        ):
            await client.send("hello")
            async with asyncio.timeout(PATIENCE_S):
                assert await client.recv() == "hello"


async def test_nobody_gets_a_tunnel_by_connect(inbound: End) -> None:
    """An app that knows CONNECT would take what follows for anything, a forged header included."""
    reader, writer = await asyncio.open_connection(*_host_port(inbound), ssl=inbound.context())
    writer.write(b"CONNECT db:80 HTTP/1.1\r\nHost: db:80\r\n\r\n")
    refusal = "404" if inbound.kind == "envoy" else "405"
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).split()[1] == refusal.encode()
    writer.close()
    reader, writer = await asyncio.open_connection(*_host_port(inbound), ssl=inbound.context(alpn=["h2"]))
    block = hpack.Encoder().encode([(":method", "CONNECT"), (":authority", "db:80")])
    writer.write(PREFACE + settings({}) + HeadersFrame(1, block, flags=["END_HEADERS"]).serialize())
    async with asyncio.timeout(PATIENCE_S):
        assert await _status(reader) == refusal
    writer.close()


async def _status(reader: asyncio.StreamReader) -> str:
    """Of the first answer on an HTTP/2 connection."""
    while True:
        frame, length = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
        body = await reader.readexactly(length)
        if isinstance(frame, HeadersFrame):
            frame.parse_body(memoryview(body))
            return dict(hpack.Decoder().decode(frame.data, raw=True))[b":status"].decode()


# Bodies, and clients that leave.


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a request with its body, while that comes."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % length)
    left = int(length)
    while left and (data := await reader.read(min(left, 1 << 16))):
        writer.write(data)
        await writer.drain()
        left -= len(data)
    writer.close()


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_bodies_pass_both_ways_at_once(kind: Kind, tmp_path: Path, version: str) -> None:
    sent, came = tmp_path / "sent", tmp_path / "came"
    sent.write_bytes(os.urandom(16 << 20))
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    app = Address(*server.sockets[0].getsockname())
    async with server, end_for(kind, tmp_path, app, "http1") as inbound:
        arguments = ("--header", "Expect:", "--output", str(came), "--write-out", "%{http_version}")
        spoken = ("--http1.1",) if version == "1.1" else ("--no-alpn", "--http2-prior-knowledge")
        said = await inbound.curl(*spoken, "--data-binary", f"@{sent}", *arguments)
        assert said == version
        assert came.read_bytes() == sent.read_bytes()
        record = await inbound.request_record()
        assert (record.sent_bytes, record.received_bytes) == (16 << 20, 16 << 20)


async def test_an_app_learns_that_its_client_has_left(kind: Kind, tmp_path: Path) -> None:
    async with (
        TcpServer.listening() as server,
        end_for(kind, tmp_path, Address("127.0.0.1", server.port), "http1") as inbound,
    ):
        _, writer = await asyncio.open_connection(*_host_port(inbound), ssl=inbound.context())
        writer.write(b"GET /events HTTP/1.1\r\nHost: hello\r\n\r\n")
        app = await server.accept()
        await app.read_until(b"\r\n\r\n")
        writer.close()
        await app.was_reset()  # or ended: it gets no further byte in any case
        record = await inbound.request_record()
        assert (record.flag, record.path) == ("DOWNSTREAM_RESET", "/events")


async def test_the_app_s_word_is_the_client_s_certificate(tmp_path: Path, app: Address) -> None:
    """What the built-in end says of odd names is what Envoy says."""
    async with end_for("envoy", tmp_path, app, "http1") as inbound:
        odd = inbound.files_of(CALLER)
        key = ec.generate_private_key(ec.SECP256R1())
        root = inbound.authority.root
        names = [x509.UniformResourceIdentifier(str(CALLER)), x509.DNSName("a.demo"), x509.DNSName("b.demo")]
        subject = [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, 'Acme, "Inc"; x=y\\z'),
            x509.NameAttribute(NameOID.COMMON_NAME, "client"),
        ]
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder(root.subject, x509.Name(subject), key.public_key(), 4711)
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(minutes=9))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(inbound.authority.key, hashes.SHA256())
        )
        (odd / "certificates.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (odd / "private_key.pem").write_bytes(private)
        said = await inbound.curl_of(odd)
        own = x509.load_pem_x509_certificate((tmp_path / "certificates" / "certificates.pem").read_bytes())
        ours = forwarded(certificate.public_bytes(Encoding.DER), own.public_bytes(Encoding.DER))
        assert told(said, "x-forwarded-client-cert") == [ours.decode()]


# gRPC, whose apps speak h2c.


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        metadata = dict(details.invocation_metadata)

        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            context.set_trailing_metadata((("x-end", "1"),))
            return str(metadata["x-forwarded-client-cert"]).encode() + b" " + request

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.parametrize("protocol", ["h2c", "auto"])
async def test_grpc(kind: Kind, tmp_path: Path, protocol: AppProtocol) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    app = Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    async with end_for(kind, tmp_path, app, protocol) as inbound:
        key: KeyPair = inbound.authority.issue(CALLER, dns_names=["hello"])
        credentials = grpc.ssl_channel_credentials(
            inbound.authority.root_pem, key.key_pem, key.certificate_pem
        )
        inbound.authority.write(
            tmp_path / "certificates", inbound.authority.issue(WORKLOAD, dns_names=["hello"])
        )
        options = (("grpc.ssl_target_name_override", "hello"),)
        async with grpc.aio.secure_channel(str(inbound.address), credentials, options=options) as channel:
            call = channel.unary_unary("/echo.Echo/Say")(b"hi", timeout=PATIENCE_S, wait_for_ready=True)
            said = await call
            assert f"URI={CALLER}".encode() in said and said.endswith(b" hi")
            assert dict(await call.trailing_metadata())["x-end"] == "1"
    await server.stop(None)


# An app of which nobody has said what it speaks.


async def test_what_offers_no_http_is_passed_on_unread(kind: Kind, tmp_path: Path) -> None:
    """The app speaks first, before its client has said a word."""
    async with (
        TcpServer.listening() as server,
        end_for(kind, tmp_path, Address("127.0.0.1", server.port), "auto") as inbound,
    ):
        for offered in ((), ("istio-peer-exchange", "istio")):
            context = inbound.context(alpn=offered)
            reader, writer = await asyncio.open_connection(*_host_port(inbound), ssl=context)
            app = await server.accept()
            await app.send(b"220 ready\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.readline() == b"220 ready\r\n"
            writer.close()
            app.end()
            record = await inbound.record()
            assert not isinstance(record, RequestRecord)
            assert (record.identity, record.received_bytes) == (str(CALLER), 11)


# Its end.


async def test_a_drain_tells_clients_to_go_elsewhere(inbound: End) -> None:
    client = http.client.HTTPSConnection(*_host_port(inbound), context=inbound.context())

    def get() -> str | None:
        client.request("GET", "/")
        answer = client.getresponse()
        answer.read()
        return answer.getheader("connection")

    assert await asyncio.to_thread(get) is None
    await inbound.drain()
    assert await asyncio.to_thread(get) == "close"
    client.close()
