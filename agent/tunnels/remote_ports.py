"""Ports that krun listens on for others: `hbone forward -R`.

Whoever holds the stream of `/_hbone/listen/PORT` has the port, on the container's loopback; it is free again
when the stream is over. In the stream's bytes an HTTP/2 connection runs with its roles turned: krun is its
client, and opens a stream in it for each connection that it accepts. The far side connects its target and
answers 200.

A connection that is accepted counts among the tunnels. krun asks for a sign of life: a front end may hold the
stream of somebody who is long gone, and with it the port.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus

from agent.config.port_range import LOOPBACK
from agent.config.settings import Settings
from shared.errors import DeniedError, DialError, HboneError, LimitError, UpstreamError
from shared.listen import BACKLOG
from shared.net.http2.answers import AskedOf, refusal
from shared.net.http2.connection import Connection
from shared.net.http2.connection_leg import ConnectionLeg
from shared.net.http2.liveness import while_connected
from shared.net.legs.accepted import AcceptedLeg
from shared.net.legs.contract import Leg
from shared.net.legs.tcp import Surplus
from shared.net.relay.relay import Relay
from shared.net.relay.tunnel_clock import TunnelClock
from shared.ops.repeated_log import RepeatedLog
from shared.tasks import spawn
from shared.tunnel import tunnel_request
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_server import ServedTunnel

log = logging.getLogger("hbone.agent")

MOST_LISTENING = 64
"""Ports at once, whatever is allowed."""

LIFE_S = 20.0
"""Silence after which the far side is asked for a sign of life; as long again without one frees the port."""

ANSWER_S = 30.0
"""For the far side to connect its target."""

SETTING = "HBONE_REMOTE_PORTS"


class RemotePorts:
    """The ports that are listened on for others."""

    def __init__(
        self,
        settings: Settings,
        tunnels: set[ServedTunnel | RemoteConnection],
        finished: Callable[[TunnelRecord], None],
        *,
        most_tunnels: int,
        refusal: Callable[[], LimitError | None],
        clock: TunnelClock,
    ) -> None:
        """`tunnels` are all that are open, to which accepted connections are added, up to `most_tunnels`;
        `finished` gets the record of each. `refusal()` says why there may be none now."""
        self._allowed = settings.remote_ports
        self._own = _own_ports(settings)
        self._half_closed_timeout_s = settings.half_closed_timeout_s
        self._tunnels = tunnels
        self._finished = finished
        self._most_tunnels = most_tunnels
        self._refusal = refusal
        self._clock = clock
        self._listening: dict[int, _Listener] = {}
        self._warnings = RepeatedLog(log)

    def serve(self, tunnel: ServedTunnel, port: int) -> None:
        """Listens on `port` as long as the request of `tunnel` is open, or refuses it."""
        if not any(port in allowed for allowed in self._allowed):
            allowed = ", ".join(map(str, self._allowed)) or "none"
            text = f"port {port} may not be listened on: {SETTING} of krun allows {allowed}"
            tunnel.refuse(HTTPStatus.FORBIDDEN, DeniedError(text))
        elif port in self._own:
            text = f"port {port} may not be listened on: what comes to krun for others is led there"
            tunnel.refuse(HTTPStatus.FORBIDDEN, DeniedError(text))
        elif len(self._listening) >= MOST_LISTENING:
            text = f"{MOST_LISTENING} ports are listened on for others, which is as many as there may be"
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, LimitError(text, SETTING))
        else:
            tunnel.carry(_Listener(self, port, tunnel).open, f"listen on {port}")

    def drain(self) -> None:
        """Accepts no further connection; each port's stream ends with its last one."""
        for listener in list(self._listening.values()):
            listener.drain()

    def close(self) -> None:
        """Writes what has not been told."""
        self._warnings.close()

    def accept(self, listener: _Listener) -> asyncio.BaseProtocol:
        """The protocol of a connection to a port."""
        refusal = self._refusal()
        if refusal is None and len(self._tunnels) >= self._most_tunnels:
            text = f"{self._most_tunnels} tunnels are open, which is HBONE_MAX_TUNNELS"
            refusal = LimitError(text, "HBONE_MAX_TUNNELS")
        if refusal is None and listener.connection.room <= 0:
            refusal = LimitError("the far side accepts no more connections", SETTING)
        if refusal is not None:
            text = f"a connection to port {listener.port} was refused: {refusal}"
            return Surplus(lambda peer: self._warnings.warning("surplus", text))
        return AcceptedLeg(lambda leg: self._accepted(listener, leg))

    def over(self, connection: RemoteConnection) -> None:
        """It has ended, or came to nothing."""
        self._tunnels.discard(connection)
        self._finished(connection.record)

    def opened(self, listener: _Listener) -> None:
        """It listens."""
        self._listening[listener.port] = listener

    def closed(self, listener: _Listener) -> None:
        """Its port is free."""
        if self._listening.get(listener.port) is listener:
            del self._listening[listener.port]

    def is_listening(self, port: int) -> bool:
        """Whether somebody has the port by us."""
        return port in self._listening

    def _accepted(self, listener: _Listener, leg: AcceptedLeg) -> None:
        connection = RemoteConnection(self, listener, leg, self._clock, self._half_closed_timeout_s)
        self._tunnels.add(connection)
        connection.begin()


