"""Listening sockets that are given up without losing a client.

The kernel deals new connections out to all sockets of a port (SO_REUSEPORT) and never moves one that it has
dealt. So closing a socket resets those who wait in its queue to be accepted, and those whose handshake is
under way. Its end is therefore, in this order:

1. If somebody else listens on the port, a filter drops new SYNs that come to this socket. Their clients send
   them again after a second (RFC 6298 section 2), when the kernel has only the others to choose from.
2. Handshakes that were under way have `HANDSHAKES_S` to complete, and are accepted as usual.
3. The queue is accepted until it is empty; then the socket is closed.

Nobody is reset by that. Without anybody else on the port (1) and (2) are left out: new clients would only be
refused a second later. With net.ipv4.tcp_migrate_req=1 Linux moves the queue itself; that is root's to set.
"""

from __future__ import annotations

import array
import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.address import Address
from shared.listen import BACKLOG, bound_address
from shared.tasks import spawn

log = logging.getLogger("hbone.listen")

HANDSHAKES_S = 0.25
"""For handshakes that are under way: a round trip to the other side of the world, well below the second after
which a client sends a SYN again."""

MAX_QUEUED = 2 * BACKLOG
"""Connections taken out of a closing socket: the whole queue, and what comes meanwhile. A flood must not keep
it open for ever."""

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER (socket(7)); the socket module does not name it

_DROP_SYNS = (
    # Classic BPF; a segment begins with its TCP header. Code, jump if true, jump if false, value.
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x54, 0, 0, 0x12),  # and it with SYN | ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # accept
)

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


async def close_listening(
    servers: Sequence[asyncio.Server], factory: Callable[[], asyncio.BaseProtocol], *, siblings: int = 1
) -> None:
    """Closes `servers`; those who wait to be accepted are given to protocols of `factory`. `siblings`
    processes that end with us listen on the same ports, this one included."""
    shared = [server for server in servers if listening_on(bound_address(server)) > siblings]
    for server in shared:
        for pseudo in server.sockets:
            _drop_syns(pseudo.dup())
    if shared:
        await asyncio.sleep(HANDSHAKES_S)
    await asyncio.gather(*(_close_empty(server, factory) for server in servers))


async def _close_empty(server: asyncio.Server, factory: Callable[[], asyncio.BaseProtocol]) -> None:
    bound = bound_address(server)
    sockets = [pseudo.dup() for pseudo in server.sockets]
    server.close()  # the loop accepts no more; the sockets live on in ours
    waiting: list[socket.socket] = []
    for sock in sockets:
        with sock:
            waiting += _queue(sock)
    loop = asyncio.get_running_loop()
    await asyncio.gather(
        *(spawn(loop.connect_accepted_socket(factory, sock), name="take from the queue") for sock in waiting),
        return_exceptions=True,  # a client that has gone meanwhile
    )
    log.info("no longer listening on %s", bound)


def listening_on(address: Address, proc: Path = Path("/proc/net")) -> int:
    """How many sockets of all processes listen on exactly this IP address and port; 0 if nobody can tell."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    packed = socket.inet_pton(family, address.host.partition("%")[0])
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]  # each in the host's byte order
    wanted = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address.port:04X}"
    count = 0
    try:
        with (proc / ("tcp6" if family is socket.AF_INET6 else "tcp")).open(encoding="ascii") as table:
            next(table, None)
            for line in table:
                _, local, _, state, *_ = line.split()
                if state != _LISTENING:
                    break  # listening sockets stand first, and there may be a million others
                count += local == wanted
    except OSError:
        return 0
    return count


def _drop_syns(sock: socket.socket) -> None:
    """Makes the kernel drop segments that would open new connections; takes `sock`, a duplicate, over.

    What is accepted later inherits the filter, which lets everything pass that an open connection is sent.
    """
    code = array.array("B", b"".join(struct.pack("HBBI", *step) for step in _DROP_SYNS))
    address, _ = code.buffer_info()
    with sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(_DROP_SYNS), address))
        except OSError as error:
            log.info("clients that connect right now may be reset: no socket filter: %s", error.strerror)


def _queue(listening: socket.socket) -> list[socket.socket]:
    """Who waits to be accepted."""
    waiting: list[socket.socket] = []
    for _ in range(MAX_QUEUED):
        try:
            sock, _ = listening.accept()
        except BlockingIOError:
            break
        except ConnectionAbortedError:
            continue  # this one has gone; the next may be there (accept(2))
        except OSError as error:
            log.warning("clients that wait to be accepted are reset: %s", error.strerror)
            break
        sock.setblocking(False)
        waiting.append(sock)
    return waiting
