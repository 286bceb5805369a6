"""`forward:` between programs that are not ours: TLS passes through hgate as it is, whoever speaks it."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest
from OpenSSL import SSL

from hbone.demo.mesh import CLIENT_FILES, HOST, SNI, TRUST_DOMAIN
from shared.credentials.certificates.authority import Authority
from tests.path.app import READ_BYTES, App, read
from tests.path.hbone_peers import Hgate, hgate
from tests.path.programs import MUCH_BYTES, client_envoy, random_file, run, s_client, sha256, start
from tests.path.tls_client import connected_to
from tests.support.tls_client import read_to_the_end
from tests.support.world import CALLER, PATIENCE_S, WORKLOAD, Identity, find_program, free_port

ISTIOD = "istiod.istio-system.svc"


@dataclass(frozen=True, slots=True)
class Ends:
    """hgate, and the files of the two that talk through it."""

    hgate: Hgate
    server: Identity
    client: Identity
    app: App
    """Where Istio's name leads to."""
    port: int
    """Where the bare name leads to: for a program to listen on."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    folder = tmp_path_factory.mktemp("forward")
    mesh = Authority.create(TRUST_DOMAIN)
    mesh.write(folder / "server", mesh.issue(WORKLOAD, dns_names=(SNI, HOST, ISTIOD)))
    mesh.write(folder / "client", mesh.issue(CALLER))
    server, client = (
        Identity(*(folder / name / file for file in CLIENT_FILES)) for name in ("server", "client")
    )
    port = free_port()
    with App(lambda sock: None) as app:
        routes = [
            {"host": ISTIOD, "forward": f"127.0.0.1:{port}"},
            {"host": HOST, "forward": str(app.address)},
        ]
        with hgate(folder, routes=routes) as running:
            yield Ends(running, server, client, app, port)


def tls(behave: Callable[[ssl.SSLSocket], None], ends: Ends) -> Callable[[socket.socket], None]:
    """A server of the mesh, which demands a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ends.server.certificates, ends.server.key)
    context.load_verify_locations(ends.server.roots)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["istio"])

    def serve(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True) as secure:
            behave(secure)

    return serve


def s_server(ends: Ends, *more: str) -> list[str | Path]:
    return [
        *(find_program("openssl"), "s_server", "-accept", f"127.0.0.1:{ends.port}", *more),
        *("-cert", ends.server.certificates, "-key", ends.server.key, "-CAfile", ends.server.roots),
        *("-Verify", "1", "-verify_return_error"),
    ]


def test_64_mib_from_s_client_to_s_server(ends: Ends, tmp_path: Path) -> None:
    body, got = random_file(tmp_path / "body", MUCH_BYTES), tmp_path / "got"
    with body.open("rb") as stdin, got.open("wb") as stdout:
        command = s_server(ends, "-quiet", "-naccept", "1")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout) as server:
            wait_for(ends.port)
            client = s_client(ends.hgate.gateway, ends.client, ISTIOD, "-no_ign_eof", "-nocommands")
            done = subprocess.run(client, stdin=stdin, capture_output=True, timeout=PATIENCE_S)
            assert (done.returncode, done.stderr) == (0, b"DONE\n")
            assert server.wait(PATIENCE_S) == 0
    assert sha256(got) == sha256(body)


def wait_for(port: int) -> None:
    """Until somebody listens there; a connection would use up the one that s_server takes."""
    wanted = f":{port:04X} 00000000:0000 0A"
    while wanted not in Path("/proc/net/tcp").read_text():
        pass


def test_64_mib_from_s_server_to_curl(ends: Ends, tmp_path: Path) -> None:
    body, got = random_file(tmp_path / "body", MUCH_BYTES), tmp_path / "got"
    server = start("s_server", ["/usr/bin/env", "-C", tmp_path, *s_server(ends, "-WWW")], tmp_path)
    try:
        wait_for(ends.port)
        done = run(
            find_program("curl"),
            *("--silent", "--show-error", "--fail", "--http0.9", "--max-time", str(PATIENCE_S)),
            *("--cacert", ends.client.roots, "--cert", ends.client.certificates, "--key", ends.client.key),
            *("--resolve", f"{ISTIOD}:{ends.hgate.gateway.port}:{ends.hgate.gateway.host}"),
            *("--output", got, f"https://{ISTIOD}:{ends.hgate.gateway.port}/body"),
        )
        assert (done.returncode, done.stderr) == (0, b"")
    finally:
        server.stop()
    assert sha256(got) == sha256(body)


def test_64_mib_there_and_back_from_envoy_by_istio_s_name(ends: Ends, tmp_path: Path) -> None:
    digest = hashlib.sha256()

    def echo(secure: ssl.SSLSocket) -> None:
        while data := secure.recv(READ_BYTES):
            digest.update(data)
            secure.sendall(data)

    ends.app.behave = tls(echo, ends)
    much = os.urandom(MUCH_BYTES)
    with (
        client_envoy(ends.hgate.gateway, ends.client, tmp_path) as address,
        socket.create_connection((address.host, address.port)) as plain,
    ):
        sending = Thread(target=plain.sendall, args=(much,))
        sending.start()
        got = read(plain, len(much))
        sending.join(PATIENCE_S)
    assert digest.digest() == hashlib.sha256(much).digest() == hashlib.sha256(got).digest()


def test_an_answer_after_the_clients_end(ends: Ends) -> None:
    """The client ends its direction, in TLS and in TCP, and is answered all the same."""

    def answer(secure: ssl.SSLSocket) -> None:
        received = bytearray()
        while data := secure.recv(READ_BYTES):
            received += data
        secure.sendall(hashlib.sha256(received).digest())
        secure.unwrap()

    ends.app.behave = tls(answer, ends)
    much = os.urandom(1 << 20)
    with connected_to(ends.hgate.gateway, ends.client, b"istio") as connection:
        connection.sendall(much)
        connection.shutdown()
        connection.sock_shutdown(socket.SHUT_WR)
        assert read_to_the_end(connection) == hashlib.sha256(much).digest()


def test_a_client_of_no_mesh_is_told_so(ends: Ends) -> None:
    before = ends.app.connections
    with (
        pytest.raises(SSL.Error, match="no application protocol"),
        connected_to(ends.hgate.gateway, ends.client, b"h2"),
    ):
        pass
    assert ends.app.connections == before
