"""The load generator against its own far end: what it says it did, it did."""

from __future__ import annotations

import socket

import pytest

from bench.tools import BenchError, Result, client, far_away, serving
from tests.support.hellos import hello
from tests.support.world import find_program


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    find_program("cc")


def done(kind: str, *scenario: str) -> Result:
    """What the load generator says of a scenario between it and its own far end."""
    with serving(kind) as far, client(far, scenario, h2=kind == "h2") as load:
        return load.run()


@pytest.mark.parametrize("kind", ["tcp", "h2"])
class TestClient:
    def test_round_trips(self, kind: str) -> None:
        result = done(kind, "rr", "--tunnels", "3", "--size", "64", "--seconds", "0.1")
        assert result.operations > 3
        assert 0 < result.p50_us <= result.p99_us <= result.p999_us
        assert result.seconds >= 0.1

    def test_round_trips_at_a_rate(self, kind: str) -> None:
        result = done(kind, "rr", "--tunnels", "4", "--rate", "500", "--seconds", "0.2")
        assert 20 < result.operations <= 110  # 100; fewer on a machine that stalls; at full speed thousands

    def test_tunnels_opened(self, kind: str) -> None:
        assert done(kind, "open", "--tunnels", "8", "--count", "200").operations == 200

    def test_bulk_both_ways(self, kind: str) -> None:
        result = done(kind, "bulk", "--tunnels", "2", "--up", "5000000", "--down", str(3 << 20))
        assert result.operations == 2 * (5_000_000 + (3 << 20))


def test_the_app_takes_a_hello_then_its_commands() -> None:
    record = hello()
    with serving("tcp") as far:
        host, port = far.split(":")
        with socket.create_connection((host, int(port)), 20) as sock, sock.makefile("rb") as answers:
            sock.sendall(record[:3])
            sock.sendall(record[3:] + b"X" + (3).to_bytes(8) + (2).to_bytes(8) + b"abc")
            assert answers.read(3) == bytes(3)
            sock.sendall(b"Eas it comes")
            assert answers.read(11) == b"as it comes"
            sock.shutdown(socket.SHUT_WR)
            assert answers.read() == b""


def test_a_path_with_a_latency() -> None:
    with serving("tcp") as far, far_away(far, 50) as near:
        with client(near, ("rr", "--tunnels", "1", "--seconds", "0.2")) as load:
            assert load.run().p50_us >= 50_000
        with client(near, ("bulk", "--tunnels", "2", "--up", "5000000", "--down", str(3 << 20))) as load:
            result = load.run()
    assert result.operations == 2 * (5_000_000 + (3 << 20))
    assert result.seconds >= 0.05


def test_a_path_with_a_latency_passes_ends_on_in_order() -> None:
    with serving("tcp") as far, far_away(far, 20) as near:
        host, port = near.split(":")
        with socket.create_connection((host, int(port)), 20) as sock, sock.makefile("rb") as answers:
            sock.sendall(hello() + b"Ethe last words")
            sock.shutdown(socket.SHUT_WR)
            assert answers.read() == b"the last words"


def test_a_far_end_that_ends_by_itself_is_no_result() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = f"127.0.0.1:{server.getsockname()[1]}"
        server.close()
        with pytest.raises(BenchError, match="said nothing"), client(far, ("rr",)):
            pass
