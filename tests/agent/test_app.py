"""krun as a whole, as a process: what starts when, what SIGTERM does, and what its end means."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.http2_peer import Http2Peer
from tests.support.metadata_server import closed_port, unsigned_token
from tests.support.process import Process, started
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer, turned_away

APP = [
    sys.executable,
    "-c",
    """
import os, signal, socket, sys
print("PORT is", os.environ["PORT"], flush=True)
gate = socket.create_connection(("127.0.0.1", int(os.environ["GATE"])))
def report(signum, _):
    gate.sendall(signal.Signals(signum).name.encode() + b"\\n")
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), report)
gate.sendall(b"started\\n")
server = None
for line in gate.makefile():
    word, _, argument = line.strip().partition(" ")
    if word == "listen":
        server = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
    elif word == "exit":
        sys.exit(int(argument))
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    gate.sendall(word.encode() + b" done\\n")
    if word == "serve":
        while True:
            client, _ = server.accept()
            try:
                if client.recv(65536):
                    break
            except ConnectionResetError:
                pass  # krun's look whether somebody listens
        client.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: " + argument.encode() + b"\\r\\n\\r\\n")
        client.sendall(bytes(int(argument)))
        client.close()
""",
]
"""An app that does what it is told through a connection of its own, and tells its signals there."""


class Krun:
    """A running krun, and the app's gate if it has an app."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.port = port
        self.gate: TcpPeer

    async def tell(self, word: str, answer: str = "") -> None:
        """Tells the app to do something, and waits until it has."""
        await self.gate.send(f"{word}\n".encode())
        if answer:
            assert await self.heard() == answer

    async def heard(self) -> str:
        """The next line from the app."""
        return (await self.gate.read_until(b"\n")).decode().strip()

    async def listening(self) -> None:
        """Waits until the tunnel port is open."""
        await self.process.said(f"^tunnels on 127.0.0.1:{self.port}$")


@asynccontextmanager
async def krun(*command: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[Krun]:
    """krun with `command`, on a free port."""
    port = closed_port()
    settings = {
        "HBONE_LISTEN": f"127.0.0.1:{port}",
        "HBONE_INBOUND": "none",
        "HBONE_APP": f"127.0.0.1:{closed_port()}",
        "HBONE_LOG_FORMAT": "json",
    }
    async with started("agent", *command, environ={**settings, **(environ or {})}) as process:
        yield Krun(process, port)


@asynccontextmanager
async def krun_with_app(**environ: str) -> AsyncIterator[Krun]:
    """krun with APP, which has started and does not listen yet."""
    async with (
        TcpServer.listening() as server,
        krun(*APP, environ={"GATE": str(server.port), **environ}) as it,
    ):
        it.gate = await server.accept()
        assert await it.heard() == "started"
        yield it


@asynccontextmanager
async def sidecar(**environ: str) -> AsyncIterator[tuple[Krun, Http2Peer]]:
    """krun without a command, and a connection to it."""
    async with krun(environ=environ) as it:
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            yield it, peer


@pytest.fixture
async def target() -> AsyncIterator[TcpServer]:
    async with TcpServer.listening() as target:
        yield target


# Start.


async def test_the_tunnel_port_opens_after_the_apps() -> None:
    async with krun_with_app() as it:
        with pytest.raises(ConnectionRefusedError):
            await TcpPeer.connect(it.port)
        await it.tell("listen", "listen done")
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            await it.tell("serve 5", "serve done")
            stream = peer.request(b"GET", b"/", end=True)
            assert await stream.rest() == bytes(5)
        await it.tell("exit 0")
        code, out, _ = await it.process.ended()
    assert code == 0
    assert re.fullmatch(r"PORT is \d+\n", out), "standard output is the app's alone"


async def test_an_app_that_never_listens() -> None:
    async with krun_with_app(HBONE_APP_START_TIMEOUT="0.2", HBONE_DRAIN_TIMEOUT="0") as it:
        code, _, err = await it.process.ended()
    assert code == 69
    assert "krun: app does not listen on 127.0.0.1:" in err


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -15 $$"], 143),
        (["/nonexistent/command"], 127),
        (["/etc/passwd"], 126),
    ],
)
async def test_the_exit_code_is_the_commands(command: list[str], code: int) -> None:
    begun = time.monotonic()
    async with krun(*command) as it:
        assert (await it.process.ended())[0] == code
    assert time.monotonic() - begun < 5


async def test_a_wrong_setting() -> None:
    async with krun("true", environ={"HBONE_DIAL_TIMEOUT": "soon"}) as it:
        code, out, err = await it.process.ended()
    assert (code, out) == (64, "")
    assert err == "krun: invalid HBONE_DIAL_TIMEOUT=soon (not a number of seconds)\n"


