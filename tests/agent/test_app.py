"""krun as a whole, as a process: what starts when, what SIGTERM does, and what its end means."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.errors import UpstreamError
from shared.http2.frames import ENHANCE_YOUR_CALM
from shared.net.legs.tcp import CLOSE_TIMEOUT_S
from shared.net.tls.certificate_folder import find
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.agent.identity.test_sts_server import Sts, form
from tests.shared.http2.dialogue import PREFACE, goaway, ping
from tests.shared.http2.dialogue import settings as settings_frame
from tests.support.api_server import SERVICE_ACCOUNT, ApiServer, LocalApiServer, api_server, kubeconfig
from tests.support.google import Google
from tests.support.google_services import DATA_PLANE, WORKLOAD
from tests.support.hbone_port import CALLER, TRUST_DOMAIN, Mesh
from tests.support.http2_peer import Http2Peer
from tests.support.metadata_server import closed_port, unsigned_token
from tests.support.process import Process, run, started
from tests.support.revocation import Hierarchy, put, revocation_list, serial_in
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer, turned_away
from tests.support.world import find_envoy

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

GKE = {"PROJECT_ID": "proj", "CLUSTER_NAME": "clu", "CLUSTER_LOCATION": "loc"}


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
async def krun(
    *command: str, environ: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> AsyncIterator[Krun]:
    """krun with `command`, on a free port; itself started by the command `before`, if there is one."""
    port = closed_port()
    settings = {
        "HBONE_LISTEN": f"127.0.0.1:{port}",
        "HBONE_INBOUND": "none",
        "HBONE_APP": f"127.0.0.1:{closed_port()}",
        "HBONE_APP_PROTOCOL": "http1",  # the apps here answer the first bytes that come
        "HBONE_LOG_FORMAT": "json",
    }
    if not command:
        settings["HBONE_STARTUP_PROBE"] = "-"  # nobody starts an app
    environ = {**settings, **(environ or {})}
    async with started("agent", *command, environ=environ, before=before) as process:
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
async def krun_before_app(**environ: str) -> AsyncIterator[Krun]:
    """krun with APP, and both listen."""
    async with krun_with_app(**environ) as it:
        await it.tell("listen", "listen done")
        await it.listening()
        yield it


@asynccontextmanager
async def sidecar(**environ: str) -> AsyncIterator[tuple[Krun, Http2Peer]]:
    """krun without a command, and a connection to it."""
    async with krun(environ=environ) as it:
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            yield it, peer


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


async def test_a_sidecar_waits_for_the_app_of_the_other_container() -> None:
    port = closed_port()
    waits = {"HBONE_APP": f"127.0.0.1:{port}", "HBONE_STARTUP_PROBE": ""}
    async with krun(environ=waits) as it:
        await it.process.said("^mTLS end: none")
        with pytest.raises(ConnectionRefusedError):
            await TcpPeer.connect(it.port)
        async with TcpServer.listening(port):
            await it.listening()


async def test_a_sidecar_that_is_told_to_end_while_it_waits() -> None:
    async with krun(environ={"HBONE_STARTUP_PROBE": "http://127.0.0.1:9/"}) as it:
        await it.process.said("^mTLS end: none")
        it.process.send(signal.SIGTERM)
        code, _, _ = await it.process.ended()
    assert code == 143


async def test_an_app_that_never_listens() -> None:
    times = {"HBONE_APP_START_TIMEOUT": "0.2", "HBONE_DRAIN_TIMEOUT": "0"}
    async with krun("sleep", "600", environ=times) as it:
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
    assert time.monotonic() - begun < PATIENCE_S


async def test_a_wrong_setting() -> None:
    async with krun("true", environ={"HBONE_DIAL_TIMEOUT": "soon"}) as it:
        code, out, err = await it.process.ended()
    assert (code, out) == (64, "")
    assert err == "krun: invalid HBONE_DIAL_TIMEOUT=soon (must be a duration such as 10s, 500ms or 5m)\n"


async def test_a_port_in_use_ends_the_app(target: TcpServer) -> None:
    async with krun_with_app(HBONE_LISTEN=f"127.0.0.1:{target.port}", HBONE_DRAIN_TIMEOUT="20") as it:
        await it.tell("listen", "listen done")
        assert await it.heard() == "SIGTERM"
        await it.tell("exit 0")
        code, _, err = await it.process.ended()
    assert code == 69
    assert '"severity":"INFO","message":"the app has ended: exit code 0"' in err, "it is not to blame"
    address = f"127.0.0.1:{target.port}"
    assert err.splitlines()[-1] == f"krun: tunnels: cannot listen on {address}: the port is in use"


async def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    environ = {"HBONE_INBOUND": "builtin", "HBONE_CERTS": str(tmp_path)}
    async with krun("true", environ=environ) as it:
        code, _, err = await it.process.ended()
    assert code == 69
    assert f"krun: HBONE_INBOUND=builtin: no certificates in {tmp_path}: set HBONE_CERTS" in err


async def test_a_certificate_is_there_before_the_mtls_end(tmp_path: Path) -> None:
    certificates = tmp_path / "certs"
    settings = {
        "HBONE_INBOUND": "builtin",
        "HBONE_INBOUND_LISTEN": f"127.0.0.1:{closed_port()}",
        "HBONE_CERTS": str(certificates),
        "HBONE_CA": "dev",
        "HBONE_CA_FOLDER": str(tmp_path / "ca"),
        "TRUST_DOMAIN": "demo.local",
        "WORKLOAD_NAMESPACE": "demo",
        "WORKLOAD_SERVICE_ACCOUNT": "hello",
    }
    async with krun(environ=settings) as it:
        await it.process.said("^certificate spiffe://demo.local/ns/demo/sa/hello from development CA in")
        await it.process.said("^mTLS end: builtin, ")
        await it.listening()
        assert find(certificates).complete
    async with krun(environ=settings) as it:
        await it.process.said(f"^certificate spiffe://demo.local/ns/demo/sa/hello found in {certificates}: ")
        await it.listening()


async def test_a_development_ca_that_others_could_use(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca").chmod(0o777)
    settings = {"HBONE_CA": "dev", "HBONE_CA_FOLDER": str(tmp_path / "ca"), "TRUST_DOMAIN": "demo.local"}
    async with krun("true", environ=settings | {"HBONE_CERTS": str(tmp_path / "certs")}) as it:
        code, _, err = await it.process.ended()
    assert code == 69
    (line,) = err.splitlines()
    assert line.startswith(f"krun: development CA: {tmp_path}/ca may be written by others than user ")
    assert line.endswith("(mode 0777); set HBONE_CA_FOLDER to another folder, or remove this one")


async def test_no_certificate_is_to_be_had(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(unsigned_token(aud="istio-ca", exp=time.time() + 3600))
    settings = {
        "HBONE_CERTS": str(tmp_path / "certs"),
        "HBONE_CA": "istio",
        "HBONE_CA_TOKEN_FILE": str(token),
        "CA_ADDR": f"127.0.0.1:{closed_port()}",
        "TRUST_DOMAIN": "demo.local",
    }
    async with krun(environ=settings) as it:
        await it.process.said("^no certificate yet, next attempt in ")
        it.process.send(signal.SIGTERM)
        assert (await it.process.ended())[0] == 143
    async with krun(environ=settings | {"HBONE_CA_TIMEOUT": "1"}) as it:
        code, _, err = await it.process.ended()
    assert code == 77
    assert "krun: no certificate in 1 s: Istio's CA at 127.0.0.1:" in err.splitlines()[-1]
    assert token.read_text() not in err


# Signals.


async def test_sigterm_goes_to_the_app() -> None:
    async with krun_before_app() as it:
        it.process.send(signal.SIGTERM)
        assert await it.heard() == "SIGTERM"
        with pytest.raises(ConnectionRefusedError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(ConnectionResetError):  # it waited to be accepted
                        await (await TcpPeer.connect(it.port)).close()
        await it.tell("exit 7")
        assert (await it.process.ended())[0] == 7


async def test_sigterm_before_the_app_listens() -> None:
    async with krun_with_app() as it:
        it.process.send(signal.SIGTERM)
        assert await it.heard() == "SIGTERM"
        await it.tell("exit 5")
        assert (await it.process.ended())[0] == 5


async def test_an_app_that_stays_after_sigterm_is_killed() -> None:
    async with krun_before_app(HBONE_APP_STOP_TIMEOUT="0.2") as it:
        it.process.send(signal.SIGTERM)
        assert await it.heard() == "SIGTERM"
        assert (await it.process.ended())[0] == 137


@pytest.mark.parametrize(
    ("environ", "number"),
    [({"HBONE_APP_STOP_TIMEOUT": "0"}, signal.SIGTERM), ({"HBONE_APP_STOP_TIMEOUT": "0.01"}, signal.SIGINT)],
)
async def test_an_app_may_stay(environ: dict[str, str], number: signal.Signals) -> None:
    """If it is told so, or if a person has asked it to end: the second time, it ends."""
    code = """
