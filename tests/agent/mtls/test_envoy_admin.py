"""Envoy's admin port in front of a real Envoy: what it shows, what it refuses, and whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.mtls.envoy import EnvoyProcess
from agent.mtls.envoy_admin import CHANGED, SHOWN, EnvoyAdmin
from agent.mtls.envoy_bootstrap import bootstrap, secrets
from agent.mtls.envoy_http import HttpSettings
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.errors import DialError
from shared.net.http1 import Response, get, request
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_envoy

ANY_PORT = Address("127.0.0.1", 0)
MOST = 1 << 24


@pytest.fixture
async def envoy(tmp_path: Path) -> AsyncIterator[EnvoyProcess]:
    binary = Path(find_envoy())
    authority = Authority.create("demo.local")
    authority.write(tmp_path / "certs", authority.issue(SpiffeId.of_workload("demo.local", "demo", "hello")))
    told = bootstrap(
        listen=ANY_PORT,
        app=Address("127.0.0.1", 9),
        policy=PeerPolicy(["spiffe://demo.local/**"]),
        secrets_folder=tmp_path / "envoy",
        connect_timeout_s=1,
        http=HttpSettings("auto", 0, "none"),
    )
    envoy = await EnvoyProcess.start(binary, told, secrets(tmp_path / "certs"), tmp_path / "envoy")
    try:
        await envoy.ready(PATIENCE_S)
        yield envoy
    finally:
        await envoy.stop(PATIENCE_S)


@pytest.fixture
async def port(envoy: EnvoyProcess) -> AsyncIterator[Address]:
    admin = EnvoyAdmin(envoy.admin)
    try:
        yield await admin.start(ANY_PORT)
    finally:
        await admin.close()


async def ask(port: Address, path: str, method: str = "GET", host: str = "", body: bytes = b"") -> Response:
    """By whatever name."""
    if not host:
        return await request(
            method, f"http://{port}{path}", headers={}, body=body, timeout_s=PATIENCE_S, max_bytes=MOST
        )
    reader, writer = await asyncio.open_connection(port.host, port.port)
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.transport.abort()
    return Response(int(head.split()[1]), {}, rest)


async def test_what_it_shows(port: Address) -> None:
    for path in SHOWN:
        answer = await ask(port, path)
        assert (answer.status, bool(answer.body)) == (200, True), path
    assert (await ask(port, "/ready")).body == b"LIVE\n"
    listeners = await ask(port, "/listeners?format=json")
    assert json.loads(listeners.body)["listener_statuses"][0]["name"] == "inbound"
    assert listeners.headers["content-type"] == "application/json"
    found = await ask(port, "/stats?usedonly&filter=^server%5C.live$")
    assert found.body == b"server.live: 1\n"


async def test_what_debugging_changes(port: Address) -> None:
    assert b"admin: debug" in (await ask(port, "/logging?admin=debug", "POST")).body
    assert (await ask(port, "/reset_counters", "POST")).body == b"OK\n"


async def test_what_is_krun_s_own_business(envoy: EnvoyProcess, port: Address) -> None:
    """Whoever is on this machine must not end the service, nor look into its memory."""
    for path in ("/quitquitquit", "/drain_listeners", "/healthcheck/fail", "/runtime_modify?a=b"):
        assert (await ask(port, path, "POST")).status == 404
    for path in ("/heap_dump", "/peak_heap_dump", "/allocprofiler", "/", "/config_dump/../quitquitquit"):
        assert (await ask(port, path)).status == 404
    for path in CHANGED:
        assert (await ask(port, path)).status == 405
    assert not envoy.exited.done()


async def test_a_web_page_is_shown_nothing(port: Address) -> None:
    for path in ("/config_dump", "/certs", "/ready"):
        assert (await ask(port, path, host=f"rebound.example:{port.port}")).status == 403
    assert (await ask(port, "/logging?level=trace", "POST", host="rebound.example")).status == 403
    for host in ("localhost", f"localhost:{port.port}", "127.0.0.1"):
        assert (await ask(port, "/ready", host=host)).status == 200


async def test_an_envoy_that_has_gone(tmp_path: Path) -> None:
    admin = EnvoyAdmin(tmp_path / "admin.sock")
    port = await admin.start(ANY_PORT)
    answer = await ask(port, "/ready")
    assert (answer.status, answer.body) == (
        500,
        f"cannot connect to {tmp_path}/admin.sock: No such file or directory\n".encode(),
    )
    with pytest.raises(DialError, match=f"cannot connect to {port}"):
        await admin.close()
        await get(f"http://{port}/ready", headers={}, timeout_s=PATIENCE_S, max_bytes=MOST)
