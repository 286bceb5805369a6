"""A TLS client of pyOpenSSL's: unlike curl, s_client and Python's ssl it can end its own direction only."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from OpenSSL import SSL

from hbone.demo.mesh import SNI
from shared.address import Address
from shared.net.legs.tcp_end import RESET_ON_CLOSE
from tests.support.tls_client import blocking, read_to_the_end
from tests.support.world import PATIENCE_S, Identity


class Mesh(Protocol):
    """hgate, and a client of it."""

    @property
    def gateway(self) -> Address: ...

    @property
    def caller(self) -> Identity: ...


@contextmanager
def connected(world: Mesh) -> Iterator[SSL.Connection]:
    """A connection to hgate, its handshake with the workload done; every read and write has a deadline."""
    with connected_to(world.gateway, world.caller) as connection:
        yield connection


@contextmanager
def connected_to(gateway: Address, caller: Identity, *alpn: bytes) -> Iterator[SSL.Connection]:
    """The same, without the rest of the mesh; the client offers `alpn`, if anything."""
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.load_verify_locations(str(caller.roots))
    context.set_verify(SSL.VERIFY_PEER, lambda *arguments: bool(arguments[-1]))
    context.use_certificate_chain_file(str(caller.certificates))
    context.use_privatekey_file(str(caller.key))
    if alpn:
        context.set_alpn_protos(list(alpn))
    with blocking(context, gateway, SNI, patience_s=PATIENCE_S) as connection:
        yield connection


def says_back(connection: SSL.Connection, words: bytes) -> None:
    """Holds that a connection carries bytes both ways."""
    connection.sendall(words)
    assert connection.recv(100) == words


def serial_of(connection: SSL.Connection) -> int:
    """The serial number of the server's certificate."""
    certificate = connection.get_peer_certificate()
    assert certificate is not None
    return certificate.get_serial_number()


def another_serial(world: Mesh, known: list[int], greeting: bytes) -> int:
    """That of the server's certificate, once new connections see another one than those that are known.
    The app says `greeting` first."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with connected(world) as connection:
            assert connection.recv(100) == greeting
            serial = serial_of(connection)
            connection.shutdown()
            assert read_to_the_end(connection) == b""
        if serial not in known:
            return serial
    raise AssertionError(f"no new certificate within {PATIENCE_S} s")


def reset_on_close(sock: socket.socket | SSL.Connection) -> None:
    """Makes the end of a connection an RST (socket(7), SO_LINGER)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