import os, signal, sys
seen = []
def ask(signum, _):
    seen.append(signum)
    print("asked", flush=True)
    if len(seen) == 2:
        sys.exit(7)
signal.signal(signal.SIGTERM, ask)
signal.signal(signal.SIGINT, ask)
print("ready", flush=True)
while True:
    signal.pause()
"""
    probe = {"HBONE_STARTUP_PROBE": "-"}
    async with krun(sys.executable, "-c", code, environ={**environ, **probe}) as it:
        assert await it.process.stdout.readline() == b"ready\n"
        await it.listening()
        it.process.send(number)
        assert await it.process.stdout.readline() == b"asked\n"
        await it.process.said("^waiting for the app")
        it.process.send(number)
        assert (await it.process.ended())[0] == 7


async def test_other_signals_go_to_the_app_and_change_nothing() -> None:
    async with krun_before_app() as it:
        it.process.send(signal.SIGUSR1)
        assert await it.heard() == "SIGUSR1"
        await (await TcpPeer.connect(it.port)).close()
        await it.tell("die")
        assert (await it.process.ended())[0] == 137


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace takes root")
async def test_as_a_container_s_first_process_it_ignores_nothing() -> None:
    """Whoever starts containers may itself have been started by nohup or a script."""
    first = ["sh", "-c", 'trap "" TERM INT HUP; exec unshare --pid --fork --kill-child "$@"', "sh"]
    app = "trap 'exit 7' TERM; kill -TERM 1; while :; do sleep 0.01; done"
    async with krun("sh", "-c", app, before=first) as it:
        assert (await it.process.ended())[0] == 7


async def test_the_app_has_the_limits_that_krun_was_started_with() -> None:
    limits = ["sh", "-c", 'ulimit -S -c 0; ulimit -S -n 123; ulimit -S -c 7 2>/dev/null; exec "$@"', "sh"]
    async with krun("sh", "-c", "ulimit -S -c; ulimit -S -n", before=limits) as it:
        code, out, _ = await it.process.ended()
    core = "7" if resource.getrlimit(resource.RLIMIT_CORE)[1] else "0"
    assert (code, out.split()) == (0, [core, "123"])


# The end of an app.


async def test_the_last_answer_of_an_app_is_delivered() -> None:
    size = 4 << 20
    async with krun_before_app() as it, Http2Peer.connected(it.port) as peer:
        stream = peer.request(b"GET", b"/", end=True)
        stream.window_held = True
        await it.tell(f"serve {size}", "serve done")
        await peer.until(lambda: len(stream.data) == 65535)
        stream.release_window()
        await it.tell("exit 0")
        assert len(await stream.rest()) == size
        assert (await it.process.ended())[0] == 0


async def test_a_tunnel_does_not_keep_krun_from_ending_with_its_app(target: TcpServer) -> None:
    async with (
        krun_before_app(PORT_OTHER=f"127.0.0.1:{target.port}") as it,
        Http2Peer.connected(it.port) as peer,
    ):
        stream = peer.request(b"POST", b"/_hbone/OTHER")
        assert await stream.status() == 200
        there = await target.accept()
        await it.tell("exit 4")
        await stream.broken()
        assert await there.was_reset()
        assert (await it.process.ended())[0] == 4


async def test_the_drain_ends_with_the_app(target: TcpServer) -> None:
    begun = time.monotonic()
    async with (
        krun_before_app(PORT_OTHER=f"127.0.0.1:{target.port}", HBONE_DRAIN_TIMEOUT="60") as it,
        Http2Peer.connected(it.port) as peer,
    ):
        assert await peer.request(b"POST", b"/_hbone/OTHER").status() == 200
        it.process.send(signal.SIGTERM)
        assert await it.heard() == "SIGTERM"
        await it.tell("exit 4")
        assert (await it.process.ended())[0] == 4
    assert time.monotonic() - begun < 60 - PATIENCE_S


async def test_the_drain_does_not_wait_for_an_app_that_stays(target: TcpServer) -> None:
    async with (
        krun_before_app(PORT_OTHER=f"127.0.0.1:{target.port}", HBONE_DRAIN_TIMEOUT="0.2") as it,
        Http2Peer.connected(it.port) as peer,
    ):
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
        await it.process.said(
            "^draining: 2 streams have up to 8 s; open are 1 tunnels, 1 requests to the app, 0 "
        )
        await peer.until(lambda: peer.goaway)
        await peer.answered()  # so krun knows that it is known
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
        await it.process.said("^draining: 1 streams have up to 8 s")
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


async def test_a_peer_that_never_answers_is_no_stream_that_is_reset() -> None:
    async with krun(environ={"HBONE_DRAIN_TIMEOUT": "0.2"}) as it:
        await it.listening()
        async with TcpPeer.connected(it.port) as silent:
            await silent.send(PREFACE + settings_frame())
            await silent.read(1)  # of krun's SETTINGS: it is one of its connections
            it.process.send(signal.SIGTERM)
            code, _, err = await it.process.ended()
    assert code == 0
    assert "draining: 0 streams have up to 0.2 s" in err
    assert "are reset" not in err


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


async def lines_of(it: Krun) -> list[str]:
    """Each line of the log that is left, once krun has ended."""
    _, _, err = await it.process.ended()
    return [json.loads(line)["message"] for line in err.splitlines()]


async def test_the_app_s_start_and_end_are_told() -> None:
    async with krun_before_app() as it:
        await it.tell("exit 3")
        started, ended = (await lines_of(it))[:2]
    steps = r"identity \d\.\d\d s, mTLS end \d\.\d\d s, app \d+\.\d\d s"
    assert re.fullmatch(rf"started in \d+\.\d\d s: {steps}", started)
    assert ended == "the app has ended: exit code 3; krun ends with 3"


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("exit 0", "exit code 0"),
        ("exit 5", "exit code 5; krun ends with 5"),
        ("kill -9 $$", "killed by SIGKILL, perhaps because memory ran out; krun ends with 137"),
        ("kill -SEGV $$", "killed by SIGSEGV; krun ends with 139"),
    ],
)
async def test_an_app_that_ends_before_it_listens(command: str, how: str) -> None:
    address = f"127.0.0.1:{closed_port()}"
    async with krun("sh", "-c", command, environ={"HBONE_APP": address}) as it:
        assert (await lines_of(it))[-1] == f"the app has ended before it listened on {address}: {how}"


async def test_sigterm_and_what_it_waits_for_are_told(target: TcpServer) -> None:
    async with krun_before_app(PORT_OTHER=f"127.0.0.1:{target.port}") as it:
        async with Http2Peer.connected(it.port) as peer:
            assert await peer.request(b"POST", b"/_hbone/OTHER").status() == 200
            it.process.send(signal.SIGTERM)
            pid = (await it.process.said(r"^SIGTERM: the app \(pid (\d+)\) gets it, too$"))[1]
            waits_for = "1 tunnels, 0 requests to the app, 0 connections of the mTLS end"
            await it.process.said(f"^draining: 1 streams have up to 8 s; open are {waits_for}$")
            assert await it.heard() == "SIGTERM"
            there = await target.accept()
            there.end()
            await peer.until(lambda: peer.goaway)
            await peer.close()
        await it.process.said(rf"^waiting for the app \(pid {pid}\) to end$")
        await it.tell("exit 7")
        assert "the app has ended: exit code 7, after SIGTERM" in await lines_of(it)


async def test_a_foreign_process_on_the_app_s_port(target: TcpServer) -> None:
    address = f"127.0.0.1:{target.port}"
    async with krun("sleep", "60", environ={"HBONE_APP": address}) as it:
        await it.process.said(f"^another process listens on {address} before the app has started, and krun ")
        await it.listening()
        it.process.send(signal.SIGTERM)
        assert (await it.process.ended())[0] == 143


async def test_curl_without_http2_is_told_and_so_is_the_log() -> None:
    async with sidecar() as (it, peer):
        url = f"http://127.0.0.1:{it.port}/hello"
        for flags in ([], ["--http2"], ["--head"]):
            _, said, _ = await run(
                "curl", "--silent", "--show-error", "--write-out", "%{http_code}", *flags, url
            )
            assert said.endswith(b"505")
            assert (b"name its port h2c" in said) == (flags != ["--head"])
        await it.process.said("^HTTP/1.1 from 127.0.0.1:.* on the tunnel port: .*name its port h2c")
        await peer.answered()
        it.process.send(signal.SIGTERM)
        await it.process.said("^SIGTERM: krun ends$")
        assert "of these since the last line)" in " ".join(await lines_of(it))


async def test_an_app_that_is_away_is_told_of() -> None:
    app = f"127.0.0.1:{closed_port()}"
    async with sidecar(HBONE_APP=app) as (it, peer):
        for _ in range(100):
            assert await peer.request(b"GET", b"/", end=True).status() == 503
        it.process.send(signal.SIGTERM)
        lines = [line for line in await lines_of(it) if line.startswith("503: ")]
    assert lines[0] == (
        f"503: app at {app}: connection refused: is the app up, and does it listen on the PORT that it is "
        "given, or on HBONE_APP?"
    )
    summary = re.compile(rf"{re.escape(lines[0])} \((\d+) of these since the last line\)")
    counted = [summary.fullmatch(line) for line in lines[1:]]
    assert len(lines) < 10
    assert sum(int(match[1]) for match in counted if match) == 99


# Limits.


async def test_lines_have_the_traceparent_of_the_request(target: TcpServer) -> None:
    """Of a tunnel and of a refusal; what is no traceparent is left out, as in hgate's lines."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with sidecar(PORT_HERE=f"127.0.0.1:{target.port}") as (it, peer):
        tunnel = peer.request(b"POST", b"/_hbone/HERE", [(b"traceparent", trace.encode())])
        there = await target.accept()
        assert await tunnel.status() == 200
        there.end()
        tunnel.end()
        assert await tunnel.rest() == b""
        for value in (trace, "00-nobody"):
            fields = [(b"traceparent", value.encode())]
            assert await peer.request(b"POST", b"/_hbone/nobody", fields, end=True).status() == 404
        it.process.send(signal.SIGTERM)
        _, _, err = await it.process.ended()
    lines = [json.loads(text) for text in err.splitlines() if "tunnel.target" in text]
    told = {(line["status"], line.get("traceparent")) for line in lines}
    assert (len(lines), told) == (3, {(200, trace), (404, trace), (404, None)})


