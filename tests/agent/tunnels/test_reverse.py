"""krun dials gateways, registers, serves, comes back; the gateway is the h2 library over mTLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.config.reverse_settings import ReverseSettings
from agent.config.settings import Settings
from agent.tunnels import reverse
from agent.tunnels.requests import Requests
from agent.tunnels.reverse import FIRST_PAUSE_S, MAX_PAUSE_S, ReverseTunnels
from shared.address import Address
from shared.errors import UnavailableError
from shared.http2.frames import REFUSED_STREAM
from shared.net.http2.connection import Connection
from shared.net.tls.mesh_tls import server_context
from shared.trust.peer_patterns import UNTOLD, TrustDomain
from shared.trust.spiffe import SpiffeId
from shared.tunnel import registration
from shared.tunnel.registration import ALREADY_REGISTERED, REGISTERED, Verdict
from tests.support.clocks import ROUNDING_S
from tests.support.hbone_port import GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.revocation import Hierarchy, end_in, put, revocation_list, serial_in
from tests.support.running_gateway import Records
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer
from tests.support.wall_clock import Clock

NAME = "hello.demo.svc.cluster.local"
WORKLOAD = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")


def process(number: int) -> str:
    """What a gateway's process calls itself."""
    return f"{number:016x}"


class Gateway:
    """A port that workloads dial; each of their connections is played step by step."""

    def __init__(self) -> None:
        self.port = 0
        self.names: list[str] = []
        """The SNI of each connection."""
        self.connections: list[Http2Peer] = []
        self._accepted: asyncio.Queue[Http2Peer] = asyncio.Queue()

    async def accept(self) -> Http2Peer:
        """The next connection, its handshake done."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._accepted.get()

    async def registered(self, number: int = 1, workers: int = 1) -> Http2Peer:
        """The next connection, registered with the process of this number."""
        peer = await self.accept()
        assert await tell(peer, Verdict(process(number), workers)).status() == REGISTERED
        return peer

    @property
    def was_dialled(self) -> bool:
        """Whether there is a connection that nobody has taken."""
        return not self._accepted.empty()

    def _opened(self, peer: Http2Peer) -> None:
        self.connections.append(peer)
        self._accepted.put_nowait(peer)

    def _asked(self, _: object, name: str | None, __: object) -> None:
        self.names.append(name or "")

    @classmethod
    @asynccontextmanager
    async def listening(cls, folder: Path) -> AsyncIterator[Gateway]:
        """One with the certificate in `folder`, until the block ends."""
        self = cls()
        tls = server_context(folder, tls12=False)
        tls.sni_callback = self._asked
        server = await asyncio.get_running_loop().create_server(
            lambda: Http2Peer(client=True, opened=self._opened), "127.0.0.1", 0, ssl=tls
        )
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for peer in self.connections:
                await peer.close()


def tell(peer: Http2Peer, verdict: Verdict) -> PeerStream:
    """The gateway's first request."""
    fields = [field for field in registration.request(NAME, verdict) if not field[0].startswith(b":")]
    return peer.request(b"POST", registration.PATH, fields, end=True)


async def opened(peer: Http2Peer, app: TcpServer) -> tuple[PeerStream, TcpPeer]:
    """A tunnel that a gateway has opened over a connection of krun's: both ends of it."""
    stream = peer.request(b"POST", b"/_hbone/15003")
    assert await stream.status() == 200
    return stream, await app.accept()


class Krun:
    """The dialling end, without the rest of krun."""

    def __init__(self, tunnels: ReverseTunnels, connections: set[Connection]) -> None:
        self.tunnels = tunnels
        self.connections = connections


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    return Mesh(tmp_path)


@pytest.fixture
async def gateway(mesh: Mesh) -> AsyncIterator[Gateway]:
    async with Gateway.listening(mesh.member(GATEWAY)) as gateway:
        yield gateway


@asynccontextmanager
async def dialling(
    mesh: Mesh,
    *ports: int,
    target: int = 1,
    peers: tuple[str, ...] = (),
    behind_each: int = 1,
    keepalive_s: float = PATIENCE_S,
    streams: int = 1000,
    names: tuple[str, ...] = (NAME,),
    crl: Path | None = None,
    trust: TrustDomain = UNTOLD,
    drain_timeout_s: float = PATIENCE_S,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Krun]:
    """krun's end, dialling these ports until the block ends; its mTLS end is at the port `target`."""
    connections: set[Connection] = set()
    settings = ReverseSettings(
        tuple(Address("127.0.0.1", port) for port in ports), names, peers, behind_each, keepalive_s, streams
    )
    requests = Requests(Settings(inbound_listen=Address("127.0.0.1", target)), lambda record: None)
    tunnels = ReverseTunnels(
        settings,
        mesh.member(WORKLOAD),
        PATIENCE_S,
        drain_timeout_s=drain_timeout_s,
        wall_clock=wall_clock,
        trust=trust,
        crl=crl,
        request=requests.serve,
        opened=connections.add,
        lost=connections.discard,
    )
    tunnels.start()
    try:
        yield Krun(tunnels, connections)
    finally:
        tunnels.close()
        for connection in list(connections):
            connection.abort("the test is over")


