"""Who is let in at the HBONE port, and what those are told who are not; all with real handshakes."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.ports.member_connection import member_identity
from shared.credentials.certificates import certificate_writer
from shared.credentials.certificates.authority import LEAF_LIFETIME_S, Authority
from shared.credentials.certificates.certificate_writer import Contents
from shared.errors import DeniedError, RevokedError
from shared.net.legs.tcp import CLOSE_TIMEOUT_S
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_files import CertificateFiles
from shared.net.tls.contexts import proved_chain
from shared.net.tls.mesh_tls import server_context
from shared.net.tls.revocation_watch import RevocationWatch
from shared.tasks import running, spawn
from shared.trust.spiffe import SpiffeId
from tests.shared.http2.dialogue import PREFACE, ping, settings
from tests.support import hbone_port, reverse_port
from tests.support.bundles import tell
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, HbonePort, Mesh
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.revocation import Hierarchy, put, revocation_list, serial_in, trust
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer, turned_away

Ends = tuple[ssl.SSLObject, ssl.SSLObject]

TLS12 = ssl.TLSVersion.TLSv1_2
EXPIRED_S = -200.0


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[HbonePort]:
    async with hbone_port.serving(tmp_path) as port:
        yield port


async def is_served(port: HbonePort, tls: ssl.SSLContext) -> None:
    """Holds that a client gets as far as an answer."""
    async with Http2Peer.connected(port.port, tls) as peer:
        assert await peer.request(b"CONNECT", b"", authority=b"10.0.0.1:1").status() == 401
        assert (await port.line())["flags"] == "DENY"


async def what_it_hears(port: HbonePort, tls: ssl.SSLContext) -> str:
    """Why a client was not let in, as its own TLS tells it."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=tls, server_hostname="")
    except ssl.SSLError as error:
        return str(error).lower().replace("_", " ")
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(1000):
                pass
        return "nothing"
    except ssl.SSLError as error:
        return str(error).lower().replace("_", " ")
    finally:
        writer.transport.abort()


async def refusal(port: HbonePort) -> tuple[str, str]:
    """Flag and error of the line that a refused connection leaves; nothing else is left of it."""
    line = await port.line()
    assert (line["message"], line["route"]) == ("connection refused", "hbone")
    assert line["src.addr"].startswith("127.0.0.1:")
    await port.until(0)
    assert port.value("hbone_connections_refused_total", flags=line["flags"]) == 1
    return line["flags"], line["error"]


# Let in.


async def test_every_connection_proves_its_certificate_anew(port: HbonePort) -> None:
    tls = port.mesh.tls(port.mesh.member(CALLER))
    async with Http2Peer.connected(port.port, tls) as peer:
        assert peer.tls.session is None or not peer.tls.session.has_ticket


async def test_tls_1_2_if_it_is_set(tmp_path: Path) -> None:
    async with hbone_port.serving(tmp_path, tls12=True) as port:
        member = port.mesh.member(CALLER)
        await is_served(port, port.mesh.tls(member, version=TLS12))
        await is_served(port, port.mesh.tls(member))


# Not let in. The client is told why by an alert (RFC 8446 section 6.2), or by GOAWAY.


async def test_tls_1_2_if_it_is_not_set(port: HbonePort) -> None:
    heard = await what_it_hears(port, port.mesh.tls(port.mesh.member(CALLER), version=TLS12))
    assert "protocol version" in heard
    assert await refusal(port) == ("TLS_FAILURE", "tls handshake: unsupported protocol")


