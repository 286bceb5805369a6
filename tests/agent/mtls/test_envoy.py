"""Envoy as the mTLS end, with the real binary: who comes in, and what a failed start says. Its app speaks no
HTTP; `test_envoy_http.py` has those that do.

tests/path/test_s_client.py has what gets through, and who talks and ends first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from cryptography.x509 import load_pem_x509_certificate
from OpenSSL import SSL

from agent.config.settings import AppProtocol
from agent.mtls.envoy import EnvoyProcess, find_binary
from agent.mtls.envoy_bootstrap import bootstrap, secrets
from agent.mtls.envoy_http import HttpSettings
from agent.mtls.envoy_json import Json
from agent.proxy.request_record import Record
from shared.address import Address
from shared.credentials.certificates import certificate_writer
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.credentials.certificates.certificate_writer import Contents
from shared.errors import DeniedError, UnavailableError
from shared.trust.peer_patterns import TrustDomain
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId
from shared.tunnel.tunnel_record import TunnelRecord
from tests.agent.conftest import on_both_loops
from tests.agent.mtls.test_envoy_records import BAD_CHAIN, NO_CERTIFICATE, STRANGER, bad_name
from tests.support.tls_client import PATIENCE_S, blocking, client_context, read_to_the_end

T = TypeVar("T")

FOUND = find_binary("", "")
if FOUND is None:
    pytest.skip("no Envoy binary: install the extra `envoy`", allow_module_level=True)
BINARY: Path = FOUND

ANY_PORT = Address("127.0.0.1", 0)
NOBODY = Address("127.0.0.1", 9)
WORKLOAD = SpiffeId.of_workload("demo.local", "demo", "hello")
CALLER = SpiffeId.of_workload("demo.local", "demo", "client")
ALLOWED = PeerPolicy(["spiffe://demo.local/ns/demo/sa/*"])


def configuration(
    folder: Path, *, app: Address = NOBODY, policy: PeerPolicy = ALLOWED, protocol: AppProtocol = "tcp"
) -> Json:
    return bootstrap(
        listen=ANY_PORT,
        app=app,
        policy=policy,
        secrets_folder=folder,
        connect_timeout_s=PATIENCE_S,
        http=HttpSettings(protocol, PATIENCE_S, "all"),
    )


# Finding it.


def executable(path: Path, content: bytes = b"\x7fELF") -> Path:
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def test_the_named_binary_is_looked_for_on_the_path_or_taken_as_a_path(tmp_path: Path) -> None:
    binary = executable(tmp_path / "envoy-1.40")
    assert find_binary("envoy-1.40", str(tmp_path)) == binary
    assert find_binary(str(binary), "") == binary


def test_a_named_binary_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="ENVOY_BIN=envoy-9: no such program"):
        find_binary("envoy-9", str(tmp_path))


def test_a_binary_on_the_path_comes_before_the_packages(tmp_path: Path) -> None:
    binary = executable(tmp_path / "envoy")
    assert find_binary("", str(tmp_path)) == binary


def test_a_script_on_the_path_is_passed_over_for_the_packages_binary(tmp_path: Path) -> None:
    executable(tmp_path / "envoy", b"#!/bin/sh\nexit 1\n")
    assert find_binary("", str(tmp_path)) == BINARY


# A running one: an app behind it that does as the test says, and a client of pyOpenSSL's, for Python's own
# ssl module cannot end one direction of a connection.

App = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An app that answers only once its peer has finished sending."""
    received = await reader.read(-1)
    writer.write(b"got " + received)


