"""krun as a container's first process, with Envoy as the mTLS end: what becomes of children that crash, hang,
do not end or leave others behind. All in a process namespace of its own, as a container has."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agent.test_app import Krun, krun
from tests.support.hbone_port import Mesh
from tests.support.http2_peer import Http2Peer
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_envoy

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace takes root")

CLOUD_RUN_S = 10.0
"""From SIGTERM to SIGKILL of all that is left."""

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

LISTENS = """
import os, signal, socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
"""
"""How an app begins."""

SERVES = """
while True:
    client, _ = server.accept()
    client.close()
"""

DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
"""


class Container:
    """A krun and all that runs beside it."""

    def __init__(self, it: Krun) -> None:
        self.krun = it
        self.init = 0
        """The first process, by its number outside."""
        self._namespace = ""

    async def find(self) -> None:
        """Finds the first process: the child of the program that has made the namespace."""
        parent = self.krun.process.pid

        def child() -> str:
            return Path(f"/proc/{parent}/task/{parent}/children").read_text()

        await self.until(lambda: child() != "", "a first process")
        self.init = int(child())
        self._namespace = os.readlink(f"/proc/{self.init}/ns/pid")

    def processes(self) -> dict[int, tuple[str, str]]:
        """Program and state of each, by its number outside."""
        found = {}
        for path in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended since
                if path.name.isdigit() and os.readlink(path / "ns/pid") == self._namespace:
                    told = (path / "stat").read_text()
                    name, state = told[told.index("(") + 1 : told.rindex(")")], told[told.rindex(")") + 2]
                    found[int(path.name)] = (name, state)
        return found

    def named(self, name: str) -> list[int]:
        """Those of a program that have not ended."""
        return [pid for pid, (program, state) in self.processes().items() if program == name and state != "Z"]

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Returns when it holds."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not holds():  # noqa: ASYNC110  # other processes' doing
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not in time: {what}; {self.krun.process.messages}") from None

    async def stopped(self) -> tuple[int, float, list[str]]:
        """As Cloud Run stops a container: the exit code, the seconds that it took, and what krun has said."""
        began = time.monotonic()
        os.kill(self.init, signal.SIGTERM)
        code, _, err = await self.krun.process.ended()
        return code, time.monotonic() - began, err.splitlines()


@asynccontextmanager
async def container(folder: Path, app: str, *, listens: bool = True) -> AsyncIterator[Container]:
    """krun with an app in Python; once its tunnel port is open, if the app `listens`."""
    find_envoy()
    told = {
        "HBONE_INBOUND": "envoy",
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_CERTS": str(Mesh(folder).member()),
    }
    async with krun(sys.executable, "-c", LISTENS + app, environ=told, before=NAMESPACE) as it:
        there = Container(it)
        await there.find()
        if listens:
            await it.listening()
        yield there


# Ends.


async def test_orphans_are_waited_for(tmp_path: Path) -> None:
    orphans = """
for _ in range(20):
    subprocess.run(["sh", "-c", "(sleep 0.1; exit 3) &"])
"""
    async with container(tmp_path, orphans + SERVES) as it:
        await it.until(lambda: not it.named("sleep"), "all orphans have ended")
        await it.until(lambda: "Z" not in {state for _, state in it.processes().values()}, "no zombies")
        code, seconds, _ = await it.stopped()
    assert (code, seconds < CLOUD_RUN_S) == (143, True)


@pytest.mark.parametrize(
    ("crash", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)]
)
async def test_an_app_that_crashes_ends_all_with_its_code(tmp_path: Path, crash: str, code: int) -> None:
    at_the_first_byte = "\nwhile not server.accept()[0].recv(1): pass\n"  # krun's probe sends none
    async with container(tmp_path, at_the_first_byte + crash) as it:
        assert it.named("envoy")
        async with Http2Peer.connected(it.krun.port) as peer:
            peer.request(b"GET", b"/", end=True)
            assert (await it.krun.process.ended())[0] == code
        assert it.processes() == {}


