"""`hbone demo` and its signals; the story that it tells is in tests/path/test_demo.py."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from pathlib import Path

import pytest

from hbone.demo import real_mesh
from shared.errors import (
    EXIT_OK,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    UnavailableError,
)
from tests.hbone.commands import Command, Ended, output_of, running

BUILTIN = ("demo", "--inbound", "builtin")
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


def children_of(command: Command) -> list[int]:
    return [
        int(word) for word in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    ]


def are_gone(pids: list[int]) -> bool:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return len(pids) == 3


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, EXIT_SIGTERM), (signal.SIGINT, EXIT_SIGINT), (signal.SIGHUP, 128 + signal.SIGHUP)],
)
async def test_a_signal_leaves_no_process_behind(number: signal.Signals, code: int) -> None:
    async with running(*BUILTIN, environ=UNBUFFERED) as demo:
        assert (await demo.line()).startswith("up after ")
        pids = children_of(demo)
        demo.signal(number)
        ended = await demo.ended()
        assert (ended.code, ended.stderr) == (code, "")
        assert are_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_keep_runs_until_a_signal(number: signal.Signals) -> None:
    async with running(*BUILTIN, "--keep", environ=UNBUFFERED) as demo:
        while not (await demo.line()).startswith("running until ^C; logs in "):
            pass
        assert (await demo.line()).startswith("curl --http1.1 --cacert ")
        pids = children_of(demo)
        demo.signal(number)
        assert await demo.ended() == Ended(EXIT_OK, b"demo: everything arrived as it should\n", "\n")
        assert are_gone(pids)


async def test_with_mesh_it_says_in_one_line_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ = {"PATH": str(tmp_path), "HBONE_TEST_CACHE": str(tmp_path)}
    ended = await output_of("demo", "--mesh", environ=environ)
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (EXIT_UNAVAILABLE, b"", 1)
    assert ended.stderr.startswith("hbone demo --mesh: ")
    for what in ("etcd is missing", "Go 1.26 or newer is missing"):
        assert what in ended.stderr
    monkeypatch.setattr(real_mesh, "CHECKOUT", tmp_path)
    with pytest.raises(UnavailableError, match="in hbone's repository only: run it from a checkout"):
        real_mesh.run(Namespace())


async def test_pilot_agent_takes_a_mesh() -> None:
    ended = await output_of("demo", "--inbound", "pilot-agent")
    assert (ended.code, ended.stderr.endswith("there is no istiod in this one\n")) == (EXIT_USAGE, True)


async def test_a_world_that_does_not_come_up() -> None:
    ended = await output_of(*BUILTIN, environ={"HBONE_LOG_LEVEL": "loud"})
    assert (ended.code, ended.stdout) == (EXIT_UNAVAILABLE, b"")
    assert ended.stderr.startswith("hbone: krun ended with exit code 64; its last line: krun: ")
