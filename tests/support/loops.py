"""Event loops that tests run on."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import uvloop


class Uvloop(uvloop.Loop):
    """uvloop's, whose `close` waits for ever for a server, or a child, that a failed test has left behind."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[asyncio.AbstractServer] = []
        self._started: list[Any] = []  # their transports, which the stubs call protocols

    async def create_server(self, *arguments: Any, **settings: Any) -> Any:
        server = await super().create_server(*arguments, **settings)
        self._made.append(server)
        return server

    async def subprocess_exec(self, *arguments: Any, **settings: Any) -> Any:
        transport, protocol = await super().subprocess_exec(*arguments, **settings)
        self._started.append(transport)
        return transport, protocol

    def close(self) -> None:
        if not self.is_closed():
            for server in self._made:
                server.close()
            for child in self._started:
                if child.get_returncode() is None:
                    child.send_signal(signal.SIGKILL)
        super().close()
