"""The app's way out of the container as users have it: krun, hgate's HBONE port, and real clients.

curl → krun's local port or proxy → hgate's HBONE port → app          (and Envoy in hgate's place)
curl → krun → Envoy or nghttpx, by POST → hgate's tunnel port → app
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from hbone.demo.processes import Process
from shared.address import Address
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId
from tests.path.app import READ_BYTES, App, echo, read
from tests.path.hbone_peers import ZTUNNEL, Hgate, envoy_server, hgate
from tests.path.krun_peers import FRONT_ENDS, krun, nghttpx
from tests.path.programs import MUCH_BYTES, random_file, run, sha256
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.world import PATIENCE_S, find_program, free_port, word_after

AT_ONCE = 200
BIG_BYTES = 1 << 20

FRONT = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "front")
STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "stranger")


@dataclass
class Way:
    """krun and its gateway."""

    krun: Process
    local: Address
    proxy: Address
    admin: Address
    app: App
    hgate: Hgate | None

    def connect(self) -> socket.socket:
        """A client of the local port."""
        return socket.create_connection((self.local.host, self.local.port), PATIENCE_S)

    def status(self) -> Any:
        """What krun tells of its way into the mesh."""
        with urllib.request.urlopen(f"http://{self.admin}/status", timeout=PATIENCE_S) as answer:
            return json.load(answer)["egress"]


@contextmanager
def egress(
    folder: Path,
    mesh: Mesh,
    gateway: Address | str,
    app: App,
    *,
    peer: SpiffeId = GATEWAY,
    found: Hgate | None = None,
    ca: str = "",
) -> Iterator[Way]:
    """krun as a sidecar, with a local port to the app and a proxy to loopback, except port 1."""
    admin = Address("127.0.0.1", free_port())
    environ = {
        "HBONE_CERTS": str(mesh.member(CALLER)),
        "HBONE_EGRESS": f"0={app.address}",
        "HBONE_EGRESS_GATEWAY": str(gateway),
        "HBONE_EGRESS_PEER": str(peer),
        "HBONE_EGRESS_PROXY": "127.0.0.1:0",
        "HBONE_EGRESS_ALLOW": "127.0.0.0/8:*,localhost:*",
        "HBONE_EGRESS_DENY": "*:1",
        "HBONE_ADMIN": str(admin),
        **({"HBONE_EGRESS_CA": ca} if ca else {}),
    }
    with krun(folder, **environ) as (process, _):
        local = Address("127.0.0.1", int(word_after(process, "egress: 127.0.0.1:")))
        proxy = Address.parse(word_after(process, "egress: HTTP and SOCKS proxy on ").rstrip(","))
        yield Way(process, local, proxy, admin, app, found)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    return Mesh(tmp_path_factory.mktemp("mesh"))


@contextmanager
def by_hgate(
    folder: Path, mesh: Mesh, app: App, *, listen: Address | None = None, by_post: bool = False
) -> Iterator[Hgate]:
    """hgate with an HBONE port that lets the workload to loopback, except port 2; `by_post`: and with a port
    for POST tunnels."""
    rules = [
        {"from": [str(CALLER)], "to": ["127.0.0.0/8:2"], "deny": True},
        {"from": [str(CALLER)], "to": ["127.0.0.0/8:*", "[::1]:*"]},
    ]
    told: dict[str, Any] = {"certificates": str(mesh.member(GATEWAY)), "rules": rules}
    if by_post:
        told["tunnel_listen"] = ["127.0.0.1:0"]
    if listen is not None:
        told["listen"] = [str(listen)]
    with hgate(folder, hbone=told) as gateway:
        yield gateway


def posts_of(gateway: Hgate) -> Address:
    """Where it takes POST tunnels."""
    return Address.parse(word_after(gateway.process, "hbone tunnels on "))


def front_of(mesh: Mesh) -> Path:
    """The front end's certificate, for localhost."""
    return mesh.member(FRONT, dns_names=["localhost"])


@contextmanager
def through(folder: Path, mesh: Mesh, front: Address, app: App, found: Hgate | None = None) -> Iterator[Way]:
    """krun with its way by POST through the front end at `front`."""
    url = f"https://localhost:{front.port}/_hbone/15008"
    roots = certificate_folder.find(front_of(mesh)).roots
    with egress(folder, mesh, url, app, found=found, ca=str(roots)) as way:
        yield way


