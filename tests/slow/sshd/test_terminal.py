"""Shells on a terminal, as a person in tmux has them."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.ssh_clients import Client, Log, running
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_program


class Tmux:
    """A terminal with a program in it."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def do(self, *words: str) -> str:
        command = [find_program("tmux"), "-S", str(self._socket), "-f", "/dev/null", *words]
        done = await asyncio.to_thread(
            subprocess.run, command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    async def type(self, *keys: str) -> None:
        await self.do("send-keys", *keys)

    async def shows(self, pattern: str) -> re.Match[str]:
        """Waits until the screen shows it."""
        screen = ""
        try:
            async with asyncio.timeout(8):
                while True:
                    screen = await self.do("capture-pane", "-p")
                    if found := re.search(pattern, screen, re.MULTILINE):
                        return found
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"no {pattern!r} in:\n{screen}") from None


@asynccontextmanager
async def terminal(client: Client, *command: str) -> AsyncIterator[Tmux]:
    tmux = Tmux(client.folder / f"tmux{len(list(client.folder.iterdir()))}")
    words = [find_program("ssh"), "-F", str(client.config), "box", *command]
    # The shell stays behind when ssh has ended.
    await tmux.do(
        "new-session", "-d", "-x", "90", "-y", "25", f"{shlex.join(words)}; echo ended with $?; cat"
    )
    try:
        yield tmux
    finally:
        await tmux.do("kill-server")


@pytest.fixture(autouse=True)
def prompt(client: Client) -> None:
    """The home is a new one, without a startup file but this."""
    (client.folder / "home/.profile").write_text("PS1='there> '\n")
    (client.folder / "home/.bash_profile").write_text("PS1='there> '\n")


async def test_a_shell_with_jobs_and_a_size(client: Client, log: Log) -> None:
    async with terminal(client) as tmux:
        await tmux.shows(r"^there>")
        await tmux.type("echo $TERM; stty size; tty", "Enter")
        await tmux.shows(r"^(tmux|screen)(-256color)?\n25 90\n/dev/pts/\d+$")
        await tmux.do("resize-window", "-x", "70", "-y", "20")
        await tmux.type("clear; stty size", "Enter")
        await tmux.shows(r"^20 70$")
        await tmux.type("clear; echo begun; sleep 1000", "Enter")
        await tmux.shows(r"^begun$")
        await tmux.type("C-z")
        await tmux.shows(r"Stopped")
        await tmux.type("clear; jobs; fg", "Enter")
        await tmux.shows(r"Stopped.*\n(.*; )?sleep 1000$")
        await tmux.type("C-c")
        await tmux.type("echo code $?", "Enter")
        await tmux.shows(r"^code 130$")
        await tmux.type("exit 5", "Enter")
        await tmux.shows(r"ended with 5")
    assert "shell" in await log.said("shell ends")


async def test_no_echo_and_raw_keys(client: Client) -> None:
    async with terminal(client) as tmux:
        await tmux.shows(r"^there>")
        await tmux.type("read -s -p 'secret: ' it; echo; echo got $it", "Enter")
        await tmux.shows(r"^secret:$")
        await tmux.type("hidden", "Enter")
        found = await tmux.shows(r"^secret:(.*)\ngot hidden$")
        assert found[1] == ""
        await tmux.type("clear; echo begun; cat", "Enter")
        await tmux.shows(r"^begun$")
        await tmux.type("ab", "BSpace", "c", "Enter", "C-d")
        await tmux.shows(r"^ac\nac$")


async def test_a_command_with_a_terminal(client: Client) -> None:
    async with terminal(
        client, "-t", "stty size; test -t 0 && test -t 1 && test -t 2 && echo yes; exit 3"
    ) as tmux:
        await tmux.shows(r"25 90\nyes")
        await tmux.shows(r"ended with 3")


async def test_a_terminal_that_goes_takes_its_jobs_along(client: Client) -> None:
    async with terminal(client) as tmux:
        await tmux.shows(r"^there>")
        await tmux.type("sleep 1001 & echo pid $!", "Enter")
        pid = int((await tmux.shows(r"^pid (\d+)$"))[1])
        os.kill(pid, 0)
    await until_gone(pid)


async def test_tmux_over_there_survives(client: Client) -> None:
    """And is there for the next session: it is a daemon."""
    far = f"{find_program('tmux')} -S {client.folder}/far -f /dev/null"
    async with terminal(client, "-t", f"{far} new-session 'echo in the far tmux; cat'") as tmux:
        await tmux.shows(r"in the far tmux")
    async with terminal(client, "-t", f"{far} attach") as tmux:
        await tmux.shows(r"in the far tmux")
        await tmux.type("still", "Enter")
        await tmux.shows(r"^still\nstill$")
    assert (await client.ssh(f"{far} kill-server")).code == 0


async def test_a_flood_that_nobody_reads_is_held_back(client: Client) -> None:
    """A program that writes without end, for a client that does not read: it stops, and others go on."""
    async with running(client, "ssh", "-tt", "box", "echo pid $$; exec yes") as process:
        assert process.stdout is not None
        pid = int(re.search(rb"pid (\d+)", await process.stdout.readuntil(b"\n"))[1])  # type: ignore[index]
        before = -1
        async with asyncio.timeout(PATIENCE_S):
            while (now := written(pid)) != before or now == 0:
                before = now
                await asyncio.sleep(0.5)
        assert now < 32 << 20  # windows, and what pipes and sockets hold
        assert (await client.ssh("echo others go on")).out == b"others go on\n"
        process.kill()
        await process.wait()
        await until_gone(pid)


def written(pid: int) -> int:
    """Bytes that a process has written."""
    told = Path(f"/proc/{pid}/io").read_text()
    return int(re.search(r"wchar: (\d+)", told)[1])  # type: ignore[index]


async def until_gone(pid: int) -> None:
    from tests.slow.sshd.test_commands import gone

    await gone(pid)
