"""The demo's world: what is started, and that nothing of it stays. Requests are in test_client.py."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from hbone.demo import mesh
from hbone.demo.mesh import CLIENT_FILES, Mesh
from shared.errors import UnavailableError


def test_the_gateway_listens_and_the_client_has_what_it_needs(world: Mesh) -> None:
    with socket.create_connection((world.gateway.host, world.gateway.port)):
        pass
    certificates, key, roots = (world.client_files / name for name in CLIENT_FILES)
    ssl.create_default_context(cafile=roots).load_cert_chain(certificates, key)
    assert world.inbound == "builtin"


def test_stop_ends_all_and_frees_the_port(tmp_path: Path) -> None:
    started = mesh.start(tmp_path, "builtin")
    started.stop()
    codes = [process.stop() for process in (started.hgate, started.cloudrun, started.krun)]
    assert codes[:2] == [0, 0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((started.gateway.host, started.gateway.port))


def test_the_others_are_ended_when_one_does_not_come_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_GATEWAY_FILE", "listen: nowhere\n")
    with pytest.raises(UnavailableError, match="hgate ended with exit code 78"):
        mesh.start(tmp_path, "builtin")
    (address,) = [
        line.partition("tunnels on ")[2].partition('"')[0]
        for line in (tmp_path / "krun.log").read_text().splitlines()
        if "tunnels on" in line
    ]
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
