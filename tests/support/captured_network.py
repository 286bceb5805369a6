"""A network of a test's own with a way out: Envoy's and pilot-agent's ports within, and behind a wire a world
with some addresses. An answer says where a connection has come to.

`python -m tests.support.captured_network envoy|world` are the two ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.captured_ends import NAME_SERVER, ip
from tests.support.network_namespace import POD, NoNetworkError, network
from tests.support.world import find_program

OWN, OWN6 = "10.55.0.1", "fd55::1"
"""The addresses of the machine that the test is on."""

_CLIENT = """
import os, socket, sys
host, port, kind = sys.argv[1], int(sys.argv[2]), getattr(socket, sys.argv[3])
os.setgroups(())
os.setgid(int(sys.argv[5]))
os.setuid(int(sys.argv[4]))
with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind) as sock:
    sock.settimeout(20)
    sock.connect((host, port))
    sock.send(b"?")
    print(sock.recv(1000).decode())
"""


class CapturedNetwork:
    """Made by `captured_network`."""

    def ask(
        self, host: str, port: int = 80, *, kind: str = "SOCK_STREAM", user: int = 0, group: int = 0
    ) -> str:
        """Where a client's connection (or question, SOCK_DGRAM) comes to: `captured ADDRESS`, with the
        address that it was for, `dns`, or `world`."""
        command = [sys.executable, "-c", _CLIENT, *map(str, (host, port, kind, user, group))]
        ran = subprocess.run(command, capture_output=True, timeout=60, text=True)
        return ran.stdout.strip() or ran.stderr.strip().splitlines()[-1]

    def app(self, host: str) -> list[str]:
        """A command that asks as `ask` does, says what it was told on standard output, and stays until its
        parent ends."""
        with_its_parent = "import ctypes\nctypes.CDLL(None).prctl(1, 9)"  # PR_SET_PDEATHSIG, SIGKILL
        stays = f"{_CLIENT}\n{with_its_parent}\nsys.stdout.flush()\nimport time\ntime.sleep(60)\n"
        return [sys.executable, "-c", stays, host, "80", "SOCK_STREAM", "0", "0"]

    def rules(self, program: str = "iptables", table: str = "nat") -> list[str]:
        """What a program lists."""
        ran = subprocess.run([program, "-t", table, "-S"], capture_output=True, text=True, check=True)
        return [line for line in ran.stdout.splitlines() if not line.startswith("-P")]


@contextmanager
def captured_network(folder: Path) -> Iterator[CapturedNetwork]:
    """As `network`; skips the test where there can be none."""
    for program in ("ip", "iptables", "unshare"):
        find_program(program)
    ends: list[subprocess.Popen[bytes]] = []
    try:
        with network(folder) as made:
            made.resolv_conf.write_text(f"nameserver {NAME_SERVER}\n")
            world = _started("world", "unshare", "-n")
            ends.append(world)
            ip(f"addr del {POD}/8 dev lo")  # all of 10.0.0.0/8 would be here
            ip("link add out0 type veth peer name out1")
            ip(f"link set out1 netns {world.pid}")
            ip("link set out0 up", f"addr add {OWN}/16 dev out0", f"addr add {OWN6}/64 dev out0 nodad")
            _say(world)
            ip("route add default via 10.55.0.2", "-6 route add default via fd55::2")
            ends.append(envoy := _started("envoy"))
            _say(envoy)
            yield CapturedNetwork()
    except NoNetworkError as error:
        pytest.skip(str(error))
    finally:
        for end in ends:
            end.kill()
            end.communicate()


def _started(end: str, *before: str) -> subprocess.Popen[bytes]:
    command = [*before, sys.executable, "-m", "tests.support.captured_ends", end]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    return process


def _say(end: subprocess.Popen[bytes]) -> None:
    """Lets it go on, and waits until it serves."""
    assert end.stdin is not None and end.stdout is not None
    end.stdin.write(b"\n")
    end.stdin.flush()
    assert end.stdout.readline() == b"serving\n"
