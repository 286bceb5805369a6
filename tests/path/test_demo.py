"""`hbone demo` as a newcomer runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from shared.errors import EXIT_OK
from tests.path.programs import run
from tests.support.world import INBOUNDS, PATIENCE_S, find_envoy, find_program

HBONE = Path(sys.executable).with_name("hbone")


@pytest.mark.parametrize("inbound", INBOUNDS)
def test_the_demo_exits_0(inbound: str) -> None:
    if inbound == "envoy":
        find_envoy()
    done = run(HBONE, "demo", "--inbound", inbound)
    told = done.stdout.decode()
    assert (done.returncode, done.stderr) == (EXIT_OK, b""), told
    assert f"mTLS end: {inbound}" in told
    assert told.count("body intact (SHA-256)") == 2
    assert "demo: everything arrived as it should" in told


def test_what_is_kept_running_answers_the_printed_curl_line_and_ends_with_sigint() -> None:
    find_program("curl")
    command = (HBONE, "demo", "--inbound", "builtin", "--keep")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout and demo.stderr
            line = curl_line(demo.stdout)
            done = subprocess.run(line, shell=True, capture_output=True, timeout=PATIENCE_S)
            assert done.stdout == b"hello from the app, you asked for /hello\n"
            demo.send_signal(signal.SIGINT)
            assert demo.wait(PATIENCE_S) == EXIT_OK
            assert demo.stdout.read() == "demo: everything arrived as it should\n"
            assert demo.stderr.read() == "\n"
            assert subprocess.run(line, shell=True, capture_output=True, timeout=PATIENCE_S).returncode == 7
        finally:
            demo.kill()


def curl_line(output: IO[str]) -> str:
    """The line that the demo tells its user to try."""
    for line in output:
        if line.startswith("curl "):
            return line
    raise AssertionError("the demo ended without a curl line")