@pytest.fixture(scope="module", params=["hgate", "envoy", "post-envoy", "post-nghttpx"])
def way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mesh: Mesh, app: App
) -> Iterator[Way]:
    """Once with each gateway. Envoy leads everything to the app."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as block:
        if request.param == "hgate":
            found = block.enter_context(by_hgate(folder, mesh, app))
            assert found.hbone is not None
            yield block.enter_context(egress(folder, mesh, found.hbone, app, found=found))
        elif request.param.startswith("post-"):
            found = block.enter_context(by_hgate(folder, mesh, app, by_post=True))
            make = FRONT_ENDS[request.param.removeprefix("post-")]
            front = block.enter_context(make(folder, front_of(mesh), posts_of(found)))
            yield block.enter_context(through(folder, mesh, front, app, found))
        else:
            own = mesh.member(ZTUNNEL)
            server = block.enter_context(envoy_server(folder, own, app.address, client_id=CALLER))
            yield block.enter_context(egress(folder, mesh, server, app, peer=ZTUNNEL))


def http_app(body: Path, uploads: SimpleQueue[str], *, lingers: bool) -> Any:
    """Answers one request of HTTP/1.1: GET with `body`, PUT with its digest. If it `lingers`, its end comes
    after the client's: an Envoy drops what the window does not take when the app has ended."""

    def behave(sock: socket.socket) -> None:
        with sock.makefile("rwb") as file:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += file.readline(READ_BYTES)
            if head.startswith(b"PUT"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                if b"expect:" in head.lower():
                    file.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    file.flush()
                digest = hashlib.sha256()
                while length:
                    data = file.read(min(length, READ_BYTES))
                    digest.update(data)
                    length -= len(data)
                uploads.put(digest.hexdigest())
                file.write(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            else:
                size = body.stat().st_size
                file.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % size)
                file.flush()
                with body.open("rb") as source:
                    sock.sendfile(source)
            file.flush()
            if lingers:
                sock.recv(1)

    return behave


@pytest.mark.parametrize("by", ["local", "http", "connect", "socks"])
def test_64_mebibytes_each_way_by_hash(way: Way, tmp_path: Path, by: str) -> None:
    find_program("curl")
    body = random_file(tmp_path / "body", MUCH_BYTES)
    uploads: SimpleQueue[str] = SimpleQueue()
    way.app.behave = http_app(body, uploads, lingers=way.hgate is None)
    options = {
        "local": [],
        "http": ["-x", f"http://{way.proxy}"],
        "connect": ["-x", f"http://{way.proxy}", "--proxytunnel"],
        "socks": ["--socks5-hostname", str(way.proxy)],
    }[by]
    url = f"http://{way.local if by == 'local' else way.app.address}/"
    curl = ["curl", "-sS", "-f", "--noproxy", "", *options]
    done = run(*curl, "-o", tmp_path / "answer", url)
    assert done.returncode == 0, done.stderr
    assert sha256(tmp_path / "answer") == sha256(body)
    done = run(*curl, "-T", body, url)
    assert done.returncode == 0, done.stderr
    assert uploads.get(timeout=PATIENCE_S) == sha256(body)


def test_200_at_once(way: Way) -> None:
    way.app.behave = echo
    before = way.app.connections

    def converse(number: int) -> bool:
        body = os.urandom(1000) + b"%d" % number
        with way.connect() as client:
            client.sendall(body)
            back = read(client, len(body))
            client.shutdown(socket.SHUT_WR)
            return back == body and client.recv(1) == b""

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(converse, range(AT_ONCE))) == [True] * AT_ONCE
    assert way.app.connections - before == AT_ONCE
    assert 2 <= way.status()["gateway"]["connections"] <= 8


