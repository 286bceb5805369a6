"""Programs that are not ours at the other end, or in the middle: what is tested of each way is the same.

An Envoy as hgate's HBONE client, and as its server for CONNECT and for POST; an Envoy in hgate's place before
krun; nghttpx, HAProxy and Envoy in the place of Cloud Run's front end; and an Envoy as the client's sidecar,
with the whole mesh behind it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from hbone.demo.processes import Process
from shared.address import Address
from shared.errors import EXIT_OK
from shared.net.tls import certificate_folder
from tests.path.app import (
    GREETING,
    LATE_S,
    App,
    Behaviour,
    answer_late,
    answer_lines,
    echo,
    give_back,
    greet_and_answer,
    read,
    say_back_and_look,
)
from tests.path.hbone_peers import ZTUNNEL, Hgate, configure, envoy_client, envoy_server, hgate
from tests.path.krun_peers import FRONT_ENDS, HOST_NAME, TARGET_PATH, envoy_poster, krun
from tests.path.programs import MUCH_BYTES, client_envoy
from tests.path.tls_client import reset_on_close
from tests.support.gateway_world import GLOB
from tests.support.hbone_port import CALLER, GATEWAY, Mesh
from tests.support.hellos import hello
from tests.support.world import INBOUNDS, PATIENCE_S, dump, running, said

SIZE_BYTES = 3 << 20
"""Three windows of a stream."""

WITHIN_WINDOW_BYTES = 500_000

AT_ONCE = 50


def connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), PATIENCE_S)


def send_and_end(client: socket.socket, data: bytes) -> None:
    client.sendall(data)
    client.shutdown(socket.SHUT_WR)


# The ways through.


class Way:
    """A way through `process`, hgate or krun, with the client's end at `address`."""

    def __init__(
        self,
        address: Address,
        process: Process,
        first: bytes = b"",
        *,
        hides_resets: bool = False,
        size: int = SIZE_BYTES,
    ) -> None:
        self.address = address
        self.process = process
        self.hides_resets = hides_resets
        """Whether a client's reset reaches the app as an orderly end, whoever does that."""
        self.first = first
        """What has to be said first, and arrives at the app as well."""
        self.size = size
        """Of what is much."""

    def connect(self) -> socket.socket:
        """A connection that has said what has to be said."""
        client = connected(self.address)
        client.sendall(self.first)
        return client


WAYS = (
    "envoy to hgate",
    "hgate to envoy, CONNECT",
    "hgate to envoy, POST",
    "envoy to krun",
    *(f"hgate to krun through {name}" for name in FRONT_ENDS),
    *(f"sidecar before {inbound}" for inbound in INBOUNDS),
)


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, app: App) -> Iterator[Way]:
    folder = tmp_path_factory.mktemp("way")
    with ExitStack() as block:
        match request.param.split():
            case ["envoy", "to", "hgate"]:
                yield _from_envoy(block, folder, app)
            case ["hgate", "to", "envoy,", method]:
                yield _to_envoy(block, folder, app, method)
            case ["envoy", "to", "krun"]:
                process, container = block.enter_context(krun(folder, HBONE_INBOUND_LISTEN=str(app.address)))
                yield Way(block.enter_context(envoy_poster(folder, container)), process)
            case ["sidecar", "before", inbound]:
                yield _from_sidecar(block, folder, app, inbound)
            case [*_, front_end]:
                yield _through(block, folder, app, front_end)


def _from_envoy(block: ExitStack, folder: Path, app: App) -> Way:
    mesh = Mesh(folder)
    rules = [{"from": [str(CALLER)], "to": [f"127.0.0.1:{app.address.port}"]}]
    port = {"certificates": str(mesh.member(GATEWAY)), "rules": rules}
    gateway = block.enter_context(hgate(folder, hbone=port))
    assert gateway.hbone is not None
    client = envoy_client(folder, mesh.member(CALLER), gateway.hbone, str(app.address), server_id=GATEWAY)
    return Way(block.enter_context(client), gateway.process)


def _to_envoy(block: ExitStack, folder: Path, app: App, method: str) -> Way:
    mesh = Mesh(folder)
    server = envoy_server(folder, mesh.member(ZTUNNEL), app.address, client_id=GATEWAY)
    address = block.enter_context(server)
    route = {"host": GLOB, "identity": str(mesh.member(GATEWAY)), "peer": [str(ZTUNNEL)], "method": method}
    route["tunnel"] = f"https://{address}" if method == "CONNECT" else f"https://{address}{TARGET_PATH}"
    gateway = block.enter_context(hgate(folder, routes=[route]))
    return Way(gateway.gateway, gateway.process, hello(), hides_resets=True)


