from __future__ import annotations

from pathlib import Path

from bench.https import https
from bench.subjects import World
from tests.support.world import find_envoy, find_program


def test_one_turn(tmp_path: Path) -> None:
    find_envoy()
    find_program("h2load")
    find_program("haproxy")
    requests, connections = https(World.create(tmp_path), turns=1)
    for measured in (requests, connections):
        (ours,), (peer,) = measured.ours, measured.peer
        assert measured.peer_name == "two envoys"
        assert 0 < ours.cpu_seconds < 1
        assert 0 < peer.cpu_seconds < 1
        assert 0 < ours.p50_us <= ours.p99_us
