"""The built-in mTLS end, from real TLS clients to a real app on loopback.

tests/path/test_s_client.py has the whole way of it, and who talks and ends first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from OpenSSL import SSL

from agent.mtls.inbound import Inbound, InboundSettings
from agent.proxy.downstream import Downstream
from shared.address import Address
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.credentials.certificates.certificate_keeper import CertificateKeeper, KeeperSettings
from shared.errors import (
    ConfigError,
    DeniedError,
    DialError,
    LimitError,
    OverloadError,
    StreamResetError,
    TlsFailureError,
    UnavailableError,
)
from shared.net.http2.answers import answer
from shared.net.legs.tcp_end import reset
from shared.net.tls.certificate_folder import BUNDLES_FILE, CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.net.tls.root_files import RootSources
from shared.tasks import spawn
from shared.trust.peer_patterns import TrustDomain
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId
from shared.tunnel.tunnel_record import TunnelRecord
from tests.support.bundles import tell
from tests.support.certificate_requests import key_pem, new_key, request_pem
from tests.support.faulty_authority import FaultyAuthority
from tests.support.process import run
from tests.support.revocation import Hierarchy, put, revocation_list, serial
from tests.support.tcp_peer import TcpPeer
from tests.support.tls_client import PATIENCE_S, VERSIONS, TlsClient, client_context, reason

MIB = 1 << 20
TRUST_DOMAIN = "demo.local"
SERVER = SpiffeId(TRUST_DOMAIN, "/ns/demo/sa/hello")
FRIEND = SpiffeId(TRUST_DOMAIN, "/ns/demo/sa/friend")
STRANGER = SpiffeId(TRUST_DOMAIN, "/ns/other/sa/stranger")
ALLOWED = PeerPolicy(["spiffe://demo.local/ns/demo/sa/*"])

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class App:
    """The app: what `serve` does with each connection; it ends them all with itself."""

    def __init__(self) -> None:
        self.serve: Serve = echo
        self.connections = 0
        self.errors: asyncio.Queue[OSError] = asyncio.Queue()
        self._visits: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> App:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = Address("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stop()
        for visit, writer in self._visits.items():
            visit.cancel()
            writer.close()
        closed = [writer.wait_closed() for writer in self._visits.values()]
        await asyncio.gather(*self._visits, *closed, return_exceptions=True)

    def stop(self) -> None:
        self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._visits[spawn(self._serve(reader, writer), name="test app")] = writer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.serve(reader, writer)
        except OSError as error:
            self.errors.put_nowait(error)
        finally:
            writer.close()

    async def error(self) -> OSError:
        """How the app's connection broke."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.errors.get()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends everything back, then ends its own side."""
    while data := await reader.read(64 << 10):
        writer.write(data)
        await writer.drain()


async def echoed(client: TlsClient, data: bytes) -> None:
    """The app has given it back."""
    client.send(data)
    assert await client.receive() == data


class House:
    """An app, the mTLS end before it, and clients; what the tests talk to."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create(TRUST_DOMAIN)
        self.friend = self.authority.issue(FRIEND)
        self.folder = folder
        self.policy = ALLOWED
        self.app = App()
        self._records: asyncio.Queue[TunnelRecord] = asyncio.Queue()
        self._clients: list[TlsClient] = []
        self.inbound: Inbound | None = None
        self.refusal: LimitError | None = None
        self.requests: asyncio.Queue[Downstream] = asyncio.Queue()

    async def start(self, **changes: object) -> Inbound:
        """Starts the mTLS end; `changes` to its settings."""
        self.inbound = Inbound(
            replace(self.settings, **changes),  # type: ignore[arg-type]  # by name, as the tests give them
            self.policy,
            self._records.put_nowait,
            lambda: self.refusal,
            lambda request, caller: self.requests.put_nowait(request),
        )
        await self.inbound.start()
        return self.inbound

    @property
    def settings(self) -> InboundSettings:
        return InboundSettings(
            listen=Address("127.0.0.1", 0),
            app=self.app.address,
            protocol="tcp",
            certificates=self.folder / CERTIFICATES_FILE,
            private_key=self.folder / PRIVATE_KEY_FILE,
            roots=self.folder / ROOTS_FILE,
            look_every_s=0,
        )

    def renew(self) -> KeyPair:
        """Gives the mTLS end a new certificate."""
        certificate = self.authority.issue(SERVER)
        self.authority.write(self.folder, certificate)
        return certificate

    async def client(
        self, certificate: KeyPair | None = None, *, version: int = SSL.TLS1_3_VERSION
    ) -> TlsClient:
        """A client after its handshake; the one with the allowed name, unless told otherwise."""
        assert self.inbound is not None
        context = client_context(self.authority, certificate or self.friend, version=version)
        client = await TlsClient.connect(self.inbound.address.port, context)
        self._clients.append(client)
        await client.shake()
        return client

    async def alert(self, certificate: KeyPair, *, version: int = SSL.TLS1_3_VERSION) -> str:
        """What a client with `certificate` is told that waits for data."""
        with pytest.raises(SSL.Error) as caught:
            await (await self.client(certificate, version=version)).receive()
        return reason(caught.value)

    async def record(self) -> TunnelRecord:
        async with asyncio.timeout(PATIENCE_S):
            return await self._records.get()

    async def request(self) -> Downstream:
        """The next that a client has made, where the mTLS end serves HTTP."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.requests.get()

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()
        if self.inbound is not None:
            await self.inbound.close(0)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    house.renew()
    async with house.app:
        yield house
        await house.close()


