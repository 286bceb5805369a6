"""Inner HBONE: a client as ztunnel is on the wire, in a POST tunnel to krun, and a real app behind it."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from h2.connection import H2Connection

from agent.config.settings import Settings, from_env
from agent.mtls.inbound import no_app
from agent.mtls.mtls_end import MtlsEnd
from shared.errors import Flag, LimitError
from shared.trust.spiffe import SpiffeId
from shared.tunnel.tunnel_record import TunnelRecord
from tests.support.ambient_client import (
    BAGGAGE,
    CANCEL,
    CLIENT,
    TRACE,
    AmbientClient,
    CarriedTls,
    InStream,
    OnSocket,
)
from tests.support.hbone_port import CALLER, TRUST_DOMAIN, Mesh
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.krun_port import KrunPort, answered_and_ended
from tests.support.metadata_server import closed_port
from tests.support.revocation import put, revocation_list, serial_in
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer
from tests.support.world import find_envoy

HELLO = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")
STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "stranger")
SERVICE = "hello.demo.svc.cluster.local"
MIB = 1 << 20


class House:
    """krun's tunnel port and its built-in mTLS end, an app, and a front end that asks for tunnels."""

    def __init__(self, mesh: Mesh, krun: KrunPort, end: MtlsEnd, front: Http2Peer, app: TcpServer) -> None:
        self.mesh = mesh
        self.krun = krun
        self.end = end
        self.front = front
        self.app = app

    async def post(self) -> PeerStream:
        """A tunnel to inner HBONE."""
        stream = self.front.request(b"POST", b"/_hbone/15008")
        assert await stream.status() == 200
        return stream

    @asynccontextmanager
    async def client(self, identity: SpiffeId = CALLER) -> AsyncIterator[AmbientClient]:
        """An inner connection of `identity`."""
        async with AmbientClient.inside(InStream(await self.post()), self.tls(identity)) as client:
            yield client

    def tls(self, identity: SpiffeId = CALLER) -> ssl.SSLContext:
        """What a client of this name shows and wants."""
        return self.mesh.tls(self.mesh.member(identity))

    async def opened(self, client: AmbientClient) -> tuple[PeerStream, TcpPeer]:
        """A tunnel of the client to the app, and the app's end of it."""
        tunnel = client.connect(f"{SERVICE}:80")
        there = await self.app.accept()
        assert await tunnel.status() == 200
        return tunnel, there

    async def record(self) -> TunnelRecord:
        """The next of a CONNECT, or of a refused connection; those of tunnels that carry them are passed
        over."""
        while (record := await self.krun.record()).name == "15008":
            pass
        return record

    async def outer_record(self) -> TunnelRecord:
        """The next of a tunnel that carries a connection."""
        while (record := await self.krun.record()).name != "15008":
            pass
        return record


@asynccontextmanager
async def a_house(
    folder: Path,
    app: TcpServer,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    refusals: list[LimitError | None] | None = None,
    mesh: Mesh | None = None,
) -> AsyncIterator[House]:
    """One whose settings are `environ`, too, until the block ends. The first of `refusals`, if there is one,
    says why nothing new is taken."""
    mesh = mesh or Mesh(folder)
    told = {
        "HBONE_INBOUND": "builtin",
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_CERTS": str(mesh.member(HELLO)),
        "HBONE_ALLOW": "ns/demo/sa/*",
        "HBONE_APP": f"127.0.0.1:{app.port}",
        "HBONE_INNER_PORTS": f"80={app.port}",
        "WORKLOAD_NAME": "hello",
        "K_REVISION": "hello-00001-abc",
        **environ,
    }
    settings: Settings = from_env({name: value for name, value in told.items() if value})
    async with AsyncExitStack() as stack:
        records: list[KrunPort] = []
        end = MtlsEnd(
            settings,
            "",
            lambda record: records[0].records.put_nowait(record),
            lambda: refusals[0] if refusals else None,
            no_app,
        )
        await end.start()
        stack.push_async_callback(end.close)
        krun = await stack.enter_async_context(KrunPort.serving(settings, hbone=end))
        records.append(krun)
        front = await stack.enter_async_context(Http2Peer.connected(krun.port))
        yield House(mesh, krun, end, front, app)


@pytest.fixture
async def house(tmp_path: Path, target: TcpServer) -> AsyncIterator[House]:
    async with a_house(tmp_path, target) as house:
        yield house


