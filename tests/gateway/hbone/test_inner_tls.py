"""The mesh's TLS inside of a route's tunnel: a member played by the h2 library, the gateway as a whole, and a
service whose end of the TLS is played by the ssl module."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.hbone.hbone_tunnel import HboneTunnels
from shared.credentials.certificates.authority import Authority
from shared.http2.frames import CANCEL, CONNECT_ERROR, INTERNAL_ERROR, REFUSED_STREAM
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_files import CertificateFiles
from shared.net.tls.revocation_watch import RevocationWatch
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.support.gateway_world import World
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.revocation import put, revocation_list, serial_in
from tests.support.running_gateway import RunningGateway, change_config

HOST = "db.prod.svc.cluster.local"
AUTHORITY = f"{HOST}:5432"
DATABASE = SpiffeId.of_workload(TRUST_DOMAIN, "prod", "db")
OTHER = SpiffeId.of_workload(TRUST_DOMAIN, "prod", "other")
RECORD_BYTES = 16 << 10
MIB = 1 << 20


class FarEnd:
    """What ends the TLS in a tunnel's stream."""

    def __init__(self, stream: PeerStream, context: ssl.SSLContext) -> None:
        self.stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def shake(self, last: bytes = b"") -> None:
        """The handshake; `last` is sent with its last bytes, and close_notify. Raises ssl.SSLError with
        hgate's alert."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                self._incoming.write(await self.stream.some())
            else:
                if last:
                    self.tls.write(last)
                    with suppress(ssl.SSLWantReadError):
                        self.tls.unwrap()
                await self._flush()
                return

    async def read(self, size: int) -> bytes:
        """So many bytes; fewer if close_notify comes before."""
        received = bytearray()
        while len(received) < size:
            try:
                data = self.tls.read(RECORD_BYTES)
            except ssl.SSLWantReadError:
                self._incoming.write(await self.stream.some())
            except ssl.SSLZeroReturnError:
                break
            else:
                if not data:
                    break
                received += data
        return bytes(received)

    async def send(self, data: bytes) -> None:
        self.tls.write(data)
        await self._flush()

    async def end(self) -> None:
        """close_notify."""
        with suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        await self._flush()

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await self.stream.send(data)


class Plain:
    """The gateway with a route for plain members, and both sides of it."""

    def __init__(self, world: World, mesh: Mesh, block: AsyncExitStack) -> None:
        self.world = world
        self.mesh = mesh
        self._block = block

    def route(self, **fields: Any) -> dict[str, Any]:
        return {
            "host": HOST,
            "tunnel": "http://{service}.example/_hbone/15003",
            "connect": f"127.0.0.1:{self.world.service.port}",
            "token": "none",
            "inner": "none",
            "peer": [str(DATABASE)],
        } | fields

    async def start(self, limits: dict[str, Any] | None = None, **fields: Any) -> RunningGateway:
        rule = {"from": ["*"], "to": ["*.prod.svc.cluster.local:5432"]}
        port = {"certificates": str(self.mesh.member(GATEWAY)), "rules": [rule]}
        return await self.world.start(self.route(**fields), hbone=port, **limits or {})

    async def member(self) -> Http2Peer:
        match = await self.world.gateway.records.match(r"hbone on 127\.0\.0\.1:(\d+)")
        tls = self.mesh.tls(self.mesh.member(CALLER))
        return await self._block.enter_async_context(Http2Peer.connected(int(match[1]), tls))

    def context(self, identity: SpiffeId = DATABASE, mesh: Mesh | None = None, **how: Any) -> ssl.SSLContext:
        """What a far end of this identity shows and wants."""
        return self.context_of((mesh or self.mesh).member(identity, **how))

    def context_of(self, folder: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        chain, key, _ = certificate_folder.find(folder).all
        context.load_cert_chain(chain, key)
        context.load_verify_locations(cadata=self.mesh.authority.root_pem.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["http/1.1", "istio"])
        return context

    async def asked(self, peer: Http2Peer) -> tuple[PeerStream, PeerStream]:
        """The member's stream and the service's, which has answered."""
        near = ask(peer)
        far = await self.world.service.request()
        far.respond(200)
        return near, far

    async def open(self, peer: Http2Peer, context: ssl.SSLContext | None = None) -> tuple[PeerStream, FarEnd]:
        """Both ends of an open tunnel."""
        near, far = await self.asked(peer)
        end = FarEnd(far, context or self.context())
        await end.shake()
        assert await near.status() == 200
        return near, end


@pytest.fixture
async def plain(world: World, tmp_path: Path) -> AsyncIterator[Plain]:
    async with AsyncExitStack() as block:
        yield Plain(world, Mesh(tmp_path), block)


@pytest.fixture
def tunnels(monkeypatch: pytest.MonkeyPatch) -> list[HboneTunnels]:
    """Those of the HBONE port of a gateway that starts."""
    found: list[HboneTunnels] = []
    listener = "gateway.hbone.hbone_port.HboneTunnels"

    def made(*arguments: Any, **more: Any) -> HboneTunnels:
        found.append(HboneTunnels(*arguments, **more))
        return found[-1]

    monkeypatch.setattr(listener, made)
    return found


def ask(peer: Http2Peer, authority: str = AUTHORITY) -> PeerStream:
    return peer.request(b"CONNECT", b"", authority=authority.encode())


async def echoes(near: PeerStream, far: FarEnd) -> None:
    """Holds that a tunnel carries bytes both ways."""
    await near.send(b"there")
    assert await far.read(5) == b"there"
    await far.send(b"and back")
    assert await near.read(8) == b"and back"


# A tunnel.


async def test_a_tunnel(plain: Plain) -> None:
    gateway = await plain.start()
    peer = await plain.member()
    near = ask(peer)
    far = await plain.world.service.request()
    assert far[b"x-forwarded-client-cert"] == f"By={GATEWAY};URI={CALLER}".encode()
    assert far[b"forwarded"].startswith(b'for="127.0.0.1:')
    await far.peer.until(lambda: bool(far.data))
    assert far.data[0] == 22, "the ClientHello has come with the request"
    names: list[str | None] = []
    context = plain.context()
    context.sni_callback = lambda _, name, __: names.append(name)
    end = FarEnd(far, context)
    far.respond(200)
    await peer.answered()
    assert not near.fields, "there is no TLS yet"
    await end.shake()
    assert await near.status() == 200
    assert (names, end.tls.selected_alpn_protocol()) == ([f"outbound_.5432_._.{HOST}"], "istio")
    await echoes(near, end)
    near.end()
    assert await end.read(1) == b""
    await end.end()
    assert await near.rest() == b""
    assert await far.rest() == b"", "the tunnel ends in order as well"
    line = await gateway.line()
    assert (line["status"], line["flags"], line["identity"]) == (200, "-", str(CALLER))
    assert (line["bytes_sent"], line["bytes_recv"], line["route"]) == (5, 8, HOST)
    assert await gateway.metric("hbone_tunnels_closed_total", route=HOST, flags="-") == 1
    assert await gateway.metric("hbone_tunnels_opening", route=HOST) == 0


@pytest.mark.parametrize(("sni", "name"), [("none", None), ("db.local", "db.local")])
async def test_the_server_name_that_a_route_says(plain: Plain, sni: str, name: str | None) -> None:
    await plain.start(sni=sni)
    names: list[str | None] = []
    context = plain.context()
    context.sni_callback = lambda _, found, __: names.append(found)
    await plain.open(await plain.member(), context)
    assert names == [name]


async def test_a_hello_after_the_answer(plain: Plain) -> None:
    await plain.start(first_flight="after_answer")
    near = ask(await plain.member())
    far = await plain.world.service.request()
    await far.peer.answered()
    assert not far.data
    far.respond(200)
    end = FarEnd(far, plain.context())
    await end.shake()
    assert await near.status() == 200
    await echoes(near, end)


async def test_a_second_attempt(plain: Plain) -> None:
    """It has a whole ClientHello again, and what the first one brought does not count."""
    gateway = await plain.start()
    near = ask(await plain.member())
    first = await plain.world.service.request()
    await first.peer.until(lambda: bool(first.data))
    first.reset(REFUSED_STREAM)
    second = await plain.world.service.request()
    second.respond(200)
    end = FarEnd(second, plain.context())
    await end.shake()
    assert await near.status() == 200
    await echoes(near, end)
    near.end()
    assert await end.read(1) == b""
    await end.end()
    assert (await gateway.line())["attempts"] == 2


async def test_what_a_member_sends_before_the_answer(plain: Plain) -> None:
    await plain.start()
    near = ask(await plain.member())
    body = os.urandom(MIB // 4)
    await near.send(body)
    near.end()
    far = await plain.world.service.request()
    far.respond(200)
    end = FarEnd(far, plain.context())
    await end.shake()
    assert await end.read(len(body) + 1) == body


async def test_a_far_end_that_ends_before_it_reads(plain: Plain) -> None:
    """With TLS 1.2 its own end can come with the handshake's: what the member has sent by then is sent all
    the same."""
    await plain.start()
    near = ask(await plain.member())
    await near.send(b"all of it")
    near.end()
    far = await plain.world.service.request()
    far.respond(200)
    context = plain.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    end = FarEnd(far, context)
    await end.shake(b"nothing to say")
    assert await end.read(100) == b"all of it"
    assert await near.status() == 200
    assert await near.rest() == b"nothing to say"


async def test_what_is_held_is_counted(plain: Plain, tunnels: list[HboneTunnels]) -> None:
    """For a member that does not read; and no more than the windows let come."""
    await plain.start()
    peer = await plain.member()
    near, end = await plain.open(peer)
    near.window_held = True
    end.tls.write(bytes(8 * MIB))
    sending = spawn(end._flush(), name="a far end that sends")
    await peer.until(lambda: peer.window_given(near) == 0)
    await peer.answered()
    [tunnel] = tunnels[0].open
    assert 0 < tunnel.buffered_bytes < 8 * MIB
    near.release_window()
    assert await near.read(8 * MIB) == bytes(8 * MIB)
    await sending
    assert tunnel.buffered_bytes == 0


# No TLS.


async def refused(plain: Plain, near: PeerStream, text: str, *, others: int = 0) -> None:
    """Holds that the member is told so, and that the log has it. So many `others` are open."""
    assert await near.status() == 503
    assert (await near.rest()).decode().strip() == text
    line = await plain.world.gateway.line()
    assert (line["status"], line["flags"], line["error"]) == (503, "CONNECT", text)
    assert await plain.world.gateway.metric("hbone_route_connections", route=HOST) == others
    assert await plain.world.gateway.metric("hbone_tunnels_opening", route=HOST) == 0


@pytest.mark.parametrize(
    ("identity", "how", "reason"),
    [
        (OTHER, {}, f"peer {OTHER} denied: no rule allows it"),
        (
            DATABASE,
            {"lifetime_s": -60},
            "tls handshake: server certificate refused: cert has expired (depth 0)",
        ),
        (
            DATABASE,
            {"mesh": "other"},
            "tls handshake: server certificate refused: unable to get issuer cert locally (depth 0)",
        ),
    ],
)
async def test_a_far_end_that_is_not_the_one(
    plain: Plain, tmp_path: Path, identity: SpiffeId, how: dict[str, Any], reason: str
) -> None:
    """It gets an alert; other streams go on."""
    if how.pop("mesh", None):
        how = {"mesh": Mesh(tmp_path / "other", authority=Authority.create("other.local"))}
    await plain.start()
    peer = await plain.member()
    witness = await plain.open(peer)
    near, far = await plain.asked(peer)
    with pytest.raises(ssl.SSLError, match=r"ALERT|alert"):
        await FarEnd(far, plain.context(identity, **how)).shake()
    await refused(plain, near, f"inside the tunnel: {reason}", others=1)
    await echoes(*witness)


async def test_a_far_end_that_says_nothing(plain: Plain) -> None:
    await plain.start({"connect_timeout": "200ms"})
    near, far = await plain.asked(await plain.member())
    await refused(plain, near, "inside the tunnel: tls handshake: not complete within 0.2 s")
    assert not far.ended or await far.rest()


async def test_a_far_end_that_is_no_tls(plain: Plain) -> None:
    await plain.start()
    near, far = await plain.asked(await plain.member())
    await far.send(b"SSH-2.0-OpenSSH_9.9\r\n")
    await refused(plain, near, "inside the tunnel: tls handshake: wrong version number")


async def test_a_far_end_that_ends_in_the_handshake(plain: Plain) -> None:
    await plain.start()
    near, far = await plain.asked(await plain.member())
    far.end()
    await refused(plain, near, "inside the tunnel: tls handshake: the far side closed the connection")


async def test_a_far_end_that_breaks_in_the_handshake(plain: Plain) -> None:
    await plain.start()
    near, far = await plain.asked(await plain.member())
    far.reset(INTERNAL_ERROR)
    assert await near.status() == 503
    line = await plain.world.gateway.line()
    assert line["flags"] == "CONNECT"
    assert line["error"].startswith("inside the tunnel: ") and "INTERNAL_ERROR" in line["error"]


async def test_certificates_of_ours_that_are_not_there(plain: Plain, tmp_path: Path) -> None:
    """Nothing is asked for."""
    gateway = await plain.start(identity=str(tmp_path / "nowhere"))
    near = ask(await plain.member())
    assert await near.status() == 503
    line = await gateway.line()
    assert line["flags"] == "CONNECT"
    assert line["error"].startswith("inside the tunnel: our own certificates: ")
    assert not plain.world.service.asked
    assert await gateway.metric("hbone_route_connections", route=HOST) == 0


async def test_a_member_that_leaves_in_the_handshake(plain: Plain) -> None:
    gateway = await plain.start()
    peer = await plain.member()
    witness = await plain.open(peer)
    near, far = await plain.asked(peer)
    await far.peer.until(lambda: bool(far.data))
    await peer.answered()
    near.reset(CANCEL)
    assert await far.broken() == CANCEL
    line = await gateway.line()
    assert (line["status"], line["flags"]) == (499, "DOWNSTREAM_RESET")
    await echoes(*witness)


async def test_a_member_that_leaves_before_the_answer(plain: Plain) -> None:
    """Its request is reset once it is answered, and there is no handshake."""
    gateway = await plain.start()
    peer = await plain.member()
    near = ask(peer)
    far = await plain.world.service.request()
    near.reset(CANCEL)
    await peer.answered()
    assert far.reset_code is None
    far.respond(200)
    assert await far.broken() == CANCEL
    assert (await gateway.line())["status"] == 499


# Its end.


async def test_a_far_end_that_ends_without_a_word(plain: Plain) -> None:
    """Truncation is no end."""
    gateway = await plain.start()
    near, end = await plain.open(await plain.member())
    await end.send(b"half of i")
    end.stream.end()
    assert await near.broken() == CONNECT_ERROR
    line = await gateway.line()
    assert (line["flags"], line["bytes_recv"]) == ("UPSTREAM_RESET", 9)
    assert line["error"] == "connection truncated: FIN without close_notify"


async def test_a_far_end_that_resets(plain: Plain) -> None:
    gateway = await plain.start()
    near, end = await plain.open(await plain.member())
    end.stream.reset(INTERNAL_ERROR)
    assert await near.broken() == CONNECT_ERROR
    line = await gateway.line()
    assert line["flags"] == "UPSTREAM_RESET" and "INTERNAL_ERROR" in line["error"]


async def test_a_member_that_resets(plain: Plain) -> None:
    gateway = await plain.start()
    near, end = await plain.open(await plain.member())
    await echoes(near, end)
    near.reset(CANCEL)
    assert await end.stream.broken() == CANCEL
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"


async def test_a_tunnel_that_is_idle_for_too_long(plain: Plain, tunnels: list[HboneTunnels]) -> None:
    gateway = await plain.start()
    tunnels[0].clock.idle_s = 0.1
    near, end = await plain.open(await plain.member())
    assert await near.broken() >= 0
    assert await end.stream.broken() == CANCEL
    assert (await gateway.line())["flags"] == "IDLE"


async def test_the_gateway_stops_in_the_handshake(plain: Plain) -> None:
    gateway = await plain.start({"drain_timeout": "200ms", "drain_delay": 0})
    _, far = await plain.asked(await plain.member())
    await far.peer.until(lambda: bool(far.data))
    gateway.terminate()
    await gateway.exit_code()
    [line] = await gateway.lines()
    assert line["flags"] == "STOPPED"


# Files that change.


async def test_a_renewed_certificate(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tunnels show it, and open ones stay."""
    at_once = partial(CertificateFiles, look_every_s=0.0)
    monkeypatch.setattr("gateway.hbone.inner_tls.CertificateFiles", at_once)
    await plain.start()
    peer = await plain.member()
    near, before = await plain.open(peer)
    plain.mesh.member(GATEWAY)
    _, after = await plain.open(peer)
    shown = [end.tls.getpeercert(binary_form=True) for end in (before, after)]
    assert None not in shown and shown[0] != shown[1]
    await echoes(near, before)


