"""mTLS through a real hgate: certificates that change, and ends that come late."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hbone.demo.mesh import SNI, TRUST_DOMAIN
from hbone.demo.processes import Process
from shared.address import Address
from shared.trust.spiffe import SpiffeId
from tests.path.app import App, answer_late, read
from tests.support.forwards import Forward, echoed, patient_echo, started
from tests.support.world import INBOUNDS, World, free_port, running, word_after


@pytest.fixture(scope="module", params=INBOUNDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, app: App
) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("world"), inbound=request.param, app=app.address) as world:
        yield world


@pytest.fixture(scope="module")
def files(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the caller's certificate is, for a test to replace."""
    folder = tmp_path_factory.mktemp("caller")
    copy(world.caller.certificates.parent, folder)
    return folder


def copy(source: Path, folder: Path) -> None:
    for name in ("certificates.pem", "private_key.pem", "ca_certificates.pem"):
        shutil.copy(source / name, folder / f"{name}.new")
        os.replace(folder / f"{name}.new", folder / name)


def flags(world: World, files: Path) -> list[object]:
    """Without --ca: the roots are beside the certificate."""
    cert, key = files / "certificates.pem", files / "private_key.pem"
    return [world.gateway, "--sni", SNI, "--cert", cert, "--key", key, "-L", "0"]


@pytest.fixture(scope="module")
def forward(world: World, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forward]:
    with started(tmp_path_factory.mktemp("forward"), *flags(world, files)) as forward:
        yield forward


def test_a_late_answer_to_a_client_that_has_ended(forward: Forward, app: App) -> None:
    app.behave = answer_late
    try:
        with forward.connect() as client:
            client.sendall(b"all of it")
            client.shutdown(socket.SHUT_WR)
            assert read(client) == b"late answer to all of it"
    finally:
        app.behave = patient_echo


def test_certificates_are_read_again(forward: Forward, world: World, files: Path) -> None:
    """First with one that the service does not allow, then with the old one."""
    stranger = SpiffeId.of_workload(TRUST_DOMAIN, "elsewhere", "client")
    world.mesh.write(files / "stranger", world.mesh.issue(stranger))
    copy(files / "stranger", files)
    refused_in_time(forward)
    forward.says(rf"{re.escape(SNI)} by way of {world.gateway}: ended after [\d.]+ s: ")
    copy(world.caller.certificates.parent, files)
    while not works(forward):
        pass


def works(forward: Forward) -> bool:
    try:
        return echoed(forward.port())
    except ConnectionResetError:
        return False


def refused_in_time(forward: Forward) -> None:
    """Returns once a connection is refused: files are looked at once a second."""
    while works(forward):
        pass


def test_a_gateway_that_goes_and_comes_back(world: World, files: Path, tmp_path: Path) -> None:
    """Another hgate in its place, which the world does not know of."""
    address = Address("127.0.0.1", free_port())
    file = tmp_path / "hgate.yaml"
    own = (world.folder / "hgate.yaml").read_text()
    file.write_text(own.replace('listen: ["127.0.0.1:0"]', f'listen: ["{address}"]'))
    arguments = ["-m", "gateway", "--config", str(file), "--log-format", "json"]
    environ = {"GCE_METADATA_HOST": world.metadata}
    hgate = Process("hgate", arguments, environ, tmp_path)
    word_after(hgate, "listening on ")
    try:
        with started(tmp_path, address, *flags(world, files)[1:]) as forward, forward.connect() as client:
            client.sendall(b"hello")
            assert client.recv(100) == b"hello"
            hgate._process.kill()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            forward.says(rf"{re.escape(SNI)} by way of {address}: ended after [\d.]+ s: connection ")
            assert not works(forward)
            forward.says(rf"{re.escape(SNI)} by way of {address}: not opened: .*connection refused")
            hgate.stop()
            hgate = Process("hgate", arguments, environ, tmp_path)
            word_after(hgate, "listening on ")
            assert works(forward)
            forward.says(rf"{re.escape(SNI)} by way of {address} works again")
    finally:
        hgate.stop()
