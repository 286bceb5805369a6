"""Inner HBONE to krun as a process, from clients that are not ours: Envoy, and OpenSSL's s_client."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hbone.demo.processes import Process
from shared.address import Address
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId
from tests.path.app import App
from tests.path.krun_peers import INNER_PATH, envoy_inner, envoy_poster, krun
from tests.support.hbone_port import CALLER, TRUST_DOMAIN, Mesh
from tests.support.world import PATIENCE_S, find_program

HELLO = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")
SERVICE = "hello.demo.svc.cluster.local"
MUCH = bytes(range(256)) * (64 << 12)
"""64 MiB."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    return Mesh(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def container(
    mesh: Mesh, app: App, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Process, Address]]:
    """krun before `app`, which has the service's port 80."""
    told = {
        "HBONE_INBOUND": "builtin",
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_CERTS": str(mesh.member(HELLO)),
        "HBONE_APP": str(app.address),
        "HBONE_APP_PROTOCOL": "tcp",
        "WORKLOAD_NAME": "hello",
    }
    with krun(tmp_path_factory.mktemp("krun"), **told) as it:
        yield it


def brought_back(address: Address, data: bytes) -> bytes:
    """What comes back of `data` by an app that sends all back, up to its end."""
    with socket.create_connection((address.host, address.port), PATIENCE_S) as sock:

        def send() -> None:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        back = bytearray()
        while piece := sock.recv(1 << 20):
            back += piece
        sender.join()
    return bytes(back)


def test_envoy_is_a_client(mesh: Mesh, container: tuple[Process, Address], tmp_path: Path) -> None:
    """64 MiB each way, the client ends first; and each connection is a CONNECT with a TLS of its own."""
    process, port = container
    with envoy_inner(tmp_path, port, mesh.member(), f"{SERVICE}:80") as address:
        assert brought_back(address, MUCH) == MUCH
        for _ in range(20):
            assert brought_back(address, b"hello") == b"hello"
    line = process.wait_for(lambda record: record.get("tunnel.target") == f"{SERVICE}:80", PATIENCE_S)
    assert line["identity"] == str(CALLER)


def test_envoy_is_told_what_it_may_not_have(
    mesh: Mesh, container: tuple[Process, Address], tmp_path: Path
) -> None:
    process, port = container
    other = "other.demo.svc.cluster.local:80"
    with envoy_inner(tmp_path, port, mesh.member(), other) as address:
        with pytest.raises(ConnectionResetError):
            assert brought_back(address, b"hello") == b""
            raise ConnectionResetError  # Envoy may end it either way
        process.wait_for(lambda record: f"{other} is no service of this workload" in str(record), PATIENCE_S)


@pytest.fixture(scope="module")
def poster(container: tuple[Process, Address], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """What carries plain TCP to inner HBONE."""
    with envoy_poster(tmp_path_factory.mktemp("poster"), container[1], INNER_PATH) as address:
        yield address


def s_client(mesh: Mesh, address: Address, *more: str) -> subprocess.CompletedProcess[str]:
    """OpenSSL's client, with a certificate of the mesh and without SNI, whose input ends at once."""
    chain, key, roots = certificate_folder.find(mesh.member()).all
    files = ("-cert", chain, "-key", key, "-CAfile", roots)
    return subprocess.run(
        [find_program("openssl"), "s_client", "-connect", str(address), "-noservername", *files, *more],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",  # krun's SETTINGS, where they come before the end
        timeout=PATIENCE_S,
        check=False,
    )


def test_openssl_completes_the_handshake(mesh: Mesh, poster: Address) -> None:
    done = s_client(mesh, poster, "-alpn", "h2")
    assert "Verify return code: 0 (ok)" in done.stdout
    assert "New, TLSv1.3" in done.stdout and "ALPN protocol: h2" in done.stdout


@pytest.mark.parametrize(
    ("more", "alert", "logged"),
    [
        (("-alpn", "istio"), "no application protocol", "the client offers 'istio' by ALPN, not h2"),
        (("-alpn", "h2", "-tls1_2"), "protocol version", "unsupported protocol"),
    ],
    ids=["sidecar", "tls12"],
)
def test_openssl_is_refused(
    mesh: Mesh,
    poster: Address,
    container: tuple[Process, Address],
    more: tuple[str, ...],
    alert: str,
    logged: str,
) -> None:
    assert alert in s_client(mesh, poster, *more).stderr
    container[0].wait_for(lambda record: logged in str(record.get("error")), PATIENCE_S)