# A tunnel.


async def test_a_client_reaches_the_app(house: House) -> None:
    async with house.client() as client:
        tls = client.transport.tls
        assert (tls.version(), tls.selected_alpn_protocol()) == ("TLSv1.3", "h2")
        tunnel, there = await house.opened(client)
        assert dict(tunnel.fields)[b"baggage"] == (
            b"k8s.cluster.name=Kubernetes,k8s.namespace.name=demo,k8s.deployment.name=hello,"
            b"service.name=hello,service.version=hello-00001-abc"
        )
        await tunnel.send(b"ping")
        assert await there.read(4) == b"ping"
        await there.send(b"pong")
        assert await tunnel.read(4) == b"pong"
        inner = house.end.inner
        assert inner is not None and (inner.connections, len(inner.tunnels)) == (1, 1)
        (row,) = inner.rows()
        assert (row["identity"], row["streams"]) == (str(CALLER), 1)
        there.end()
        tunnel.end()
        assert await tunnel.rest() == b""
        record = await house.record()
    assert (record.identity, record.route, record.name) == (str(CALLER), "hbone", f"{SERVICE}:80")
    assert (record.sent_bytes, record.received_bytes, record.status) == (4, 4, 200)
    assert (record.flag, record.error, record.forwarded_for) == (Flag.NONE, None, CLIENT)
    assert str(record.target) == f"127.0.0.1:{house.app.port}"
    assert record.traceparent == TRACE and record.opened
    assert BAGGAGE not in str(record).encode()


async def test_each_direction_ends_by_itself(house: House) -> None:
    async with house.client() as client:
        tunnel, there = await house.opened(client)
        await answered_and_ended(tunnel, there)
        assert (await house.record()).error is None