@dataclass(slots=True)
class Inbound:
    """An Envoy with an app behind it."""

    envoy: EnvoyProcess
    authority: Authority
    certificates: Path
    records: asyncio.Queue[TunnelRecord]
    behave: App
    connections: int = 0

    @property
    def address(self) -> Address:
        assert self.envoy.inbound is not None
        return self.envoy.inbound

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await asyncio.wait_for(self.behave(reader, writer), PATIENCE_S)
        finally:
            writer.close()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An app that speaks first."""
    writer.write(b"hello")
    await reader.read(-1)


@asynccontextmanager
async def envoy_with(folder: Path, policy: PeerPolicy, authority: Authority) -> AsyncIterator[Inbound]:
    """An Envoy with an app that greets, until the block ends."""
    certificates = folder / "certificates"
    authority.write(certificates, authority.issue(WORKLOAD))
    inbound: Inbound

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await inbound.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    app = Address(*server.sockets[0].getsockname())
    records: asyncio.Queue[TunnelRecord] = asyncio.Queue()

    def finished(record: Record) -> None:
        assert isinstance(record, TunnelRecord)
        records.put_nowait(record)

    told = configuration(folder / "envoy", app=app, policy=policy)
    envoy = await EnvoyProcess.start(BINARY, told, secrets(certificates), folder / "envoy", finished=finished)
    inbound = Inbound(envoy, authority, certificates, records, greet)
    try:
        await envoy.ready(PATIENCE_S)
        yield inbound
    finally:
        await envoy.stop(PATIENCE_S)
        server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Inbound]:
    folder = tmp_path_factory.mktemp("envoy")
    async with envoy_with(folder, ALLOWED, Authority.create("demo.local")) as inbound:
        yield inbound


@pytest.fixture
def inbound(started: Inbound) -> Inbound:
    started.behave = answer_at_the_end
    started.connections = 0
    return started


async def record_of(inbound: Inbound, wanted: Callable[[TunnelRecord], bool]) -> TunnelRecord:
    """The next record that is `wanted`; those of earlier tests' connections are passed over."""
    while True:
        record = await asyncio.wait_for(inbound.records.get(), PATIENCE_S)
        if wanted(record):
            return record


@pytest.fixture
def caller(inbound: Inbound) -> KeyPair:
    return inbound.authority.issue(CALLER)


running = pytest.mark.asyncio(loop_scope="module")


@contextmanager
def connected(
    inbound: Inbound, pair: KeyPair | None, *, alpn: tuple[bytes, ...] = (), version: int = SSL.TLS1_3_VERSION
) -> Iterator[SSL.Connection]:
    """A TLS connection to Envoy whose handshake is done; every read and write has a deadline."""
    context = client_context(inbound.authority, pair, version=version, alpn=alpn)
    with blocking(context, inbound.address) as connection:
        yield connection


def exchange(inbound: Inbound, pair: KeyPair | None, request: bytes, **options: Any) -> bytes:
    """Sends `request`, ends this direction, and returns the answer."""
    with connected(inbound, pair, **options) as connection:
        connection.sendall(request)
        connection.shutdown()
        return read_to_the_end(connection)


def look(inbound: Inbound, pair: KeyPair, at: Callable[[SSL.Connection], T], **options: Any) -> T:
    """What there is to see on a connection; the app has answered and gone when it returns."""
    with connected(inbound, pair, **options) as connection:
        seen = at(connection)
        connection.shutdown()
        read_to_the_end(connection)
        return seen


@running
async def test_an_allowed_peer_reaches_the_app_and_half_close_passes(
    inbound: Inbound, caller: KeyPair
) -> None:
    assert await asyncio.to_thread(exchange, inbound, caller, b"hello") == b"got hello"
    assert inbound.connections == 1


@running
async def test_each_connection_has_its_record_with_the_peer_s_identity(
    inbound: Inbound, caller: KeyPair
) -> None:
    question = os.urandom(12_345)
    await asyncio.to_thread(exchange, inbound, caller, question)
    record = await record_of(inbound, lambda record: record.sent_bytes == len(question))
    assert (record.identity, record.received_bytes, record.error) == (str(CALLER), len(question) + 4, None)


@running
async def test_an_app_that_breaks_off_is_no_orderly_end(inbound: Inbound, caller: KeyPair) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)
        reset_at_close = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_at_close)

    inbound.behave = break_off
    with pytest.raises(SSL.SysCallError, match="ECONNRESET"):
        await asyncio.to_thread(exchange, inbound, caller, b"hello")


@running
@pytest.mark.parametrize("version", [SSL.TLS1_2_VERSION, SSL.TLS1_3_VERSION])
async def test_tls_versions(inbound: Inbound, caller: KeyPair, version: int) -> None:
    seen = await asyncio.to_thread(
        look, inbound, caller, SSL.Connection.get_protocol_version, version=version
    )
    assert seen == version