@pytest.mark.parametrize("version", [TLS12, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
async def test_no_certificate(tmp_path: Path, version: ssl.TLSVersion) -> None:
    async with hbone_port.serving(tmp_path, tls12=True) as port:
        heard = await what_it_hears(port, port.mesh.tls(None, version=version))
        assert "certificate required" in heard or "handshake failure" in heard
        assert await refusal(port) == ("TLS_FAILURE", "tls handshake: peer did not return a certificate")


@pytest.mark.parametrize("version", [TLS12, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
async def test_an_authority_that_is_not_ours(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """Its certificates carry the right name."""
    other = Authority.create(TRUST_DOMAIN)
    other.write(tmp_path / "other", other.issue(CALLER))
    async with hbone_port.serving(tmp_path / "own", tls12=True) as port:
        assert "unknown ca" in await what_it_hears(port, port.mesh.tls(tmp_path / "other", version=version))
        flag, error = await refusal(port)
        assert flag == "TLS_FAILURE"
        assert error.startswith("tls handshake: client certificate refused: ")


async def test_an_expired_certificate(port: HbonePort) -> None:
    expired = port.mesh.member(CALLER, lifetime_s=EXPIRED_S)
    assert "certificate expired" in await what_it_hears(port, port.mesh.tls(expired))
    assert await refusal(port) == (
        "TLS_FAILURE",
        "tls handshake: client certificate refused: certificate has expired",
    )


async def test_a_server_s_certificate(port: HbonePort) -> None:
    """Not good for a client (RFC 5280 section 4.2.1.12)."""
    folder = port.mesh.member(CALLER, client=False)
    assert "unsupported certificate" in await what_it_hears(port, port.mesh.tls(folder))
    assert (await refusal(port))[0] == "TLS_FAILURE"


async def test_no_http2(port: HbonePort) -> None:
    tls = port.mesh.tls(port.mesh.member(CALLER))
    tls.set_alpn_protocols(["http/1.1"])
    assert await what_it_hears(port, tls) == "nothing"
    assert await refusal(port) == ("TLS_FAILURE", "the client does not offer HTTP/2 (ALPN h2)")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"dns_names": ["hello.demo.svc"]}, "it has 0 URI names instead of one"),
        ({"spiffe_id": SpiffeId(TRUST_DOMAIN, "")}, "names a trust domain, not a workload"),
    ],
)
async def test_a_certificate_that_names_no_workload(
    port: HbonePort, tmp_path: Path, how: dict[str, Any], reason: str
) -> None:
    authority = port.mesh.authority
    authority.write(tmp_path / "odd", authority.issue(**how))
    async with Http2Peer.connected(port.port, port.mesh.tls(tmp_path / "odd")) as peer:
        await peer.until(lambda: peer.lost)
        assert peer.goaway
    flag, error = await refusal(port)
    assert flag == "DENY"
    assert error.startswith("peer certificate denied: ") and reason in error


async def test_what_it_asks_for_meanwhile_is_not_answered(port: HbonePort, tmp_path: Path) -> None:
    authority = port.mesh.authority
    authority.write(tmp_path / "odd", authority.issue(dns_names=["a"]))
    async with Http2Peer.connected(port.port, port.mesh.tls(tmp_path / "odd")) as peer:
        stream = peer.request(b"CONNECT", b"", authority=b"127.0.0.1:1")
        await stream.broken()
        assert stream.fields == []
    assert (await refusal(port))[0] == "DENY"


async def test_no_tls(port: HbonePort) -> None:
    client = await TcpPeer.connect(port.port)
    client.send_soon(b"GET / HTTP/1.1\r\n\r\n")
    await client.was_reset()  # or FIN
    assert await refusal(port) == ("TLS_FAILURE", "tls handshake: http request")
    await client.close()


async def test_a_client_that_leaves_without_a_byte_is_no_news(port: HbonePort) -> None:
    """A load balancer's probe."""
    client = await TcpPeer.connect(port.port)
    client.end()
    await client.rest()
    await port.until(0)
    assert port.value("hbone_connections_refused_total", flags="EMPTY") == 1
    await what_it_hears(port, port.mesh.tls(None))
    assert (await port.line())["flags"] == "TLS_FAILURE", "the only line"
    await client.close()


async def test_a_client_that_leaves_in_the_middle(port: HbonePort) -> None:
    client = await TcpPeer.connect(port.port)
    await client.send(b"\x16\x03\x01\x01\x00")
    client.end()
    await client.rest()
    flag, error = await refusal(port)
    assert (flag, error.startswith("tls handshake: ")) == ("TLS_FAILURE", True)
    await client.close()


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x01\x00"])
async def test_a_slow_handshake(tmp_path: Path, first: bytes) -> None:
    async with hbone_port.serving(tmp_path, handshake_timeout_s=0.2) as port:
        client = await TcpPeer.connect(port.port)
        if first:
            await client.send(first)
        assert await client.rest() == b""
        assert await refusal(port) == ("TLS_FAILURE", "tls handshake: not done within 0.2 s")
        await client.close()


async def test_one_connection_too_many(tmp_path: Path) -> None:
    """Half-open ones count."""
    async with hbone_port.serving(tmp_path, max_connections=2) as port, port.caller():
        silent = await TcpPeer.connect(port.port)
        await port.until(2)
        third = await TcpPeer.connect(port.port)
        assert await third.was_reset()
        line = await port.line()
        assert (line["flags"], line["error"]) == ("LIMIT", "2 connections are open, which is max_connections")
        assert port.value("hbone_connections_refused_total", flags="LIMIT") == 1
        await silent.close()
        await port.until(1)
        async with port.caller():
            await port.until(2)
        await third.close()


async def test_a_flooder_s_place_is_soon_another_s(tmp_path: Path) -> None:
    """It neither reads why, nor ends."""
    async with hbone_port.serving(tmp_path, max_connections=1) as port:
        tls = port.mesh.tls(port.mesh.member(CALLER))
        _, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=tls, server_hostname="")
        await port.until(1)
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.write(PREFACE + settings() + ping(b"12345678") * 1500)
        async with asyncio.timeout(CLOSE_TIMEOUT_S / 3):
            await port.until(0)
        async with port.caller() as peer:
            await peer.answered()
            assert not peer.lost
        writer.transport.abort()