def test_half_close(way: Way) -> None:
    """The client ends first; what the app says then still comes, all of it."""

    def count_and_tell(sock: socket.socket) -> None:
        size = 0
        while data := sock.recv(READ_BYTES):
            size += len(data)
        sock.sendall(b"%d " % size + bytes(BIG_BYTES))

    way.app.behave = count_and_tell
    with way.connect() as client:
        client.sendall(bytes(BIG_BYTES))
        client.shutdown(socket.SHUT_WR)
        told = b""
        while data := client.recv(READ_BYTES):
            told += data
    assert told == b"%d " % BIG_BYTES + bytes(BIG_BYTES)


def test_deny_at_krun_and_at_hgate(way: Way) -> None:
    """By krun's list, and by hgate's rule about the workload's identity."""
    if way.hgate is None:
        pytest.skip("this Envoy has no rules")
    for port, why in (
        (1, "HBONE_EGRESS_DENY has *:1"),
        (2, f"peer {CALLER} denied 127.0.0.1:2: rules[0] denies it"),
    ):
        done = run("curl", "-sS", "--noproxy", "", "-x", f"http://{way.proxy}", f"http://127.0.0.1:{port}/")
        assert why in done.stdout.decode()
        more = ["-w", "%{http_connect}", "-x", f"http://{way.proxy}", "--proxytunnel"]
        assert run("curl", "-s", "--noproxy", "", *more, f"http://127.0.0.1:{port}/").stdout == b"403"
        done = run(
            "curl", "-sS", "--noproxy", "", "--socks5-hostname", str(way.proxy), f"http://127.0.0.1:{port}/"
        )
        assert done.returncode == 97
    line = way.hgate.process.wait_for(lambda one: one.get("tunnel.target") == "127.0.0.1:2", PATIENCE_S)
    assert (line["identity"], line["status"], line["flags"]) == (str(CALLER), 401, "DENY")