# Who may come in.


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
async def test_an_allowed_peer_reaches_the_app(house: House, version: int) -> None:
    await house.start()
    client = await house.client(version=version)
    await echoed(client, b"hello")
    client.end()
    assert await client.receive() == b""

    record = await house.record()
    assert record.identity == str(FRIEND)
    assert (record.sent_bytes, record.received_bytes) == (5, 5)
    assert record.error is None
    assert str(record.target) == str(house.app.address)
    assert record.peer.startswith("127.0.0.1:")
    assert record.duration_s is not None and 0 < record.duration_s < PATIENCE_S


async def test_another_peer_is_refused_and_the_app_left_alone(house: House) -> None:
    await house.start()
    assert "alert internal error" in await house.alert(house.authority.issue(STRANGER))
    record = await house.record()
    assert isinstance(record.error, DeniedError)
    assert record.error.flag == "DENY"
    assert str(STRANGER) in str(record.error)
    assert (record.identity, record.sent_bytes, record.received_bytes) == ("", 0, 0)
    assert house.app.connections == 0


async def test_python_clients_get_an_alert(house: House) -> None:
    inbound = await house.start()
    context = _python_context(house, house.authority.issue(STRANGER))
    reader, writer = await asyncio.open_connection("127.0.0.1", inbound.address.port, ssl=context)
    with pytest.raises(ssl.SSLError, match="INTERNAL_ERROR"):
        await reader.read()
    writer.close()


async def test_a_peer_with_two_names_is_refused(house: House) -> None:
    await house.start()
    authority = FaultyAuthority(TRUST_DOMAIN, time.time)
    authority.authority, authority.fault = house.authority, "two names"
    key = new_key()
    signed = await authority.sign(request_pem(key, x509.UniformResourceIdentifier(str(FRIEND))), 3600)
    assert "alert internal error" in await house.alert(KeyPair(signed.chain_pem, key_pem(key)))
    record = await house.record()
    assert isinstance(record.error, DeniedError)
    assert "2 URI names" in str(record.error)


async def test_an_expired_certificate_is_refused(house: House) -> None:
    await house.start()
    expired = house.authority.issue(FRIEND, lifetime_s=-60)
    assert "certificate expired" in await house.alert(expired)
    record = await house.record()
    assert isinstance(record.error, TlsFailureError)
    assert (record.error.flag, record.identity) == ("TLS_FAILURE", "")


async def test_plaintext_is_refused(house: House) -> None:
    inbound = await house.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", inbound.address.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert len(await reader.read()) == 7  # one alert
    writer.close()
    record = await house.record()
    assert record.flag == "BAD_HELLO"


async def test_an_app_that_is_not_there_is_told_by_a_reset(house: House) -> None:
    await house.start()
    house.app.stop()
    client = await house.client()
    with pytest.raises(ConnectionResetError):
        await client.receive()
    record = await house.record()
    assert isinstance(record.error, DialError)
    assert record.identity == str(FRIEND)