@running
@pytest.mark.parametrize(
    ("offered", "agreed"),
    [
        (["istio-http/1.1", "istio", "http/1.1"], "istio"),
        (["istio-peer-exchange", "istio"], "istio"),
        (["istio-h2", "istio", "h2"], "istio"),
        (["istio-http/1.0"], "istio-http/1.0"),
        (["h2", "http/1.1"], "http/1.1"),
        (["h2"], "h2"),
        (["h2", "istio-h2"], "istio-h2"),
        (["istio-peer-exchange"], ""),
        ([], ""),
    ],
)
async def test_alpn(inbound: Inbound, caller: KeyPair, offered: list[str], agreed: str) -> None:
    names = tuple(name.encode() for name in offered)
    seen = await asyncio.to_thread(
        look, inbound, caller, SSL.Connection.get_alpn_proto_negotiated, alpn=names
    )
    assert seen.decode() == agreed


# Who does not come in, and what Envoy says of it.


async def refused(inbound: Inbound, pair: KeyPair | None, flag: str, said: str) -> None:
    def alerted() -> None:
        """In TLS 1.3 a client learns of it only when it reads."""
        with pytest.raises(SSL.Error, match="alert"), connected(inbound, pair) as connection:
            connection.recv(1)

    await asyncio.to_thread(alerted)
    record = await record_of(inbound, lambda record: said in str(record.error))
    assert record.error is not None
    assert (record.error.flag, record.identity, record.sent_bytes) == (flag, "", 0)
    assert inbound.connections == 0, "the app must not hear of it"


@running
@pytest.mark.parametrize(
    "identity",
    [
        STRANGER,
        SpiffeId("demo.local", "/ns/demo/sa/client/more"),
        SpiffeId("other.local", "/ns/demo/sa/client"),
        SpiffeId("demoxlocal", "/ns/demo/sa/client"),
    ],
    ids=str,
)
async def test_a_peer_that_no_pattern_allows(inbound: Inbound, identity: SpiffeId) -> None:
    said = f"TLS handshake of {identity} refused: {bad_name(identity)}"
    await refused(inbound, inbound.authority.issue(identity), "DENY", said)


@running
async def test_a_peer_without_a_certificate(inbound: Inbound) -> None:
    await refused(inbound, None, "TLS_FAILURE", f"TLS handshake refused: {NO_CERTIFICATE}")


@running
async def test_a_peer_without_a_spiffe_id(inbound: Inbound) -> None:
    name = "spiffe---demo.local-ns-demo-sa-client"
    await refused(inbound, inbound.authority.issue(dns_names=[name]), "DENY", bad_name(name))


@running
async def test_an_allowed_name_from_another_authority(inbound: Inbound) -> None:
    said = f"TLS handshake of {CALLER} refused: {BAD_CHAIN}"
    await refused(inbound, Authority.create("demo.local").issue(CALLER), "TLS_FAILURE", said)


@running
async def test_an_expired_certificate(inbound: Inbound) -> None:
    expired = inbound.authority.issue(CALLER, lifetime_s=-60)
    await refused(inbound, expired, "TLS_FAILURE", "certificate_has_expired")


def serial_number(connection: SSL.Connection) -> int:
    """Of the certificate that Envoy shows."""
    shown = connection.get_peer_certificate(as_cryptography=True)
    assert shown is not None
    return shown.serial_number


@running
async def test_a_rotated_certificate_is_taken_up(inbound: Inbound, caller: KeyPair) -> None:
    rotated = inbound.authority.issue(WORKLOAD)
    expected = load_pem_x509_certificate(rotated.certificate_pem).serial_number

    async def wait_for_it() -> None:
        while await asyncio.to_thread(look, inbound, caller, serial_number) != expected:
            pass

    inbound.authority.write(inbound.certificates, rotated)
    await asyncio.wait_for(wait_for_it(), PATIENCE_S)
    assert await asyncio.to_thread(exchange, inbound, caller, b"again") == b"got again"