def until_echoed(way: Way) -> None:
    """Returns when a new tunnel carries bytes: the next dial after a failure waits a moment."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with way.connect() as client:
                client.sendall(b"two")
                assert read(client, 3) == b"two"
                return
        except (ConnectionResetError, BrokenPipeError):
            assert time.monotonic() < until, "what it leads to is there, and not found"


def test_the_gateway_restarts(tmp_path: Path, mesh: Mesh, app: App) -> None:
    """Open tunnels end with it; new ones are led to the next as soon as it is there."""
    app.behave = echo
    listen = Address("127.0.0.1", free_port())
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with ExitStack() as block:
        one = ExitStack()
        one.enter_context(by_hgate(first, mesh, app, listen=listen))
        way = block.enter_context(egress(tmp_path, mesh, listen, app))
        with way.connect() as client:
            client.sendall(b"one")
            assert read(client, 3) == b"one"
            client.shutdown(socket.SHUT_WR)  # it may finish in the drain
            one.close()
            assert client.recv(1) == b""
        with pytest.raises(ConnectionResetError), way.connect() as client:
            client.recv(1)
        block.enter_context(by_hgate(second, mesh, app, listen=listen))
        until_echoed(way)
        assert way.status()["gateway"]["last_failure"] == ""


def test_a_front_end_restarts(tmp_path: Path, mesh: Mesh, app: App) -> None:
    """Open tunnels break with it; new ones go by the next as soon as it is there."""

    def echo_until_reset(sock: socket.socket) -> None:
        with suppress(ConnectionResetError):
            echo(sock)

    app.behave = echo_until_reset
    listen = Address("127.0.0.1", free_port())
    chain, key, _ = map(str, certificate_folder.find(front_of(mesh)).all)
    with ExitStack() as block:
        found = block.enter_context(by_hgate(tmp_path, mesh, app, by_post=True))
        first = ExitStack()
        first.enter_context(nghttpx(tmp_path, posts_of(found), key, chain, address=listen))
        way = block.enter_context(through(tmp_path, mesh, listen, app))
        with way.connect() as client:
            client.sendall(b"one")
            assert read(client, 3) == b"one"
            first.close()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        with pytest.raises(ConnectionResetError), way.connect() as client:
            client.recv(1)
        block.enter_context(nghttpx(tmp_path, posts_of(found), key, chain, address=listen))
        until_echoed(way)


def test_a_front_end_with_another_name(tmp_path: Path, mesh: Mesh, app: App) -> None:
    """The certificate has to be the URL's host's."""
    with by_hgate(tmp_path, mesh, app, by_post=True) as found, ExitStack() as block:
        front = block.enter_context(FRONT_ENDS["nghttpx"](tmp_path, mesh.member(ZTUNNEL), posts_of(found)))
        way = block.enter_context(through(tmp_path, mesh, front, app))
        with pytest.raises(ConnectionResetError), way.connect() as client:
            client.recv(1)
        way.krun.wait_for(lambda one: "certificate refused" in str(one.get("error", "")), PATIENCE_S)


def test_a_front_end_that_speaks_http1_to_hgate(tmp_path: Path, mesh: Mesh, app: App) -> None:
    """What most do unless they are told otherwise. hgate says what to declare, and krun repeats it."""
    chain, key, _ = map(str, certificate_folder.find(front_of(mesh)).all)
    with by_hgate(tmp_path, mesh, app, by_post=True) as found, ExitStack() as block:
        front = block.enter_context(nghttpx(tmp_path, posts_of(found), key, chain, back=""))
        way = block.enter_context(through(tmp_path, mesh, front, app))
        with pytest.raises(ConnectionResetError), way.connect() as client:
            client.recv(1)
        way.krun.wait_for(
            lambda one: "appProtocol: kubernetes.io/h2c" in str(one.get("error", "")), PATIENCE_S
        )
        found.process.wait_for(
            lambda one: "on hbone.tunnel_listen: it accepts HTTP/2" in str(one.get("message", "")), PATIENCE_S
        )


def test_a_gateway_that_refuses_the_certificate(tmp_path: Path, mesh: Mesh, app: App) -> None:
    """It is not the one that HBONE_EGRESS_PEER wants: nothing is sent, and the log says who it is."""
    with by_hgate(tmp_path, mesh, app) as gateway:
        assert gateway.hbone is not None
        with egress(tmp_path, mesh, gateway.hbone, app, peer=STRANGER) as way:
            before = app.connections
            with pytest.raises(ConnectionResetError), way.connect() as client:
                client.recv(1)
            way.krun.wait_for(lambda one: str(GATEWAY) in str(one.get("error", "")), PATIENCE_S)
            assert app.connections == before


APP = """
import os, sys, socket, urllib.request
print(os.environ.get("HTTP_PROXY", "none"), flush=True)
print(urllib.request.urlopen(sys.argv[1]).read().decode(), flush=True)
socket.create_server(("127.0.0.1", int(os.environ["PORT"]))).accept()
"""


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.headers.get("via", "direct").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("told", "comes_by"), [("0", "direct"), ("1", "1.1 krun")])
def test_the_app_gets_http_proxy_only_if_it_is_to(
    tmp_path: Path, mesh: Mesh, app: App, told: str, comes_by: str
) -> None:
    """And may use it as soon as it is started, before it listens itself."""
    proxy = Address("127.0.0.1", free_port())
    environ = {
        "XDS_ADDR": "-",
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_INBOUND": "none",
        "HBONE_APP": f"127.0.0.1:{free_port()}",
        "HBONE_LOG_FORMAT": "json",
        "HBONE_CERTS": str(mesh.member(CALLER)),
        "HBONE_EGRESS_PEER": str(GATEWAY),
        "HBONE_EGRESS_PROXY": str(proxy),
        "HBONE_EGRESS_ALLOW": "127.0.0.0/8:*",
        "HBONE_EGRESS_APP_PROXY": told,
    }
    with by_hgate(tmp_path, mesh, app) as gateway, ThreadingHTTPServer(("127.0.0.2", 0), _Page) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), name="page")
        serving.start()
        environ["HBONE_EGRESS_GATEWAY"] = str(gateway.hbone)
        command = ["-m", "agent", sys.executable, "-c", APP, f"http://127.0.0.2:{server.server_port}/"]
        process = Process("krun", command, environ, tmp_path)
        try:
            told_app = f"http://{proxy}" if told == "1" else "none"
            process.wait_for(lambda one: one.get("text") == told_app, PATIENCE_S)
            process.wait_for(lambda one: one.get("text") == comes_by, PATIENCE_S)
        finally:
            process.stop()
            server.shutdown()
            serving.join()
