"""The addresses that clients connect to: opened, changed by a reload, and given up without losing a client.

Owned here: the listening sockets of `listen:`, side by side with those of other processes on the same port
(SO_REUSEPORT), and their end. What becomes of an accepted connection is the factory's matter.

The kernel deals new connections out to all sockets of a port and never moves one that it has dealt. So
closing a socket resets those who wait in its queue to be accepted, and those whose handshake is under way.
Its end is therefore, in this order:

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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shared.errors import HboneError, UnavailableError
from shared.net.address import Address
from shared.net.listen import BACKLOG, bound_address, listen
from shared.tasks import spawn

log = logging.getLogger("hbone.gateway")

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
    (0x06, 0, 0, 0xFFFFFFFF),  # take
)

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp

Key = tuple[Address, int]
"""An address as the file has it, and which of several equal ones it is: port 0 may stand there twice."""


class Listeners:
    """The listening sockets. `factory` makes the protocol of each accepted connection."""

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        siblings: int = 1,
        ports: Mapping[Key, Address] | None = None,
        purpose: str = "listening",
    ) -> None:
        """`siblings` processes listen on these addresses together, this one included; `ports` are those that
        they have settled on in place of port 0. `purpose` is what the log says of it."""
        self._factory = factory
        self._siblings = siblings
        self._ports = ports or {}
        self._purpose = purpose
        self._servers: dict[Key, asyncio.Server] = {}
        self._is_over = False

    async def open(self, addresses: Iterable[Address]) -> None:
        """Listens on those of `addresses` that are not open yet: on all of them or, if one cannot be had, on
        none. Raises UnavailableError, which names it, or says that everything has been closed for good.
        """
        opened: dict[Key, asyncio.Server] = {}
        try:
            for key in keys(addresses):
                if key not in self._servers:
                    address = self._ports.get(key, key[0])
                    opened[key] = await listen(address, self._factory, purpose="listen", shared=True)
            if self._is_over:
                raise UnavailableError(f"{self._purpose}: the gateway stops")
        except HboneError:
            for server in opened.values():
                server.close()
            raise
        self._servers |= opened
        for server in opened.values():
            bound = bound_address(server)
            log.info("%s on %s", self._purpose, bound, extra={"address": str(bound)})
            if listening_on(bound) > self._siblings:
                log.info("another process listens on %s too: both take connections until one ends", bound)

    async def keep_only(self, addresses: Iterable[Address]) -> None:
        """Closes what is open beside `addresses`, without losing a client."""
        wanted = set(keys(addresses))
        await self._close([key for key in self._servers if key not in wanted])

    async def close(self) -> None:
        """Closes everything for good, without losing a client."""
        self._is_over = True
        await self._close(list(self._servers))

    def abort(self) -> None:
        """Closes everything for good, now."""
        self._is_over = True
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    @property
    def bound(self) -> list[Address]:
        """Where it listens, one address for each given."""
        return [bound_address(server) for server in self._servers.values()]

    def have_company(self) -> bool:
        """Whether on each address somebody else listens too: a successor, who takes who comes."""
        servers = self._servers.values()
        return bool(servers) and all(
            listening_on(bound_address(server)) > self._siblings for server in servers
        )

    async def _close(self, chosen: Iterable[Key]) -> None:
        servers = [self._servers.pop(key) for key in chosen]
        shared = [server for server in servers if listening_on(bound_address(server)) > self._siblings]
        for server in shared:
            for pseudo in server.sockets:
                _drop_syns(pseudo.dup())
        if shared:
            await asyncio.sleep(HANDSHAKES_S)
        await asyncio.gather(*(self._close_empty(server) for server in servers))

    async def _close_empty(self, server: asyncio.Server) -> None:
        bound = bound_address(server)
        sockets = [pseudo.dup() for pseudo in server.sockets]
        server.close()  # the loop accepts no more; the sockets live on in ours
        waiting: list[socket.socket] = []
        for sock in sockets:
            with sock:
                waiting += _queue(sock)
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(
                spawn(loop.connect_accepted_socket(self._factory, sock), name="take from the queue")
                for sock in waiting
            ),
            return_exceptions=True,  # a client that has gone meanwhile
        )
        log.info("no longer listening on %s", bound)


def keys(addresses: Iterable[Address]) -> list[Key]:
    """The addresses, each with its number among equal ones."""
    seen: Counter[Address] = Counter()
    found: list[Key] = []
    for address in addresses:
        found.append((address, seen[address]))
        seen[address] += 1
    return found


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
