"""An app that ends as soon as it has sent all, behind Envoy as Cloud Run's front end or as the tunnel's end.

Envoy resets a stream whose response has ended before its request, and drops what its peer's window does not
take at that moment (envoy#47378). Answers up to hgate's largest window arrive whole, if the client reads.
With `allow_multiplexed_upstream_half_close` Envoy waits as a front end, so slow readers lose nothing, either.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.address import Address
from shared.net.tls import certificate_folder
from tests.path.app import READ_BYTES, App, read
from tests.path.hbone_peers import ZTUNNEL, envoy_server, hgate
from tests.path.krun_peers import HOST_NAME, TARGET_PATH, envoy_front, krun
from tests.support.envoy_config import Json
from tests.support.gateway_world import GLOB
from tests.support.hbone_port import GATEWAY, Mesh
from tests.support.hellos import hello
from tests.support.world import PATIENCE_S

SIZES = (2 << 20, 8 << 20, 64 << 20)
"""From more than the window with which HTTP/2 streams begin to the largest one."""

WAITS = {"envoy.reloadable_features.allow_multiplexed_upstream_half_close": True}

MOST_OF_5 = 4
"""One reader of five may be late where the machine has other work: its window shrinks, as it should."""

SLOW_BYTES_PER_S = 16 << 20


@dataclass
class Way:
    gateway: Address
    app: App
    answer: bytes = b""

    def serve(self, sock: socket.socket) -> None:
        read(sock, len(hello()))
        sock.sendall(self.answer)

    def connect(self) -> socket.socket:
        """A client that has asked."""
        client = socket.create_connection((self.gateway.host, self.gateway.port), PATIENCE_S)
        client.sendall(hello())
        return client


@pytest.fixture(params=["front end", "end of the tunnel"])
def place(request: pytest.FixtureRequest) -> str:
    """Where the Envoy is."""
    return str(request.param)


def running(block: ExitStack, folder: Path, place: str, runtime: Json | None = None) -> Way:
    app = block.enter_context(App(lambda sock: served.serve(sock)))
    mesh = Mesh(folder)
    own = mesh.member(ZTUNNEL, dns_names=[HOST_NAME])
    route: Json = {"host": GLOB}
    if place == "front end":
        _, container = block.enter_context(krun(folder, HBONE_INBOUND_LISTEN=str(app.address)))
        address = block.enter_context(envoy_front(folder, own, container, runtime=runtime))
        roots = str(certificate_folder.find(own).roots)
        route |= {"tunnel": f"https://{HOST_NAME}{TARGET_PATH}", "ca": roots, "token": "none"}
        route["connect"] = str(address)
    else:
        server = envoy_server(folder, own, app.address, client_id=GATEWAY, runtime=runtime)
        address = block.enter_context(server)
        route |= {"tunnel": f"https://{address}{TARGET_PATH}", "method": "POST"}
        route |= {"identity": str(mesh.member(GATEWAY)), "peer": [str(ZTUNNEL)]}
    gateway = block.enter_context(hgate(folder, routes=[route]))
    served = Way(gateway.gateway, app)
    return served


@pytest.fixture
def way(place: str, tmp_path: Path) -> Iterator[Way]:
    with ExitStack() as block:
        yield running(block, tmp_path, place)


def test_an_answer_of_any_size_is_whole(way: Way) -> None:
    for size in SIZES:
        way.answer = os.urandom(size)
        assert sum(is_whole(way) for _ in range(5)) >= MOST_OF_5, f"answers of {size} bytes"


def is_whole(way: Way) -> bool:
    """Whether an answer arrives to its end; what arrives is right in any case."""
    with way.connect() as client:
        got = bytearray()
        try:
            while data := client.recv(READ_BYTES):
                got += data
        except ConnectionResetError:
            assert way.answer.startswith(got)
            return False
        return got == way.answer


def test_a_slow_reader_loses_nothing_where_envoy_waits(tmp_path: Path) -> None:
    with ExitStack() as block:
        way = running(block, tmp_path, "front end", WAITS)
        way.answer = os.urandom(2 * SIZES[-1])
        digest, got = hashlib.sha256(), 0
        with way.connect() as client:
            started = time.monotonic()
            while data := client.recv(READ_BYTES):
                digest.update(data)
                got += len(data)
                time.sleep(
                    max(0.0, started + got / SLOW_BYTES_PER_S - time.monotonic())
                )  # as slow as it says
        assert digest.digest() == hashlib.sha256(way.answer).digest()
