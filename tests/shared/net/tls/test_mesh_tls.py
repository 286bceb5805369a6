"""mTLS between members of the mesh: what a folder has to hold, and what both ends make of each other."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from shared.address import Address
from shared.credentials.certificates import certificate_writer
from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.certificate_writer import Contents
from shared.errors import (
    ConfigError,
    DialError,
    ExpelledError,
    HboneError,
    StreamResetError,
    UnavailableError,
)
from shared.net.dial import Origin
from shared.net.pool import pool
from shared.net.tls.certificate_files import LOOK_EVERY_S, CertificateFiles, in_use
from shared.net.tls.certificate_folder import BUNDLES_FILE, CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.net.tls.mesh_tls import (
    MeshIdentity,
    alert_of,
    client_context,
    server_context,
)
from shared.trust.peer_patterns import TrustDomain
from shared.trust.spiffe import SpiffeId
from tests.shared.net.loopback import connected, not_connected, until
from tests.shared.net.pooled import pooled
from tests.support.http2_peer import Service
from tests.support.locked_key import locked
from tests.support.revocation import Hierarchy, end_in, put, revocation_list, serial_in, trust
from tests.support.wall_clock import Clock

TRUST_DOMAIN = "demo.local"
SERVER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "server")
CLIENT = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "client")
PATIENCE_S = 20.0


@pytest.fixture
def mesh() -> Authority:
    return Authority.create(TRUST_DOMAIN)


@pytest.fixture
def server(mesh: Authority, tmp_path: Path) -> Path:
    mesh.write(tmp_path / "server", mesh.issue(SERVER))
    return tmp_path / "server"


@pytest.fixture
def client(mesh: Authority, tmp_path: Path) -> MeshIdentity:
    mesh.write(tmp_path / "client", mesh.issue(CLIENT))
    return MeshIdentity(tmp_path / "client", (str(SERVER),))


# Files.


def test_files_that_another_process_replaces_all_the_time(tmp_path: Path) -> None:
    """Whatever moment a reader meets, it has a key and its certificate, and in the end the last ones."""
    mesh = Authority.create("demo.local")
    folder = tmp_path / "kept"
    pairs = [mesh.issue(CLIENT) for _ in range(20)]

    def write(number: int) -> None:
        pair = pairs[number % len(pairs)]
        certificate_writer.write(folder, Contents(pair.certificate_pem, pair.key_pem, mesh.root_pem))

    write(0)
    identity = MeshIdentity(folder, (str(SERVER),))
    seen = {client_context(identity, 0.0)}
    writer = threading.Thread(target=lambda: [write(number) for number in range(1, 400)])
    writer.start()
    now = 0.0
    while writer.is_alive():
        now += 2 * LOOK_EVERY_S
        seen.add(client_context(identity, now))
    writer.join()
    client_context(identity, now + 2 * LOOK_EVERY_S)
    client_context(identity, now + 4 * LOOK_EVERY_S)
    (used,) = [files for files in in_use() if files.chain_file.parent == folder]
    assert used.chain_pem == pairs[399 % len(pairs)].certificate_pem
    assert len(seen) > 1


@pytest.mark.parametrize("name", [CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE])
def test_a_file_that_is_missing_is_named(server: Path, name: str) -> None:
    (server / name).unlink()
    with pytest.raises(UnavailableError, match=f"{name}: No such file"):
        server_context(server, tls12=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (CERTIFICATES_FILE, "certificates.pem: no certificate chain for the key in"),
        (PRIVATE_KEY_FILE, "certificates.pem: no certificate chain for the key in"),
        (ROOTS_FILE, "ca_certificates.pem: no usable root certificates"),
    ],
)
def test_a_file_with_something_else_is_named(server: Path, name: str, reason: str) -> None:
    (server / name).write_text("no PEM\n")
    with pytest.raises(ConfigError, match=reason):
        server_context(server, tls12=False)


def test_a_key_of_another_certificate(mesh: Authority, server: Path) -> None:
    (server / PRIVATE_KEY_FILE).write_bytes(mesh.issue(SERVER).key_pem)
    with pytest.raises(ConfigError, match="key values mismatch"):
        server_context(server, tls12=False)


def test_nobody_is_asked_for_a_passphrase(server: Path) -> None:
    key = server / PRIVATE_KEY_FILE
    key.write_bytes(locked(key.read_bytes()))
    with pytest.raises(ConfigError, match="no certificate chain for the key"):
        server_context(server, tls12=False)


def test_a_client_s_folder_is_read_again_when_it_changes(mesh: Authority, client: MeshIdentity) -> None:
    first = client_context(client, 10.0)
    assert client_context(client, 20.0) is first
    mesh.write(client.folder, mesh.issue(CLIENT))
    assert client_context(client, 30.0) is not first


def test_a_client_s_folder_may_come_later(mesh: Authority, tmp_path: Path) -> None:
    identity = MeshIdentity(tmp_path / "later", (str(SERVER),))
    with pytest.raises(UnavailableError):
        client_context(identity, 1.0)
    mesh.write(identity.folder, mesh.issue(CLIENT))
    assert client_context(identity, 1.0).verify_mode is ssl.CERT_REQUIRED


# Both ends, on a socket.


def listening(folder: Path) -> AbstractAsyncContextManager[Service]:
    """A server with the certificates in `folder`."""
    return Service.listening(server_context(folder, tls12=False))


def origin(service: Service, identity: MeshIdentity) -> Origin:
    return Origin("https", "ztunnel", Address("127.0.0.1", service.port), identity=identity)


class Names:
    """What clients asked a context for."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.seen: list[str | None] = []
        context.sni_callback = lambda _, name, __: self.seen.append(name)