async def test_it_registers_its_name(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port) as krun:
        peer = await gateway.registered()
        assert gateway.names == [NAME]
        assert peer.tls.selected_alpn_protocol() == "h2"
        assert len(krun.connections) == krun.tunnels.registered == 1


async def test_it_serves_what_comes_back(mesh: Mesh, gateway: Gateway, app: TcpServer) -> None:
    async with dialling(mesh, gateway.port, target=app.port):
        stream, target = await opened(await gateway.registered(), app)
        await stream.send(b"there")
        assert await target.read(5) == b"there"
        await target.send(b"and back")
        assert await stream.read(8) == b"and back"
        stream.end()
        assert await target.rest() == b""


async def test_each_name_and_each_gateway_has_a_connection(mesh: Mesh, gateway: Gateway) -> None:
    async with (
        Gateway.listening(mesh.member(GATEWAY)) as second,
        dialling(mesh, gateway.port, second.port, names=(NAME, "b.svc")),
    ):
        for one in (gateway, second):
            await one.registered()
            await one.registered()  # the same process, for another name
            assert sorted(one.names) == ["b.svc", NAME]


async def test_how_many_tunnels_a_connection_takes(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port, streams=7):
        peer = await gateway.registered()
        assert peer._h2.remote_settings.max_concurrent_streams == 7


async def test_anything_but_a_verdict_is_no_registration(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port) as krun:
        peer = await gateway.accept()
        stream = peer.request(b"POST", registration.PATH, [(b"hbone-registration", b"perhaps")], end=True)
        assert await stream.status() == 400
        assert krun.tunnels.registered == 0
        assert await tell(peer, Verdict(process(1))).status() == REGISTERED


# Several processes behind an address.


async def test_every_worker_gets_a_connection(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port) as krun:
        await gateway.registered(1, workers=3)
        again = await gateway.accept()
        assert await tell(again, Verdict(process(1), 3)).status() == ALREADY_REGISTERED
        await again.until(lambda: again.lost)
        await gateway.registered(2, workers=3)
        await gateway.registered(3, workers=3)
        assert krun.tunnels.registered == 3
        assert not gateway.was_dialled


async def test_every_gateway_behind_an_address_gets_a_connection(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port, behind_each=2) as krun:
        await gateway.registered(1)
        await gateway.registered(2)
        assert krun.tunnels.registered == 2


async def test_a_worker_that_died_is_replaced(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port) as krun:
        first = await gateway.registered(1, workers=2)
        await gateway.registered(2, workers=2)
        first.drop()
        await gateway.registered(3, workers=2)
        assert krun.tunnels.registered == 2


# Coming back.


async def test_after_goaway_there_is_a_new_one_and_the_old_one_finishes(
    mesh: Mesh, gateway: Gateway, app: TcpServer
) -> None:
    async with dialling(mesh, gateway.port, target=app.port) as krun:
        old = await gateway.registered(1)
        stream, target = await opened(old, app)
        old.say_goaway(0)
        await gateway.registered(2)
        assert krun.tunnels.registered == 1
        assert len(krun.connections) == 2
        await target.send(b"still here")
        assert await stream.read(10) == b"still here"
        late = old.request(b"POST", b"/_hbone/15003")  # the gateway may, until it ends
        assert await late.status() == 200


async def test_a_tunnel_that_is_on_its_way_when_krun_ends_is_served(
    mesh: Mesh, gateway: Gateway, app: TcpServer
) -> None:
    async with dialling(mesh, gateway.port, target=app.port) as krun:
        peer = await gateway.registered()
        krun.tunnels.stop()
        (connection,) = krun.connections
        connection.drain()
        stream = peer.request(b"POST", b"/_hbone/15003")  # not a turn of the loop later: GOAWAY has not come
        assert not peer.goaway
        assert await stream.status() == 200
        target = await app.accept()
        await peer.answered()
        assert peer.goaway
        late = peer.request(b"POST", b"/_hbone/15003")
        assert await late.broken() == REFUSED_STREAM
        await stream.send(b"in time")
        stream.end()
        assert await target.rest() == b"in time"
        target.end()
        assert await stream.rest() == b""
        await peer.until(lambda: peer.lost)


