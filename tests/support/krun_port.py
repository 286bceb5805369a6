"""krun's tunnel port in this process: what takes streams, without the rest of krun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agent.config.settings import Settings
from agent.proxy.request_record import Record
from agent.tunnels.requests import HboneEnd, Requests
from agent.tunnels.tunnel_port import LIMITS
from shared.address import Address
from shared.errors import LimitError
from shared.listen import bound_address, listen
from shared.net.http2.connection import Connection
from shared.tunnel.tunnel_record import TunnelRecord
from tests.support.http2_peer import PeerStream
from tests.support.last_bytes import last_bytes_are_gone
from tests.support.tcp_peer import PATIENCE_S, TcpPeer


class KrunPort:
    """Made by `serving`."""

    def __init__(
        self,
        settings: Settings,
        refusal: Callable[[], LimitError | None] = lambda: None,
        hbone: HboneEnd | None = None,
    ) -> None:
        self.records: asyncio.Queue[Record] = asyncio.Queue()
        self.requests = Requests(
            settings, self.records.put_nowait, refusal=refusal, app_refusal=refusal, hbone=hbone
        )
        self.port = 0
        self._connections: set[Connection] = set()

    @property
    def open_streams(self) -> int:
        """Streams that are not over."""
        return sum(connection.open_streams for connection in self._connections)

    async def record(self) -> TunnelRecord:
        """What is told of the next tunnel that is over."""
        async with asyncio.timeout(PATIENCE_S):
            record = await self.records.get()
        assert isinstance(record, TunnelRecord), record
        return record

    def _accept(self) -> Connection:
        connection = Connection(
            client=False,
            limits=LIMITS,
            on_request=self.requests.serve,
            on_lost=self._connections.discard,
        )
        self._connections.add(connection)
        return connection

    @classmethod
    @asynccontextmanager
    async def serving(
        cls,
        settings: Settings,
        refusal: Callable[[], LimitError | None] = lambda: None,
        hbone: HboneEnd | None = None,
    ) -> AsyncIterator[KrunPort]:
        """A free loopback port that serves with `settings` until the block ends. `refusal()` says why nothing
        new is taken, if so; `hbone` ends inner HBONE."""
        self = cls(settings, refusal, hbone)
        listener = await listen(Address("127.0.0.1", 0), self._accept, purpose="test")
        self.port = bound_address(listener).port
        try:
            yield self
        finally:
            listener.close()
            self.requests.close()
            for connection in list(self._connections):
                connection.abort("the test is over")
            await last_bytes_are_gone()


async def answered_and_ended(stream: PeerStream, there: PeerStream | TcpPeer) -> None:
    """Holds that bytes of the app, its end, bytes of the client and its end come in this order. `stream` is
    the client's, `there` the app's."""
    await there.send(b"pong")
    assert await stream.read(4) == b"pong"
    there.end()
    assert await stream.rest() == b""
    await stream.send(b"bye")
    stream.end()
    assert await there.rest() == b"bye"
