"""HBONE through nghttpx, a forward proxy of another make: it takes hgate's CONNECT and passes it on.

    hello and bytes → hgate as a client → nghttpx --http2-proxy → hgate's HBONE port → app

Both connections are mTLS: nghttpx asks hgate for a certificate, and shows its own to hgate's port. It does
not pass the end of a CONNECT's request on, so the target has to end first here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from shared.address import Address
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId
from tests.path.app import READ_BYTES, App, Behaviour, answer_lines, give_back, read
from tests.path.hbone_peers import Hgate, hgate
from tests.path.krun_peers import nghttpx
from tests.support.gateway_world import GLOB
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.hellos import ACCESS_DENIED, hello
from tests.support.world import PATIENCE_S, find_program, free_port

HOST_NAME = "hgate.demo.local"
NGHTTPX = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "nghttpx")
SIZE_BYTES = 3 << 20
WITHIN_WINDOW_BYTES = 500_000
AT_ONCE = 20


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory, app: App) -> Iterator[Hgate]:
    """hgate with both ends, and nghttpx between them."""
    find_program("nghttpx")
    folder = tmp_path_factory.mktemp("nghttpx")
    mesh = Mesh(folder)
    middle = Address("127.0.0.1", free_port())
    port = {
        # nghttpx checks a host name, too.
        "certificates": str(mesh.member(GATEWAY, dns_names=[HOST_NAME])),
        "rules": [{"from": [str(NGHTTPX)], "to": [str(app.address)]}],
    }
    route = {
        "tunnel": f"https://{middle}",
        "method": "CONNECT",
        "identity": str(mesh.member(CALLER)),
        "peer": [str(NGHTTPX)],
    }
    routes = [
        {"host": "other.demo.svc.cluster.local", "authority": "10.0.0.1:80", **route},
        {"host": GLOB, "authority": str(app.address), **route},
    ]
    with ExitStack() as block:
        gateway = block.enter_context(hgate(folder, routes=routes, hbone=port))
        assert gateway.hbone is not None
        chain, key, roots = map(str, certificate_folder.find(mesh.member(NGHTTPX)).all)
        more = [
            *("--http2-proxy", "--verify-client", f"--verify-client-cacert={roots}", f"--cacert={roots}"),
            *(f"--client-cert-file={chain}", f"--client-private-key-file={key}", key, chain),
        ]
        back = f";;proto=h2;tls;sni={HOST_NAME}"
        block.enter_context(nghttpx(folder, gateway.hbone, *more, address=middle, back=back))
        yield gateway


def echo_and_end(size: int) -> Behaviour:
    """Sends back `size` bytes as they come, and ends."""

    def behave(sock: socket.socket) -> None:
        left = size
        while left and (data := sock.recv(READ_BYTES)):
            sock.sendall(data)
            left -= len(data)

    return behave


def test_three_mebibytes_there_and_back_at_once(way: Hgate, app: App) -> None:
    body = hello() + os.urandom(SIZE_BYTES)
    app.behave = echo_and_end(len(body))
    with way.connect() as client, ThreadPoolExecutor(1) as sender:
        sending = sender.submit(client.sendall, body)
        assert read(client) == body
        sending.result()
    near = way.process.wait_for(lambda record: record.get("route") == GLOB, PATIENCE_S)
    assert (near["status"], near["flags"], near["bytes_recv"]) == (200, "-", len(body))


def test_there_and_then_back(way: Hgate, app: App) -> None:
    body = hello() + os.urandom(WITHIN_WINDOW_BYTES)
    app.behave = give_back(len(body))
    with way.connect() as client:
        client.sendall(body)
        assert read(client) == body


def test_twenty_at_once(way: Hgate, app: App) -> None:
    app.behave = answer_lines(1)

    def converse(number: int) -> bool:
        line = hello().replace(b"\n", b" ") + b"%d\n" % number
        with way.connect() as client:
            client.sendall(line)
            return read(client) == line

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(converse, range(AT_ONCE))) == [True] * AT_ONCE


def test_a_refusal_comes_all_the_way_back(way: Hgate) -> None:
    """The port's 401 passes nghttpx, and becomes the client's alert."""
    with way.connect() as client:
        client.sendall(hello("outbound_.80_._.other.demo.svc.cluster.local"))
        assert read(client) == ACCESS_DENIED
    far = way.process.wait_for(lambda record: record.get("identity") == str(NGHTTPX), PATIENCE_S)
    near = way.process.wait_for(lambda record: record.get("flags") == "STATUS", PATIENCE_S)
    assert (far["status"], near["status"], far["flags"]) == (401, 401, "DENY")
    assert far["traceparent"] == near["traceparent"]
    assert far["forwarded.for"] == near["src.addr"]