async def test_both_prove_who_they_are_without_a_name(server: Path, client: MeshIdentity) -> None:
    context = server_context(server, tls12=False)
    names = Names(context)
    async with Service.listening(context) as service, connected(origin(service, client)) as connection:
        stream = connection.open([(b":method", b"CONNECT"), (b":authority", b"a:1")])
        asked = await service.request()
        asked.respond(200)
        assert await stream.response(PATIENCE_S) == 200
        stream.abort()
        assert names.seen == [None]


async def test_a_name_can_be_sent(server: Path, client: MeshIdentity) -> None:
    context = server_context(server, tls12=False)
    names = Names(context)
    named = MeshIdentity(client.folder, client.peers, "outbound_.80_._.hello")
    async with Service.listening(context) as service, connected(origin(service, named)):
        assert names.seen == ["outbound_.80_._.hello"]


@pytest.mark.parametrize(
    ("peers", "reason"),
    [
        (("spiffe://demo.local/ns/demo/sa/other",), f"peer {SERVER} denied: no rule allows it"),
        (("spiffe://other.local/**",), f"peer {SERVER} denied: no rule allows it"),
        (("spiffe://demo.local/ns/*/sa/server",), ""),
        (("spiffe://other.local/**", "spiffe://demo.local/**"), ""),
    ],
)
async def test_the_server_has_to_be_the_one_we_want(
    server: Path, client: MeshIdentity, peers: tuple[str, ...], reason: str
) -> None:
    wanted = MeshIdentity(client.folder, peers)
    async with listening(server) as service:
        if reason:
            assert await not_connected(origin(service, wanted)) == reason
        else:
            async with connected(origin(service, wanted)):
                pass
        assert not service.asked


async def test_a_server_of_another_mesh(tmp_path: Path, client: MeshIdentity) -> None:
    """The name alone is worth nothing."""
    other = Authority.create(TRUST_DOMAIN)
    other.write(tmp_path / "other", other.issue(SERVER))
    async with listening(tmp_path / "other") as service:
        assert (await not_connected(origin(service, client))).startswith("certificate refused: ")


async def test_a_root_vouches_for_its_own_trust_domain_only(
    mesh: Authority, server: Path, client: MeshIdentity
) -> None:
    other = Authority.create("other.local")
    other.write(server, other.issue(SERVER))
    for folder in (server, client.folder):
        trust(folder, mesh.root_pem, other.root_pem)
    async with listening(server) as service:
        assert await not_connected(origin(service, client)) == (
            f"peer certificate denied: a root of other.local may not vouch for {SERVER}"
        )
        assert not service.asked
    mesh.write(server, mesh.issue(SERVER))
    trust(server, mesh.root_pem, other.root_pem)
    async with listening(server) as service, connected(origin(service, client)):
        pass


async def test_a_map_that_is_none_is_named(server: Path, client: MeshIdentity) -> None:
    for folder in (server, client.folder):
        (folder / BUNDLES_FILE).write_text("oops")
    with pytest.raises(ConfigError, match=f"{server / BUNDLES_FILE}: no map of SPIFFE bundles"):
        server_context(server, tls12=False)
    with pytest.raises(ConfigError, match=f"{client.folder / BUNDLES_FILE}: no map of SPIFFE bundles"):
        client_context(client, 0.0)