async def test_one_connection_too_many() -> None:
    async with sidecar(HBONE_MAX_CONNECTIONS="1") as (it, peer):
        address = await turned_away(it.port)
        await peer.answered()
        it.process.send(signal.SIGTERM)
        _, _, err = await it.process.ended()
    [line] = [json.loads(text) for text in err.splitlines() if "HBONE_MAX_CONNECTIONS" in text]
    assert line["error"] == "1 connections are open, which is HBONE_MAX_CONNECTIONS"
    assert (line["flags"], line["src.addr"]) == ("LIMIT", address)


async def test_a_flooder_s_place_is_soon_another_s() -> None:
    """It is told why, and then goes on for as long as it can."""
    async with krun(environ={"HBONE_MAX_CONNECTIONS": "1"}) as it:
        await it.listening()
        flooder = await TcpPeer.connect(it.port)
        await flooder.send(PREFACE + settings_frame() + ping(b"12345678") * 1500)
        await flooder.read_until(goaway(0, ENHANCE_YOUR_CALM))

        async def flood() -> None:
            with contextlib.suppress(OSError):
                while True:
                    await flooder.send(ping(b"12345678") * 100)
                    await asyncio.sleep(0.01)

        flooding = spawn(flood(), name="flood")
        async with asyncio.timeout(CLOSE_TIMEOUT_S / 3):
            await asyncio.wait({flooding})
        async with Http2Peer.connected(it.port) as peer:
            await peer.answered()
            assert not peer.lost
        await flooder.close()