@running
async def test_rotations_by_a_turned_link_are_taken_up_and_disturb_no_tunnel(
    inbound: Inbound, caller: KeyPair
) -> None:
    """As our keeper, and kubelet, replace the three files."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    def round_trip(connection: SSL.Connection) -> None:
        sent = os.urandom(20_000)
        connection.sendall(sent)
        came = b""
        while len(came) < len(sent):
            came += connection.recv(65536)
        assert came == sent

    inbound.behave = echo
    with connected(inbound, caller) as before:
        for _ in range(5):
            pair = inbound.authority.issue(WORKLOAD)
            contents = Contents(pair.certificate_pem, pair.key_pem, inbound.authority.root_pem)
            certificate_writer.write(inbound.certificates, contents)
            expected = load_pem_x509_certificate(pair.certificate_pem).serial_number
            async with asyncio.timeout(PATIENCE_S):
                while await asyncio.to_thread(look, inbound, caller, serial_number) != expected:
                    await asyncio.to_thread(round_trip, before)
            await asyncio.to_thread(round_trip, before)
        before.shutdown()
        await asyncio.to_thread(read_to_the_end, before)


# Its life as a process.


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    authority = Authority.create("demo.local")
    authority.write(tmp_path / "certificates", authority.issue(WORKLOAD))
    return tmp_path / "certificates"


async def start(folder: Path, certificates: Path, listen: Address = ANY_PORT) -> EnvoyProcess:
    told = configuration(folder)
    told["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = listen.port
    return await EnvoyProcess.start(BINARY, told, secrets(certificates), folder)


async def failure(envoy: EnvoyProcess) -> str:
    """What `ready` says about an Envoy that does not get there."""
    try:
        with pytest.raises(UnavailableError) as caught:
            await envoy.ready(PATIENCE_S)
        return str(caught.value)
    finally:
        await envoy.stop(PATIENCE_S)


@on_both_loops
async def test_it_starts_is_ready_and_stops_without_a_word(
    tmp_path: Path, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hbone")
    envoy = await start(tmp_path, certificates)
    await envoy.ready(PATIENCE_S)
    assert envoy.inbound is not None
    assert not envoy.exited.done()
    await envoy.stop(PATIENCE_S)
    assert envoy.exited.result() == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(envoy.inbound.host, envoy.inbound.port)
    assert caplog.messages == []


@on_both_loops
async def test_what_envoy_says_goes_to_our_log_at_its_level(
    tmp_path: Path, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (certificates / "ca_certificates.pem").write_text("no roots\n")
    await failure(await start(tmp_path, certificates))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("hbone.envoy", "WARNING")
    assert record.getMessage().startswith("envoy: Filesystem config update rejected: ")


@on_both_loops
async def test_a_port_in_use_is_named(tmp_path: Path, certificates: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(*taken.getsockname())
        text = await failure(await start(tmp_path, certificates, address))
    assert text == f"envoy ended with exit code 1: cannot bind '{address}': Address already in use"


@on_both_loops
async def test_its_admin_interface_is_the_user_s_own(tmp_path: Path, certificates: Path) -> None:
    """No other user reaches it, and no web page; a socket that an earlier run has left is no hindrance."""
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as left:
            (tmp_path / "admin.sock").unlink(missing_ok=True)
            left.bind(str(tmp_path / "admin.sock"))
        envoy = await start(tmp_path, certificates)
        try:
            await envoy.ready(PATIENCE_S)
            found = envoy.admin.stat()
            assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
            assert listening(envoy.pid) == 1, "the mTLS end's, and no other port"
        finally:
            await envoy.stop(PATIENCE_S)


def listening(pid: int) -> int:
    """How many TCP ports a process listens on (proc(5)); each of its workers' sockets counts once."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the folder was read
            held.add(os.readlink(descriptor))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                ports.add(fields[1])
    return len(ports)


@on_both_loops
async def test_a_folder_whose_name_is_too_long_for_a_socket(tmp_path: Path, certificates: Path) -> None:
    folder = tmp_path / ("a" * 100)
    with pytest.raises(UnavailableError, match="is too long for a socket: set TMPDIR"):
        await start(folder, certificates)


@on_both_loops
async def test_a_configuration_that_envoy_refuses(tmp_path: Path, certificates: Path) -> None:
    told: Json = configuration(tmp_path) | {"surprise": True}
    envoy = await EnvoyProcess.start(BINARY, told, secrets(certificates), tmp_path)
    text = await failure(envoy)
    assert text.startswith("envoy ended with exit code 1: ")
    assert "surprise" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "Invalid path"), ("no certificate\n", "Failed to load certificate chain")]
)
@on_both_loops
async def test_certificates_that_are_missing_or_broken(
    tmp_path: Path, certificates: Path, content: str | None, reason: str
) -> None:
    chain = certificates / "certificates.pem"
    chain.unlink() if content is None else chain.write_text(content)
    text = await failure(await start(tmp_path, certificates))
    assert text.startswith("envoy cannot use the certificates (HBONE_CERTS): ")
    assert reason in text