def _own_ports(settings: Settings) -> frozenset[int]:
    """Ports of loopback where the app, an sshd, Envoy or another target listens, or will: whoever had one of
    them would get what others send there."""
    addresses = (settings.app, settings.inbound_listen, settings.sshd, settings.ssh.listen)
    others = (settings.envoy_admin, settings.listen, settings.health, settings.metrics, settings.admin)
    found = (*addresses, *settings.targets.values(), *(one for one in others if one is not None))
    return frozenset(one.port for one in found if one.is_loopback or one.host in ("", "0.0.0.0", "::"))


class _Listener:
    """One port, and the connection to whoever it is listened on for."""

    def __init__(self, ports: RemotePorts, port: int, tunnel: ServedTunnel) -> None:
        self.port = port
        self._ports = ports
        self._tunnel = tunnel
        self._server: asyncio.Server | None = None
        self.connection = Connection(
            client=True, on_lost=lambda _: self._close(), keepalive=while_connected(LIFE_S)
        )
        self.peer_name = tunnel.stream.connection.peer_name
        """The address of whoever has asked for it."""

    async def open(self) -> Leg:
        """Listens, and returns what is to run in the stream. Raises DialError, which the peer has been
        told."""
        sock = self._bind()
        try:
            self._ports.opened(self)
            self._server = await asyncio.get_running_loop().create_server(
                lambda: self._ports.accept(self), sock=sock, backlog=BACKLOG
            )
        except BaseException:
            self._close()
            sock.close()
            raise
        log.info("listening on %s:%d for %s", LOOPBACK, self.port, self.peer_name)
        return ConnectionLeg(self.connection, self._tunnel.stream)

    def _bind(self) -> socket.socket:
        """A socket with the port, not listening yet."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((LOOPBACK, self.port))
            sock.listen(BACKLOG)  # with SO_REUSEADDR two may bind, but only one may listen
        except OSError as error:
            sock.close()
            status, cause = HTTPStatus.SERVICE_UNAVAILABLE, error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                owner = " by another hbone forward" if self._ports.is_listening(self.port) else ""
                status, cause = HTTPStatus.CONFLICT, f"the port is in use{owner}"
            refused = DialError(f"cannot listen on {LOOPBACK}:{self.port}: {cause}")
            self._tunnel.refuse(status, refused)
            raise refused from error
        return sock

    def drain(self) -> None:
        """Ends with the last connection."""
        if self._server is not None:
            self._server.close()
        self.connection.drain()

    def _close(self) -> None:
        """Frees the port."""
        if self._server is not None:
            self._server.close()
        self._ports.closed(self)


class RemoteConnection:
    """One connection that was accepted for somebody else; a tunnel like those that are asked for."""

    def __init__(
        self,
        ports: RemotePorts,
        listener: _Listener,
        leg: AcceptedLeg,
        clock: TunnelClock,
        half_closed_timeout_s: float,
    ) -> None:
        self.relay: Relay | None = None
        """There while bytes may pass."""
        self.record = TunnelRecord(
            peer=leg.peer_name, name=f"accepted/{listener.port}", target=listener.peer_name
        )
        self._ports = ports
        self._listener = listener
        self._leg = leg
        self._clock = clock
        self._half_closed_timeout_s = half_closed_timeout_s
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        return self._leg.buffered_bytes if self.relay is None else self.relay.buffered_bytes

    @property
    def age_s(self) -> float:
        """Seconds since it was accepted."""
        return self._loop.time() - self._started

    def begin(self) -> None:
        """Asks the far side to connect its target."""
        self._task = spawn(self._carry(), name=f"connection to port {self._listener.port}")

    def abort(self, error: HboneError) -> None:
        """Ends it at once as broken off."""
        if self._task is not None:
            self._task.cancel()
        if self.relay is not None:
            self.relay.abort(error)
        else:
            self._refuse(error)

    async def _carry(self) -> None:
        path = f"{tunnel_request.TUNNEL_PREFIX}{self.record.name}"
        stream = None
        try:
            stream = self._listener.connection.open(tunnel_request.post("http", "localhost", path))
            self.record.stream = stream.id
            status = await stream.response(ANSWER_S)
            self.record.status = status
            if status != HTTPStatus.OK:
                raise await refusal(stream, status, AskedOf(token_sent=False, in_mesh=True))
        except UpstreamError as error:
            if stream is not None:
                stream.abort()
            self._refuse(error)
            return
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        finally:
            self._task = None
        self.record.opened = True
        self.record.setup_s = self.age_s
        self.relay = Relay(
            self._leg, stream, self._relayed, half_closed_timeout_s=self._half_closed_timeout_s
        )
        self.relay.start()
        if self.relay is not None:
            self._clock.watch(self.relay)

    def _refuse(self, error: HboneError) -> None:
        self._leg.abort()
        self.record.fail(error, self.age_s)
        self._end()

    def _relayed(self, relay: Relay) -> None:
        self._clock.forget(relay)
        self.record.end(relay, self.age_s)
        self.relay = None
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._ports.over(self)