async def test_a_port_in_use_ends_the_app(target: TcpServer) -> None:
    async with krun_with_app(HBONE_LISTEN=f"127.0.0.1:{target.port}", HBONE_DRAIN_TIMEOUT="20") as it:
        await it.tell("listen", "listen done")
        assert await it.heard() == "SIGTERM"
        await it.tell("exit 0")
        code, _, err = await it.process.ended()
    assert code == 69
    address = f"127.0.0.1:{target.port}"
    assert err.splitlines()[-1] == f"krun: tunnels: cannot listen on {address}: the port is in use"


async def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    environ = {"HBONE_INBOUND": "builtin", "HBONE_CERTS": str(tmp_path)}
    async with krun("true", environ=environ) as it:
        code, _, err = await it.process.ended()
    assert code == 69
    assert f"krun: HBONE_INBOUND=builtin: no certificates in {tmp_path}: set HBONE_CERTS" in err


# Signals.


async def test_sigterm_goes_to_the_app() -> None:
    async with krun_with_app() as it:
        await it.tell("listen", "listen done")
        await it.listening()
        it.process.send(signal.SIGTERM)
        assert await it.heard() == "SIGTERM"
        with pytest.raises(ConnectionRefusedError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await (await TcpPeer.connect(it.port)).close()
        await it.tell("exit 7")
        assert (await it.process.ended())[0] == 7


async def test_sigterm_before_the_app_listens() -> None:
    async with krun_with_app() as it:
        it.process.send(signal.SIGTERM)
        assert await it.heard() == "SIGTERM"
        await it.tell("exit 5")
        assert (await it.process.ended())[0] == 5


async def test_other_signals_go_to_the_app_and_change_nothing() -> None:
    async with krun_with_app() as it:
        await it.tell("listen", "listen done")
        await it.listening()
        it.process.send(signal.SIGUSR1)
        assert await it.heard() == "SIGUSR1"
        await (await TcpPeer.connect(it.port)).close()
        await it.tell("die")
        assert (await it.process.ended())[0] == 137


# The end of an app.


async def test_the_last_answer_of_an_app_is_delivered() -> None:
    size = 4 << 20
    async with krun_with_app() as it:
        await it.tell("listen", "listen done")
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            stream = peer.request(b"GET", b"/", end=True)
            stream.window_held = True
            await it.tell(f"serve {size}", "serve done")
            await peer.until(lambda: len(stream.data) == 65535)
            stream.release_window()
            await it.tell("exit 0")
            assert len(await stream.rest()) == size
            assert (await it.process.ended())[0] == 0


async def test_a_tunnel_does_not_keep_krun_from_ending_with_its_app(target: TcpServer) -> None:
    async with krun_with_app(PORT_OTHER=f"127.0.0.1:{target.port}") as it:
        await it.tell("listen", "listen done")
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            stream = peer.request(b"POST", b"/_hbone/OTHER")
            assert await stream.status() == 200
            there = await target.accept()
            await it.tell("exit 4")
            await stream.broken()
            assert await there.was_reset()
            assert (await it.process.ended())[0] == 4


async def test_the_drain_ends_with_the_app(target: TcpServer) -> None:
    begun = time.monotonic()
    async with krun_with_app(PORT_OTHER=f"127.0.0.1:{target.port}", HBONE_DRAIN_TIMEOUT="60") as it:
        await it.tell("listen", "listen done")
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            assert await peer.request(b"POST", b"/_hbone/OTHER").status() == 200
            it.process.send(signal.SIGTERM)
            assert await it.heard() == "SIGTERM"
            await it.tell("exit 4")
            assert (await it.process.ended())[0] == 4
    assert time.monotonic() - begun < 10


async def test_the_drain_does_not_wait_for_an_app_that_stays(target: TcpServer) -> None:
    async with krun_with_app(PORT_OTHER=f"127.0.0.1:{target.port}", HBONE_DRAIN_TIMEOUT="0.2") as it:
        await it.tell("listen", "listen done")
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            stream = peer.request(b"POST", b"/_hbone/OTHER")
            assert await stream.status() == 200
            it.process.send(signal.SIGTERM)
            assert await it.heard() == "SIGTERM"
            await stream.broken()
            assert await (await target.accept()).was_reset()
            await it.tell("exit 6")
            assert (await it.process.ended())[0] == 6


# A sidecar.


async def test_a_sidecar_ends_in_order() -> None:
    async with sidecar() as (it, peer):
        it.process.send(signal.SIGTERM)
        await peer.until(lambda: peer.lost)
        assert peer.goaway
        assert (await it.process.ended())[0] == 0


async def test_a_sidecar_lets_tunnels_and_requests_finish(target: TcpServer) -> None:
    here = f"127.0.0.1:{target.port}"
    async with sidecar(PORT_HERE=here, HBONE_APP=here) as (it, peer):
        tunnel = peer.request(b"POST", b"/_hbone/HERE")
        there = await target.accept()
        assert await tunnel.status() == 200
        request = peer.request(b"GET", b"/", end=True)
        app = await target.accept()
        await app.read_until(b"\r\n\r\n")
        it.process.send(signal.SIGTERM)
        await it.process.said("^draining: 2 streams have up to 8 s$")
        await peer.until(lambda: peer.goaway)
        with pytest.raises(ConnectionRefusedError):
            await TcpPeer.connect(it.port)
        late = peer.request(b"POST", b"/_hbone/HERE")
        assert await late.broken() == 7, "REFUSED_STREAM: safe to try elsewhere"
        await app.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        assert await request.rest() == b"ok"
        await tunnel.send(b"ping")
        assert await there.read(4) == b"ping"
        await there.send(b"pong")
        there.end()
        tunnel.end()
        assert await tunnel.rest() == b"pong"
        code, out, err = await it.process.ended()
    assert (code, out) == (0, "")
    [line] = [json.loads(text) for text in err.splitlines() if "connection complete" in text]
    assert (line["tunnel.target"], line["dst.addr"], line["flags"]) == ("HERE", here, "-")
    assert (line["bytes_sent"], line["bytes_recv"], line["status"]) == (4, 4, 200)


async def test_a_sidecars_end_loses_no_byte_of_a_finished_tunnel(target: TcpServer) -> None:
    async with sidecar(PORT_HERE=f"127.0.0.1:{target.port}") as (it, peer):
        tunnel = peer.request(b"POST", b"/_hbone/HERE")
        tunnel.window_held = True
        there = await target.accept()
        tunnel.end()
        assert await there.rest() == b""
        await there.send(bytes(65535 + 60_000))  # h2's window, and less than what stops the reading
        there.end()
        await peer.until(lambda: len(tunnel.data) == 65535)
        await peer.answered()
        it.process.send(signal.SIGTERM)
        await it.process.said("^draining: 1 streams have up to 8 s$")
        tunnel.release_window()
        assert len(await tunnel.rest()) == 65535 + 60_000
        assert (await it.process.ended())[0] == 0


@pytest.mark.parametrize("seconds", ["0", "0.2"])
async def test_the_end_of_a_drain_resets_what_is_left(target: TcpServer, seconds: str) -> None:
    async with sidecar(PORT_HERE=f"127.0.0.1:{target.port}", HBONE_DRAIN_TIMEOUT=seconds) as (it, peer):
        tunnel = peer.request(b"POST", b"/_hbone/HERE")
        there = await target.accept()
        assert await tunnel.status() == 200
        it.process.send(signal.SIGTERM)
        await it.process.said("^end of the drain: 1 streams are reset$")
        assert await there.was_reset()
        await tunnel.broken()
        code, _, err = await it.process.ended()
    assert code == 0
    [line] = [json.loads(text) for text in err.splitlines() if "connection complete" in text]
    assert line["error"] == "krun stops"


# What it logs.


async def test_a_refusal_is_logged_without_the_token() -> None:
    token = unsigned_token(aud="https://hello.a.run.app").encode()
    async with sidecar(HBONE_LOG_LEVEL="debug") as (it, peer):
        for path in (b"/_hbone/nobody", b"/_hbone/22", b"/"):
            stream = peer.request(b"POST", path, [(b"authorization", b"Bearer " + token)], end=True)
            assert await stream.status() in (404, 503)
        it.process.send(signal.SIGTERM)
        code, _, err = await it.process.ended()
    assert code == 0
    lines = [json.loads(text) for text in err.splitlines() if "connection refused" in text]
    told = [(line["tunnel.target"], line["status"], line["flags"]) for line in lines if "status" in line]
    assert told == [("nobody", 404, "NO_ROUTE"), ("22", 503, "CONNECT")]
    assert token.decode() not in err


# Limits.


async def test_one_connection_too_many() -> None:
    async with sidecar(HBONE_MAX_CONNECTIONS="1") as (it, peer):
        address = await turned_away(it.port)
        await peer.answered()
        it.process.send(signal.SIGTERM)
        _, _, err = await it.process.ended()
    [line] = [json.loads(text) for text in err.splitlines() if "HBONE_MAX_CONNECTIONS" in text]
    assert line["error"] == "1 connections are open, which is HBONE_MAX_CONNECTIONS"
    assert (line["flags"], line["src.addr"]) == ("LIMIT", address)