async def test_connections_beyond_the_limit_are_reset(house: House) -> None:
    inbound = await house.start(max_connections=2)
    first, _ = await house.client(), await house.client()
    with pytest.raises(ConnectionResetError):
        await house.client()
    record = await house.record()
    assert str(record.error) == "2 connections are open, which is HBONE_MAX_TUNNELS"
    assert record.flag == "LIMIT"

    first.end()
    assert await first.receive() == b""
    await first.fin()
    assert inbound.connections == 1
    again = await house.client()
    await echoed(again, b"room again")


# Data and ends.


async def test_megabytes_both_ways_arrive_unchanged(house: House) -> None:
    await house.start()
    client = await house.client()
    upload = hashlib.shake_128(b"upload").digest(6 * MIB + 13)

    async def send() -> None:
        await client.send_all(upload)
        client.end()

    sending = spawn(send(), name="test client")
    assert await client.receive_all() == upload
    await sending
    record = await house.record()
    assert (record.sent_bytes, record.received_bytes, record.error) == (len(upload), len(upload), None)


async def test_the_app_may_end_long_before_the_client(house: House) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"go on")
        writer.write_eof()
        heard.put_nowait(await reader.read())

    house.app.serve = listen
    await house.start()
    client = await house.client()
    assert await client.receive_all() == b"go on"
    await client.send_all(bytes(MIB))
    client.end()
    async with asyncio.timeout(PATIENCE_S):
        assert await heard.get() == bytes(MIB)
    assert (await house.record()).error is None


async def test_truncation_reaches_the_app_as_a_reset(house: House) -> None:
    await house.start()
    client = await house.client()
    await echoed(client, b"half a req")
    client.cut()
    assert isinstance(await house.app.error(), ConnectionResetError)
    record = await house.record()
    assert isinstance(record.error, StreamResetError)
    assert "FIN without close_notify" in str(record.error)


async def test_a_reset_by_the_client_reaches_the_app(house: House) -> None:
    await house.start()
    client = await house.client()
    await echoed(client, b"x")
    client.reset()
    assert isinstance(await house.app.error(), ConnectionResetError)
    record = await house.record()
    assert isinstance(record.error, StreamResetError)
    assert record.flag == "DOWNSTREAM_RESET"


async def test_a_reset_by_the_app_reaches_the_client(house: House) -> None:
    async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reset(cast(asyncio.Transport, writer.transport))

    house.app.serve = slam
    await house.start()
    client = await house.client()
    client.send(b"x")
    with pytest.raises(ConnectionResetError):
        await client.receive()
    record = await house.record()
    assert isinstance(record.error, StreamResetError)
    assert record.flag == "UPSTREAM_RESET"


async def test_a_slow_app_holds_the_client_back(house: House) -> None:
    upload = hashlib.shake_128(b"slow").digest(1 << 20) * 24
    may_read = asyncio.Event()
    digest: asyncio.Queue[bytes] = asyncio.Queue()

    async def dawdle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        found = hashlib.sha256()
        while data := await reader.read(64 << 10):
            found.update(data)
        digest.put_nowait(found.digest())
        writer.write_eof()

    house.app.serve = dawdle
    await house.start()
    client = await house.client()

    async def send() -> None:
        await client.send_all(upload)
        client.end()

    sending = spawn(send(), name="test client")
    await client.until_stuck()
    assert not sending.done()
    may_read.set()
    await sending
    async with asyncio.timeout(PATIENCE_S):
        assert await digest.get() == hashlib.sha256(upload).digest()
    assert await client.receive() == b""


async def test_two_hundred_connections_at_once(house: House) -> None:
    inbound = await house.start()

    async def visit(number: int) -> bytes:
        client = await house.client()
        client.send(f"number {number}".encode())
        answer = await client.receive()
        client.end()
        assert await client.receive() == b""
        await client.fin()
        return answer

    answers = await asyncio.gather(*map(visit, range(200)))
    assert answers == [f"number {number}".encode() for number in range(200)]
    records = [await house.record() for _ in range(200)]
    assert all(record.error is None for record in records)
    assert inbound.connections == 0


# Files.


async def test_new_connections_get_the_new_certificate_and_open_ones_stay(house: House) -> None:
    await house.start()
    before = await house.client()
    old = _shown(before)
    new = house.renew()
    after = await house.client()
    assert _shown(after) == new.certificate_pem != old
    for client in (before, after):
        await echoed(client, b"still here")