async def test_much_each_way_at_once(house: House) -> None:
    much = bytes(range(256)) * (64 * MIB // 256)
    async with house.client() as client:
        tunnel, there = await house.opened(client)

        async def back() -> bytes:
            return b"".join([await there.read(MIB) for _ in range(64)])

        async def forth() -> bytes:
            return b"".join([await tunnel.read(MIB) for _ in range(64)])

        got, gave, *_ = await asyncio.gather(back(), forth(), tunnel.send(much), there.send(much))
        assert (got == much, gave == much) == (True, True)
        tunnel.end()
        there.end()
        record = await house.record()
    assert (record.sent_bytes, record.received_bytes) == (64 * MIB, 64 * MIB)


async def test_a_reset_of_the_app_resets_the_tunnel_only(house: House) -> None:
    async with house.client() as client:
        tunnel, there = await house.opened(client)
        there.reset()
        assert await tunnel.broken() == 10, "CONNECT_ERROR"
        assert (await house.record()).flag == "UPSTREAM_RESET"
        tunnel, there = await house.opened(client)
        tunnel.reset(CANCEL)
        assert await there.was_reset()
        assert (await house.record()).flag == "DOWNSTREAM_RESET"


async def test_what_came_before_a_reset_still_arrives(house: House) -> None:
    """ztunnel ends its outer stream with RST_STREAM, which may come in one read with the last bytes."""
    async with house.client() as client:
        tunnel, there = await house.opened(client)
        there.end()
        assert await tunnel.rest() == b""
        carrier = client.transport.carrier
        assert isinstance(carrier, InStream)
        client.transport.hold()
        await tunnel.send(b"the last" * 5000)
        tunnel.end()
        _send_and_reset(carrier.stream, client.transport.take_held())
        assert await there.rest() == b"the last" * 5000
        record = await house.record()
        assert (record.sent_bytes, record.error) == (40000, None)


def _send_and_reset(stream: PeerStream, data: bytes) -> None:
    """In one write, so that krun has both in one read."""

    def act(h2: H2Connection) -> None:
        for at in range(0, len(data), h2.max_outbound_frame_size):
            h2.send_data(stream.number, data[at : at + h2.max_outbound_frame_size])
        h2.reset_stream(stream.number, CANCEL)

    stream.peer.act(act)


async def test_a_client_that_is_done_may_reset_what_carried_it(house: House) -> None:
    async with house.client() as client:
        tunnel, there = await house.opened(client)
        there.end()
        tunnel.end()
        assert await tunnel.rest() == b""
    record = await house.outer_record()
    assert (record.flag, record.error) == (Flag.NONE, None)


async def test_nor_has_it_to_say_close_notify(house: House) -> None:
    async with house.client() as client:
        tunnel, there = await house.opened(client)
        there.end()
        tunnel.end()
        assert await tunnel.rest() == b""
        client.transport.carrier.end()
        record = await house.outer_record()
        assert (record.flag, record.error) == (Flag.NONE, None)


async def test_a_client_that_is_not_has_broken_it(house: House) -> None:
    async with house.client() as client:
        _, there = await house.opened(client)
    assert await there.was_reset()
    assert (await house.outer_record()).flag == "DOWNSTREAM_RESET"
    assert (await house.record()).flag == "DOWNSTREAM_RESET"


async def test_a_slow_reader_holds_the_app_back(house: House) -> None:
    much = 96 * MIB
    async with house.client() as client:
        slow, there = await house.opened(client)
        slow.window_held = True
        there.send_soon(bytes(much))
        await slow.peer.until(lambda: len(slow.data) >= 4 * MIB)
        assert there.unsent > much // 2
        async with house.client() as another:
            tunnel, also_there = await house.opened(another)
            await answered_and_ended(tunnel, also_there)
        slow.release_window()
        assert len(await slow.read(much)) == much


async def test_many_clients_at_once(tmp_path: Path, target: TcpServer) -> None:
    many = 500
    async with AsyncExitStack() as stack, a_house(tmp_path, target) as house:
        tls = house.tls()
        fronts = [await stack.enter_async_context(Http2Peer.connected(house.krun.port)) for _ in range(5)]

        async def one(number: int) -> bytes:
            post = fronts[number % 5].request(b"POST", b"/_hbone/15008")
            assert await post.status() == 200
            async with AmbientClient.inside(InStream(post), tls) as client:
                tunnel = client.connect(f"{SERVICE}:80")
                assert await tunnel.status() == 200
                await tunnel.send(b"%d" % number)
                tunnel.end()
                return await tunnel.rest()

        async def serve() -> None:
            for _ in range(many):
                there = await target.accept()
                said = await there.rest()
                await there.send(said)
                there.end()

        *said, _ = await asyncio.gather(*(one(number) for number in range(many)), serve())
        assert said == [b"%d" % number for number in range(many)]
        records = [await house.krun.record() for _ in range(2 * many)]
        assert Counter(record.name for record in records) == {"15008": many, f"{SERVICE}:80": many}
        assert {record.error for record in records} == {None}


# What a CONNECT may ask for.


@pytest.mark.parametrize(
    ("authority", "status", "text"),
    [
        (f"{SERVICE}:8080", 401, f"{SERVICE}:8080 is no service of this workload: HBONE_INNER_PORTS"),
        (f"{SERVICE}:15009", 401, "is no service of this workload: HBONE_INNER_PORTS of krun has 80"),
        ("other.demo.svc.cluster.local:80", 401, f"workload: HBONE_INNER_HOSTS of krun has {SERVICE}"),
        ("127.0.0.1:80", 401, "127.0.0.1:80 is no service of this workload"),
        ("localhost:80", 401, "localhost:80 is no service of this workload"),
        ("metadata.google.internal:80", 401, "is no service of this workload"),
        (f"{SERVICE}:15008", 400, "no tunnel leads to port 15008"),
        (SERVICE, 400, ":authority: no port"),
        ("x" * 400 + ":80", 400, ":authority: over 300 bytes"),
    ],
)
async def test_what_is_no_service_of_ours(house: House, authority: str, status: int, text: str) -> None:
    async with house.client() as client:
        tunnel = client.connect(authority)
        assert await tunnel.status() == status
        assert text in (await tunnel.rest()).decode()
        record = await house.record()
        assert (record.status, record.identity, record.opened) == (status, str(CALLER), False)
        tunnel, there = await house.opened(client)  # the connection is as good as before
        await answered_and_ended(tunnel, there)


@pytest.mark.parametrize("authority", [SERVICE + ".:80", SERVICE.upper() + ":80"])
async def test_ways_to_write_a_name(house: House, authority: str) -> None:
    async with house.client() as client:
        tunnel = client.connect(authority)
        await house.app.accept()
        assert await tunnel.status() == 200


async def test_names_and_ports_by_settings(tmp_path: Path, target: TcpServer) -> None:
    told = {"HBONE_INNER_HOSTS": "*.shop.example, api.example", "HBONE_INNER_PORTS": ""}
    async with a_house(tmp_path, target, told) as house, house.client() as client:
        for authority in ("a.shop.example:80", f"api.example:{target.port}"):
            tunnel = client.connect(authority)
            await house.app.accept()
            assert await tunnel.status() == 200
        for authority in (f"{SERVICE}:80", "a.b.shop.example:80", "api.example:443"):
            assert await client.connect(authority).status() == 401


async def test_other_methods_are_told_where_they_belong(house: House) -> None:
    async with house.client() as client:
        stream = client.peer.request(b"GET", b"/", end=True)
        assert await stream.status() == 405
        assert stream[b"allow"] == b"CONNECT"
        assert b"for the mTLS of sidecars the tunnel URL ends in /_hbone/15003" in await stream.rest()
        assert (await house.record()).status == 405


async def test_an_app_that_is_not_there(tmp_path: Path, target: TcpServer) -> None:
    async with a_house(tmp_path, target, {"HBONE_INNER_PORTS": f"80={closed_port()}"}) as house:
        async with house.client() as client:
            tunnel = client.connect(f"{SERVICE}:80")
            assert await tunnel.status() == 503
            assert b"connection refused" in await tunnel.rest()
        assert (await house.record()).flag == "CONNECT"


# Who may come in.


async def refused(house: House, context: ssl.SSLContext) -> str:
    """The alert that a client is sent, in the handshake or behind it."""
    carrier = InStream(await house.post())
    transport = CarriedTls(carrier, context)
    with pytest.raises(ssl.SSLError) as caught:
        await transport.shake()
        while data := await carrier.some():
            transport.feed(data)
    return str(caught.value)


async def test_a_stranger_fails_in_the_handshake(house: House) -> None:
    assert "internal error" in await refused(house, house.tls(STRANGER))
    record = await house.record()
    assert f"peer {STRANGER} denied: no rule allows it" in str(record.error)
    assert (record.flag, record.route, record.name) == ("DENY", "hbone", None)


async def test_one_of_another_mesh(house: House, tmp_path: Path) -> None:
    other = Mesh(tmp_path / "other")
    context = house.mesh.tls(None)
    context.load_cert_chain(*(_files(other.member())))
    assert "unknown ca" in await refused(house, context)
    assert "client certificate refused" in str((await house.record()).error)


def _files(folder: Path) -> tuple[Path, Path]:
    return folder / "certificates.pem", folder / "private_key.pem"


async def test_one_without_a_certificate(house: House) -> None:
    assert "certificate required" in await refused(house, house.mesh.tls(None))
    assert (await house.record()).flag == "TLS_FAILURE"


async def test_one_with_tls_1_2(house: House) -> None:
    context = house.mesh.tls(house.mesh.member(), version=ssl.TLSVersion.TLSv1_2)
    assert "protocol version" in await refused(house, context)
    assert (await house.record()).flag == "TLS_FAILURE"


@pytest.mark.parametrize("offer", [["http/1.1"], ["istio-peer-exchange", "istio"]])
async def test_one_that_offers_no_h2(house: House, offer: list[str]) -> None:
    context = house.tls()
    context.set_alpn_protocols(offer)
    assert "no application protocol" in await refused(house, context)
    error = str((await house.record()).error)
    assert f"the client offers '{', '.join(offer)}' by ALPN, not h2" in error
    assert "the tunnel URL ends in /_hbone/15003" in error


async def test_one_that_offers_nothing(house: House) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=house.mesh.authority.root_pem.decode())
    context.load_cert_chain(*_files(house.mesh.member()))
    async with AmbientClient.inside(InStream(await house.post()), context) as client:
        await client.peer.until(lambda: client.peer.goaway)
    assert str((await house.record()).error) == "tls handshake: the client does not offer HTTP/2 (ALPN h2)"