async def test_a_hundred_rotations_of_a_client_disturb_no_tunnel(
    mesh: Authority, server: Path, client: MeshIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CertificateFiles.__init__.__kwdefaults__ or {}, "look_every_s", 0.0)
    context = server_context(server, tls12=False)
    async with Service.listening(context) as service, connected(origin(service, client)) as connection:
        stream = connection.open([(b":method", b"CONNECT"), (b":authority", b"a:1")])
        asked = await service.request()
        asked.respond(200)
        assert await stream.response(PATIENCE_S) == 200
        for _ in range(100):
            pair = mesh.issue(CLIENT)
            contents = Contents(pair.certificate_pem, pair.key_pem, mesh.root_pem)
            certificate_writer.write(client.folder, contents)
            async with connected(origin(service, client)) as newcomer:
                newcomer.open([(b":method", b"CONNECT"), (b":authority", b"a:1")])
                shown = (await service.request()).peer.tls.getpeercert(binary_form=True)
                assert shown == ssl.PEM_cert_to_DER_cert(pair.certificate_pem.decode()), "at once"
            stream.write(b"still there")
            assert await asked.read(11) == b"still there"
        stream.abort()


async def test_a_server_whose_certificate_is_a_client_s(
    mesh: Authority, server: Path, client: MeshIdentity
) -> None:
    mesh.write(server, mesh.issue(SERVER, server=False))
    async with listening(server) as service:
        assert "certificate refused: " in await not_connected(origin(service, client))


async def test_a_server_without_a_spiffe_id(mesh: Authority, server: Path, client: MeshIdentity) -> None:
    mesh.write(server, mesh.issue(dns_names=["ztunnel"]))
    async with listening(server) as service:
        assert "0 URI names instead of one" in await not_connected(origin(service, client))


async def test_our_own_certificate_is_missing(server: Path, tmp_path: Path) -> None:
    nobody = MeshIdentity(tmp_path / "nobody", (str(SERVER),))
    async with listening(server) as service:
        assert await not_connected(origin(service, nobody)) == (
            f"our own certificates: {tmp_path}/nobody/certificates.pem: No such file or directory"
        )


def test_origins_differ_by_identity(client: MeshIdentity) -> None:
    """The pool's key: nobody's tunnel goes over another's connection."""
    address = Address("127.0.0.1", 15008)
    others = [
        MeshIdentity(client.folder.parent / "other", client.peers),
        MeshIdentity(client.folder, ("spiffe://demo.local/**",)),
        MeshIdentity(client.folder, client.peers, "name"),
        None,
    ]
    own = Origin("https", "ztunnel", address, identity=client)
    assert own == Origin("https", "ztunnel", address, identity=MeshIdentity(client.folder, client.peers))
    assert all(own != Origin("https", "ztunnel", address, identity=other) for other in others)


# The alert that the event loop would drop.