async def test_requests_leave_files_for_tunnels_and_the_token_exchange(target: TcpServer) -> None:
    """Of 364 files that may be open each kind has its share."""
    few = ["sh", "-c", 'ulimit -n 364; exec "$@"', "sh"]
    told = {
        "HBONE_STS_LISTEN": "127.0.0.1:0",
        **GKE,
        "PORT_HERE": f"127.0.0.1:{target.port}",
    }
    async with TcpServer.listening() as app:
        told["HBONE_APP"] = f"127.0.0.1:{app.port}"
        async with krun(environ=told, before=few) as it:
            sts = (await it.process.said("^token exchange on (.*)$"))[1]
            shares = await it.process.said(
                "^only 364 files may be open .*, (\\d+) of HBONE_MAX_REQUESTS=1000 "
            )
            most = int(shares[1])
            assert 16 < most < 200
            await it.listening()
            async with Http2Peer.connected(it.port) as peer:
                for _ in range(most):
                    peer.request(b"GET", b"/", end=True)
                    await app.accept()
                one_too_many = peer.request(b"GET", b"/", end=True)
                assert await one_too_many.status() == 503
                tunnels = [peer.request(b"POST", b"/_hbone/HERE") for _ in range(50)]
                assert {await tunnel.status() for tunnel in tunnels} == {200}
                answer = await Sts(sts).post(form(subject_token="no token"))
                assert answer.status == 400
                idle = [await TcpPeer.connect(it.port) for _ in range(10)]
                await peer.answered()
                for one in idle:
                    await one.close()