async def test_one_connection_of_an_address_too_many(tmp_path: Path) -> None:
    async with hbone_port.serving(tmp_path, max_connections_per_source=1) as port:
        async with port.caller():
            await turned_away(port.port)
            error = (await port.line())["error"]
            assert error == "1 connections from 127.0.0.1 are open, which is max_connections_per_source"
        await port.until(0)
        garbage = await TcpPeer.connect(port.port)
        await garbage.send(b"no TLS")
        await garbage.rest()
        await port.until(0)
        async with port.caller():
            await port.until(1)
        await port.until(0)
        assert port.listener._connections.sources == {}
        await garbage.close()


# Certificates that change.


async def until_shown(port: HbonePort, wanted_pem: bytes) -> None:
    """Returns once the port shows `wanted_pem` to clients, which it refuses here: the files are looked at
    once a second."""
    wanted = ssl.PEM_cert_to_DER_cert(wanted_pem.decode())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    tls.set_alpn_protocols(["h2"])
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=tls, server_hostname="")
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.transport.abort()
            if shown == wanted:
                return


async def test_new_roots_shut_the_old_ones_out(tmp_path: Path) -> None:
    """TLS 1.2 could resume a session that the old roots had let in."""
    async with hbone_port.serving(tmp_path / "own", tls12=True) as port:
        old = port.mesh.tls(port.mesh.member(CALLER), version=TLS12)
        async with Http2Peer.connected(port.port, old) as peer:
            session = peer.tls.session
        own = port.mesh.member(GATEWAY)
        new = Mesh(tmp_path / "new")
        for source, target in zip(
            certificate_folder.find(new.member(GATEWAY)).all, certificate_folder.find(own).all, strict=True
        ):
            shutil.copyfile(source, target)
        await until_shown(port, (own / "certificates.pem").read_bytes())
        assert session is not None
        assert "unknown ca" in await resumed(port, old, session)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None) -> Ends:
    """Both ends of a connection in memory."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(there, here, session=session)
    ours = server.wrap_bio(here, there, server_side=True)
    for _ in range(3):
        for end in (theirs, ours):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ours, theirs


def test_an_expired_certificate_resumes_nothing(tmp_path: Path) -> None:
    """OpenSSL does not look at it again."""
    mesh = Mesh(tmp_path)
    server = server_context(mesh.member(GATEWAY), tls12=True)
    client = mesh.tls(mesh.member(CALLER), version=TLS12)
    first, theirs = handshake(server, client, None)
    second, _ = handshake(server, client, theirs.session)
    assert (first.session_reused, second.session_reused) == (False, True)
    today, some_day = time.time(), time.time() + 10 * LEAF_LIFETIME_S
    assert member_identity(first, today) == member_identity(second, today) == CALLER
    with pytest.raises(DeniedError, match=f"that of {CALLER} has expired"):
        member_identity(second, some_day)


async def test_a_revoked_certificate_resumes_nothing(tmp_path: Path) -> None:
    """In a resumed handshake there is no chain."""
    mesh, crl = Mesh(tmp_path), tmp_path / "crl.pem"
    put(crl, revocation_list(mesh.authority))
    server = server_context(mesh.member(GATEWAY), tls12=True)
    watch = RevocationWatch(crl, certificate_folder.find(mesh.folder_of(GATEWAY)).roots, purpose="test")
    watch.read()
    client = mesh.tls(mesh.member(CALLER), version=TLS12)
    first, theirs = handshake(server, client, None)
    second, _ = handshake(server, client, theirs.session)
    assert (first.session_reused, second.session_reused) == (False, True)
    assert [len(proved_chain(one)) for one in (first, second)] == [2, 1]
    assert watch.check(proved_chain(first)) == watch.check(proved_chain(second))
    put(crl, revocation_list(mesh.authority, serial_in(mesh.folder_of(CALLER))))
    await watch.check_files()
    third, _ = handshake(server, client, theirs.session)
    assert third.session_reused
    with pytest.raises(RevokedError):
        watch.check(proved_chain(third))


def test_a_session_of_one_that_was_refused_resumes_nothing(tmp_path: Path) -> None:
    """OpenSSL keeps it: TLS was content."""
    mesh = Mesh(tmp_path)
    server = server_context(mesh.member(GATEWAY), tls12=True)
    client = mesh.tls(mesh.member(SpiffeId("other.local", "/x")), version=TLS12)
    first, theirs = handshake(server, client, None)
    second, _ = handshake(server, client, theirs.session)
    assert (first.session_reused, second.session_reused) == (False, True)
    for ours in (first, second):
        with pytest.raises(DeniedError, match=r"vouch(es)? for spiffe://other\.local/x"):
            member_identity(ours, time.time())


async def resumed(port: HbonePort, tls: ssl.SSLContext, session: ssl.SSLSession) -> str:
    """What a client hears that asks for its old session."""
    tls.verify_mode = ssl.CERT_NONE
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.wrap_bio(there, here)
    client.session = session
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    try:
        while True:
            try:
                client.do_handshake()
                client.read()
            except ssl.SSLWantReadError:
                writer.write(here.read())
                async with asyncio.timeout(PATIENCE_S):
                    there.write(await reader.read(10_000))
            except ssl.SSLError as error:
                return str(error).lower().replace("_", " ")
    finally:
        writer.transport.abort()


# Several trust domains, and certificates that change.


async def test_a_root_vouches_for_its_own_trust_domain_only(tmp_path: Path) -> None:
    """TLS is content with either root, whatever the certificate says."""
    mesh, other = Mesh(tmp_path), Mesh(tmp_path / "other", "other.local")
    async with hbone_port.serving(tmp_path, mesh=mesh) as port:
        trust(mesh.folder_of(GATEWAY), mesh.authority.root_pem, other.authority.root_pem)
        await is_served(port, mesh.tls(other.member(SpiffeId("other.local", CALLER.path))))
        await is_served(port, mesh.tls(mesh.member(CALLER)))
        async with Http2Peer.connected(port.port, mesh.tls(other.member(CALLER))) as peer:
            await peer.until(lambda: peer.lost)
            assert peer.goaway
        line = await port.line()
        assert (line["flags"], line["error"]) == (
            "DENY",
            f"peer certificate denied: a root of other.local may not vouch for {CALLER}",
        )


async def test_a_map_of_bundles_tells_whose_roots_are(tmp_path: Path) -> None:
    mesh, nameless = Mesh(tmp_path), Hierarchy(TRUST_DOMAIN)
    member = tmp_path / "member"
    nameless.write(member, nameless.issue(CALLER))
    async with hbone_port.serving(tmp_path, mesh=mesh) as port:
        own = mesh.folder_of(GATEWAY)
        trust(own, mesh.authority.root_pem, nameless.root_pem)
        tell(own, {TRUST_DOMAIN: [mesh.authority], "other.local": [nameless.root]})
        async with Http2Peer.connected(port.port, mesh.tls(member)) as peer:
            await peer.until(lambda: peer.lost)
        assert "a root of other.local may not vouch for" in (await port.line())["error"]
    async with hbone_port.serving(tmp_path, mesh=mesh) as port:
        tell(own, {TRUST_DOMAIN: [mesh.authority, nameless.root]})
        trust(own, mesh.authority.root_pem, nameless.root_pem)
        await is_served(port, mesh.tls(member))


def rotate(mesh: Mesh) -> bytes:
    """Gives the gateway a new certificate, which is returned in DER."""
    pair = mesh.authority.issue(GATEWAY)
    contents = Contents(pair.certificate_pem, pair.key_pem, mesh.authority.root_pem)
    certificate_writer.write(mesh.folder_of(GATEWAY), contents)
    return ssl.PEM_cert_to_DER_cert(pair.certificate_pem.decode())


@pytest.fixture
def at_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificate files are looked at each time, instead of once a second."""
    monkeypatch.setitem(CertificateFiles.__init__.__kwdefaults__ or {}, "look_every_s", 0.0)


