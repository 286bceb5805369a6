"""The two ends of a captured network: `python -m tests.support.captured_ends envoy|world`.

With Python's own modules only: both are started for every test that has such a network.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import subprocess
import sys
from contextlib import suppress

NAME_SERVER = "10.55.0.53"

ADDRESSES = (NAME_SERVER, "10.1.2.3", "10.9.1.1", "203.0.113.7", "169.254.169.254", "fd99::1")
"""Of the world."""

WORLD_PORTS = (53, 80, 9000, 15008, 15009)
OUTBOUND, DNS, READY, INBOUND_MTLS = 15001, 15053, 15031, 15003

PROXY = 1337
"""Envoy's user and pilot-agent's."""

_SO_ORIGINAL_DST = 80
"""linux/netfilter_ipv4.h; the same number for IPv6."""


def ip(*commands: str) -> None:
    """Runs ip(8) with each of them."""
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


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
    ip("link set lo up", "link set out1 up", "addr add 10.55.0.2/16 dev out1")
    ip("addr add fd55::2/64 dev out1 nodad", "route add default via 10.55.0.1")
    for address in ADDRESSES:
        ip(f"addr add {address} dev lo{' nodad' if ':' in address else ''}")
    _serve(dict.fromkeys(WORLD_PORTS, "world"), ("0.0.0.0", "::"))


if __name__ == "__main__":
    os.setpgid(0, 0)
    _main(sys.argv[1])