# Who may come in: the same settings for either end.


@pytest.mark.parametrize("end", ["envoy", "builtin"])
async def test_denied_and_revoked_peers(end: str, tmp_path: Path) -> None:
    if end == "envoy":
        find_envoy()
    mesh = Mesh(tmp_path, authority=Hierarchy().root)  # which names no trust domain, as Istio's
    crl = tmp_path / "crl.pem"
    put(crl, revocation_list(mesh.authority))

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        writer.close()

    app = await asyncio.start_server(greet, "127.0.0.1", 0)
    environ = {
        "HBONE_APP": f"127.0.0.1:{app.sockets[0].getsockname()[1]}",
        "HBONE_INBOUND": end,
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_CERTS": str(mesh.member(SpiffeId(TRUST_DOMAIN, "/ns/demo/sa/hello"))),
        "HBONE_DENY": "ns/demo/sa/bad-*",
        "TRUST_DOMAIN_ALIASES": "old.local",
        "HBONE_APP_PROTOCOL": "tcp",
    }
    if end == "builtin":  # Envoy follows no lists
        environ["HBONE_CRL"] = str(crl)
    async with app, krun(environ=environ) as it:
        told = await it.process.said(r"^mTLS end: .*15003: 127\.0\.0\.1:(\d+)$")
        port = int(told[1])
        await it.listening()

        async def is_let_in(folder: Path) -> bool:
            tls = mesh.tls(folder)
            tls.set_alpn_protocols(["istio"])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await reader.read(1) == b"x"
            except OSError:  # TLS's alert, or a reset
                return False
            finally:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

        old = mesh.member(SpiffeId("old.local", "/ns/demo/sa/client"))
        assert await is_let_in(old)
        assert not await is_let_in(mesh.member(SpiffeId(TRUST_DOMAIN, "/ns/demo/sa/bad-1")))
        assert not await is_let_in(mesh.member(SpiffeId("old.local", "/ns/demo/sa/bad-2")))
        assert not await is_let_in(mesh.member(SpiffeId("other.local", "/ns/demo/sa/client")))
        if end == "builtin":
            put(crl, revocation_list(mesh.authority, serial_in(old)))
            await it.process.said("revocation lists read again")
            assert not await is_let_in(old)
        assert await is_let_in(mesh.member(CALLER))
        it.process.send(signal.SIGTERM)  # killed, it would leave its Envoy behind
        code, _, _ = await it.process.ended()
        assert code == 0


