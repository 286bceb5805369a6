"""Runs the attacks of `floods.py` and `stalls.py` against a loopback port and says how each ended.

Bounded in count and time, and only ever connected to 127.0.0.0/8. A flood is over when the server has closed
the connection, whatever it said before.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hpack

from shared.tasks import spawn
from tests.support.floods import Flood
from tests.support.stalls import Stall

FLOOD_S = 5.0
"""After which an attack that nobody ends is given up."""

BATCH_BYTES = 16 << 10
"""Sent at a time: the answer is looked for between two."""

CONNECT_S = 10.0
READ_BYTES = 64 << 10

SMALL_BUFFER_BYTES = 4096
"""Of the kernel's, for who reads nothing: else it would take megabytes for us."""

LOOK_S = 1.0
"""Between two looks at the state of a connection that nobody reads."""

TCP_ESTABLISHED = "01"
"""In the kernel's list (proc_pid_net(5))."""

HEADERS, RST_STREAM, GOAWAY = 0x1, 0x3, 0x7
FRAME_HEADER_BYTES = 9


@dataclass(frozen=True, slots=True)
class End:
    """Which server, beside its port."""

    host: str = "127.0.0.1"
    """An IP address on loopback."""
    tls: ssl.SSLContext | None = None
    """None: h2c with prior knowledge."""
    name: str = ""
    """In its certificate, if it is not `host`."""


@dataclass(slots=True)
class Outcome:
    """How an attack ended."""

    ended: bool = False
    """By the server: the connection is closed."""
    code: int | None = None
    """Of its GOAWAY, None if there was none."""
    sent: int = 0
    """Repetitions that left before its end was seen; what the kernel held is among them."""
    seconds: float = 0.0
    """From the first byte to the end, or to when we gave up."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Of answers to requests."""
    resets: int = 0
    """RST_STREAM from the server."""
    data_bytes: int = 0
    """Payload of its DATA."""
    streams_ended: int = 0
    """END_STREAM from the server."""


async def flood(attack: Flood, port: int, end: End | None = None) -> Outcome:
    """Repeats the offence until the server ends it, `attack.count` is reached, or FLOOD_S seconds are over.

    Raises OSError if the server accepts no connection.
    """
    async with _connected(port, end or End(), reads=attack.reads) as (watch, writer):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLOOD_S):
                if not attack.reads:
                    await _send(attack.pieces(), writer, watch)
                    writer.transport.resume_reading()  # type: ignore[attr-defined]  # typeshed's base lacks it
                    await watch.run()
                else:
                    await _beside(watch, _send(attack.pieces(), writer, watch))
    return watch.outcome


async def stall(attack: Stall, port: int, hold_s: float, end: End | None = None) -> Outcome:
    """Sends the pieces with their gaps and waits for the end, `hold_s` seconds in all.

    Raises OSError if the server accepts no connection.
    """
    async with _connected(port, end or End(), reads=attack.reads) as (watch, writer):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                if not attack.reads:
                    await _send(iter(attack.pieces), writer, watch)
                    await _gone(writer, watch.outcome)
                else:
                    await _beside(watch, _send(iter(attack.pieces), writer, watch, attack.gap_s))
    return watch.outcome


async def converse(pieces: Iterator[bytes], port: int, timeout_s: float, end: End | None = None) -> Outcome:
    """Sends the pieces of an honest client and reads until the server has ended a stream."""
    async with _connected(port, end or End()) as (watch, writer):
        watch.until_stream_ends = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _beside(watch, _send(pieces, writer, watch))
    return watch.outcome


async def _beside(watch: _Watch, sending: Coroutine[None, None, None]) -> None:
    """Reads until the end, and sends meanwhile."""
    task = spawn(sending, name="attack")
    try:
        await watch.run()
    finally:
        task.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await task


async def _send(
    pieces: Iterator[bytes], writer: asyncio.StreamWriter, watch: _Watch, gap_s: float = 0.0
) -> None:
    """Sends them all, in batches if there is no gap between them, unless the end comes before."""
    if writer.is_closing():
        return  # turned away at the door, which uvloop tells by another error than OSError
    writer.write(next(pieces, b""))
    while not watch.over:
        await asyncio.sleep(gap_s)
        batch: list[bytes] = []
        size = 0
        for piece in pieces:
            batch.append(piece)
            size += len(piece)
            if gap_s or size >= BATCH_BYTES:
                break
        if not batch:
            await writer.drain()
            return
        writer.write(b"".join(batch))
        await writer.drain()
        watch.outcome.sent += len(batch)


async def _gone(writer: asyncio.StreamWriter, outcome: Outcome) -> None:
    """Returns when the server has closed a connection that nobody reads.

    Its own end says so: ours need not hear of it. The server's RST is dropped if the small buffer here had to
    drop what was sent before it, for its number is then not the one that is expected (RFC 9293 section
    3.10.7.4).
    """
    server, own = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
    while not outcome.ended:
        await asyncio.sleep(LOOK_S)
        outcome.ended = not _is_open(server, own)


def _is_open(own: tuple[str, int], peer: tuple[str, int]) -> bool:
    """Whether somebody on this machine has such a connection."""
    return f" {_listed(*own)} {_listed(*peer)} {TCP_ESTABLISHED} " in Path("/proc/net/tcp").read_text()


def _listed(host: str, port: int) -> str:
    """An IPv4 address as the kernel lists it."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


@asynccontextmanager
async def _connected(
    port: int, end: End, *, reads: bool = True
) -> AsyncIterator[tuple[_Watch, asyncio.StreamWriter]]:
    reader, writer = await _connect(port, end, reads)
    loop = asyncio.get_running_loop()
    started = loop.time()
    watch = _Watch(reader)
    try:
        yield watch, writer
    finally:
        watch.outcome.seconds = loop.time() - started
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _connect(port: int, end: End, reads: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not ipaddress.ip_address(end.host).is_loopback:
        raise ValueError(f"{end.host} is not on loopback: nobody else is to be attacked")
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    try:
        sock.setblocking(False)
        if not reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(sock, (end.host, port))
            name = (end.name or end.host) if end.tls else None
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=end.tls, server_hostname=name, limit=READ_BYTES
            )
    except BaseException:
        sock.close()
        raise
    if not reads:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # typeshed's base lacks it
    return reader, writer


class _Watch:
    """Reads what the server says, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.outcome = Outcome()
        self.over = False
        self.until_stream_ends = False
        self._reader = reader
        self._decoder = hpack.Decoder()

    async def run(self) -> None:
        """Returns when the server has closed, or ended a stream if that is waited for."""
        outcome = self.outcome
        try:
            while not (self.until_stream_ends and outcome.streams_ended):
                head = await self._reader.readexactly(FRAME_HEADER_BYTES)
                body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], body)
        except (asyncio.IncompleteReadError, OSError):
            outcome.ended = True
        self.over = True

    def _take(self, kind: int, flags: int, body: bytes) -> None:
        outcome = self.outcome
        if kind == GOAWAY:
            outcome.code = int.from_bytes(body[4:8], "big")
        elif kind == RST_STREAM:
            outcome.resets += 1
        elif kind == HEADERS:
            status = dict(self._decoder.decode(body, raw=True)).get(b":status", b"?").decode()
            outcome.statuses[status] = outcome.statuses.get(status, 0) + 1
        elif kind == 0:
            outcome.data_bytes += len(body)
        if kind <= HEADERS and flags & 0x1:
            outcome.streams_ended += 1