async def test_bytes_that_are_no_tls(house: House) -> None:
    post = await house.post()
    await post.send(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")
    assert len(await post.rest()) == 7, "one alert"
    record = await house.record()
    assert (record.flag, record.name) == ("BAD_HELLO", None)
    assert "the first bytes are no TLS" in str(record.error)


async def test_http1_in_the_tls(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hbone.connection")
    async with AmbientClient.inside(InStream(await house.post()), house.tls()) as client:
        client.transport.write(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")
        await client.peer.until(lambda: client.peer.goaway)
    assert f"protocol error of {house.front.local_address}" in caplog.text


async def test_a_client_that_leaves_in_the_handshake(house: House) -> None:
    for leave in (InStream.end, InStream.reset):
        carrier = InStream(await house.post())
        transport = CarriedTls(carrier, house.tls())
        with pytest.raises(ssl.SSLWantReadError):
            transport.tls.do_handshake()
        await carrier.send(transport._outgoing.read())
        await carrier.some()
        leave(carrier)
        record = await house.record()
        assert "tls handshake: " in str(record.error) and record.flag == "DOWNSTREAM_RESET"
    assert house.end.inner is not None
    await until_empty(house)


async def until_empty(house: House) -> None:
    """Returns once krun has let go of all inner connections."""
    assert house.end.inner is not None
    async with asyncio.timeout(PATIENCE_S):
        while house.end.inner.connections:
            await house.front.answered()


async def test_a_silent_client_has_the_time_of_a_handshake(tmp_path: Path, target: TcpServer) -> None:
    async with a_house(tmp_path, target, {"HBONE_HANDSHAKE_TIMEOUT": "0.2"}) as house:
        post = await house.post()
        assert len(await post.rest()) == 7, "one alert"
        assert "tls handshake: not complete within 0.2 s" in str((await house.record()).error)


async def test_a_connection_without_a_tunnel_is_not_kept(tmp_path: Path, target: TcpServer) -> None:
    async with (
        a_house(tmp_path, target, {"HBONE_INNER_IDLE_TIMEOUT": "0.2"}) as house,
        house.client() as client,
    ):
        await client.peer.until(lambda: client.peer.goaway)
        client.close()
        await until_empty(house)


# Bounds and ends.


async def test_tunnels_have_a_limit(tmp_path: Path, target: TcpServer) -> None:
    async with a_house(tmp_path, target, {"HBONE_MAX_TUNNELS": "2"}) as house, house.client() as client:
        first, _ = await house.opened(client)
        await house.opened(client)
        third = client.connect(f"{SERVICE}:80")
        assert await third.status() == 503
        assert b"2 tunnels of inner HBONE are open, which is HBONE_MAX_TUNNELS" in await third.rest()
        assert (await house.record()).flag == "LIMIT"
        first.reset(CANCEL)
        assert (await house.record()).opened
        await house.opened(client)


async def test_nothing_new_while_memory_is_full(tmp_path: Path, target: TcpServer) -> None:
    refusals: list[LimitError | None] = [None]
    async with a_house(tmp_path, target, refusals=refusals) as house, house.client() as client:
        refusals[0] = LimitError("too much is held", "HBONE_MAX_BUFFERED")
        assert await client.connect(f"{SERVICE}:80").status() == 503
        assert str((await house.record()).error) == "too much is held"


async def test_a_drain_lets_tunnels_finish(house: House) -> None:
    async with house.client() as client, house.client() as idle:
        tunnel, there = await house.opened(client)
        await house.end.drain()
        await client.peer.until(lambda: client.peer.goaway)
        await idle.peer.until(lambda: idle.peer.goaway)
        async with house.client() as late:
            await late.peer.until(lambda: late.peer.goaway)
        await answered_and_ended(tunnel, there)
        for one in (client, idle):
            async with asyncio.timeout(PATIENCE_S):
                await one.transport.ended.wait()
            assert one.transport.error is None, "close_notify"


async def test_a_new_certificate_is_shown_to_new_clients(house: House) -> None:
    async with house.client() as client:
        before = client.transport.tls.getpeercert(binary_form=True)
        tunnel, there = await house.opened(client)
        house.mesh.member(HELLO)  # writes another
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with house.client() as later:
                    if later.transport.tls.getpeercert(binary_form=True) != before:
                        break
        await answered_and_ended(tunnel, there)


async def test_a_peer_that_is_revoked(tmp_path: Path, target: TcpServer) -> None:
    lists = tmp_path / "lists.pem"
    mesh = Mesh(tmp_path)
    put(lists, revocation_list(mesh.authority))
    async with (
        a_house(tmp_path, target, {"HBONE_CRL": str(lists)}, mesh=mesh) as house,
        house.client() as client,
    ):
        _, there = await house.opened(client)
        put(lists, revocation_list(mesh.authority, serial_in(mesh.folder_of(CALLER))))
        await client.peer.until(lambda: client.peer.goaway)
        assert await there.was_reset()
        records = [await house.record(), await house.record()]
        assert {str(record.flag) for record in records} == {"DENY"}
        context = mesh.tls(mesh.folder_of(CALLER))
        assert "internal error" in await refused(house, context)
        assert "is revoked" in str((await house.record()).error)


# Beside which end it is served.


async def test_it_stands_beside_envoy(tmp_path: Path, target: TcpServer) -> None:
    find_envoy()
    told = {"HBONE_INBOUND": "envoy", "HBONE_ENVOY_ADMIN": "127.0.0.1:0"}
    async with a_house(tmp_path, target, told) as house:
        async with house.client() as client:
            await answered_and_ended(*await house.opened(client))
        assert (await house.record()).identity == str(CALLER)
        assert "internal error" in await refused(house, house.tls(STRANGER))


async def test_not_beside_pilot_agent(house: House) -> None:
    """Whose policies krun does not know."""
    house.end._kind, house.end._policy = "pilot-agent", None
    post = house.front.request(b"POST", b"/_hbone/15008")
    assert await post.status() == 404
    assert b"Envoy enforces the mesh's policies, and krun does not know them" in await post.rest()


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"HBONE_INNER": "0"}, "HBONE_INNER=0 of krun says so"),
        ({"HBONE_INBOUND": "none"}, "krun has no mTLS end of its own: set HBONE_INBOUND=builtin"),
        (
            {"HBONE_INBOUND": "auto", "HBONE_CERTS": "/nowhere"},
            "krun has no certificates in /nowhere: set HBONE_CERTS or HBONE_CA",
        ),
    ],
)
async def test_where_it_is_not_served(
    tmp_path: Path, target: TcpServer, environ: dict[str, str], text: str
) -> None:
    async with a_house(tmp_path, target, environ) as house:
        post = house.front.request(b"POST", b"/_hbone/15008")
        assert await post.status() == 404
        assert (await post.rest()).decode() == f"inner HBONE is not served here: {text}\n"
        assert (await house.krun.record()).flag == "NO_ROUTE"


