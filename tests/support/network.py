"""What tests take from the machine's network: ports of loopback, and whether there is IPv6."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path

import pytest

LEAST_PORT = 20_000
"""Below are the ports of well-known services, our own among them."""

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
"""Marks a test that needs an IPv6 address of loopback."""


@contextmanager
def unanswering(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that neither accepts nor refuses: the queue of its listener is full."""
    with ExitStack() as sockets:
        listener, *waiting = [sockets.enter_context(socket.socket()) for _ in range(4)]
        listener.bind((host, 0))
        listener.listen(0)
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def _share() -> Iterator[int]:
    """The ports that this process gives out, in turn, from a random one on. Each worker of a run has ports of
    its own. Chosen at random from the same ones, two were the same now and then."""
    try:
        most = int(_RANGE.read_text().split()[0])
    except OSError:
        return
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = range(LEAST_PORT, most)[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    if share:
        begin = random.randrange(len(share))
        yield from cycle([*share[begin:], *share[:begin]])


_own_ports = _share()


def free_port() -> int:
    """A loopback port that nobody has, for programs that cannot choose one themselves.

    It is none of those that the kernel gives to whoever asks for any (ip(7), ip_local_port_range), and none
    that another worker of this run is given: until the program has it nobody else gets it, however much goes
    on on the machine.
    """
    for port in islice(_own_ports, 100):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port as `free_port` has it, on which nobody listens and which nobody else is given until the block
    ends. The test itself may listen on it in between, as asyncio does (SO_REUSEADDR)."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", free_port()))
        yield holder.getsockname()[1]


def closed_port() -> int:
    """A loopback port on which nobody listens."""
    return free_port()
