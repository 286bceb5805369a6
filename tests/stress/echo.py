"""The far end of all tunnels, a process of its own: `python -m tests.stress.echo`.

It sends everything back. A tunnel that begins with a TLS hello may ask for another end: the byte after the
hello's record says which of `ENDS`, and is echoed like the hello and what follows.
"""

from __future__ import annotations

import asyncio
import signal
from typing import cast

from shared import loop
from shared.address import Address
from shared.listen import bound_address, listen
from shared.net.legs.tcp_end import reset

ECHO = b"e"
"""Ends when the client has ended."""

FIN = b"f"
"""Ends first, after `PAYLOAD_BYTES`, and then wants `TAIL` and the client's end."""

RST = b"r"
"""Breaks the connection after `PAYLOAD_BYTES`."""

PAYLOAD_BYTES = 64
TAIL = b"what is still sent to one that has ended"

TLS_HANDSHAKE = 0x16
RECORD_HEADER_BYTES = 5


class Echo(asyncio.Protocol):
    """One connection."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._received = bytearray()  # until the wanted end is known or, for FIN, up to the client's end
        self._end: bytes | None = None
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._ended:
            self._transport.write(data)
        if self._end == ECHO:
            return
        self._received += data
        if self._received[0] != TLS_HANDSHAKE:
            self._end = ECHO
        elif len(self._received) >= RECORD_HEADER_BYTES:
            self._look()

    def eof_received(self) -> bool:
        if self._end == FIN and bytes(self._received).partition(TAIL)[1:] != (TAIL, b""):
            print("a tail is missing or wrong", flush=True)
        return False

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def _look(self) -> None:
        received = self._received
        hello_bytes = RECORD_HEADER_BYTES + int.from_bytes(received[3:RECORD_HEADER_BYTES], "big")
        self._end = bytes(received[hello_bytes : hello_bytes + 1]) or None
        if self._end == ECHO:
            received.clear()
        elif self._end in (FIN, RST) and len(received) > hello_bytes + PAYLOAD_BYTES and not self._ended:
            self._ended = True
            if self._end == FIN:
                self._transport.write_eof()
            else:
                reset(self._transport)


async def serve() -> None:
    """Listens on a free loopback port, says which, and serves until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await listen(Address("127.0.0.1", 0), Echo, purpose="echo")
    print(f"echo on {bound_address(server)}", flush=True)
    await stop.wait()


if __name__ == "__main__":
    loop.run(serve())