async def test_a_hundred_rotations_under_load_disturb_no_tunnel(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    authority = FaultyAuthority(TRUST_DOMAIN, time.time)
    house.authority, house.friend = authority.authority, authority.authority.issue(FRIEND)
    house.folder = house.folder / "kept"
    settings = KeeperSettings(house.folder, SERVER, roots=RootSources(optional_files=()))
    keeper = CertificateKeeper(settings, authority)
    await keeper.start()
    await house.start()
    stop = asyncio.Event()
    rounds = connects = 0

    async def talk(client: TlsClient) -> None:
        """One tunnel that is open all the time, and always busy."""
        nonlocal rounds
        while not stop.is_set():
            sent = secrets.token_bytes(20_000)
            client.send(sent)
            came = b""
            while len(came) < len(sent):
                came += await client.receive()
            assert came == sent
            rounds += 1

    async def come_and_go() -> None:
        """New connections that heed no rotation; in the middle of one is where files would be torn."""
        nonlocal connects
        while not stop.is_set():
            client = await house.client()
            await echoed(client, b"x")
            connects += 1
            client.writer.close()

    before = [await house.client() for _ in range(5)]
    load = [spawn(talk(client), name="tunnel") for client in before]
    load += [spawn(come_and_go(), name="newcomers") for _ in range(2)]
    shown = set()
    for _ in range(100):
        await keeper.renew()
        chain = (house.folder / CERTIFICATES_FILE).read_bytes()
        client = await house.client()
        assert _shown(client) == chain, "new connections get the new one at once"
        shown.add(chain)
        client.writer.close()
    stop.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*load)
    assert len(shown) == 100
    assert rounds > 100, "the tunnels were busy all the time"
    assert connects > 50
    assert "keeping the certificate in use" not in caplog.text
    await keeper.close()


async def test_new_roots_count_for_new_connections(house: House) -> None:
    await house.start()
    other = Authority.create(TRUST_DOMAIN)
    assert "unknown ca" in await house.alert(other.issue(FRIEND))
    (house.folder / ROOTS_FILE).write_bytes(house.authority.root_pem + other.root_pem)
    await echoed(await house.client(other.issue(FRIEND)), b"in")


async def test_a_root_vouches_for_its_own_trust_domain_only(house: House) -> None:
    other = Authority.create("other.local")
    await house.start()
    (house.folder / ROOTS_FILE).write_bytes(house.authority.root_pem + other.root_pem)
    assert "alert internal error" in await house.alert(other.issue(FRIEND))
    record = await house.record()
    assert str(record.error) == (f"peer certificate denied: a root of other.local may not vouch for {FRIEND}")
    await echoed(await house.client(), b"in")


async def test_a_map_of_bundles_tells_whose_roots_are(house: House) -> None:
    nameless = Hierarchy(TRUST_DOMAIN).root
    (house.folder / ROOTS_FILE).write_bytes(house.authority.root_pem + nameless.root_pem)
    tell(house.folder, {TRUST_DOMAIN: [house.authority], "other.local": [nameless]})
    await house.start(bundles=house.folder / BUNDLES_FILE)
    assert "alert internal error" in await house.alert(nameless.issue(FRIEND))
    tell(house.folder, {TRUST_DOMAIN: [house.authority, nameless]})
    await echoed(await house.client(nameless.issue(FRIEND)), b"in")


async def test_broken_files_keep_the_old_certificate_and_are_reported_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hbone.inbound")
    await house.start()
    good = (house.folder / CERTIFICATES_FILE).read_bytes()
    (house.folder / CERTIFICATES_FILE).write_bytes(b"oops")
    for _ in range(3):
        client = await house.client()
        await echoed(client, b"x")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "keeping the certificate in use" in caplog.text
    assert CERTIFICATES_FILE in caplog.text

    (house.folder / CERTIFICATES_FILE).write_bytes(good)
    (house.folder / PRIVATE_KEY_FILE).unlink()
    assert _shown(await house.client()) == good
    assert "private_key.pem: No such file" in caplog.text
    new = house.renew()
    assert _shown(await house.client()) == new.certificate_pem
    assert "read again" in caplog.text


async def test_the_files_are_looked_at_no_more_often_than_told(house: House) -> None:
    await house.start(look_every_s=3600)
    old = _shown(await house.client())
    house.renew()
    assert _shown(await house.client()) == old


