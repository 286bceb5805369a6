"""What of mTLS through a gateway needs no gateway. The rest is in tests/path and tests/slow/forwards."""

from __future__ import annotations

import socket

from hbone.forward.sni_gateway import PROBES, keep_alive


def test_the_kernel_asks_for_a_sign_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        with sock:
            keep_alive(sock, 15.0)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            told = [
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert told == [15, 5, PROBES]
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            keep_alive(sock, 0.1)  # the kernel counts whole seconds
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