async def test_a_far_end_that_is_revoked(plain: Plain, tmp_path: Path, tunnels: list[HboneTunnels]) -> None:
    """It loses its tunnel, and gets no other one."""
    file = tmp_path / "crl.pem"
    put(file, revocation_list(plain.mesh.authority))
    gateway = await plain.start(crl=str(file))
    folder = plain.mesh.member(DATABASE)
    peer = await plain.member()
    near, end = await plain.open(peer, plain.context_of(folder))
    await echoes(near, end)
    [watch] = tunnels[0].inner_revocations()
    assert isinstance(watch, RevocationWatch)
    put(file, revocation_list(plain.mesh.authority, serial_in(folder)))
    await watch.check_files()
    assert await near.broken() == CONNECT_ERROR
    assert await end.stream.broken() == CANCEL
    line = await gateway.line()
    assert line["flags"] == "DENY" and "is revoked" in line["error"]
    assert await gateway.metric("hbone_crl_connections_ended_total", place="routes") == 1
    again, far = await plain.asked(peer)
    with pytest.raises(ssl.SSLError):
        await FarEnd(far, plain.context_of(folder)).shake()
    assert await again.status() == 503
    assert "is revoked" in (await gateway.line())["error"]


async def test_lists_that_cannot_be_used(plain: Plain, tmp_path: Path) -> None:
    (tmp_path / "crl.pem").write_text("nothing")
    gateway = await plain.start(crl=str(tmp_path / "crl.pem"))
    assert await ask(await plain.member()).status() == 503
    assert "no usable revocation lists" in (await gateway.line())["error"]


