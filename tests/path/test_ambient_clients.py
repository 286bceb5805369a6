"""Clients of the HBONE port whose CONNECTs a route takes, through programs that are not ours.

    plain TCP → Envoy as an HBONE client ┐
    a member played by the h2 library    ┴→ hgate's HBONE port → the Cloud Run stand-in → krun → app

The app stands where krun's inner end would be: what the bytes are is nobody's matter up to there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue

import pytest

from hbone.demo.processes import Process
from shared.address import Address
from shared.http2.frames import CANCEL
from tests.path.app import READ_BYTES, App, answer_lines, echo, read
from tests.path.hbone_peers import Hgate, envoy_client, hgate
from tests.path.krun_peers import krun
from tests.support.hbone_port import CALLER, GATEWAY, Mesh
from tests.support.http2_peer import Http2Peer
from tests.support.world import PATIENCE_S, printed

HOST = "hello.demo.svc.cluster.local"
AUTHORITY = f"{HOST}:8080"
SERVICE_URL = "https://hello-123456789012.us-central1.run.app"
SIZE_BYTES = 3 << 20
AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Way:
    """The programs between a client and the app."""

    mesh: Mesh
    gateway: Hgate
    krun: Process
    envoy: Address
    """Where Envoy takes plain TCP for AUTHORITY."""
    nowhere: Address
    """The same for a name that no rule knows."""

    @property
    def hbone(self) -> Address:
        """hgate's HBONE port."""
        assert self.gateway.hbone is not None
        return self.gateway.hbone


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory, app: App) -> Iterator[Way]:
    folder = tmp_path_factory.mktemp("ambient")
    mesh = Mesh(folder)
    with ExitStack() as block:
        process, container = block.enter_context(krun(folder, HBONE_INBOUND_LISTEN=str(app.address)))
        arguments = [
            *("-m", "hbone", "cloudrun", "--log-format", "json", "--dir", str(folder / "cloudrun")),
            *("--listen", "127.0.0.1:0", "--metadata", "127.0.0.1:0"),
            *("--container", str(container), "--audience", SERVICE_URL),
        ]
        cloudrun = Process("cloudrun", arguments, {}, folder)
        block.callback(cloudrun.stop)
        route = {
            "host": HOST,
            "tunnel": f"{SERVICE_URL}/_hbone/15003",
            "connect": printed(cloudrun, "CLOUDRUN_ADDRESS"),
            "ca": printed(cloudrun, "CLOUDRUN_CA"),
            "inner": "hbone",
        }
        port = {
            "certificates": str(mesh.member(GATEWAY)),
            "rules": [{"from": [str(CALLER)], "to": [AUTHORITY]}],
        }
        environ = {"GCE_METADATA_HOST": printed(cloudrun, "GCE_METADATA_HOST")}
        gateway = block.enter_context(hgate(folder, routes=[route], hbone=port, environ=environ))
        assert gateway.hbone is not None
        own = mesh.member(CALLER)
        places = []
        for name, target in (("known", AUTHORITY), ("unknown", "nobody.demo.svc.cluster.local:8080")):
            (folder / name).mkdir()
            client = envoy_client(folder / name, own, gateway.hbone, target, server_id=GATEWAY)
            places.append(block.enter_context(client))
        yield Way(mesh, gateway, process, *places)


def connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), PATIENCE_S)


def test_three_mebibytes_there_and_back_at_once(way: Way, app: App) -> None:
    app.behave = echo
    body = os.urandom(SIZE_BYTES)
    with connected(way.envoy) as client, ThreadPoolExecutor(1) as sender:

        def send() -> None:
            client.sendall(body)
            client.shutdown(socket.SHUT_WR)

        sending = sender.submit(send)
        assert read(client) == body
        sending.result()
    line = way.gateway.process.wait_for(lambda record: record.get("bytes_recv") == len(body), PATIENCE_S)
    assert (line["status"], line["flags"], line["bytes_sent"]) == (200, "-", len(body))
    assert (line["route"], line["tunnel.target"]) == (f"hbone {HOST}", AUTHORITY)
    trace = line["traceparent"]
    there = way.krun.wait_for(lambda record: record.get("traceparent") == trace, PATIENCE_S)
    assert (there["bytes_sent"], there["flags"]) == (len(body), "-"), "the same trace, the same bytes"


def test_an_app_that_speaks_first_and_ends_first(way: Way, app: App) -> None:
    answer = os.urandom(SIZE_BYTES)
    heard: SimpleQueue[bytes] = SimpleQueue()

    def behave(sock: socket.socket) -> None:
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)
        heard.put(read(sock))

    app.behave = behave
    with connected(way.envoy) as client:
        assert read(client) == answer
        client.sendall(b"late")
        client.shutdown(socket.SHUT_WR)
        way.krun.wait_for(lambda record: record.get("bytes_sent") == 4, PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == b"late"


def test_many_at_once(way: Way, app: App) -> None:
    app.behave = answer_lines(1)

    def converse(number: int) -> bool:
        line = b"client %d\n" % number
        with connected(way.envoy) as client:
            client.sendall(line)
            return read(client) == line

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(converse, range(AT_ONCE))) == [True] * AT_ONCE


def test_a_name_that_no_rule_knows(way: Way, app: App) -> None:
    before = app.connections
    with connected(way.nowhere) as client:
        assert read(client) == b""
    line = way.gateway.process.wait_for(lambda record: record.get("status") == 401, PATIENCE_S)
    assert (line["flags"], line["identity"]) == ("DENY", str(CALLER))
    assert line["error"].endswith("denied nobody.demo.svc.cluster.local:8080: no rule allows it")
    assert app.connections == before


async def test_a_member_that_lets_go_when_all_is_sent(way: Way, app: App) -> None:
    """As ztunnel ends double HBONE: RST_STREAM CANCEL, without an end of what it sent. An app that reads
    slowly still gets all of it, and its end."""
    body = os.urandom(SIZE_BYTES)
    heard: SimpleQueue[bytes] = SimpleQueue()

    def behave(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        sock.sendall(b"go")
        heard.put(read(sock))

    app.behave = behave
    tls = way.mesh.tls(way.mesh.member(CALLER))
    async with Http2Peer.connected(way.hbone.port, tls) as peer:
        stream = peer.request(b"CONNECT", b"", authority=AUTHORITY.encode())
        assert await stream.status() == 200
        assert await stream.read(2) == b"go"
        await stream.send(body)
        stream.reset(CANCEL)
        await peer.answered()
        way.krun.wait_for(lambda record: record.get("bytes_sent") == len(body), PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == body
