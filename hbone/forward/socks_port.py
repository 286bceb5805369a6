"""-D: a SOCKS port. Its clients reach what krun serves, here and in other services of the mesh.

A container has no resolver and no router for us: krun leads to targets with names, and to nothing else. So
the host of a request chooses the service, and its port the target:

- `localhost`, its addresses, and the service's own host: this service;
- SERVICE.NAMESPACE, and what else `destination.find` knows for a name of a service: that one;
- everything else is not allowed. A token would go there, to whoever has the name.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping

from hbone import destination
from hbone.destination import Destination
from hbone.forward.connections import Connection, Connections, Way
from hbone.forward.flags import Place
from hbone.forward.local_ports import LocalPort
from hbone.forward.service import Service
from hbone.services import named_service
from shared.address import Address
from shared.errors import (
    DialError,
    HboneError,
    NoRouteError,
    RefusedError,
    StatusError,
    TokenError,
    UnavailableError,
    UsageError,
)
from shared.net.legs.accepted import AcceptedLeg
from shared.net.socks import MAX_BYTES, Negotiation, Reply, Request, SocksError

ANY_PORT = 80
"""A name that is looked up has to have one."""

NEGOTIATION_S = 10.0
"""From a connection to its whole request; programs send it at once."""

MAX_SERVICES = 256
"""Other services that are kept; one more, and the first is looked up anew when it is next asked for."""

MOST_LOOKUPS = 8
"""At once: each asks the cluster and Cloud Run's API."""

NOT_FOUND_S = 10.0
"""How long a name that nobody knows is not looked up again: a browser asks for many."""


class Reach:
    """What SOCKS clients can reach, from one service on."""

    def __init__(
        self,
        own: Service,
        own_text: str,
        options: argparse.Namespace,
        environ: Mapping[str, str],
        service: Callable[[Destination], Service],
        find: Callable[
            [str, argparse.Namespace, Mapping[str, str]], Awaitable[Destination]
        ] = destination.find,
    ) -> None:
        """`own_text` is what the user has called the service; `service` makes another one."""
        self._own = own
        self._own_names = {"localhost", own.where.target.host}
        if (named := named_service.read(own_text)) is not None:
            self._own_names |= {f"{named}{suffix}" for suffix in ("", ".svc", ".svc.cluster.local")}
        # These are about the one service that the user has named.
        self._options = argparse.Namespace(**{**vars(options), "connect": None, "audience": None})
        self._environ = environ
        self._service = service
        self._find = find
        self._others: dict[str, asyncio.Future[Service]] = {}
        self._unknown: dict[str, tuple[float, HboneError]] = {}
        self._looking = asyncio.Semaphore(MOST_LOOKUPS)

    async def way(self, target: Address) -> Way:
        """The way to `target`.

        Raises:
            NoRouteError: it is no service, and must not be reached.
            HboneError: it looks like a service, and nobody knows it.
        """
        name = str(target.port)
        if target.host in self._own_names or target.is_loopback:
            return self._own.target(name)
        if target.is_ip:
            raise NoRouteError("an address is no service; let the client send names (socks5h)")
        return (await self._other(target.host)).target(name)

    async def _other(self, host: str) -> Service:
        loop = asyncio.get_running_loop()
        until, known = self._unknown.get(host, (0.0, None))
        if known is not None and loop.time() < until:
            raise known
        coming = self._others.get(host)
        if coming is not None:
            return await asyncio.shield(coming)
        if len(self._others) >= MAX_SERVICES:
            del self._others[next(iter(self._others))]
        coming = self._others[host] = loop.create_future()
        coming.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may wait
        try:
            service = self._service(await self._look_up(host))
        except BaseException as error:
            self._others.pop(host, None)
            if isinstance(error, HboneError):
                if len(self._unknown) >= MAX_SERVICES:
                    self._unknown.clear()
                self._unknown[host] = (loop.time() + NOT_FOUND_S, error)
                coming.set_exception(error)
            else:
                coming.cancel()
            raise
        coming.set_result(service)
        return service

    async def _look_up(self, host: str) -> Destination:
        if named_service.read(host) is None:
            raise NoRouteError("no name of a service; write SERVICE.NAMESPACE")
        async with self._looking:
            return await self._find(f"{host}:{ANY_PORT}", self._options, self._environ)


class SocksPort(LocalPort):
    """A port that speaks SOCKS."""

    def __init__(self, place: Place, connections: Connections, reach: Reach) -> None:
        super().__init__(place, connections)
        self._reach = reach

    def __str__(self) -> str:
        return f"{self.place} -> SOCKS to {self._reach._own} and services by name"

    def accepted(self, leg: AcceptedLeg) -> None:
        _Client(self.connections, self._reach, leg).begin()


class _Client:
    """One connection, up to its request."""

    def __init__(self, connections: Connections, reach: Reach, leg: AcceptedLeg) -> None:
        self._connections = connections
        self._reach = reach
        self._leg = leg
        self._connection: Connection = connections.begin(leg)
        self._negotiation = Negotiation()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(NEGOTIATION_S, self._too_slow)
        self._leg.on_early = self._read

    def _read(self) -> None:
        request = None
        try:
            while request is None:
                data = self._leg.first(MAX_BYTES)
                used, answer, request = self._negotiation.receive(data)
                if not used:
                    if len(data) >= MAX_BYTES:
                        raise SocksError("more than any request has")
                    return
                self._leg.drop_first(used)
                if answer:
                    self._leg.write(answer)
        except SocksError as error:
            self._done()
            self._connections.troubles.noted("SOCKS", f"SOCKS: refused {self._leg.peer_name}: {error}")
            if error.answer:
                self._leg.write(error.answer)
            self._connection.turn_away()
            return
        self._done()
        self._connect(request)

    def _connect(self, request: Request) -> None:
        leg = self._leg
        self._connection.carry_to(
            lambda: self._reach.way(request.target),
            f"SOCKS to {request.target}",
            opened=lambda: leg.write(request.answer(Reply.GRANTED)),
            refused=lambda error: leg.write(request.answer(reply_to(error))),
        )

    def _too_slow(self) -> None:
        self._done()
        self._connection.abort(UnavailableError("no request in time"))

    def _done(self) -> None:
        self._leg.on_early = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def reply_to(error: HboneError) -> Reply:
    """What a client is told of `error`."""
    if isinstance(error, StatusError):
        # krun does not know the target, or it does not listen: as a closed port.
        return Reply.NOT_ALLOWED if error.status in (401, 403) else Reply.REFUSED
    if isinstance(error, RefusedError | TokenError):
        return Reply.NOT_ALLOWED
    if isinstance(error, DialError | UnavailableError | UsageError):
        return Reply.HOST_UNREACHABLE
    return Reply.FAILED