async def test_a_daemon_that_the_app_leaves_behind_ends_with_the_container(tmp_path: Path) -> None:
    daemon = """
subprocess.Popen(["setsid", "--fork", "sh", "-c", "trap '' TERM HUP; sleep 1000; :"])
"""
    async with container(tmp_path, daemon + SERVES) as it:
        await it.until(lambda: it.named("sleep") != [], "the daemon runs")
        code, seconds, _ = await it.stopped()
        assert (code, seconds < CLOUD_RUN_S) == (143, True)
        assert it.processes() == {}


async def test_an_envoy_that_crashes_is_started_again_and_the_app_goes_on(tmp_path: Path) -> None:
    async with container(tmp_path, SERVES) as it:
        (envoy,) = it.named("envoy")
        others = it.processes().keys() - {envoy}
        os.kill(envoy, signal.SIGKILL)
        await it.krun.process.said("^envoy ended with exit code 137; again in 0.5 s$")
        await it.krun.process.said("^envoy is ready again$")
        (another,) = it.named("envoy")
        assert another != envoy
        assert it.processes().keys() - {another} == others
        async with Http2Peer.connected(it.krun.port) as peer:
            assert await peer.request(b"POST", b"/_hbone/15003").status() == 200
        assert (await it.stopped())[0] == 143


# What hangs.


@dataclass(frozen=True, slots=True)
class Case:
    """Somebody who hangs."""

    app: str
    code: int
    """krun's exit code."""
    listens: bool = True
    serves: bool = True
    envoy_is_stopped: bool = False


CASES = {
    "an app that ignores SIGTERM": Case(DEAF + SERVES, 137),
    "an app that is stopped": Case("os.kill(os.getpid(), signal.SIGSTOP)", 137, serves=False),
    "an app that does not even listen": Case(f"server.close(){DEAF}time.sleep(1000)", 137, listens=False),
    "an Envoy that is stopped": Case(SERVES, 143, envoy_is_stopped=True),
    "both": Case(DEAF + SERVES, 137, envoy_is_stopped=True),
}


async def ended(folder: Path, case: Case) -> tuple[int, float, list[str]]:
    """What `Container.stopped` tells of it, with a tunnel that nobody ends."""
    async with container(folder, case.app, listens=case.listens) as it:
        if DEAF in case.app:
            assert await it.krun.process.stdout.readline() == b"deaf\n"
        if not case.listens:
            return await it.stopped()
        async with Http2Peer.connected(it.krun.port) as peer:
            if case.serves:
                assert await peer.request(b"POST", b"/_hbone/15003").status() == 200
            if case.envoy_is_stopped:
                os.kill(it.named("envoy")[0], signal.SIGSTOP)
            told = await it.stopped()
        assert it.processes() == {}
        return told


async def test_all_is_over_in_cloud_run_s_time_whoever_hangs(tmp_path: Path) -> None:
    """All cases at once, for each takes nearly all of that time."""
    folders = [tmp_path / str(number) for number in range(len(CASES))]
    found = await asyncio.gather(*map(ended, folders, CASES.values()))
    told = {
        name: (code, seconds < CLOUD_RUN_S) for name, (code, seconds, _) in zip(CASES, found, strict=True)
    }
    assert told == {name: (case.code, True) for name, case in CASES.items()}, [each[1] for each in found]
    for case, (_, _, lines) in zip(CASES.values(), found, strict=True):
        if case.code == 137:
            said = [json.loads(line)["message"] for line in lines if line.startswith("{")]
            assert "app has not ended 8.5 s after SIGTERM: killed" in said
            when = "" if case.listens else r" before it listened on \S+"
            end = rf"the app has ended{when}: killed by SIGKILL, after SIGTERM; krun ends with 137"
            assert [line for line in said if re.fullmatch(end, line)], said
