"""The TLS leg against real TLS clients: OpenSSL 4 through pyOpenSSL, OpenSSL 3 as the `openssl` command."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from OpenSSL import SSL

from shared.credentials.certificates.authority import Authority, KeyPair
from shared.errors import (
    ALERT_DECODE_ERROR,
    ClientHelloError,
    DeniedError,
    HboneError,
    StreamResetError,
    TlsFailureError,
)
from shared.net.legs import tcp_end
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.legs.tls import CONTROL_LIMIT_BYTES, RECORD_BYTES, TlsServerLeg
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.tasks import spawn
from shared.tls import alerts
from tests.shared.net.legs.mesh_server import TRUST_DOMAIN, context_of, each_version, nobody
from tests.shared.net.loopback import ACKNOWLEDGED_S
from tests.support.tls_client import PATIENCE_S, TlsClient, client_context, reason

MIB = 1 << 20

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")


# The server.


class Tunnel:
    """The relay's end of one leg: keeps what the leg pushes, in order."""

    def __init__(self, leg: TlsServerLeg) -> None:
        self.leg = leg
        self.data = bytearray()
        self.end: asyncio.Future[HboneError | None] = asyncio.get_running_loop().create_future()
        self.is_full = asyncio.Event()
        self.has_room = asyncio.Event()
        self.on_data: Callable[[], None] = lambda: None

    def received(self, leg: Leg, data: Buffer) -> None:
        assert leg is self.leg
        assert not self.end.done(), "data after the end"
        self.data += data
        self.on_data()

    def ended(self, leg: Leg) -> None:
        self.end.set_result(None)

    def failed(self, leg: Leg, error: HboneError) -> None:
        if not self.end.done():
            self.end.set_result(error)

    def full(self, leg: Leg) -> None:
        self.is_full.set()

    def drained(self, leg: Leg) -> None:
        self.has_room.set()

    async def fill(self, piece: bytes) -> int:
        """Writes `piece` until the leg is full, and says how often."""
        pieces = 0
        async with asyncio.timeout(PATIENCE_S):
            while not self.is_full.is_set():
                self.leg.write(piece)
                pieces += 1
                await asyncio.sleep(0)  # lets the loop hand it to the kernel
        return pieces

    async def over(self) -> HboneError | None:
        """Waits for `ended` (None) or `failed` (the error)."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.end


class Bench:
    """A listener whose legs a test joins or refuses; `async with bench(context):`."""

    def __init__(self, context: SSL.Context, *, handshake_timeout_s: float = PATIENCE_S) -> None:
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._legs: asyncio.Queue[TlsServerLeg] = asyncio.Queue()
        self._refusals: asyncio.Queue[HboneError] = asyncio.Queue()
        self._open: set[TlsServerLeg] = set()
        self._all_closed = asyncio.Event()
        self._clients: list[TlsClient] = []
        self.port = 0

    async def __aenter__(self) -> Bench:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for client in self._clients:
            client.writer.close()
        for leg in list(self._open):
            leg.abort()
        async with asyncio.timeout(PATIENCE_S):
            while self._open:
                self._all_closed.clear()
                await self._all_closed.wait()

    def _accept(self) -> TlsServerLeg:
        leg = TlsServerLeg(self._context, self, handshake_timeout_s=self._handshake_timeout_s)
        self._open.add(leg)
        return leg

    # Owner.

    def established(self, leg: TlsServerLeg) -> None:
        self._legs.put_nowait(leg)

    def refused(self, leg: TlsServerLeg, error: HboneError) -> None:
        self._refusals.put_nowait(error)

    def closed(self, leg: TlsServerLeg) -> None:
        self._open.remove(leg)
        self._all_closed.set()

    # What tests do.

    async def tcp(self, context: SSL.Context) -> TlsClient:
        """A client that has connected and said nothing yet."""
        client = await TlsClient.connect(self.port, context)
        self._clients.append(client)
        return client

    async def connect(self, context: SSL.Context) -> tuple[TlsClient, TlsServerLeg]:
        """Both ends of a connection: the client's handshake done, the leg held."""
        client = await self.tcp(context)
        shaking = spawn(client.shake(), name="test client")
        try:
            leg = await self.leg()
            if client.tls.get_protocol_version() == SSL.TLS1_3_VERSION:
                await shaking
            self._shaking = shaking
        except TimeoutError:
            shaking.cancel()
            raise
        return client, leg

    async def tunnel(self, context: SSL.Context) -> tuple[TlsClient, Tunnel]:
        """Both ends of a joined connection."""
        client, leg = await self.connect(context)
        tunnel = Tunnel(leg)
        leg.join(tunnel)
        await self._shaking
        return client, tunnel

    async def leg(self) -> TlsServerLeg:
        async with asyncio.timeout(PATIENCE_S):
            return await self._legs.get()

    async def refusal(self) -> HboneError:
        async with asyncio.timeout(PATIENCE_S):
            return await self._refusals.get()

    async def alert(self, context: SSL.Context) -> str:
        """What a client is told that connects and waits for data."""
        client = await self.tcp(context)
        with pytest.raises(SSL.Error) as caught:
            await client.shake()
            await client.receive()
        return reason(caught.value)


