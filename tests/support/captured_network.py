"""A network of a test's own with a way out: Envoy's and pilot-agent's ports within, and behind a wire a world
with some addresses. An answer says where a connection has come to.

`python -m tests.support.captured_network envoy|world` are the two ends.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.network_namespace import POD, NoNetworkError, network
from tests.support.world import find_program

OWN, OWN6 = "10.55.0.1", "fd55::1"
"""The addresses of the machine that the test is on."""

NAME_SERVER = "10.55.0.53"

ADDRESSES = (NAME_SERVER, "10.1.2.3", "10.9.1.1", "203.0.113.7", "169.254.169.254", "fd99::1")
"""Of the world."""

WORLD_PORTS = (53, 80, 9000, 15008, 15009)
OUTBOUND, DNS, READY, INBOUND_MTLS = 15001, 15053, 15031, 15003

PROXY = 1337
"""Envoy's user and pilot-agent's."""

_SO_ORIGINAL_DST = 80
"""linux/netfilter_ipv4.h; the same number for IPv6."""

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
            _ip(f"addr del {POD}/8 dev lo")  # all of 10.0.0.0/8 would be here
            _ip("link add out0 type veth peer name out1")
            _ip(f"link set out1 netns {world.pid}")
            _ip("link set out0 up", f"addr add {OWN}/16 dev out0", f"addr add {OWN6}/64 dev out0 nodad")
            _say(world)
            _ip("route add default via 10.55.0.2", "-6 route add default via fd55::2")
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
    command = [*before, sys.executable, "-m", "tests.support.captured_network", end]
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


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


# The two ends.


def _serve(ports: dict[int, str], hosts: tuple[str, ...]) -> None:
    """Answers every connection and question on these ports, for ever."""
    waiting = selectors.DefaultSelector()
    for port, answer in ports.items():
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                if kind == socket.SOCK_DGRAM and host == "0.0.0.0":
                    host = NAME_SERVER  # its answers have to be from the address that was asked
                made = socket.socket(family, kind)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind((host, port))
                if kind == socket.SOCK_STREAM:
                    made.listen()
                waiting.register(made, selectors.EVENT_READ, answer)
    print("serving", flush=True)
    while True:
        for key, _ in waiting.select():
            assert isinstance(key.fileobj, socket.socket)
            sock, answer = key.fileobj, key.data
            if sock.type == socket.SOCK_DGRAM:
                _, peer = sock.recvfrom(1000)
                sock.sendto(answer.encode(), peer)
                continue
            client, _ = sock.accept()
            with client, suppress(OSError):  # some only look whether somebody listens
                client.sendall((f"captured {_original(client)}" if answer == "captured" else answer).encode())
                client.shutdown(socket.SHUT_WR)
                client.settimeout(1)
                while client.recv(1000):
                    pass


def _original(client: socket.socket) -> str:
    """The address that a redirected connection was for."""
    if client.family == socket.AF_INET6:
        told = client.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, 28)
        return f"[{socket.inet_ntop(socket.AF_INET6, told[8:24])}]:{struct.unpack('!H', told[2:4])[0]}"
    told = client.getsockopt(socket.IPPROTO_IP, _SO_ORIGINAL_DST, 16)
    return f"{socket.inet_ntoa(told[4:8])}:{struct.unpack('!H', told[2:4])[0]}"


def _main(end: str) -> None:
    print("here", flush=True)
    sys.stdin.readline()
    if end == "envoy":
        os.setgid(PROXY)  # Istio's rules for DNS know its answers by that
        os.setuid(PROXY)
        answers = {OUTBOUND: "captured", DNS: "dns", READY: "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"}
        _serve(answers | {INBOUND_MTLS: "mtls"}, ("127.0.0.1", "::1"))
        return
    _ip("link set lo up", "link set out1 up", "addr add 10.55.0.2/16 dev out1")
    _ip("addr add fd55::2/64 dev out1 nodad", "route add default via 10.55.0.1")
    for address in ADDRESSES:
        _ip(f"addr add {address} dev lo{' nodad' if ':' in address else ''}")
    _serve(dict.fromkeys(WORLD_PORTS, "world"), ("0.0.0.0", "::"))


if __name__ == "__main__":
    os.setpgid(0, 0)
    _main(sys.argv[1])