def _through(block: ExitStack, folder: Path, app: App, front_end: str) -> Way:
    own = Mesh(folder).member(ZTUNNEL, dns_names=[HOST_NAME])
    _, container = block.enter_context(krun(folder, HBONE_INBOUND_LISTEN=str(app.address)))
    address = block.enter_context(FRONT_ENDS[front_end](folder, own, container))
    route = {
        "host": GLOB,
        "tunnel": f"https://{HOST_NAME}{TARGET_PATH}",
        "connect": str(address),
        "ca": str(certificate_folder.find(own).roots),
        "token": "none",
    }
    gateway = block.enter_context(hgate(folder, routes=[route]))
    # HAProxy sends END_STREAM before the RST_STREAM that it passes on.
    return Way(gateway.gateway, gateway.process, hello(), hides_resets=front_end == "haproxy")


def _from_sidecar(block: ExitStack, folder: Path, app: App, inbound: str) -> Way:
    world = block.enter_context(running(folder, inbound=inbound, app=app.address))
    address = block.enter_context(client_envoy(world.gateway, world.caller, folder))
    return Way(address, world.hgate, size=MUCH_BYTES)


def take_first(way: Way, sock: socket.socket) -> None:
    """Takes what has to be said first, and no byte more."""
    if way.first:
        taken = b""
        while len(taken) < len(way.first):
            taken += sock.recv(len(way.first) - len(taken))
        assert taken == way.first


def after_first(way: Way, behaviour: Behaviour) -> Behaviour:
    """`behaviour`, once what has to be said first is taken."""

    def behave(sock: socket.socket) -> None:
        take_first(way, sock)
        behaviour(sock)

    return behave


def test_much_there_and_back_at_once(way: Way, app: App) -> None:
    app.behave = after_first(way, echo)
    body = os.urandom(way.size)
    with way.connect() as client, ThreadPoolExecutor(1) as sender:
        sending = sender.submit(send_and_end, client, body)
        assert read(client) == body
        sending.result()


def test_there_and_then_back_after_the_clients_end(way: Way, app: App) -> None:
    app.behave = lambda sock: sock.sendall(read(sock))
    body = os.urandom(way.size)
    with way.connect() as client:
        send_and_end(client, body)
        assert read(client) == way.first + body


def test_an_answer_long_after_the_clients_end(way: Way, app: App) -> None:
    app.behave = answer_late
    with way.connect() as client:
        send_and_end(client, b"question")
        began = time.monotonic()
        assert read(client) == b"late answer to " + way.first + b"question"
        assert time.monotonic() - began >= LATE_S


def test_the_server_talks_first(way: Way, app: App) -> None:
    app.behave = after_first(way, greet_and_answer)
    with way.connect() as client:
        assert read(client, len(GREETING)) == GREETING
        client.sendall(b"only me\n")
        assert read(client) == b"only me\n"


def test_the_server_ends_first(way: Way, app: App) -> None:
    """And does not wait for the client's end."""
    app.behave = give_back(WITHIN_WINDOW_BYTES + len(way.first))
    body = os.urandom(WITHIN_WINDOW_BYTES)
    with way.connect() as client:
        client.sendall(body)
        assert read(client) == way.first + body


def test_the_server_ends_first_after_more_than_a_window(way: Way, app: App) -> None:
    app.behave = give_back(SIZE_BYTES + len(way.first))
    body = os.urandom(SIZE_BYTES)
    with way.connect() as client:
        client.sendall(body)
        assert read(client) == way.first + body


def test_the_clients_reset_reaches_the_app(way: Way, app: App) -> None:
    seen: SimpleQueue[bytes | None] = SimpleQueue()
    app.behave = after_first(way, say_back_and_look(seen))
    with way.connect() as client:
        client.sendall(b"hello")
        assert read(client, 5) == b"hello"
        reset_on_close(client)
    way.process.wait_for(lambda record: record.get("flags") == "DOWNSTREAM_RESET", PATIENCE_S)
    assert seen.get(timeout=PATIENCE_S) == (b"" if way.hides_resets else None)


def test_fifty_at_once(way: Way, app: App) -> None:
    app.behave = after_first(way, answer_lines(2))

    def converse(number: int) -> bytes:
        line = b"%d" % number * 1000 + b"\n"
        with way.connect() as client:
            client.sendall(line)
            first = read(client, len(line))
            client.sendall(line)
            return first + read(client)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        heard = list(threads.map(converse, range(AT_ONCE)))
    assert heard == [(b"%d" % number * 1000 + b"\n") * 2 for number in range(AT_ONCE)]


# What only one of them has.