@pytest.fixture
async def bench(files: Path) -> AsyncIterator[Bench]:
    async with Bench(context_of(files)) as started:
        yield started


@pytest.fixture
async def _tunnel(bench: Bench, authority: Authority, certificate: KeyPair) -> tuple[TlsClient, Tunnel]:
    return await bench.tunnel(client_context(authority, certificate))


@pytest.fixture
def client(_tunnel: tuple[TlsClient, Tunnel]) -> TlsClient:
    return _tunnel[0]


@pytest.fixture
def tunnel(_tunnel: tuple[TlsClient, Tunnel]) -> Tunnel:
    return _tunnel[1]


@pytest.fixture
async def strict(files: Path) -> AsyncIterator[Bench]:
    async with Bench(context_of(files, nobody)) as started:
        yield started


# Handshake.


@each_version
async def test_the_owner_sees_who_the_client_is(
    bench: Bench, authority: Authority, certificate: KeyPair, version: int
) -> None:
    client, tunnel = await bench.tunnel(client_context(authority, certificate, version=version))
    shown = x509.load_der_x509_certificate(tunnel.leg.certificate)
    assert shown.public_bytes(serialization.Encoding.PEM) == certificate.certificate_pem
    assert tunnel.leg.alpn == ""
    name = client.writer.get_extra_info("sockname")
    assert tunnel.leg.peer_name == f"127.0.0.1:{name[1]}"


@pytest.mark.parametrize(
    ("version", "alert"),
    [
        pytest.param(SSL.TLS1_2_VERSION, "handshake failure", id="tls12"),
        pytest.param(SSL.TLS1_3_VERSION, "certificate required", id="tls13"),
    ],
)
async def test_a_client_without_certificate_is_told_so(
    bench: Bench, authority: Authority, version: int, alert: str
) -> None:
    assert alert in await bench.alert(client_context(authority, None, version=version))
    refusal = await bench.refusal()
    assert isinstance(refusal, TlsFailureError)
    assert str(refusal) == "tls handshake: peer did not return a certificate"


