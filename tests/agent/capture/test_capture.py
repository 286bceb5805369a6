"""A whole krun that captures: before its app, until its end, and after it was killed. pilot-agent is a script
here, and Envoy's ports the test's; with the real ones: tests/mesh."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.app import Agent
from agent.capture.capture import Capture
from agent.config.settings import from_env
from shared.credentials.certificates.authority import Authority
from shared.errors import EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from shared.net.http1 import get
from shared.ops.access_log import AccessLog
from tests.support.captured_network import CapturedNetwork, captured_network
from tests.support.other_user import root_only, shared_folder
from tests.support.process import Process, run, started
from tests.support.tcp_peer import PATIENCE_S

pytestmark = root_only


@pytest.fixture
def net(tmp_path: Path) -> Iterator[CapturedNetwork]:
    with captured_network(tmp_path) as net:
        yield net


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    with shared_folder() as folder:
        program = folder / "pilot-agent"
        ends_with_krun = "while [ -d /proc/$PPID ]; do sleep 0.1; done"
        program.write_text(f'#!/bin/sh\n[ "$1" = proxy ] || exit 1\n{ends_with_krun}\n')
        program.chmod(0o755)
        roots = folder / "roots.pem"
        roots.write_bytes(Authority.create("cluster.local").root_pem)
        yield {
            "XDS_ADDR": "10.1.2.3:15012",
            "HBONE_INBOUND": "pilot-agent",
            "HBONE_PILOT_AGENT": str(program),
            "HBONE_ROOTS": str(roots),
            "HBONE_STARTUP_PROBE": "-",
            "HBONE_LOG_FORMAT": "json",
            "HBONE_ADMIN": "127.0.0.1:15019",
        }


@asynccontextmanager
async def krun(environ: dict[str, str], *command: str) -> AsyncIterator[Process]:
    async with started("agent", *command, environ=environ) as process:
        yield process


async def asked(process: Process) -> str:
    """What the app was told."""
    return (await process.stdout.readline()).decode().strip()


async def test_from_before_the_app_s_start_to_krun_s_end(
    net: CapturedNetwork, environ: dict[str, str]
) -> None:
    async with krun(environ, *net.app("10.1.2.3")) as process:
        await process.said(r"^outbound traffic: iptables \(10.0.0.0/8, by krun\)$")
        assert await asked(process) == "captured 10.1.2.3:80"
        await process.said("^tunnels on")
        url = "http://127.0.0.1:15019/status"
        status = await get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=10_000)
        assert json.loads(status.body)["outbound"] == "iptables"
        process.send(signal.SIGTERM)
        code, _, _ = await process.ended()
    assert code == 128 + signal.SIGTERM
    assert net.rules() == []


async def test_a_krun_that_was_killed_leaves_no_doubles_to_the_next(
    net: CapturedNetwork, environ: dict[str, str]
) -> None:
    async with krun(environ, *net.app("10.1.2.3")) as process:
        await process.said("^tunnels on")
        assert await asked(process) == "captured 10.1.2.3:80"
        left = net.rules()
        process.send(signal.SIGKILL)
    assert net.rules() == left != []
    async with krun(environ, *net.app("10.1.2.3")) as process:
        await process.said("^tunnels on")
        assert await asked(process) == "captured 10.1.2.3:80"
        assert net.rules() == left
        process.send(signal.SIGTERM)
        await process.ended()
    assert net.rules() == []


@pytest.mark.parametrize("left", ["KRUN_OUTPUT", "KRUN_ISTIO ISTIO_OUTPUT"])
async def test_rules_that_nobody_holds_do_not_capture_the_next_krun(net: CapturedNetwork, left: str) -> None:
    """Krun's own, and those that pilot-agent has made for it."""
    for chain in left.split():
        await run("iptables", "-t", "nat", "-N", chain)
    await run("iptables", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", left.split()[-1])
    plain = {"HBONE_INBOUND": "none", "HBONE_LISTEN": "127.0.0.1:0", "HBONE_LOG_FORMAT": "json"}
    async with krun({**plain, "HBONE_CAPTURE": "none"}, "true") as process:
        await process.said("^removed [12] chains of iptables, which a krun that was killed has left$")
        await process.ended()
    assert net.rules() == []


async def test_the_rules_of_a_krun_that_runs_stay(net: CapturedNetwork, environ: dict[str, str]) -> None:
    async with krun(environ, *net.app("10.1.2.3")) as process:
        await process.said("^tunnels on")
        there = net.rules()
        plain = {"HBONE_INBOUND": "none", "HBONE_LISTEN": "127.0.0.1:0"}
        async with krun(plain, "true") as other:
            await other.ended()
        assert net.rules() == there != []


async def test_the_rules_of_an_istio_init_stay(net: CapturedNetwork) -> None:
    """Which has run in the same pod."""
    for rule in ("-N ISTIO_OUTPUT", "-A OUTPUT -p tcp --dport 7 -j ISTIO_OUTPUT", "-N KRUN_OUTPUT"):
        await run("sh", "-c", f"iptables -t nat {rule}")
    async with krun({"HBONE_INBOUND": "none", "HBONE_LISTEN": "127.0.0.1:0"}, "true") as process:
        await process.ended()
    assert net.rules() == ["-N ISTIO_OUTPUT", "-A OUTPUT -p tcp -m tcp --dport 7 -j ISTIO_OUTPUT"]


async def test_a_start_that_fails_removes_them(net: CapturedNetwork, environ: dict[str, str]) -> None:
    async with krun({**environ, "HBONE_ROOTS": "/nowhere"}, "true") as process:
        await process.said("^outbound traffic: iptables")
        code, _, told = await process.ended()
    assert (code, "/nowhere" in told) == (EXIT_UNAVAILABLE, True)
    assert net.rules() == []


async def test_what_fails_at_the_end_leaves_no_rules(
    net: CapturedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(from_env({}), [], {}, AccessLog(sys.stderr, "text", "krun"))
    capture = Capture(from_env({}).capture, os.environ["PATH"])
    await capture.start("pilot-agent", Path("/bin/false"))
    assert net.rules() != []
    monkeypatch.setattr(agent, "_capture", capture)

    async def fails() -> None:
        raise OSError("no such process")

    monkeypatch.setattr(agent, "_stop_app", fails)
    with pytest.raises(OSError, match="no such process"):
        await agent._close()
    assert net.rules() == []


async def test_without_iptables_the_app_has_a_proxy(net: CapturedNetwork, environ: dict[str, str]) -> None:
    told = {**environ, "HBONE_CAPTURE": "proxy", "GCE_METADATA_HOST": "127.0.0.9:80"}
    async with krun(told, "sh", "-c", "echo $http_proxy $HTTP_PROXY $NO_PROXY") as process:
        await process.said(r"^outbound traffic: proxy \(HBONE_CAPTURE=proxy\)$")
        proxy, again, direct = (await asked(process)).split()
        assert proxy == again == "http://127.0.0.1:15007"
        assert {"localhost", "127.0.0.1", "169.254.169.254", "127.0.0.9"} < set(direct.split(","))
    assert net.rules() == []


async def test_nobody_captures_without_pilot_agent(net: CapturedNetwork) -> None:
    environ = {"HBONE_CAPTURE": "iptables", "HBONE_INBOUND": "none", "HBONE_LOG_FORMAT": "text"}
    async with krun(environ, "true") as process:
        code, _, told = await process.ended()
    assert code == EXIT_UNAVAILABLE
    assert told.splitlines()[-1].startswith(
        "krun: HBONE_CAPTURE=iptables: the mTLS end is none, and only Envoy"
    )


# By hand.


async def by_hand(*words: str, **environ: str) -> tuple[int, str, str]:
    async with krun(environ, "capture", *words) as process:
        return await process.ended()


async def test_rules_in_a_person_s_hand(net: CapturedNetwork, environ: dict[str, str]) -> None:
    plain = {"OUTBOUND_IP_RANGES_INCLUDE": "203.0.113.0/24"}
    for _ in range(2):
        assert await by_hand("apply", **plain) == (
            EXIT_OK,
            "applied by krun: KRUN_OUTPUT, KRUN_REDIRECT\n",
            "",
        )
    assert net.ask("203.0.113.7") == "captured 203.0.113.7:80"
    assert await by_hand("remove") == (EXIT_OK, "removed 2 chains\n", "")
    assert await by_hand("remove") == (EXIT_OK, "there were none\n", "")
    assert net.ask("203.0.113.7") == "world"
    code, text, _ = await by_hand("print", **plain)
    assert (code, text.splitlines()[:2]) == (EXIT_OK, ["# iptables-restore --noflush --wait 5", "*nat"])
    code, _, _ = await run("sh", "-c", f"echo '{text}' | iptables-restore --noflush --wait 5")
    assert code == 0
    assert net.ask("203.0.113.7") == "captured 203.0.113.7:80"
    _, text, _ = await by_hand("print", HBONE_PILOT_AGENT=environ["HBONE_PILOT_AGENT"])
    assert text.startswith(f"{environ['HBONE_PILOT_AGENT']} istio-iptables -m REDIRECT -b '' -p 15001 ")


@pytest.mark.parametrize("words", [(), ("list",), ("print", "apply")])
async def test_other_words(words: tuple[str, ...]) -> None:
    told = "krun: krun capture print|apply|remove; an app of that name: krun -- capture\n"
    assert await by_hand(*words) == (EXIT_USAGE, "", told)