async def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes, OSError]:
    """What a refusing server has still to say, and what the client makes of it."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(there, here)
    ours = server.wrap_bio(here, there, server_side=True)
    with pytest.raises(ssl.SSLWantReadError):
        theirs.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        ours.do_handshake()
    theirs.do_handshake()
    with pytest.raises(ssl.SSLError) as refusal:
        ours.do_handshake()
    there.read()
    there.write(alert_of(refusal.value))
    with pytest.raises(ssl.SSLError) as heard:
        theirs.read()
    return alert_of(refusal.value), heard.value


async def test_a_failed_handshake_leaves_its_alert(server: Path, mesh: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=mesh.root_pem.decode())
    words, heard = await handshake(server_context(server, tls12=False), context)
    assert words
    assert "certificate required" in str(heard).lower().replace("_", " ")


def test_other_errors_have_no_alert() -> None:
    assert alert_of(OSError("gone")) == b""


@pytest.mark.parametrize(
    ("tls12", "version", "taken"),
    [
        (False, ssl.TLSVersion.TLSv1_3, True),
        (False, ssl.TLSVersion.TLSv1_2, False),
        (True, ssl.TLSVersion.TLSv1_2, True),
        (True, ssl.TLSVersion.TLSv1_3, True),
    ],
)
async def test_versions(
    server: Path, client: MeshIdentity, tls12: bool, version: ssl.TLSVersion, taken: bool
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(client.folder / ROOTS_FILE)
    context.load_cert_chain(client.folder / CERTIFICATES_FILE, client.folder / PRIVATE_KEY_FILE)
    context.minimum_version = context.maximum_version = version
    async with Service.listening(server_context(server, tls12=tls12)) as service:
        try:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", service.port, ssl=context, server_hostname=""
            )
        except (OSError, HboneError):
            assert not taken
        else:
            assert taken
            writer.transport.abort()


# Servers whose certificates are revoked.


async def test_a_revoked_server_is_left_alone(mesh: Authority, server: Path, client: MeshIdentity) -> None:
    crl = client.folder / "crl.pem"
    put(crl, revocation_list(mesh, serial_in(server)))
    wanted = replace(client, crl=crl)
    async with listening(server) as service, pooled() as world:
        with pytest.raises(DialError, match="peer certificate denied: it is revoked"):
            await world.open(origin(service, wanted))
        (watch,) = world.pool.watches.values()
        assert watch.rejected == 1
        assert not service.asked


async def test_a_server_that_is_revoked_later_loses_its_connections(
    mesh: Authority, server: Path, client: MeshIdentity, tmp_path: Path
) -> None:
    crl = client.folder / "crl.pem"
    put(crl, revocation_list(mesh))
    wanted = replace(client, crl=crl)
    other = tmp_path / "other"
    mesh.write(other, mesh.issue(SERVER))
    async with (
        listening(server) as leaving,
        listening(other) as staying,
        pooled() as world,
    ):
        stream = await world.open(origin(leaving, wanted))
        kept = await world.open(origin(staying, wanted))
        gone: list[StreamResetError] = []
        stream.on_gone = gone.append
        assert stream.connection.proof and len(stream.connection.proof) == 1
        (watch,) = world.pool.watches.values()
        put(crl, revocation_list(mesh, serial_in(server)))
        await watch.check_files()
        assert [(type(error), error.flag) for error in gone] == [(ExpelledError, "DENY")]
        assert "is revoked" in str(gone[0])
        assert watch.ended == 1 and not kept.connection.lost
        await until(lambda: world.closed() == {"revoked": 1})
        with pytest.raises(DialError, match="is revoked"):
            await world.open(origin(leaving, wanted))
        kept.abort()


async def test_lists_that_cannot_be_used_are_a_failed_dial(server: Path, client: MeshIdentity) -> None:
    wanted = replace(client, crl=client.folder / "crl.pem")
    async with listening(server) as service, pooled() as world:
        with pytest.raises(DialError, match=r"revocation lists: .*crl\.pem: No such file"):
            await world.open(origin(service, wanted))


async def test_the_lists_that_are_followed_are_bounded(
    mesh: Authority, server: Path, client: MeshIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_WATCHES", 2)
    async with listening(server) as service, pooled() as world:
        for number in range(4):
            crl = client.folder / f"crl-{number}.pem"
            put(crl, revocation_list(mesh))
            await world.open(origin(service, replace(client, crl=crl)))
        assert len(world.pool.watches) == 2


async def test_a_server_of_an_alias_is_one_of_ours(server: Path, client: MeshIdentity) -> None:
    mesh = Hierarchy().root  # names no trust domain, as Istio's
    mesh.write(server, mesh.issue(SpiffeId("old.local", SERVER.path)))
    mesh.write(client.folder, mesh.issue(CLIENT))
    wanted = replace(client, trust=TrustDomain(TRUST_DOMAIN, ("old.local",)))
    async with listening(server) as service:
        assert "no rule allows it" in await not_connected(origin(service, client))
        async with connected(origin(service, wanted)):
            pass


# Servers whose certificates end.


async def test_a_server_whose_certificate_ends_gets_no_new_streams(
    mesh: Authority, server: Path, client: MeshIdentity, clock: Clock
) -> None:
    """The loop's timers know nothing of it: the machine has slept."""
    async with listening(server) as service, pooled(wall_clock=clock) as world:
        stream = await world.open(origin(service, client))
        old = stream.connection
        assert old.certificate_ends == end_in(server)
        clock.now = end_in(server) + 1
        with pytest.raises(DialError, match="the peer's certificate ends at this moment"):
            await world.open(origin(service, client))
        clock.now = time.time()  # for its new one, which is as young
        assert (await world.open(origin(service, client))).connection is not old
        assert not stream.over, "what is open goes on"
        stream.abort()
        await until(lambda: world.closed() == {"expired": 1})


async def test_it_is_noticed_without_a_stream(server: Path, client: MeshIdentity, clock: Clock) -> None:
    async with listening(server) as service, pooled(wall_clock=clock) as world:
        clock.now = end_in(server) - 0.1
        stream = await world.open(origin(service, client))
        clock.turn(0.2)
        await until(lambda: world.counts.draining == 1)
        stream.abort()
        await until(lambda: world.closed() == {"expired": 1})