@pytest.mark.usefixtures("at_every_connection")
async def test_a_hundred_rotations_of_the_hbone_port_disturb_no_tunnel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop, rounds = asyncio.Event(), 0

    async def talk(stream: PeerStream, there: TcpPeer) -> None:
        nonlocal rounds
        while not stop.is_set():
            await stream.send(bytes(5000))
            await there.send(await there.read(5000))
            await stream.read(5000)
            rounds += 1

    async with hbone_port.serving(tmp_path) as port, TcpServer.listening() as target, port.caller() as peer:
        tls = port.mesh.tls(port.mesh.member(CALLER))
        load = []
        for _ in range(3):
            stream = peer.request(b"CONNECT", b"", authority=f"127.0.0.1:{target.port}".encode())
            load.append(spawn(talk(stream, await target.accept()), name="tunnel"))
        for _ in range(100):
            new = rotate(port.mesh)
            async with Http2Peer.connected(port.port, tls) as newcomer:
                assert newcomer.tls.getpeercert(binary_form=True) == new, "the new one at once"
                await newcomer.answered()
                assert not newcomer.lost
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*load)
        assert rounds > 100, "the tunnels were busy all the time"
        assert "keeping the certificate in use" not in caplog.text


@pytest.mark.usefixtures("at_every_connection")
async def test_a_hundred_rotations_of_the_reverse_port_disturb_no_tunnel(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    async with reverse_port.serving(tmp_path, mesh=mesh) as port, port.workload() as workload:
        stream, far = await port.opened(workload)
        for number in range(100):
            new = rotate(mesh)
            name = f"w{number}.demo.svc.cluster.local"
            identity = SpiffeId.of_workload(TRUST_DOMAIN, "demo", f"w{number}")
            async with port.dialled(name, identity) as newcomer:
                await newcomer.registered()
                assert newcomer.peer.tls.getpeercert(binary_form=True) == new, "the new one at once"
            stream.write(b"x")
            assert await far.read(1) == b"x"
        assert not workload.peer.goaway


# The end.


async def test_a_drain_waits_for_a_handshake(port: HbonePort) -> None:
    client = await TcpPeer.connect(port.port)
    await port.until(1)
    await port.listener.drain()
    assert port.listener.open_connections == 1
    await client.close()
    await port.until(0)


async def test_closing_leaves_no_handshake_behind(port: HbonePort) -> None:
    silent = await TcpPeer.connect(port.port)
    begun = await TcpPeer.connect(port.port)
    await begun.send(b"\x16\x03\x01\x01\x00")
    await port.until(2)
    await port.listener.close()
    assert (port.listener.open_connections, running()) == (0, 0)
    for client in (silent, begun):
        await client.was_reset()  # or FIN: it is gone
        await client.close()