# Start and end.


async def test_start_names_what_is_missing(house: House) -> None:
    (house.folder / ROOTS_FILE).unlink()
    with pytest.raises(UnavailableError, match=ROOTS_FILE):
        await house.start()
    (house.folder / ROOTS_FILE).write_bytes(b"oops")
    with pytest.raises(ConfigError, match=ROOTS_FILE):
        await house.start()
    house.inbound = None


async def test_start_names_an_address_in_use(house: House) -> None:
    with pytest.raises(UnavailableError, match=r"built-in mTLS end: cannot listen on .*: the port is in use"):
        await house.start(listen=house.app.address)
    house.inbound = None


async def test_close_lets_open_connections_finish(house: House) -> None:
    inbound = await house.start()
    port = inbound.address.port
    client = await house.client()
    closing = spawn(inbound.close(PATIENCE_S), name="test drain")
    await echoed(client, b"last words")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert not closing.done()
    client.end()
    assert await client.receive() == b""
    await closing
    assert (await house.record()).error is None


async def test_close_resets_what_does_not_finish(house: House) -> None:
    inbound = await house.start()
    silent = await asyncio.open_connection("127.0.0.1", inbound.address.port)
    client = await house.client()
    await echoed(client, b"x")
    assert inbound.connections == 2
    await inbound.close(0.05)
    assert inbound.connections == 0
    with pytest.raises(ConnectionResetError):
        await client.receive()
    with pytest.raises(ConnectionResetError):
        await silent[0].read()
    silent[1].close()
    assert isinstance(await house.app.error(), ConnectionResetError)
    for record in (await house.record(), await house.record()):
        assert str(record.error) == "drain: still open after 0.05 s"


async def test_close_does_not_wait_for_a_client_that_does_not_read(house: House) -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(64):
            writer.write(bytes(MIB))
            await writer.drain()

    house.app.serve = pour
    inbound = await house.start()
    client = await house.client()
    client.end()
    record = spawn(house.record(), name="test record")
    await inbound.close(0.05)
    assert inbound.connections == 0
    assert (await record).sent_bytes == 0


# Certificates.


def _shown(client: TlsClient) -> bytes:
    """The server's certificate as the client saw it, in PEM."""
    certificate = client.tls.get_peer_certificate(as_cryptography=True)
    assert certificate is not None
    return certificate.public_bytes(serialization.Encoding.PEM)


def _python_context(house: House, certificate: KeyPair) -> ssl.SSLContext:
    mine = house.folder / "python"
    house.authority.write(mine, certificate)
    context = ssl.create_default_context(cafile=mine / ROOTS_FILE)
    context.check_hostname = False  # mesh certificates name no hosts
    context.load_cert_chain(mine / CERTIFICATES_FILE, mine / PRIVATE_KEY_FILE)
    return context


async def test_a_slow_handshake_is_ended(house: House) -> None:
    inbound = await house.start(handshake_timeout_s=0.05)
    async with TcpPeer.connected(inbound.address.port) as silent:
        await silent.rest()
        record = await house.record()
    assert str(record.error) == "tls handshake: not complete within 0.05 s"


async def test_a_client_that_leaves_in_the_handshake(house: House) -> None:
    inbound = await house.start()
    async with TcpPeer.connected(inbound.address.port) as client:
        client.reset()
        assert (await house.record()).flag == "DOWNSTREAM_RESET"


# Certificates that are revoked.


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
async def test_a_revoked_peer_is_refused(house: House, version: int) -> None:
    crl = house.folder / "crl.pem"
    put(crl, revocation_list(house.authority, serial(house.friend)))
    await house.start(crl=crl)
    assert "alert internal error" in await house.alert(house.friend, version=version)
    record = await house.record()
    assert (record.flag, record.identity) == ("DENY", "")
    assert "is revoked" in str(record.error)
    assert house.app.connections == 0
    client = await house.client(house.authority.issue(FRIEND))
    await echoed(client, b"hello")


