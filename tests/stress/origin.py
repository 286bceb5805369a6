"""An origin behind hgate whose every response is DATA frames of one byte: an app that writes byte by byte.

It counts hgate's windows and sends within them, in pieces as hgate reads. That is all the HTTP/2 it knows;
frames are written with hyperframe, so it shares no code with what it talks to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import hpack
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from tests.support.attack_frames import INITIAL_WINDOW, MAX_WINDOW, PREFACE

BYTE = b"x"
PIECE_FRAMES = 1000
"""Written at a time."""

FIRST_WINDOW = 65535
FRAME_HEADER_BYTES = 9
SETTING = 6
"""Bytes of one setting."""


class Origin(asyncio.Protocol):
    """One connection; it answers one request at a time with `count` bytes."""

    _transport: asyncio.Transport

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._received = bytearray()
        self._preface_left = len(PREFACE)
        self._connection_window = FIRST_WINDOW
        self._first_window = FIRST_WINDOW
        self._stream_window = 0
        self._stream = 0  # that is being answered
        self._writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(SettingsFrame(0).serialize())
        credit = WindowUpdateFrame(0, window_increment=MAX_WINDOW - FIRST_WINDOW)
        self._transport.write(credit.serialize())

    def data_received(self, data: bytes) -> None:
        taken = min(self._preface_left, len(data))
        self._preface_left -= taken
        self._received += data[taken:]
        while len(self._received) >= FRAME_HEADER_BYTES:
            size = FRAME_HEADER_BYTES + int.from_bytes(self._received[:3], "big")
            if len(self._received) < size:
                break
            frame = bytes(self._received[:size])
            del self._received[:size]
            self._take(frame[3], frame[4], int.from_bytes(frame[5:9], "big"), frame[FRAME_HEADER_BYTES:])
        self._send()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._send()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == HeadersFrame.type and not self._stream:
            self._stream = stream
            self._stream_window = self._first_window
            self._left = self._count
            block = hpack.Encoder().encode([(":status", "200")])
            self._transport.write(HeadersFrame(stream, block, flags=["END_HEADERS"]).serialize())
        elif kind == SettingsFrame.type and not flags & 1:
            for at in range(0, len(body), SETTING):
                if int.from_bytes(body[at : at + 2], "big") == INITIAL_WINDOW:
                    self._first_window = int.from_bytes(body[at + 2 : at + SETTING], "big")
            self._transport.write(SettingsFrame(0, flags=["ACK"]).serialize())
        elif kind == WindowUpdateFrame.type:
            increment = int.from_bytes(body, "big")
            if not stream:
                self._connection_window += increment
            elif stream == self._stream:
                self._stream_window += increment

    def _send(self) -> None:
        frame = DataFrame(self._stream or 1, BYTE).serialize()
        while self._writable and self._stream:
            count = min(PIECE_FRAMES, self._left, self._stream_window, self._connection_window)
            if count <= 0:
                return
            self._left -= count
            self._stream_window -= count
            self._connection_window -= count
            self._transport.write(frame * count)
            if not self._left:
                self._transport.write(DataFrame(self._stream, flags=["END_STREAM"]).serialize())
                self._stream = 0


@asynccontextmanager
async def listening(count: int) -> AsyncIterator[int]:
    """Serves on a loopback port, which it yields; responses have `count` bytes."""
    server = await asyncio.get_running_loop().create_server(lambda: Origin(count), "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
