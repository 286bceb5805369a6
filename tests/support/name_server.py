"""A name server (RFC 1035) on UDP and TCP that answers from a table, late, never or wrongly, as it is told.

It counts what it was asked, and lives in the event loop of the test.
"""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar, cast

from shared.tasks import spawn
from tests.support.tcp_peer import PATIENCE_S

T = TypeVar("T")

A, AAAA = 1, 28
TYPES = {A: "A", AAAA: "AAAA"}

NOERROR, SERVFAIL, NXDOMAIN, REFUSED = 0, 2, 3, 5

_HEADER = struct.Struct("!6H")
_RECORD = struct.Struct("!3HLH")
_RESPONSE, _TRUNCATED, _RECURSION = 0x8000, 0x0200, 0x0180
_TO_QUESTION = 0xC00C  # RFC 1035 section 4.1.4: the name at byte 12


@dataclass(frozen=True)
class Query:
    """One question."""

    id: int
    name: str
    """Absolute, in lower case, with its dot."""
    type: str
    """A or AAAA, or a number."""
    transport: str
    """udp or tcp."""
    peer: tuple[str, int]
    """Who asks."""
    question: bytes = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """What is said to a question; a fault makes another one of the right one."""

    code: int = NOERROR
    addresses: tuple[str, ...] = ()
    delay_s: float | None = 0.0
    """None: never."""
    truncated: bool = False
    id_shift: int = 0
    raw: bytes | None = None
    """These bytes instead."""
    ttl_s: int = 30

    def encode(self, query: Query) -> bytes:
        """The message."""
        if self.raw is not None:
            return self.raw
        flags = _RESPONSE | _RECURSION | self.code | (_TRUNCATED if self.truncated else 0)
        addresses = () if self.truncated else self.addresses
        packed = [ipaddress.ip_address(address) for address in addresses]
        head = _HEADER.pack((query.id + self.id_shift) % 65536, flags, 1, len(packed), 0, 0)
        records = [
            _RECORD.pack(_TO_QUESTION, A if ip.version == 4 else AAAA, 1, self.ttl_s, len(ip.packed))
            + ip.packed
            for ip in packed
        ]
        return head + query.question + b"".join(records)


Fault = Callable[[Query, Answer], Answer]


def late(seconds: float) -> Fault:
    """The right answer after so long."""
    return lambda _, answer: replace(answer, delay_s=seconds)


def never(query: Query, answer: Answer) -> Answer:
    """None at all."""
    return replace(answer, delay_s=None)


def failing(code: int) -> Fault:
    """This code."""
    return lambda _, answer: Answer(code, delay_s=answer.delay_s)


def empty(query: Query, answer: Answer) -> Answer:
    """The name exists, and has no such address."""
    return Answer()


def truncated(query: Query, answer: Answer) -> Answer:
    """Too long for UDP; whole over TCP."""
    return replace(answer, truncated=query.transport == "udp")


def wrong_id(query: Query, answer: Answer) -> Answer:
    """The answer to another question."""
    return replace(answer, id_shift=1)


def garbage(query: Query, answer: Answer) -> Answer:
    """The right number, and then nothing that is DNS."""
    return replace(answer, raw=struct.pack("!H", query.id) + b"\xff" * 40)


def only(type_: str, fault: Fault) -> Fault:
    """`fault` for questions of this type, A or AAAA."""
    return lambda query, answer: fault(query, answer) if query.type == type_ else answer


def both(first: Fault, second: Fault) -> Fault:
    """One after the other."""
    return lambda query, answer: second(query, first(query, answer))


class NameServer:
    """Made by `name_server`."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, ...]] = {}
        """Addresses by pattern (`*` takes all) of absolute names; what none takes is NXDOMAIN."""
        self.faults: dict[str, Fault] = {}
        """By pattern; the first that takes a name counts."""
        self.ttl_s = 30
        self.asked: list[Query] = []
        self.port = 0
        self._heard = asyncio.Event()

    def questions(self, name: str) -> list[str]:
        """The types that it was asked for this absolute name, in order."""
        return [query.type for query in self.asked if query.name == name]

    @property
    def asked_names(self) -> list[str]:
        """The names that it was asked for, each once, in order."""
        return list(dict.fromkeys(query.name for query in self.asked))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition` holds, which is looked at whenever it was asked something."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    def _respond(
        self, message: bytes, transport: str, peer: tuple[str, int], send: Callable[[bytes], None]
    ) -> None:
        query = _read(message, transport, peer)
        self.asked.append(query)
        self._heard.set()
        answer = self._answer(query)
        if answer.delay_s is None:
            return
        if not answer.delay_s:
            send(answer.encode(query))
            return
        asyncio.get_running_loop().call_later(answer.delay_s, send, answer.encode(query))

    def _answer(self, query: Query) -> Answer:
        addresses = _first(self.names, query.name)
        version = {"A": 4, "AAAA": 6}.get(query.type)
        answer = Answer(NXDOMAIN)
        if addresses is not None:
            of_type = tuple(one for one in addresses if ipaddress.ip_address(one).version == version)
            answer = Answer(addresses=of_type, ttl_s=self.ttl_s)
        fault = _first(self.faults, query.name)
        return answer if fault is None else fault(query, answer)

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                message = await reader.readexactly(size)
                peer = writer.get_extra_info("peername")[:2]
                self._respond(
                    message, "tcp", peer, lambda told: writer.write(len(told).to_bytes(2, "big") + told)
                )
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.transport.abort()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        def send(message: bytes) -> None:
            if not self._transport.is_closing():
                self._transport.sendto(message, addr)

        self._server._respond(data, "udp", addr[:2], send)


@asynccontextmanager
async def name_server(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[NameServer]:
    """One that listens there, until the block ends; port 0: any free one."""
    loop = asyncio.get_running_loop()
    server = NameServer()
    tcp = await asyncio.start_server(
        lambda reader, writer: spawn(server._serve_tcp(reader, writer), name="DNS over TCP"), host, port
    )
    server.port = tcp.sockets[0].getsockname()[1]
    udp, _ = await loop.create_datagram_endpoint(lambda: _Udp(server), local_addr=(host, server.port))
    try:
        yield server
    finally:
        udp.close()
        tcp.close()


def _read(message: bytes, transport: str, peer: tuple[str, int]) -> Query:
    number, *_ = _HEADER.unpack_from(message)
    at, labels = _HEADER.size, []
    while size := message[at]:
        labels.append(message[at + 1 : at + 1 + size].decode().lower())
        at += 1 + size
    end = at + 5
    kind = int.from_bytes(message[at + 1 : at + 3], "big")
    name = "".join(f"{label}." for label in labels)
    return Query(number, name, TYPES.get(kind, str(kind)), transport, peer, message[_HEADER.size : end])


def _first(patterns: Mapping[str, T], name: str) -> T | None:
    return next((found for pattern, found in patterns.items() if fnmatchcase(name, pattern)), None)