async def test_a_peer_that_is_revoked_later_is_reset(house: House) -> None:
    crl = house.folder / "crl.pem"
    put(crl, revocation_list(house.authority))
    inbound = await house.start(crl=crl, lists_every_s=0.02)
    other = house.authority.issue(FRIEND)
    staying, leaving = await house.client(other), await house.client()
    for client in (staying, leaving):
        await echoed(client, b"hello")
    put(crl, revocation_list(house.authority, serial(house.friend)))
    with pytest.raises(ConnectionResetError):
        await leaving.receive()
    record = await house.record()
    assert (record.flag, record.identity) == ("DENY", str(FRIEND))
    assert "is revoked" in str(record.error)
    await echoed(staying, b"again")
    assert inbound.connections == 1


async def test_so_is_its_request(house: House) -> None:
    crl = house.folder / "crl.pem"
    put(crl, revocation_list(house.authority))
    await house.start(crl=crl, lists_every_s=0.02, protocol="http1")
    client = await house.client()
    client.send(b"GET /events HTTP/1.1\r\nHost: hello\r\n\r\n")
    gone: asyncio.Queue[StreamResetError] = asyncio.Queue()
    request = await house.request()
    request.on_gone = gone.put_nowait
    put(crl, revocation_list(house.authority, serial(house.friend)))
    async with asyncio.timeout(PATIENCE_S):
        await gone.get()
    assert request.over


async def test_who_comes_in_a_drain_is_told(house: House) -> None:
    """It may have been in its handshake when the drain began."""
    inbound = await house.start(protocol="http1")
    inbound.drain()
    client = await house.client()
    client.send(b"GET / HTTP/1.1\r\nHost: hello\r\n\r\n")
    answer(await house.request(), 200, "hi")
    assert b"connection: close\r\n" in (await client.receive()).lower()


async def test_a_revocation_list_that_is_none_stops_the_start(house: House) -> None:
    crl = house.folder / "crl.pem"
    with pytest.raises(UnavailableError, match=r"crl\.pem"):
        await house.start(crl=crl)
    put(crl, b"garbage")
    with pytest.raises(ConfigError, match="no usable revocation lists"):
        await house.start(crl=crl)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
async def test_openssl_s_own_client_is_told(house: House) -> None:
    """OpenSSL's `s_client` in our client's place."""
    crl = house.folder / "crl.pem"
    put(crl, revocation_list(house.authority, serial(house.friend)))
    inbound = await house.start(crl=crl)
    mine = house.folder / "friend"
    house.authority.write(mine, house.friend)
    _, _, told = await run(
        *("openssl", "s_client", "-connect", inbound.address, "-quiet"),
        *("-cert", mine / CERTIFICATES_FILE, "-key", mine / PRIVATE_KEY_FILE),
    )
    assert b"alert internal error" in told and b"alert number 80" in told


async def test_a_denied_peer_is_told_the_rule(house: House) -> None:
    house.policy = PeerPolicy(["spiffe://demo.local/**"], ["ns/demo/sa/fr*"], TrustDomain(TRUST_DOMAIN))
    await house.start()
    assert "alert internal error" in await house.alert(house.friend)
    assert str((await house.record()).error) == f"peer {FRIEND} denied: ns/demo/sa/fr* is denied"


async def test_a_peer_of_an_alias_is_one_of_ours(house: House) -> None:
    house.policy = PeerPolicy(["ns/demo/sa/*"], (), TrustDomain(TRUST_DOMAIN, ("old.local",)))
    house.authority = Hierarchy().root  # names no trust domain, as Istio's
    house.authority.write(house.folder, house.authority.issue(SERVER))
    await house.start()
    client = await house.client(house.authority.issue(SpiffeId("old.local", FRIEND.path)))
    await echoed(client, b"hello")


# What it holds, and when it takes nobody.


async def test_what_it_holds_can_be_ended(house: House) -> None:
    inbound = await house.start()
    client = await house.client()
    await echoed(client, b"hello")
    [relay] = inbound.holders()
    assert relay.buffered_bytes == 0
    relay.abort(OverloadError("it holds most"))
    record = await house.record()
    assert (str(record.error), record.identity) == ("it holds most", str(FRIEND))
    assert list(inbound.holders()) == []
    assert isinstance(await house.app.error(), ConnectionResetError)


async def test_while_too_much_is_held_nobody_is_taken(house: House) -> None:
    house.refusal = LimitError("too much is held", "HBONE_MAX_BUFFERED")
    await house.start()
    with pytest.raises(OSError):
        await house.client()
    record = await house.record()
    assert (str(record.error), record.identity) == ("too much is held", "")
    house.refusal = None
    await house.client()