async def test_revocation_lists_that_are_not_there(tmp_path: Path) -> None:
    environ = {
        "HBONE_INBOUND": "builtin",
        "HBONE_CERTS": str(Mesh(tmp_path).member()),
        "HBONE_CRL": str(tmp_path / "crl.pem"),
    }
    async with krun("true", environ=environ) as it:
        code, _, err = await it.process.ended()
    assert code == 69
    assert f"krun: {tmp_path}/crl.pem: No such file or directory" in err


# Kubernetes tokens.


@asynccontextmanager
async def krun_in_a_mesh(
    folder: Path, server: ApiServer, *command: str, token: str | None = None
) -> AsyncIterator[Krun]:
    """krun with `command` and Istio's token in `folder`, which it asks of `server`."""
    (folder / "kubeconfig").write_text(kubeconfig(server, token))
    told = {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "WORKLOAD_SERVICE_ACCOUNT": SERVICE_ACCOUNT,
        "HBONE_K8S_TOKENS": f"istio-ca={folder / 'istio-token'}",
    }
    async with krun(*command, environ=told) as it:
        yield it


@pytest.mark.shows_secret  # `cat` is the app
async def test_kubernetes_tokens_are_there_before_the_app(tmp_path: Path) -> None:
    async with (
        api_server() as server,
        krun_in_a_mesh(tmp_path, server, "cat", str(tmp_path / "istio-token")) as it,
    ):
        code, out, err = await it.process.ended()
        assert code == 0
        await server.verify(out, "istio-ca")
    assert out not in err and server.allowed not in err


