"""The app behind the plain path's bench: HTTP/1.1 that keeps its connections, and does as little as it can.

python -m bench.plain_app PORT

GET /BYTES is answered with so many bytes, POST with 2 bytes once its body, of known length or chunked, has
come. It trusts its client.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

BLOCK = bytes(256 << 10)
READ_BUFFER = memoryview(bytearray(256 << 10))
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
END_OF_CHUNKS = b"\r\n0\r\n\r\n"


class App(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._head = bytearray()
        self._body_left = 0  # of a request; -1: it is chunked
        self._last = b""  # bytes of a chunked body, in which its end is looked for
        self._send_left = 0
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        data = READ_BUFFER[:nbytes]
        if self._body_left:
            self._body(data)
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return
        head, rest = bytes(self._head[:end]).lower(), bytes(self._head[end + 4 :])
        self._head.clear()
        if head.startswith(b"get /"):
            self._send(int(head[5 : head.index(b" ", 5)]))
            return
        if head.startswith(b"pri *"):  # the question whether we speak HTTP/2
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            self._transport.close()
            return
        name = b"\r\ncontent-length:"
        at = head.find(name)
        self._body_left = -1 if at < 0 else int(head[at + len(name) :].split(b"\r\n", 1)[0])
        if rest:
            self._body(memoryview(rest))
        elif not self._body_left:
            self._send(2)

    def _body(self, data: memoryview) -> None:
        if self._body_left > 0:
            self._body_left -= len(data)
        else:
            self._last = self._last[-len(END_OF_CHUNKS) :] + bytes(data[-len(END_OF_CHUNKS) :])
            if self._last.endswith(END_OF_CHUNKS):
                self._body_left, self._last = 0, b""
        if not self._body_left:
            self._send(2)

    def _send(self, size: int) -> None:
        self._send_left = size
        self._transport.write(OK % size)
        self._go_on()

    def _go_on(self) -> None:
        while self._send_left and not self._is_full:
            block = BLOCK[: self._send_left]
            self._send_left -= len(block)
            self._transport.write(block)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._go_on()


async def serve(port: int) -> None:
    """Serves on a loopback port until it is stopped."""
    server = await asyncio.get_running_loop().create_server(App, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
