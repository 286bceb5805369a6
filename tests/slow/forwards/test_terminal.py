"""The line of rates, on a terminal and on none."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.path.app import read
from tests.support.forwards import connected, way
from tests.support.world import World


def test_rates_on_a_terminal(world: World, tmp_path: Path) -> None:
    shown = on_terminal(world, tmp_path, "xterm")
    assert re.search(rb"\r1 open, [\d.]+ [kM]?B/s to the container \([\d.]+ MB\), ", shown)
    last = shown.replace(b"\r\n", b"\n").rpartition(b"\n")[2]
    assert re.fullmatch(rb"\r.*\r *\r", last)  # it is cleared


def test_no_rates_on_a_dumb_terminal(world: World, tmp_path: Path) -> None:
    assert b" open, " not in on_terminal(world, tmp_path, "dumb")


def on_terminal(world: World, tmp_path: Path, kind: str) -> bytes:
    """What stands on a terminal of this kind after two seconds and a megabyte."""
    path = tmp_path / "a.sock"
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "hbone", "forward", *map(str, way(world)), "-L", f"{path}:ECHO"]
    shown = b""
    with subprocess.Popen(arguments, stderr=theirs, env={**os.environ, "TERM": kind}) as process:
        os.close(theirs)
        with connected(path) as client:
            body = bytes(1_000_000)
            with ThreadPoolExecutor(1) as threads:
                sending = threads.submit(client.sendall, body)
                assert len(read(client, len(body))) == len(body)
                sending.result()
            end = time.monotonic() + 2.2  # the line comes once a second
            while (left := end - time.monotonic()) > 0:
                if select.select([ours], [], [], left)[0]:
                    shown += os.read(ours, 4096)
        process.terminate()
        with contextlib.suppress(OSError):  # Linux says EIO once nobody has the other end
            while data := os.read(ours, 4096):
                shown += data
    os.close(ours)
    return shown
