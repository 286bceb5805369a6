"""A TLS client of pyOpenSSL's: unlike curl, s_client and Python's ssl it can end its own direction only."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from OpenSSL import SSL

from hbone.demo.mesh import SNI
from shared.address import Address
from tests.support.tls_client import blocking
from tests.support.world import PATIENCE_S, Identity

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Mesh(Protocol):
    """hgate, and a client of it."""

    @property
    def gateway(self) -> Address: ...

    @property
    def caller(self) -> Identity: ...


@contextmanager
def connected(world: Mesh) -> Iterator[SSL.Connection]:
    """A connection to hgate, its handshake with the workload done; every read and write has a deadline."""
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.load_verify_locations(str(world.caller.roots))
    context.set_verify(SSL.VERIFY_PEER, lambda *arguments: bool(arguments[-1]))
    context.use_certificate_chain_file(str(world.caller.certificates))
    context.use_privatekey_file(str(world.caller.key))
    with blocking(context, world.gateway, SNI, patience_s=PATIENCE_S) as connection:
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


def reset_on_close(sock: socket.socket | SSL.Connection) -> None:
    """Makes the end of a connection an RST (socket(7), SO_LINGER)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