async def test_without_the_permission_the_app_is_not_started(tmp_path: Path) -> None:
    async with (
        LocalApiServer() as server,
        krun_in_a_mesh(tmp_path, server, "echo", "started", token=server.forbidden) as it,
    ):
        code, out, err = await it.process.ended()
    assert (code, out) == (77, "")
    assert "krun: no token of service account demo/hello: " in err
    assert "a Role has to allow us the verb create on serviceaccounts/token in namespace demo" in err


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_signal_while_the_first_token_is_awaited(
    number: signal.Signals, expected: int, tmp_path: Path
) -> None:
    async with LocalApiServer() as server:
        server.gate.clear()
        async with krun_in_a_mesh(tmp_path, server, "echo", "started") as it:
            await server.seen(1)
            it.process.send(number)
            code, out, _ = await it.process.ended()
    assert (code, out) == (expected, "")


# The token exchange.


async def test_the_token_exchange(tmp_path: Path) -> None:
    async with Google() as google:
        google.grants |= {(WORKLOAD, DATA_PLANE)}
        (tmp_path / "ca.pem").write_bytes(google.authority.root_pem)
        told = {
            "HBONE_STS_LISTEN": "127.0.0.1:0",
            **GKE,
            "PROJECT_NUMBER": "42",
            "HBONE_STS_URL": f"{google.url}/v1/token",
            "HBONE_IAM_URL": google.url,
            "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
        }
        async with krun(environ=told) as it:
            address = (await it.process.said("^token exchange on (.*)$"))[1]
            sts = Sts(address)
            asked = form(subject_token=google.kubernetes_token(), audience="https://a.example")
            answer = json.loads((await sts.post(asked)).body)
            assert google.claims(answer["access_token"], "https://a.example")["email"] == DATA_PLANE
            google.closed.add("sts")
            late = spawn(sts.post(form(subject_token=google.kubernetes_token())), name="a late request")
            await google.seen(3)
            it.process.send(signal.SIGTERM)
            code, _, err = await it.process.ended()
            with pytest.raises(UpstreamError):
                await late
        assert code == 0
        assert google.found_in(err + " ".join(it.process.messages)) == []


async def test_a_port_of_the_token_exchange_that_is_taken(target: TcpServer) -> None:
    async with krun("echo", "started", environ={"HBONE_STS_LISTEN": f"127.0.0.1:{target.port}", **GKE}) as it:
        code, out, err = await it.process.ended()
    assert (code, out) == (69, "")
    assert f"127.0.0.1:{target.port}" in err and "token exchange" in err
