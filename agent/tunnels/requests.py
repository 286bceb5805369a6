"""What a stream on 15009 asks for: a tunnel to a target, or the app as an ordinary HTTP request.

`/_hbone/15003`, `/_hbone/22` and `/_hbone/NAME` are tunnels; `/_hbone/` is krun's own (`own_path`), any other
path is the app's. A target is dialled first and 200 said after, so that a 200 means a connected target. The
inner HBONE of `/_hbone/15008` ends in this process, where the app is dialled before the 200 of a CONNECT.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from agent.config.port_range import LOOPBACK
from agent.config.settings import HBONE_TARGET, SSHD_TARGET, Settings
from agent.proxy.request_record import Record
from agent.tunnels.descriptors import Shares
from agent.tunnels.own_path import OwnPath, is_own
from agent.tunnels.request_bounds import BoundedRequests
from shared.address import Address
from shared.errors import Flag, HboneError, LimitError, NoRouteError, RefusedError
from shared.net.dial import dial
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream, header_value
from shared.net.relay.tunnel_clock import TunnelClock
from shared.tunnel.request_context import CLIENT_CERTIFICATE, certified_client, forwarded_for
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_request import NO_TARGET, listen_port, target_name
from shared.tunnel.tunnel_server import ServedTunnel

if TYPE_CHECKING:
    from agent.tunnels.remote_ports import RemoteConnection, RemotePorts

DialSshd = Callable[[Address, float, str, str | None], Awaitable[Leg]]
"""Connects to the address within so many seconds, for a peer, which says that it speaks for another client.
Raises DialError."""


class HboneEnd(Protocol):
    """What ends inner HBONE."""

    def hbone_leg(self, stream: Stream) -> Leg:
        """The end of what comes in the tunnel of `stream`. Raises NoRouteError if inner HBONE is not served
        here, or another HboneError if it cannot be."""

    def is_hbone_at_rest(self, stream: Stream) -> bool:
        """Whether the client in the tunnel of `stream` has had what it wanted, and nothing is open in it."""


MAX_FORWARDED_CHARS = 200
"""Of what a peer says for whom it speaks."""


class Requests:
    """The streams of all connections. `finished` gets the record of every tunnel request, refused or not, and
    of requests to the app through the mTLS end."""

    def __init__(
        self,
        settings: Settings,
        finished: Callable[[Record], None],
        *,
        shares: Shares | None = None,
        refusal: Callable[[], LimitError | None] = lambda: None,
        app_refusal: Callable[[], LimitError | None] = lambda: None,
        dial_sshd: DialSshd | None = None,
        hbone: HboneEnd | None = None,
    ) -> None:
        """`shares` says how many tunnels and requests to the app there may be at once; None: as many as the
        settings say. `refusal()` says why no tunnel is accepted now, if so, `app_refusal()` why no request
        to the app is. `dial_sshd` connects to krun's own sshd; None: it has none. `hbone` ends inner HBONE;
        None: it is not served."""
        self._settings = settings
        self._finished = finished
        self._most_tunnels = settings.max_tunnels if shares is None else shares.tunnels
        self._refusal = refusal
        self._dial_sshd = dial_sshd
        self._hbone = hbone
        self._clock = TunnelClock(settings.idle_timeout_s)
        self._own_path = OwnPath(settings)
        self.tunnels: set[ServedTunnel | RemoteConnection] = set()
        """Those that are being connected, and those that are being refused, included; and the connections
        that were accepted for others."""
        most_requests = settings.max_requests if shares is None else shares.requests
        self.app = BoundedRequests(settings, most_requests, app_refusal, clock=self._clock, finished=finished)
        """For what is no tunnel."""
        self._remote_ports: RemotePorts | None = None  # most have none

    @property
    def open_tunnels(self) -> int:
        """Tunnels that are not over, those that are being connected included."""
        return len(self.tunnels)

    def serve(self, stream: Stream) -> None:
        """Answers a stream that a peer opened."""
        method = header_value(stream.headers, b":method")
        path = header_value(stream.headers, b":path")
        if is_own(path):
            self._own_path.serve(stream)
            return
        port = listen_port(path)
        name = f"listen/{port}" if port else target_name(path)
        # A CONNECT that names a protocol is a request like others, such as a WebSocket (RFC 8441).
        if name is None and (method != b"CONNECT" or header_value(stream.headers, b":protocol")):
            self.app.serve(stream)
            return
        target = Address(LOOPBACK, port) if port else self._settings.target(name) if name else None
        is_hbone = target is None and name == HBONE_TARGET
        tunnel = ServedTunnel(
            stream,
            TunnelRecord(peer=stream.connection.peer_name, name=name or "", target=target),
            self._over,
            None if is_hbone else self._clock,  # which watches the tunnels in it
            half_closed_timeout_s=self._settings.half_closed_timeout_s,
        )
        self.tunnels.add(tunnel)
        if target is None and not is_hbone and method != b"CONNECT":  # which names no target of ours
            known = ", ".join(self._settings.target_names)
            tunnel.refuse(404, NoRouteError(f"{NO_TARGET}{known}"))
        elif (target is None and not is_hbone) or method != b"POST":
            tunnel.refuse(405, RefusedError("a tunnel is opened with POST"), [(b"allow", b"POST")])
        elif (refusal := self._refusal()) is not None:
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, refusal)
        elif self.open_tunnels > self._most_tunnels:
            text = f"{self._most_tunnels} tunnels are open, which is HBONE_MAX_TUNNELS"
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, LimitError(text, "HBONE_MAX_TUNNELS"))
        elif port:
            self._ports().serve(tunnel, port)
        elif target is None:
            self._carry_hbone(tunnel)
        else:
            timeout_s = self._settings.dial_timeout_s
            dial_sshd = self._dial_sshd
            if name == SSHD_TARGET and dial_sshd is not None:
                peer, client = stream.connection.peer_name, _forwarded_for(stream)
                tunnel.carry(lambda: dial_sshd(target, timeout_s, peer, client), f"tunnel to {name}")
            else:
                tunnel.carry(lambda: dial(target, timeout_s), f"tunnel to {name}")

    def drain(self) -> None:
        """Has ports that are listened on for others accept no further connection."""
        if self._remote_ports is not None:
            self._remote_ports.drain()

    def close(self) -> None:
        """Looks after open tunnels no more, and ends requests to the app."""
        self._clock.close()
        self._own_path.close()
        self.app.close()
        if self._remote_ports is not None:
            self._remote_ports.close()

    def _carry_hbone(self, tunnel: ServedTunnel) -> None:
        try:
            if self._hbone is None:
                raise NoRouteError("inner HBONE is not served here")
            leg = self._hbone.hbone_leg(tunnel.stream)
        except NoRouteError as error:
            tunnel.refuse(HTTPStatus.NOT_FOUND, error)
        except HboneError as error:
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
        else:
            tunnel.open(leg)

    def _ports(self) -> RemotePorts:
        if self._remote_ports is None:
            from agent.tunnels.remote_ports import RemotePorts

            self._remote_ports = RemotePorts(
                self._settings,
                self.tunnels,
                self._finished,
                most_tunnels=self._most_tunnels,
                refusal=self._refusal,
                clock=self._clock,
            )
        return self._remote_ports

    def _over(self, tunnel: ServedTunnel) -> None:
        self.tunnels.discard(tunnel)
        record = tunnel.record
        if (
            record.name == HBONE_TARGET
            and record.flag in (Flag.DOWNSTREAM_RESET, Flag.UPSTREAM_RESET)
            and self._hbone is not None
            and self._hbone.is_hbone_at_rest(tunnel.stream)
        ):
            # A client that is done may let go in any way: ztunnel sends RST_STREAM, others no close_notify.
            record.flag, record.error = Flag.NONE, None
        headers = tunnel.stream.headers
        record.forwarded_for = forwarded_for(header_value(headers, b"forwarded"))
        record.forwarded_identity = certified_client(header_value(headers, CLIENT_CERTIFICATE))
        self._finished(record)


def _forwarded_for(stream: Stream) -> str | None:
    """The client behind the front end, as that says."""
    told = header_value(stream.headers, b"x-forwarded-for")
    return told[:MAX_FORWARDED_CHARS].decode("ascii", "backslashreplace") if told else None
