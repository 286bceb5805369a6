"""Envoy as the mTLS end of apps that speak HTTP, with the real binary: who comes in, what the app is told of
its clients, and what clients are told when krun stops. The clients are curl, gRPC's and Python's own."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import websockets.asyncio.client
import websockets.asyncio.server

from agent.config.settings import AppProtocol
from agent.mtls.envoy import EnvoyProcess
from agent.mtls.envoy_bootstrap import bootstrap, secrets
from agent.mtls.envoy_http import HttpSettings
from agent.mtls.envoy_records import Record, RequestRecord
from shared.address import Address
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId
from tests.agent.mtls.test_envoy import MOVED, NAMES, POLICIES, lets_in
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


@dataclass(slots=True)
class Inbound:
    """An Envoy, its clients' files, and what it has told."""

    envoy: EnvoyProcess
    authority: Authority
    folder: Path
    records: asyncio.Queue[Record]

    @property
    def address(self) -> Address:
        assert self.envoy.inbound is not None
        return self.envoy.inbound

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
        files = self.files_of(identity)
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
async def envoy_for(
    folder: Path, app: Address, protocol: AppProtocol, policy: PeerPolicy = ALLOWED
) -> AsyncIterator[Inbound]:
    binary = Path(find_envoy())
    authority = Authority.create("demo.local")
    authority.write(folder / "certificates", authority.issue(WORKLOAD))
    told = bootstrap(
        listen=Address("127.0.0.1", 0),
        app=app,
        policy=policy,
        secrets_folder=folder / "envoy",
        connect_timeout_s=PATIENCE_S,
        http=HttpSettings(protocol, 0, "all"),
    )
    records: asyncio.Queue[Record] = asyncio.Queue()
    envoy = await EnvoyProcess.start(
        binary, told, secrets(folder / "certificates"), folder / "envoy", finished=records.put_nowait
    )
    try:
        await envoy.ready(PATIENCE_S)
        yield Inbound(envoy, authority, folder / "clients", records)
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


@pytest.fixture(params=["http1", "auto"])
async def inbound(request: pytest.FixtureRequest, tmp_path: Path, app: Address) -> AsyncIterator[Inbound]:
    async with envoy_for(tmp_path, app, request.param) as inbound:
        yield inbound


def told(answer: str, name: str) -> list[str]:
    """The values of a field that the app got."""
    fields = (line.partition(": ") for line in json.loads(answer)[1:])
    return [value for key, _, value in fields if key.lower() == name]


# What an app that speaks HTTP/1.1 gets.


async def test_the_app_is_told_who_calls_whatever_the_caller_says(inbound: Inbound) -> None:
    header = ("--header", f"X-Forwarded-Client-Cert: {FORGED}")
    (certificate,) = told(await inbound.curl(*header), "x-forwarded-client-cert")
    assert f"URI={CALLER}" in certificate
    assert FORGED not in certificate
    assert f"By={WORKLOAD}" in certificate


async def test_fields_arrive_as_they_were_spelt_and_nothing_of_envoy_s(inbound: Inbound) -> None:
    lines = json.loads(await inbound.curl("--http1.1", "--header", "X-Spelt-So: 1", path="/a%2Fb?c=d"))
    assert lines[0] == "GET /a%2Fb?c=d HTTP/1.1"
    assert "X-Spelt-So: 1" in lines
    assert not [line for line in lines if line.lower().startswith(("x-envoy", "x-forwarded-for"))]


async def test_http2_of_a_client_becomes_the_app_s_http1(tmp_path: Path, app: Address) -> None:
    async with envoy_for(tmp_path, app, "http1") as inbound:
        _, writer = await asyncio.open_connection(*_host_port(inbound), ssl=inbound.context(alpn=["h2"]))
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()
        # Without ALPN it is the first bytes that tell.
        said = await inbound.curl("--no-alpn", "--http2-prior-knowledge", "--write-out", " %{http_version}")
        assert said.startswith('["GET / HTTP/1.1"') and said.endswith(" 2")


def _host_port(inbound: Inbound) -> tuple[str, int]:
    return inbound.address.host, inbound.address.port


async def test_a_request_has_a_record_without_its_query(inbound: Inbound) -> None:
    await inbound.curl("--data", "12345", "--header", "X-Request-Id: 4711", path="/a?secret=1")
    record = await inbound.request_record()
    assert (record.method, record.path, record.status, record.error) == ("POST", "/a", 200, None)
    assert (record.identity, record.authority) == (str(CALLER), str(inbound.address))
    assert (record.request_id, record.sent_bytes, record.flag) == ("4711", 5, "-")