@each_version
async def test_a_peer_that_the_rule_denies_gets_an_alert(
    strict: Bench,
    authority: Authority,
    certificate: KeyPair,
    version: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert "alert internal error" in await strict.alert(
        client_context(authority, certificate, version=version)
    )
    refusal = await strict.refusal()
    assert isinstance(refusal, DeniedError)
    assert str(refusal) == "peer denied: no rule allows it"
    assert capfd.readouterr().err == ""  # where a callback's traceback would go


@each_version
async def test_the_owner_can_reset_a_held_leg(
    bench: Bench, authority: Authority, certificate: KeyPair, version: int
) -> None:
    client = await bench.tcp(client_context(authority, certificate, version=version))
    shaking = spawn(client.shake(), name="test client")
    (await bench.leg()).abort()
    with pytest.raises((ConnectionResetError, EOFError)):
        await shaking
        await client.receive()


async def test_an_alert_reaches_a_client_that_is_sending(
    strict: Bench, authority: Authority, certificate: KeyPair
) -> None:
    client = await strict.tcp(client_context(authority, certificate))
    await client.shake()
    client.send(bytes(MIB))
    with pytest.raises(SSL.Error) as caught:
        await client.receive()
    assert "alert internal error" in reason(caught.value)


async def test_what_is_no_tls_is_refused_with_a_plaintext_alert(bench: Bench, authority: Authority) -> None:
    client = await bench.tcp(client_context(authority, None))
    client.writer.write(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        answer = await client.reader.read()  # up to FIN, so no RST
    assert answer[:3] == alerts.fatal(0)[:3]
    assert len(answer) == len(alerts.fatal(0))
    assert isinstance(await bench.refusal(), ClientHelloError)


async def test_a_client_that_leaves_during_the_handshake_is_reported(
    bench: Bench, authority: Authority
) -> None:
    silent = await bench.tcp(client_context(authority, None))
    silent.cut()
    assert str(await bench.refusal()) == "tls handshake: the client closed the connection"

    rude = await bench.tcp(client_context(authority, None))
    rude.writer.write(b"\x16\x03\x01")
    rude.reset()
    assert "tls handshake:" in str(await bench.refusal())


async def test_a_client_that_does_not_trust_the_server_is_reported(
    bench: Bench, certificate: KeyPair
) -> None:
    client = await bench.tcp(client_context(Authority.create(TRUST_DOMAIN), certificate))
    with pytest.raises(SSL.Error):
        await client.shake()
    client.flush()
    refusal = await bench.refusal()
    assert isinstance(refusal, StreamResetError)
    assert "the client gave up" in str(refusal)
    assert "unknown ca" in str(refusal)


async def test_a_slow_handshake_is_ended(files: Path, authority: Authority) -> None:
    async with Bench(context_of(files), handshake_timeout_s=0.05) as bench:
        client = await bench.tcp(client_context(authority, None))
        client.writer.write(b"\x16\x03\x01")
        refusal = await bench.refusal()
        assert isinstance(refusal, TlsFailureError)
        assert str(refusal) == "tls handshake: not complete within 0.05 s"
        async with asyncio.timeout(PATIENCE_S):
            assert await client.reader.read() == alerts.fatal(ALERT_DECODE_ERROR)


async def test_a_handshake_in_single_bytes_succeeds(
    bench: Bench, authority: Authority, certificate: KeyPair
) -> None:
    client = await bench.tcp(client_context(authority, certificate))
    client.writer.get_extra_info("socket").setsockopt(6, 1, 1)  # TCP_NODELAY
    whole = client.writer.write

    def piecemeal(data: bytes) -> None:
        for byte in data:
            whole(bytes((byte,)))

    client.writer.write = piecemeal  # type: ignore[method-assign,assignment]  # this very client's wire
    await client.shake()
    assert (await bench.leg()).certificate


@pytest.mark.parametrize(("offered", "agreed"), [((b"h2", b"istio"), "istio"), ((b"istio-h2",), "")])
async def test_the_owner_sees_what_alpn_agreed(
    bench: Bench, authority: Authority, certificate: KeyPair, offered: tuple[bytes, ...], agreed: str
) -> None:
    client, leg = await bench.connect(client_context(authority, certificate, alpn=offered))
    assert client.tls.get_alpn_proto_negotiated() == agreed.encode()
    assert leg.alpn == agreed


# Data.


@each_version
async def test_data_goes_both_ways_unchanged(
    bench: Bench, authority: Authority, certificate: KeyPair, version: int
) -> None:
    upload, download = _pattern(3 * MIB + 7, 1), _pattern(5 * MIB + 11, 2)
    client, tunnel = await bench.tunnel(client_context(authority, certificate, version=version))
    for start in range(0, len(download), 100_000):  # over several records, not in whole ones
        tunnel.leg.write(memoryview(download)[start : start + 100_000])
    tunnel.leg.write(b"")
    tunnel.leg.write_eof()
    sending = spawn(client.send_all(upload), name="test client")
    assert await client.receive_all() == download
    await sending
    client.end()
    assert await tunnel.over() is None
    assert tunnel.data == upload


async def test_what_comes_before_join_is_kept_and_bounded(
    bench: Bench, authority: Authority, certificate: KeyPair
) -> None:
    upload = _pattern(16 * MIB, 3)
    client, leg = await bench.connect(client_context(authority, certificate))
    sending = spawn(client.send_all(upload), name="test client")
    await client.until_stuck()

    tunnel = Tunnel(leg)
    leg.join(tunnel)
    assert len(tunnel.data) <= READ_BYTES  # the kernels have the rest, not we

    await sending
    client.end()
    assert await tunnel.over() is None
    assert tunnel.data == upload


async def test_a_paused_leg_pushes_nothing(client: TlsClient, tunnel: Tunnel) -> None:
    upload = _pattern(16 * MIB, 4)
    tunnel.on_data = tunnel.leg.pause_reading
    sending = spawn(client.send_all(upload), name="test client")
    await client.until_stuck()
    assert len(tunnel.data) <= RECORD_BYTES

    tunnel.on_data = lambda: None
    tunnel.leg.resume_reading()
    assert len(tunnel.data) <= READ_BYTES
    await sending
    client.end()
    assert await tunnel.over() is None
    assert tunnel.data == upload


async def test_a_client_that_does_not_read_makes_the_leg_full(client: TlsClient, tunnel: Tunnel) -> None:
    piece = _pattern(READ_BYTES, 5)
    pieces = await tunnel.fill(piece)
    assert not tunnel.has_room.is_set()

    tunnel.leg.write_eof()
    assert await client.receive_all() == piece * pieces
    assert tunnel.has_room.is_set()


@needs_openssl
async def test_a_key_update_is_answered(
    bench: Bench, authority: Authority, certificate: KeyPair, tmp_path: Path
) -> None:
    process = await _s_client(bench.port, authority, certificate, tmp_path)
    tunnel = await _joined(bench)
    assert process.stdin and process.stderr and process.stdout
    process.stdin.write(b"K\n")  # the command for a key update that asks for ours
    async with asyncio.timeout(PATIENCE_S):
        await process.stderr.readuntil(b"KEYUPDATE\n")
    process.stdin.write(b"hello\n")
    while not tunnel.data.endswith(b"hello\n"):
        await _news(tunnel)
    tunnel.leg.write(b"good morning\n")
    tunnel.leg.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        assert b"good morning\n" in await process.stdout.read()
        await process.wait()


async def test_a_flood_of_key_updates_is_ended(
    bench: Bench, authority: Authority, certificate: KeyPair
) -> None:
    secrets: dict[bytes, bytes] = {}
    context = client_context(authority, certificate, suites="TLS_AES_128_GCM_SHA256")

    def note(tls: SSL.Connection, line: bytes) -> None:
        name, _, secret = line.split(b" ")
        secrets[name] = bytes.fromhex(secret.decode())

    context.set_keylog_callback(note)
    client, tunnel = await bench.tunnel(context)
    await tunnel.fill(bytes(READ_BYTES))
    secret = secrets[b"CLIENT_TRAFFIC_SECRET_0"]
    for _ in range(2 * CONTROL_LIMIT_BYTES // KEY_UPDATE_BYTES):
        client.writer.write(_key_update(secret))
        secret = _expand(secret, b"traffic upd", 32)
    error = await tunnel.over()
    assert isinstance(error, StreamResetError)
    assert "asks for key updates" in str(error)


# Ends.


@each_version
async def test_the_client_ends_first_and_still_gets_its_answer(
    bench: Bench, authority: Authority, certificate: KeyPair, version: int
) -> None:
    client, tunnel = await bench.tunnel(client_context(authority, certificate, version=version))
    client.send(b"question")
    client.end()
    assert await tunnel.over() is None
    assert tunnel.data == b"question"
    tunnel.leg.write(b"answer")
    tunnel.leg.close()
    assert await client.receive_all() == b"answer"
    await client.fin()


async def test_fin_after_close_notify_leaves_the_answer_alone(client: TlsClient, tunnel: Tunnel) -> None:
    client.send(b"question")
    client.end()
    client.cut()
    assert await tunnel.over() is None
    tunnel.leg.pause_reading()
    tunnel.leg.resume_reading()
    tunnel.leg.write(b"answer")
    tunnel.leg.close()
    assert await client.receive_all() == b"answer"


@each_version
async def test_the_server_ends_first_and_the_connection_stays_open(
    bench: Bench, authority: Authority, certificate: KeyPair, version: int
) -> None:
    client, tunnel = await bench.tunnel(client_context(authority, certificate, version=version))
    tunnel.leg.write(b"greeting")
    tunnel.leg.write_eof()
    tunnel.leg.write_eof()
    assert await client.receive_all() == b"greeting"
    client.send(b"still here")
    while tunnel.data != b"still here":
        await _news(tunnel)
    assert not client.reader.at_eof()  # FIN would have come with close_notify
    client.end()
    assert await tunnel.over() is None
    tunnel.leg.close()
    await client.fin()


async def test_fin_without_close_notify_is_truncation(client: TlsClient, tunnel: Tunnel) -> None:
    client.send(b"all of i")
    client.cut()
    error = await tunnel.over()
    assert isinstance(error, StreamResetError)
    assert str(error) == "connection truncated: FIN without close_notify"
    assert tunnel.data == b"all of i"
    with pytest.raises(ConnectionResetError):
        await client.receive()


async def test_truncation_of_a_paused_leg_comes_after_the_data(client: TlsClient, tunnel: Tunnel) -> None:
    tunnel.on_data = tunnel.leg.pause_reading
    client.send(b"one")
    while not tunnel.data:
        await _news(tunnel)
    client.send(b"two")
    client.cut()
    tunnel.on_data = lambda: None
    tunnel.leg.resume_reading()
    assert isinstance(await tunnel.over(), StreamResetError)
    assert tunnel.data == b"onetwo"


async def _write_until_it_is_over(tunnel: Tunnel) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not tunnel.end.done():
            tunnel.leg.write(b"answer")
            await asyncio.sleep(0)


async def test_a_client_that_has_ended_and_is_gone_loses_nothing(client: TlsClient, tunnel: Tunnel) -> None:
    """It closes its socket over bytes of ours, so the kernel says RST; the app is slow, we write."""
    tunnel.leg.pause_reading()
    client.send(bytes(100_000))
    client.end()
    await asyncio.sleep(ACKNOWLEDGED_S)
    client.reset()
    await _write_until_it_is_over(tunnel)
    assert await tunnel.over() is None
    assert tunnel.data == bytes(100_000)


async def test_a_client_that_has_not_ended_and_is_gone_has_broken_off(
    client: TlsClient, tunnel: Tunnel
) -> None:
    tunnel.leg.pause_reading()
    client.send(bytes(100_000))
    await asyncio.sleep(ACKNOWLEDGED_S)
    client.reset()
    await _write_until_it_is_over(tunnel)
    assert isinstance(await tunnel.over(), StreamResetError)


async def test_close_over_unread_bytes_destroys_nothing(client: TlsClient, tunnel: Tunnel) -> None:
    """And FIN, which would end the tunnel's response, waits for the client's."""
    tunnel.leg.write(bytes(8 * MIB))
    tunnel.leg.close()
    sending = spawn(client.send_all(bytes(8 * MIB)), name="test client sends")
    assert await client.receive_all() == bytes(8 * MIB)
    async with asyncio.timeout(PATIENCE_S):
        await sending
    client.end()
    client.cut()
    await client.fin()


async def test_a_reset_by_the_client_breaks_the_leg(client: TlsClient, tunnel: Tunnel) -> None:
    client.reset()
    error = await tunnel.over()
    assert isinstance(error, StreamResetError)
    assert "connection reset" in str(error)
    tunnel.leg.write(b"to nobody")  # none of these raises on a leg that is gone
    tunnel.leg.write_eof()
    tunnel.leg.pause_reading()
    tunnel.leg.resume_reading()
    tunnel.leg.close()
    tunnel.leg.abort()


async def test_abort_resets_the_client(client: TlsClient, tunnel: Tunnel) -> None:
    tunnel.leg.abort()
    with pytest.raises(ConnectionResetError):
        await client.receive()
    assert not tunnel.end.done()


async def test_abort_cuts_a_close_short(client: TlsClient, tunnel: Tunnel) -> None:
    await tunnel.fill(bytes(READ_BYTES))
    tunnel.leg.close()
    tunnel.leg.close()
    tunnel.leg.abort()
    with pytest.raises(ConnectionResetError):
        await client.receive_all()
    assert not tunnel.end.done()


async def test_a_close_ends_with_a_reset_if_the_client_takes_nothing(
    client: TlsClient, tunnel: Tunnel, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIN would make what it got look like the whole."""
    monkeypatch.setattr(tcp_end, "LAST_BYTES_TIMEOUT_S", 0.2)
    await tunnel.fill(bytes(READ_BYTES))
    tunnel.leg.close()
    async with asyncio.timeout(PATIENCE_S):
        await bench._all_closed.wait()
    with pytest.raises(ConnectionResetError):
        await client.receive_all()


async def test_a_leg_that_was_lost_before_join_says_so(
    bench: Bench, authority: Authority, certificate: KeyPair
) -> None:
    _, leg = await bench.connect(client_context(authority, certificate))
    leg.abort()
    tunnel = Tunnel(leg)
    leg.join(tunnel)
    assert isinstance(await tunnel.over(), StreamResetError)


async def test_a_forged_record_breaks_the_leg_and_is_answered(client: TlsClient, tunnel: Tunnel) -> None:
    client.send(b"genuine")
    client.writer.write(b"\x17\x03\x03\x00\x20" + bytes(32))
    error = await tunnel.over()
    assert isinstance(error, StreamResetError)
    assert tunnel.data == b"genuine"
    with pytest.raises(SSL.Error) as caught:
        await client.receive()
    assert "bad record mac" in reason(caught.value)


# The openssl command.


@needs_openssl
async def test_s_client_is_told_the_reason(
    strict: Bench, authority: Authority, certificate: KeyPair, tmp_path: Path
) -> None:
    process = await _s_client(strict.port, authority, certificate, tmp_path)
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        # Not `communicate`, which closes standard input from Python 3.12 on: then s_client leaves at once.
        errors = await process.stderr.read()
        await process.wait()
    assert b"alert internal error" in errors
    assert b"SSL alert number 80" in errors


# Key updates, which no library sends in numbers.


KEY_UPDATE_BYTES = 27  # 5 of header, 5 of message, 1 of type, 16 of tag


def _key_update(secret: bytes) -> bytes:
    """The first record under `secret` (AES-128): a key update that asks for one (RFC 8446 section 4.6.3)."""
    header = b"\x17\x03\x03" + (KEY_UPDATE_BYTES - 5).to_bytes(2, "big")
    aead = AESGCM(_expand(secret, b"key", 16))
    return header + aead.encrypt(_expand(secret, b"iv", 12), b"\x18\x00\x00\x01\x01\x16", header)


def _expand(secret: bytes, label: bytes, size: int) -> bytes:
    """HKDF-Expand-Label (RFC 8446 section 7.1)."""
    label = b"tls13 " + label
    info = size.to_bytes(2, "big") + bytes((len(label),)) + label + b"\0"
    return HKDFExpand(hashes.SHA256(), size, info).derive(secret)


# Waiting.


async def _news(tunnel: Tunnel) -> None:
    """Waits for the next data."""
    arrived = asyncio.Event()
    tunnel.on_data = arrived.set
    async with asyncio.timeout(PATIENCE_S):
        await arrived.wait()


async def _joined(bench: Bench) -> Tunnel:
    leg = await bench.leg()
    tunnel = Tunnel(leg)
    leg.join(tunnel)
    return tunnel


async def _s_client(
    port: int, authority: Authority, certificate: KeyPair, folder: Path
) -> asyncio.subprocess.Process:
    """The openssl command as a client that shows `certificate`."""
    mine = folder / "s_client"
    authority.write(mine, certificate)
    return await asyncio.create_subprocess_exec(
        *("openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-CAfile", mine / ROOTS_FILE),
        *("-cert", mine / CERTIFICATES_FILE, "-key", mine / PRIVATE_KEY_FILE, "-verify_return_error"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def _pattern(size: int, seed: int) -> bytes:
    """`size` bytes in which every shift and swap shows."""
    step = 251 + 2 * seed
    block = bytes((i * step + seed) & 0xFF for i in range(65_521))
    return (block * (size // len(block) + 1))[:size]