@on_both_loops
async def test_an_end_that_nobody_asked_for_is_noticed(tmp_path: Path, certificates: Path) -> None:
    envoy = await start(tmp_path, certificates)
    await envoy.ready(PATIENCE_S)
    os.kill(envoy.pid, signal.SIGKILL)
    await asyncio.wait({envoy.exited}, timeout=PATIENCE_S)
    assert envoy.exited.result() == 128 + signal.SIGKILL
    await envoy.stop(PATIENCE_S)


@on_both_loops
async def test_not_ready_in_time(tmp_path: Path, certificates: Path) -> None:
    silent = executable(tmp_path / "silent", b"#!/bin/sh\nexec sleep 60\n")
    envoy = await EnvoyProcess.start(silent, {}, {}, tmp_path)
    with pytest.raises(UnavailableError, match=r"envoy is not ready after 0\.05 s"):
        await envoy.ready(0.05)
    await envoy.stop(PATIENCE_S)


@on_both_loops
async def test_a_binary_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cannot start envoy: .*No such file"):
        await EnvoyProcess.start(tmp_path / "nothing", {}, {}, tmp_path)


@on_both_loops
async def test_it_is_out_of_the_terminals_reach(tmp_path: Path, certificates: Path) -> None:
    envoy = await start(tmp_path, certificates)
    assert os.getpgid(envoy.pid) == envoy.pid != os.getpgrp()
    await envoy.stop(PATIENCE_S)


# Rules, of an Envoy each: the same verdicts as the built-in end's.


def greeted(inbound: Inbound, pair: KeyPair) -> bool:
    """Whether a peer that says nothing is let in: it hears the app, or an alert."""
    try:
        with connected(inbound, pair) as connection:
            return connection.recv(5) == b"hello"
    except SSL.Error:
        return False


MOVED = TrustDomain("demo.local", ("old.local",))


POLICIES = (
    (("spiffe://demo.local/ns/demo-*/sa/*",), ()),
    (("spiffe://demo.local/**",), ("ns/demo-1/sa/*",)),
    (("ns/demo-*/sa/*", "spiffe://other.local/**"), ("ns/*/sa/a*c*e", "spiffe://other.local/x")),
)
"""Whom to allow, and of those whom to deny."""

_PATHS = (
    *("/ns/demo-1/sa/hello", "/ns/demo-/sa/a", "/ns/demo-2/sa/abcde", "/ns/demo-2/sa/ace"),
    *("/ns/demo-2/sa/aecb", "/ns/x/sa/ace", "/ns/demo-1/sa/a/b", "/x", "/x/y"),
)
NAMES = tuple(
    SpiffeId(domain, path)
    for domain in ("demo.local", "old.local", "other.local", "demoxlocal")
    for path in _PATHS
)


def lets_in(policy: PeerPolicy, identity: SpiffeId) -> bool:
    try:
        policy.check(identity)
    except DeniedError:
        return False
    return True


@pytest.mark.parametrize(("allow", "deny"), POLICIES, ids=["glob", "deny", "both"])
async def test_envoy_s_verdicts_are_ours(
    tmp_path: Path, allow: tuple[str, ...], deny: tuple[str, ...]
) -> None:
    policy = PeerPolicy(allow, deny, MOVED)
    async with envoy_with(tmp_path, policy, Authority.create("demo.local")) as inbound:
        for identity in NAMES:
            heard = await asyncio.to_thread(greeted, inbound, inbound.authority.issue(identity))
            assert heard is lets_in(policy, identity), identity
            if not heard:
                record = await record_of(inbound, lambda record: record.target == "")
                assert isinstance(record.error, DeniedError), record


async def test_a_denied_peer_never_reaches_an_app_that_speaks_first(tmp_path: Path) -> None:
    """As it would with Envoy's RBAC filter, which waits for the peer's first byte."""
    policy = PeerPolicy(["spiffe://demo.local/**"], [str(CALLER)])
    async with envoy_with(tmp_path, policy, Authority.create("demo.local")) as inbound:
        assert not await asyncio.to_thread(greeted, inbound, inbound.authority.issue(CALLER))
        assert inbound.connections == 0


async def test_its_configuration_can_be_kept_for_whoever_looks_for_a_fault(
    inbound: Inbound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = inbound.envoy.save_configuration()
    kept = await asyncio.to_thread(Path(said.removeprefix("; its configuration is in ")).read_text)
    assert json.loads(kept)["static_resources"]["listeners"][0]["name"] == "inbound"
    assert "PRIVATE KEY" not in kept