@pytest.mark.parametrize("identity", [GUEST, STRANGER, FOREIGNER], ids=str)
async def test_a_peer_that_may_not_come_in_gets_403(inbound: Inbound, identity: SpiffeId) -> None:
    said = await inbound.curl("--write-out", " %{http_code}", identity=identity)
    assert said == "RBAC: access denied 403"
    record = await inbound.request_record()
    assert record.flag == "DENY"
    assert record.app is None
    assert str(identity) in str(record.error)


@pytest.mark.parametrize(("allow", "deny"), POLICIES, ids=["glob", "deny", "both"])
async def test_its_verdicts_are_ours(
    tmp_path: Path, app: Address, allow: tuple[str, ...], deny: tuple[str, ...]
) -> None:
    policy = PeerPolicy(allow, deny, MOVED)
    async with envoy_for(tmp_path, app, "http1", policy) as inbound:
        for identity in NAMES:
            client = http.client.HTTPSConnection(*_host_port(inbound), context=inbound.context(identity))

            def status(client: http.client.HTTPSConnection = client) -> int:
                client.request("GET", "/")
                return client.getresponse().status

            found = await asyncio.to_thread(status)
            client.close()
            assert found == (200 if lets_in(policy, identity) else 403), identity


async def test_strangers_do_not_come_so_far(inbound: Inbound, tmp_path: Path) -> None:
    """Without a certificate, or with one of another authority, the handshake fails."""
    inbound.authority = Authority.create("demo.local")
    said = await inbound.curl("--write-out", "%{http_code}")
    assert said == "000"
    record = await inbound.record()
    assert not isinstance(record, RequestRecord)
    assert (record.flag, record.identity) == ("TLS_FAILURE", "")


async def test_an_app_that_is_away_is_named(tmp_path: Path) -> None:
    async with envoy_for(tmp_path, Address("127.0.0.1", 9), "http1") as inbound:
        assert (await inbound.curl("--output", "/dev/null", "--write-out", "%{http_code}")) == "503"
        record = await inbound.request_record()
        assert record.flag == "CONNECT"
        assert str(record.error).startswith("the app cannot be connected: ")


async def test_a_websocket(tmp_path: Path) -> None:
    async def echo(connection: websockets.asyncio.server.ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async with websockets.asyncio.server.serve(echo, "127.0.0.1", 0) as server:
        app = Address(*next(iter(server.sockets)).getsockname()[:2])
        async with (
            envoy_for(tmp_path, app, "auto") as inbound,
            websockets.asyncio.client.connect(
                f"wss://{inbound.address}/", ssl=inbound.context(), proxy=None
            ) as client,
        ):
            await client.send("hello")
            async with asyncio.timeout(PATIENCE_S):
                assert await client.recv() == "hello"


# gRPC, whose apps speak h2c.


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        metadata = dict(details.invocation_metadata)

        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            context.set_trailing_metadata((("x-end", "1"),))
            return str(metadata["x-forwarded-client-cert"]).encode() + b" " + request

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.parametrize("protocol", ["h2c", "auto"])
async def test_grpc(tmp_path: Path, protocol: AppProtocol) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    app = Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    async with envoy_for(tmp_path, app, protocol) as inbound:
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


async def test_what_offers_no_http_is_passed_on_unread(tmp_path: Path) -> None:
    """The app speaks first, before its client has said a word."""
    async with (
        TcpServer.listening() as server,
        envoy_for(tmp_path, Address("127.0.0.1", server.port), "auto") as inbound,
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


async def test_a_drain_tells_clients_to_go_elsewhere(inbound: Inbound) -> None:
    client = http.client.HTTPSConnection(*_host_port(inbound), context=inbound.context())

    def get() -> str | None:
        client.request("GET", "/")
        answer = client.getresponse()
        answer.read()
        return answer.getheader("connection")

    assert await asyncio.to_thread(get) is None
    await inbound.envoy.drain()
    assert await asyncio.to_thread(get) == "close"
    client.close()


async def test_its_configuration_can_be_kept_for_whoever_looks_for_a_fault(
    inbound: Inbound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = inbound.envoy.save_configuration()
    kept = await asyncio.to_thread(Path(said.removeprefix("; its configuration is in ")).read_text)
    assert json.loads(kept)["static_resources"]["listeners"][0]["name"] == "inbound"
    assert "PRIVATE KEY" not in kept