async def test_certificates_that_cannot_be_used_yet(tmp_path: Path, target: TcpServer) -> None:
    async with a_house(tmp_path, target) as house:
        key = house.mesh.folder_of(HELLO) / "private_key.pem"
        kept = key.read_bytes()
        key.write_bytes(b"nonsense")
        post = house.front.request(b"POST", b"/_hbone/15008")
        assert await post.status() == 503
        assert b"private_key.pem" in await post.rest()
        key.write_bytes(kept)
        async with house.client() as client:
            await house.opened(client)


async def test_only_post_opens_it(house: House) -> None:
    get = house.front.request(b"GET", b"/_hbone/15008", end=True)
    assert (await get.status(), get[b"allow"]) == (405, b"POST")


async def test_a_target_of_the_user_s_own_goes_first(tmp_path: Path, target: TcpServer) -> None:
    async with a_house(tmp_path, target, {"PORT_15008": f"127.0.0.1:{target.port}"}) as house:
        post = house.front.request(b"POST", b"/_hbone/15008")
        there = await target.accept()
        await answered_and_ended(post, there)


async def test_connect_at_the_other_end_is_told_where_it_belongs(
    tmp_path: Path, target: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Inner HBONE that a route sends to /_hbone/15003, which the built-in end serves as HTTP."""
    told = "no tunnels here: for inner HBONE the tunnel URL ends in /_hbone/15008"
    async with a_house(tmp_path, target) as house:
        bounded = house.krun.requests.app
        house.end._serve = bounded.serve
        assert house.end._inbound is not None
        house.end._inbound._serve_request = bounded.serve
        carrier = await OnSocket.to(house.end.address.port)
        async with AmbientClient.inside(carrier, house.tls()) as client:
            tunnel = client.connect(f"{SERVICE}:80")
            assert await tunnel.status() == 405
            assert (await tunnel.rest()).decode() == f"{told}\n"
        record = await house.krun.records.get()
        assert (record.status, str(record.error), record.identity) == (405, told, str(CALLER))
        assert f"CONNECT of {CALLER} at the mTLS end: {told}" in caplog.text
