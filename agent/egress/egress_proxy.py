"""The proxy into the mesh: HTTP and SOCKS on one port, told apart by the first byte of a connection.

- `CONNECT HOST:PORT`, and SOCKS version 5 (4 and 4a, too): a tunnel. Its client is told that it is connected
  once the gateway has said so, else why not.
- `GET http://HOST/PATH` and all other methods: see `plain_requests`.

It leads only to what HBONE_EGRESS_ALLOW has. Names go to the gateway as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

from agent.egress.egress_tunnel import CONNECT, SOCKS, EgressTunnel, EgressTunnels
from agent.egress.plain_requests import PlainRequests
from agent.egress.proxy_targets import connect_target
from agent.egress.refusals import reply_for, status_for
from agent.proxy.http1_server import Http1Server
from shared.address import Address
from shared.errors import BadRequestError, HboneError
from shared.net import socks
from shared.net.legs.accepted import AcceptedLeg

REQUEST_S = 10.0
"""From a connection to its first byte, and to the whole request of SOCKS; programs send it at once."""

IDLE_S = 60.0
"""How long a connection that speaks HTTP may be without a request."""

_Refusal = Callable[[HboneError], bytes]
"""What the client is told of an error."""

CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class EgressProxy:
    """What all connections to the proxy share."""

    def __init__(self, tunnels: EgressTunnels) -> None:
        self.tunnels = tunnels
        self.requests = PlainRequests(tunnels)
        self.servers: set[Http1Server] = set()
        """Connections that speak HTTP, without those that have become tunnels."""
        self.clients: dict[AcceptedLeg, _Client] = {}
        """Connections that have not said yet what they speak."""

    def accepted(self, leg: AcceptedLeg) -> None:
        """A connection has come."""
        _Client(self, leg).begin()

    def left(self, leg: AcceptedLeg) -> None:
        """Its connection is gone."""
        client = self.clients.get(leg)
        if client is not None:
            client.stop()

    def close(self) -> None:
        """Ends all connections that are no tunnels."""
        self.requests.close()
        for server in list(self.servers):
            server.close()
        for client in list(self.clients.values()):
            client.stop()
            client.leg.abort()


class _Client:
    """One connection, until it is known what it wants."""

    def __init__(self, proxy: EgressProxy, leg: AcceptedLeg) -> None:
        self.leg = leg
        self._proxy = proxy
        self._negotiation: socks.Negotiation | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Waits for the first bytes."""
        self._proxy.clients[self.leg] = self
        self._timer = asyncio.get_running_loop().call_later(REQUEST_S, self._too_slow)
        self.leg.on_early = self._read

    def stop(self) -> None:
        """Waits no longer."""
        self._proxy.clients.pop(self.leg, None)
        self.leg.on_early = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self.stop()
        self.leg.abort()

    def _read(self) -> None:
        if self._negotiation is None:
            if self.leg.first(1)[0] not in socks.VERSIONS:
                self.stop()
                self._serve_http()
                return
            self._negotiation = socks.Negotiation()
        self._negotiate(self._negotiation)

    # SOCKS.

    def _negotiate(self, negotiation: socks.Negotiation) -> None:
        leg = self.leg
        request = None
        try:
            while request is None:
                data = leg.first(socks.MAX_BYTES)
                used, said, request = negotiation.receive(data)
                if not used:
                    if len(data) >= socks.MAX_BYTES:
                        raise socks.SocksError("more than any request of SOCKS has")
                    return
                leg.drop_first(used)
                if said:
                    leg.write(said)
        except socks.SocksError as error:
            self.stop()
            record = self._proxy.tunnels.record(leg.peer_name, SOCKS, None)
            record.fail(BadRequestError(f"SOCKS: {error}"), 0.0)
            self._proxy.tunnels.over(record)
            leg.write(error.answer)
            leg.close()
            return
        self.stop()
        self._lead(
            request.target,
            SOCKS,
            granted=request.answer(socks.Reply.GRANTED),
            refusal=lambda error: request.answer(reply_for(error)),
        )

    # HTTP.

    def _serve_http(self) -> None:
        proxy, leg = self._proxy, self.leg
        peer = leg.peer_name
        server = Http1Server(
            leg,
            lambda request: proxy.requests.serve(request, peer),
            idle_timeout_s=IDLE_S,
            tunnel=self._connect,
            gone=proxy.servers.discard,
        )
        proxy.servers.add(server)
        leg.join(server)

    def _connect(self, asked: bytes, early: bytes) -> None:
        self.leg.leave(early)
        try:
            target = connect_target(asked)
        except BadRequestError as error:
            record = self._proxy.tunnels.record(self.leg.peer_name, CONNECT, None)
            record.fail(error, 0.0)
            self._proxy.tunnels.over(record)
            self.leg.write(http_refusal(error))
            self.leg.close()
            return
        self._lead(target, CONNECT, granted=CONNECTED, refusal=http_refusal)

    # Either.

    def _lead(self, target: Address, route: str, *, granted: bytes, refusal: _Refusal) -> None:
        leg = self.leg

        def refused(error: HboneError) -> None:
            leg.write(refusal(error))
            leg.close()

        tunnels = self._proxy.tunnels
        tunnel = EgressTunnel(
            tunnels, leg, target, route, opened=partial(leg.write, granted), refused=refused
        )
        try:
            tunnels.settings.check_proxy(target)
        except HboneError as error:
            tunnel.refuse(error)
        else:
            tunnel.begin()


def http_refusal(error: HboneError) -> bytes:
    """The answer to a CONNECT that comes to nothing."""
    status = HTTPStatus(status_for(error))
    text = f"krun: {error}\n".encode()
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, status.phrase.encode(), len(text), text)
    )