async def test_after_a_reset_there_is_a_new_one(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port):
        for _ in range(3):
            (await gateway.registered()).drop()
        await gateway.registered()


async def test_a_silent_gateway_is_noticed(
    mesh: Mesh, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with dialling(mesh, gateway.port, keepalive_s=0.1):
        (await gateway.registered(1)).pause()
        await gateway.registered(2)
    assert "has not answered PING within 0.1 s" in caplog.text


async def test_a_refusal_is_told_and_tried_again(
    mesh: Mesh, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with dialling(mesh, gateway.port) as krun:
        peer = await gateway.accept()
        assert await tell(peer, Verdict(process(1), 1, "no rule allows it")).status() == REGISTERED
        await peer.until(lambda: peer.lost)
        assert krun.tunnels.registered == 0
        await gateway.registered()
    assert f"register {NAME} with 127.0.0.1:{gateway.port}: the gateway refuses it: no rule" in caplog.text


async def test_who_says_nothing_is_given_up(
    mesh: Mesh, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reverse, "VERDICT_S", 0.1)
    async with dialling(mesh, gateway.port):
        peer = await gateway.accept()
        await peer.until(lambda: peer.lost)
        await gateway.accept()
    assert "no word from the gateway within 0.1 s" in caplog.text


async def test_pauses_grow_up_to_a_bound(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    loop = asyncio.get_running_loop()
    async with dialling(mesh) as krun:
        assert krun.tunnels._places == []
    settings = ReverseSettings((Address("127.0.0.1", 1),), (NAME,))
    nothing: dict[str, Any] = dict.fromkeys(("request", "opened", "lost"), lambda _: None)
    (place,) = ReverseTunnels(settings, mesh.member(WORKLOAD), 1.0, drain_timeout_s=1.0, **nothing)._places
    for doublings, pause_s in ((0, 1.0), (1, 2.0), (2, 4.0), (3, 8.0), (100, MAX_PAUSE_S / FIRST_PAUSE_S)):
        place._not_before = 0.0
        before = loop.time()
        place._pause(doublings)
        after = loop.time()
        assert before <= place._not_before - pause_s * FIRST_PAUSE_S + ROUNDING_S
        assert place._not_before - pause_s * FIRST_PAUSE_S - ROUNDING_S <= after


async def test_once_stopped_it_dials_no_more(mesh: Mesh, gateway: Gateway) -> None:
    async with dialling(mesh, gateway.port) as krun:
        peer = await gateway.registered()
        krun.tunnels.stop()
        peer.drop()
        await peer.until(lambda: peer.lost)
        await asyncio.sleep(3 * FIRST_PAUSE_S)
        assert not gateway.was_dialled


# Whom it trusts.


OTHERS = (f"spiffe://{TRUST_DOMAIN}/ns/istio-system/sa/other",)


async def test_a_gateway_of_another_identity_is_not_served(
    mesh: Mesh, gateway: Gateway, app: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with dialling(mesh, gateway.port, target=app.port, peers=OTHERS):
        peer = await gateway.accept()
        stream = peer.request(b"POST", b"/_hbone/15003")
        await stream.broken()
        assert not stream.fields
        assert app.count == 0
    assert f"peer {GATEWAY} denied: no rule allows it" in caplog.text


async def test_who_it_is_is_known_before_its_first_byte(
    mesh: Mesh, gateway: Gateway, app: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dialler's own look comes when a gateway's first request may have been served already."""
    monkeypatch.setattr("shared.net.tls.mesh_tls.check_server", lambda *_: None)
    async with dialling(mesh, gateway.port, target=app.port, peers=OTHERS):
        stream = (await gateway.accept()).request(b"POST", b"/_hbone/15003")
        await stream.broken()
        assert not stream.fields


async def test_a_gateway_of_a_foreign_authority_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    other = Mesh(tmp_path / "other")
    with Records() as records:
        async with Gateway.listening(other.member(GATEWAY)) as gateway, dialling(mesh, gateway.port):
            await records.match("certificate refused")
    assert not gateway.connections


async def test_without_certificates_it_does_not_start(tmp_path: Path) -> None:
    settings = ReverseSettings((Address("127.0.0.1", 1),), (NAME,))
    nothing: dict[str, Any] = dict.fromkeys(("request", "opened", "lost"), lambda _: None)
    with pytest.raises(UnavailableError, match="certificate"):
        ReverseTunnels(settings, tmp_path, 1.0, drain_timeout_s=1.0, **nothing)


async def test_a_revoked_gateway_is_not_served(
    mesh: Mesh, gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crl = tmp_path / "crl.pem"
    put(crl, revocation_list(mesh.authority, serial_in(mesh.folder_of(GATEWAY))))
    async with dialling(mesh, gateway.port, crl=crl):
        stream = (await gateway.accept()).request(b"POST", b"/_hbone/15003")
        await stream.broken()
        assert not stream.fields
        await gateway.accept()  # it tries again
    assert "peer certificate denied: it is revoked" in caplog.text


async def test_a_gateway_that_is_revoked_later_is_left(
    mesh: Mesh, gateway: Gateway, app: TcpServer, tmp_path: Path
) -> None:
    crl = tmp_path / "crl.pem"
    put(crl, revocation_list(mesh.authority))
    async with dialling(mesh, gateway.port, target=app.port, crl=crl) as krun:
        peer = await gateway.registered()
        stream, there = await opened(peer, app)
        put(crl, revocation_list(mesh.authority, serial_in(mesh.folder_of(GATEWAY))))
        assert krun.tunnels._revocations is not None
        with Records() as records:
            await krun.tunnels._revocations.check_files()
            await records.match("lost: peer certificate denied: it is revoked")
        await stream.broken()
        await peer.until(lambda: peer.lost)
        assert peer.goaway
        with pytest.raises(ConnectionResetError):
            await there.read(1)
        assert (krun.tunnels.registered, krun.tunnels._revocations.ended) == (0, 1)


# A gateway's certificate that ends.


async def test_a_gateway_whose_certificate_ends_is_left_in_order(
    mesh: Mesh, gateway: Gateway, app: TcpServer, clock: Clock
) -> None:
    clock.now = end_in(mesh.folder_of(GATEWAY)) - 0.1
    async with dialling(mesh, gateway.port, target=app.port, wall_clock=clock) as krun:
        old = await gateway.registered()
        stream, target = await opened(old, app)
        old.pause()
        with Records() as records:
            clock.turn(0.2)
            await records.match(f"{GATEWAY} has expired: another connection is made; open tunnels have 20 s")
        late = old.request(b"POST", b"/_hbone/15003")
        old.resume()
        assert await late.status() == 200, "it was on its way"
        assert old.goaway
        await gateway.accept()
        assert krun.tunnels.registered == 0
        await stream.send(b"still here")
        assert await target.read(10) == b"still here"


async def test_after_the_drain_timeout_its_tunnels_are_broken_off(
    mesh: Mesh, gateway: Gateway, app: TcpServer, clock: Clock
) -> None:
    clock.now = end_in(mesh.folder_of(GATEWAY)) - 0.1
    async with dialling(mesh, gateway.port, target=app.port, wall_clock=clock, drain_timeout_s=0.05):
        old = await gateway.registered()
        stream, target = await opened(old, app)
        clock.turn(0.2)
        assert await target.was_reset()
        await stream.broken()
        await old.until(lambda: old.lost)


async def test_a_container_that_was_frozen_serves_no_expired_gateway(
    mesh: Mesh, gateway: Gateway, clock: Clock
) -> None:
    """Its timers have not noticed."""
    async with dialling(mesh, gateway.port, wall_clock=clock) as krun:
        old = await gateway.registered()
        clock.turn(30 * 86400)
        assert krun.tunnels.registered == 1
        assert await old.request(b"POST", b"/_hbone/15003").broken() == REFUSED_STREAM
        await old.until(lambda: old.goaway and old.lost)
        assert krun.tunnels.registered == 0
        await gateway.accept()


async def test_lists_that_are_none_are_said_at_once(mesh: Mesh, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="crl"):
        async with dialling(mesh, 1, crl=tmp_path / "crl.pem"):
            pass


async def test_a_gateway_of_an_alias_is_one_of_ours(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, authority=Hierarchy().root)  # which names no trust domain, as Istio's
    trust = TrustDomain(TRUST_DOMAIN, ("old.local",))
    folder = mesh.member(SpiffeId("old.local", GATEWAY.path))
    peers = ("ns/istio-system/sa/hgate*",)
    async with Gateway.listening(folder) as gateway, dialling(mesh, gateway.port, peers=peers, trust=trust):
        await gateway.registered()
