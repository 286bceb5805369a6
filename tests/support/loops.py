"""Event loops that tests run on."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop


class Uvloop(uvloop.Loop):
    """uvloop's, whose `close` waits for ever for a server that a failed test has left open."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[asyncio.AbstractServer] = []

    async def create_server(self, *arguments: Any, **settings: Any) -> Any:
        server = await super().create_server(*arguments, **settings)
        self._made.append(server)
        return server

    def close(self) -> None:
        if not self.is_closed():
            for server in self._made:
                server.close()
        super().close()