async def test_a_route_that_goes(plain: Plain, tmp_path: Path, tunnels: list[HboneTunnels]) -> None:
    """Its tunnels stay, and its lists are followed up to the last one's end."""
    file = tmp_path / "crl.pem"
    put(file, revocation_list(plain.mesh.authority))
    gateway = await plain.start(crl=str(file))
    folder = plain.mesh.member(DATABASE)
    near, end = await plain.open(await plain.member(), plain.context_of(folder))
    [watch] = tunnels[0].inner_revocations()
    assert isinstance(watch, RevocationWatch)
    change_config(gateway.file, routes=[])
    gateway.reload()
    await gateway.records.match("^reload: 0 routes from ")
    assert list(tunnels[0].inner_revocations()) == [watch]
    await echoes(near, end)
    put(file, revocation_list(plain.mesh.authority, serial_in(folder)))
    await watch.check_files()
    assert await near.broken() == CONNECT_ERROR


async def test_other_certificates_of_the_port(plain: Plain) -> None:
    """They are for the next start, as the log says, inside of tunnels as well."""
    gateway = await plain.start()
    peer = await plain.member()
    other = plain.mesh.member(OTHER)
    rule = {"from": ["*"], "to": ["*.prod.svc.cluster.local:5432"]}
    change_config(gateway.file, hbone={"certificates": str(other), "rules": [rule]})
    gateway.reload()
    await gateway.records.match("takes effect at the next start")
    await gateway.records.match("^reload: 1 routes? from ")
    _, end = await plain.open(peer)
    shown = end.tls.getpeercert()
    assert shown is not None and ("URI", str(GATEWAY)) in shown["subjectAltName"]


