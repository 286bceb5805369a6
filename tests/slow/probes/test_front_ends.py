"""What `hbone doctor --probe` measures of front ends that are not ours, each set so that something is
found, before a krun that is the far end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.address import Address
from tests.path.krun_peers import haproxy, krun, nghttpx
from tests.path.programs import envoy
from tests.support.envoy_config import HTTP2, bootstrap, cluster_of, http_chain
from tests.support.world import PATIENCE_S

WATCH_S = 1.6


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with krun(tmp_path_factory.mktemp("krun"), HBONE_PROBES="1") as (_, address):
        yield address


def measured(front: Address) -> dict[str, Any]:
    command = (sys.executable, "-m", "hbone", "doctor", "--probe", "--probe-for", str(WATCH_S), "--json")
    done = subprocess.run([*command, f"http://{front}"], capture_output=True, text=True, timeout=PATIENCE_S)
    told = json.loads(done.stdout)
    assert told["ok"], told
    found: dict[str, Any] = told["measured"]
    assert found["unknown"] == {}
    return found


@contextmanager
def envoy_front(folder: Path, container: Address, **manager: Any) -> Iterator[Address]:
    """An Envoy without TLS, whose connection manager has these settings."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "krun", "timeout": "0s"}}
    chain = http_chain("in", [route], codec_type="HTTP2", **manager)
    cluster = cluster_of("krun", container, typed_extension_protocol_options=HTTP2)
    with envoy("front", bootstrap(chain, cluster), folder) as address:
        yield address


def test_envoys_limits(tmp_path: Path, container: Address) -> None:
    settings = {
        "stream_idle_timeout": "0.5s",
        "common_http_protocol_options": {"max_connection_duration": "0.8s"},
        "drain_timeout": "0.1s",
        "http2_protocol_options": {"max_concurrent_streams": 33, "initial_stream_window_size": 70_000},
        "max_request_headers_kb": 20,
    }
    with envoy_front(tmp_path, container, **settings) as front:
        found = measured(front)
    assert (found["max_streams"], found["stream_window_bytes"]) == (33, 70_000)
    assert 18_000 < found["header_bytes"] < 22_000
    assert 0.4 < found["stream_idle_s"] < 1.3
    assert 0.7 < found["connection_age_s"] < 1.6
    assert (found["first_flight"], found["early_answer"], found["client_end"]) == (True, True, True)
    assert found["connect_answer"].startswith("answered 4")
    assert found["connect_answer"].endswith("by the front end"), "Envoy's routes are not for CONNECT"


def test_envoys_longest_stream(tmp_path: Path, container: Address) -> None:
    options = {"max_stream_duration": "0.7s"}
    with envoy_front(tmp_path, container, common_http_protocol_options=options) as front:
        found = measured(front)
    assert 0.6 < found["request_timeout_s"] < 1.4
    assert found["stream_idle_s"] is None


def test_nghttpx(tmp_path: Path, container: Address) -> None:
    flags = ("--frontend-http2-max-concurrent-streams=17", "--frontend-http2-window-size=131071")
    with nghttpx(tmp_path, container, *flags, front=";no-tls") as front:
        found = measured(front)
    assert (found["max_streams"], found["stream_window_bytes"]) == (17, 131_071)
    assert (found["first_flight"], found["client_end"]) == (True, True)
    assert found["request_timeout_s"] is None


def test_haproxy(tmp_path: Path, container: Address) -> None:
    with haproxy(tmp_path, container, "proto h2\n  timeout client 700ms") as front:
        found = measured(front)
    assert found["max_streams"] == 100
    assert 8_000 < found["header_bytes"] < 17_000, "tune.bufsize is 16 KiB"
    assert 0.5 < found["connection_idle_s"] < 1.5