def test_what_hgate_says_of_itself(tmp_path: Path, app: App) -> None:
    """Plain CONNECT, no SNI, and the headers that ztunnel sends."""
    app.behave = echo
    mesh = Mesh(tmp_path)
    first = hello()
    with ExitStack() as block:
        server = envoy_server(tmp_path, mesh.member(ZTUNNEL), app.address, client_id=GATEWAY)
        address = block.enter_context(server)
        own = {"identity": str(mesh.member(GATEWAY)), "peer": [str(ZTUNNEL)]}
        route = {"host": GLOB, "tunnel": f"https://{address}", "method": "CONNECT", **own}
        gateway = block.enter_context(hgate(tmp_path, routes=[route]))
        with gateway.connect() as client:
            send_and_end(client, first)
            assert read(client) == first
            own_name = "{}:{}".format(*client.getsockname())
        line = gateway.process.wait_for(
            lambda record: record.get("message") == "connection complete", PATIENCE_S
        )
    records = (tmp_path / "envoy-server.log").read_text().splitlines()
    (told,) = [json.loads(record) for record in records if record.startswith('{"')]
    assert told == {
        "method": "CONNECT",
        "authority": "hello.demo.svc.cluster.local:8080",
        "protocol": None,
        "baggage": "k8s.namespace.name=demo,service.name=hello",
        "forwarded": f'for="{own_name}"',
        "traceparent": line["traceparent"],
        "sni": None,
        "peer": str(GATEWAY),
        "status": 200,
    }


@pytest.fixture
def door(tmp_path: Path, app: App) -> Iterator[tuple[Hgate, Address]]:
    """hgate's HBONE port, and an Envoy before it; the rules allow nothing yet."""
    mesh = Mesh(tmp_path)
    port = {"certificates": str(mesh.member(GATEWAY)), "rules": []}
    with hgate(tmp_path, hbone=port) as gateway:
        assert gateway.hbone is not None
        client = envoy_client(
            tmp_path, mesh.member(CALLER), gateway.hbone, str(app.address), server_id=GATEWAY
        )
        with client as address:
            yield gateway, address


def allow(gateway: Hgate, app: App) -> None:
    """Changes the rules of a running gateway, which sees that by itself."""
    certificates = json.loads(gateway.file.read_text())["hbone"]["certificates"]
    rules = [{"from": [str(CALLER)], "to": [str(app.address)]}]
    configure(gateway.file, [], {"certificates": certificates, "rules": rules})
    gateway.process.wait_for(lambda record: said(record).startswith("reload: "), PATIENCE_S)


def test_a_refusal_and_a_reload_of_the_rules(door: tuple[Hgate, Address], app: App) -> None:
    gateway, address = door
    app.behave = echo
    before = app.connections
    with connected(address) as client:
        assert client.recv(1) == b""
    line = gateway.process.wait_for(lambda record: record.get("status") == 401, PATIENCE_S)
    assert (line["flags"], line["identity"]) == ("DENY", str(CALLER))
    assert app.connections == before
    allow(gateway, app)
    with connected(address) as client:
        send_and_end(client, b"now I may")
        assert read(client) == b"now I may"


def test_a_drain_lets_an_envoys_tunnel_finish(door: tuple[Hgate, Address], app: App) -> None:
    gateway, address = door
    app.behave = echo
    allow(gateway, app)
    with connected(address) as client, ThreadPoolExecutor(1) as threads:
        client.sendall(b"before")
        assert read(client, 6) == b"before"
        assert [row["route"] for row in dump(gateway.admin, "/tunnels")] == ["hbone"]
        stopping = threads.submit(gateway.process.stop)
        gateway.process.wait_for(lambda record: said(record).startswith("draining: "), PATIENCE_S)
        client.sendall(b"after")
        assert read(client, 5) == b"after"
        client.shutdown(socket.SHUT_WR)
        assert read(client) == b""
        assert stopping.result() == EXIT_OK, "the last tunnel's end is the end"
    line = gateway.process.wait_for(lambda record: record.get("message") == "connection complete", PATIENCE_S)
    assert (line["flags"], line["bytes_sent"]) == ("-", 11)


def test_an_envoy_whom_the_mesh_does_not_know(tmp_path: Path, app: App) -> None:
    mesh, other = Mesh(tmp_path), Mesh(tmp_path / "other")
    port = {"certificates": str(mesh.member(GATEWAY)), "rules": []}
    with hgate(tmp_path, hbone=port) as gateway:
        assert gateway.hbone is not None
        stranger = other.member(CALLER)
        (stranger / "ca_certificates.pem").write_bytes(mesh.authority.root_pem)
        client = envoy_client(tmp_path, stranger, gateway.hbone, str(app.address), server_id=GATEWAY)
        with client as address, connected(address) as waiting:
            assert waiting.recv(1) == b""
        line = gateway.process.wait_for(lambda record: record.get("flags") == "TLS_FAILURE", PATIENCE_S)
        assert "client certificate refused" in line["error"]