async def test_a_route_that_goes_before_the_answer(
    plain: Plain, tmp_path: Path, tunnels: list[HboneTunnels]
) -> None:
    """Its lists are followed for the tunnel that is to come."""
    file = tmp_path / "crl.pem"
    put(file, revocation_list(plain.mesh.authority))
    gateway = await plain.start(crl=str(file))
    folder = plain.mesh.member(DATABASE)
    near = ask(await plain.member())
    far = await plain.world.service.request()
    [watch] = tunnels[0].inner_revocations()
    assert isinstance(watch, RevocationWatch)
    change_config(gateway.file, routes=[])
    gateway.reload()
    await gateway.records.match("^reload: 0 routes from ")
    assert watch.is_followed
    far.respond(200)
    await FarEnd(far, plain.context_of(folder)).shake()
    assert await near.status() == 200
    near.reset(CANCEL)
    await far.broken()
    await gateway.line()
    assert not watch.is_followed


async def test_counts_of_lists_that_no_route_has_any_more(plain: Plain, tmp_path: Path) -> None:
    """Counters never go back, and those whom such a list ends are counted, too."""
    file = tmp_path / "crl.pem"
    folder = plain.mesh.member(DATABASE)
    put(file, revocation_list(plain.mesh.authority, serial_in(folder)))
    gateway = await plain.start(crl=str(file))
    near, far = await plain.asked(await plain.member())
    with pytest.raises(ssl.SSLError):
        await FarEnd(far, plain.context_of(folder)).shake()
    assert await near.status() == 503
    assert await gateway.metric("istio_crl_policy_rejections_total", reporter="source") == 1
    change_config(gateway.file, routes=[])
    gateway.reload()
    await gateway.records.match("^reload: 0 routes from ")
    assert await gateway.metric("istio_crl_policy_rejections_total", reporter="source") == 1
