"""Plain requests of a proxy's client, `GET http://HOST/PATH`: each goes in HTTP/1.1 over a tunnel of its own.

What the target gets is the request without what is for the proxy; what the client gets is the target's
answer, or why there is none. The client's connection is used again, the tunnel is not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

from agent.egress.egress_tunnel import REQUEST, EgressTunnels, note_opening
from agent.egress.proxy_targets import plain_head, plain_target
from agent.egress.refusals import status_for
from agent.egress.stream_leg import StreamLeg
from agent.proxy.exchange import Exchange
from agent.proxy.fields import Field, RequestHead
from agent.proxy.http1_connection import Http1Connection
from agent.proxy.http1_server import Http1Request
from shared.address import Address
from shared.errors import Flag, HboneError, UpstreamError
from shared.net.http2.answers import answer
from shared.net.legs.contract import Leg
from shared.tasks import spawn
from shared.tunnel.opening import Opening
from shared.tunnel.tunnel_record import TunnelRecord

log = logging.getLogger("hbone.egress")


class PlainRequests:
    """All of them."""

    def __init__(self, tunnels: EgressTunnels) -> None:
        self._tunnels = tunnels
        self.open: set[PlainExchange] = set()
        """Those whose answers have not ended."""
        self._connections: set[Http1Connection] = set()

    def serve(self, request: Http1Request, peer: str) -> None:
        """Answers `request` of the client `peer`."""
        wanted: Address | None = None
        opening: Opening | None = None
        record = self._tunnels.record(peer, REQUEST, None)
        try:
            wanted = plain_target(request.asked)
            record.name = str(wanted)
            head = plain_head(request.asked, request.headers, wanted)
            self._tunnels.settings.check_proxy(wanted)
            opening = self._tunnels.opening(record)
        except HboneError as error:
            record.fail(error, 0.0)
            self._tunnels.over(record)
            answer(request, status_for(error), f"krun: {error}")
            return
        exchange = PlainExchange(request, head, record, self._over)
        self.open.add(exchange)
        _Opening(exchange, opening, self._carry)

    def close(self) -> None:
        """Ends what is left."""
        for exchange in list(self.open):
            exchange.fail(HTTPStatus.BAD_GATEWAY, "krun stops")
        for connection in list(self._connections):
            connection.close()

    def _carry(self, exchange: PlainExchange, leg: StreamLeg) -> None:
        connection = Http1Connection(
            leg,
            free=Http1Connection.close,
            gone=self._connections.discard,
            upgraded=_refuse,
            http2=lambda: None,
        )
        self._connections.add(connection)
        connection.carry(exchange)

    def _over(self, exchange: Exchange) -> None:
        assert isinstance(exchange, PlainExchange)
        self.open.discard(exchange)
        record = exchange.record
        record.duration_s = exchange.age_s
        record.sent_bytes, record.received_bytes = exchange.sent_bytes, exchange.received_bytes
        if exchange.failure is not None:
            record.flag, text = exchange.failure
            record.error = exchange.refused or UpstreamError(text)
        self._tunnels.over(record)


class PlainExchange(Exchange):
    """One request, and its row among the tunnels."""

    def __init__(
        self,
        request: Http1Request,
        head: RequestHead,
        record: TunnelRecord,
        over: Callable[[Exchange], None],
    ) -> None:
        self.record = record
        self.refused: HboneError | None = None
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        super().__init__(request, head, over, _never_again)

    @property
    def upstream_name(self) -> str:
        return str(self.record.name)

    @property
    def age_s(self) -> float:
        """Seconds since it came."""
        return self._loop.time() - self._began

    @property
    def relay(self) -> PlainExchange | None:
        """What counts its bytes, once it has a tunnel."""
        return self if self.record.opened else None

    def refuse(self, error: HboneError) -> None:
        """There is no tunnel for it."""
        self.refused = error
        self.carrier = None
        self.fail(status_for(error), str(error), flag=error.flag)

    def respond(self, status: int, fields: list[Field], *, end: bool = False) -> None:
        super().respond(status, fields, end=end)

    def _fail(self, status: int, text: str, code: int, flag: Flag) -> None:
        super()._fail(status, f"krun: {text.partition(': set HBONE_APP')[0]}", code, flag)


class _Opening:
    """Carries a request while its tunnel is opened."""

    def __init__(
        self,
        exchange: PlainExchange,
        opening: Opening,
        opened: Callable[[PlainExchange, StreamLeg], None],
    ) -> None:
        self._exchange = exchange
        self._opening = opening
        self._opened = opened
        exchange.carrier = self
        self._task = spawn(self._run(), name=f"egress request to {exchange.record.name}")

    @property
    def buffered_bytes(self) -> int:
        """Nothing: what the client sends meanwhile stays with its request."""
        return 0

    def drop(self) -> None:
        """The client has left: nothing more is asked, but an answer is awaited (`opening`, rule 4)."""
        if self._opening.abandon():
            self._task.cancel()

    async def _run(self) -> None:
        exchange, opening = self._exchange, self._opening
        record = exchange.record
        try:
            stream = await opening.run()
        except HboneError as error:
            note_opening(record, opening)
            record.stream = None
            if not exchange.is_over:
                exchange.refuse(error)
            return
        except BaseException:
            # Cancelled because the client has left; or a fault of ours, which the task's end reports.
            if not exchange.is_over:
                exchange.refuse(HboneError("a fault in krun: its log says more"))
            raise
        if exchange.is_over:
            stream.abort()
            return
        note_opening(record, opening)
        record.opened = True
        record.setup_s = exchange.age_s
        self._opened(exchange, StreamLeg(stream))


def _never_again(_: Exchange) -> None:
    """Never called: only a request on a connection that was used before is sent again."""


def _refuse(exchange: Exchange, leg: Leg, _: bytes) -> None:
    """Never called: no request here asks for another protocol."""
    leg.abort()
    exchange.fail(HTTPStatus.BAD_GATEWAY, "a tunnel that nobody has asked for")
