"""The demo's client against a running world."""

from __future__ import annotations

import dataclasses

import pytest

from hbone.demo.client import random_body, request
from hbone.demo.mesh import SNI, Mesh
from shared.address import Address
from shared.errors import EXIT_UNAVAILABLE, UpstreamError
from tests.support.metadata_server import closed_port


def test_get(world: Mesh) -> None:
    answer = request(world, SNI, "GET", "/x")
    assert (answer.method, answer.path, answer.status, answer.intact) == ("GET", "/x", 200, True)
    assert (answer.sent_bytes, answer.received_bytes) == (0, len("hello from the app, you asked for /x\n"))
    assert answer.peer == "spiffe://demo.local/ns/demo/sa/hello"
    assert answer.tls.startswith("TLSv1.3 TLS_")
    assert min(answer.connect_s, answer.handshake_s, answer.answer_s) > 0


def test_post(world: Mesh) -> None:
    answer = request(world, SNI, "POST", "/echo", random_body(1 << 20))
    assert (answer.status, answer.intact) == (200, True)
    assert (answer.sent_bytes, answer.received_bytes) == (1 << 20, 1 << 20)


@pytest.mark.parametrize("body", [b"", b"x" * 10_000], ids=["GET", "POST"])
def test_its_end_is_one_in_order_for_every_hop(world: Mesh, body: bytes) -> None:
    answer = request(world, SNI, "POST" if body else "GET", "/", body)
    client = f"127.0.0.1:{answer.port}"
    assert world.hgate.wait_for(lambda record: record.get("src.addr") == client)["flags"] == "-"


def test_a_refusal_tells_the_alert(world: Mesh) -> None:
    with pytest.raises(UpstreamError, match="UNRECOGNIZED_NAME") as caught:
        request(world, "outbound_.8080_._.elsewhere.prod.svc.cluster.local", "GET", "/")
    assert caught.value.exit_code == EXIT_UNAVAILABLE


def test_nobody_there(world: Mesh) -> None:
    nowhere = dataclasses.replace(world, gateway=Address("127.0.0.1", closed_port()))
    with pytest.raises(UpstreamError, match="Connection refused"):
        request(nowhere, SNI, "GET", "/")
