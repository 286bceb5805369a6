"""What a stream on 15009 asks for: a tunnel to a target, or the app as an ordinary HTTP request.

`/_hbone/15003`, `/_hbone/22` and `/_hbone/NAME` are tunnels; any other path is the app's (`app_proxy.py`). A
target is dialled first and 200 said after, so that a 200 means a connected target.
"""

from __future__ import annotations

from collections.abc import Callable

from agent.app_proxy import AppProxy
from agent.settings import INBOUND_TARGET, SSHD_TARGET, Settings
from shared.errors import LimitError, NoRouteError, RefusedError
from shared.net.dial import dial
from shared.net.stream import Stream, header_value
from shared.net.tunnel_clock import TunnelClock
from shared.net.tunnel_server import UNAVAILABLE, ServedTunnel, TunnelRecord
from shared.wire.tunnel_request import target_name


class Requests:
    """Takes the streams of all connections. `finished` is told about every tunnel request, taken or not."""

    def __init__(self, settings: Settings, finished: Callable[[TunnelRecord], None]) -> None:
        self._settings = settings
        self._finished = finished
        self._clock = TunnelClock(settings.idle_timeout_s)
        self.open_tunnels = 0
        """Those that are being connected included."""
        self.app = AppProxy(
            settings.app,
            settings.dial_timeout_s,
            settings.app_protocol,
            clock=self._clock,
            half_closed_timeout_s=settings.half_closed_timeout_s,
        )
        """Takes what is no tunnel."""

    def take(self, stream: Stream) -> None:
        """Answers a stream that a peer opened."""
        method = header_value(stream.headers, b":method")
        name = target_name(header_value(stream.headers, b":path"))
        # A CONNECT that names a protocol is a request like others, such as a WebSocket (RFC 8441).
        if name is None and (method != b"CONNECT" or header_value(stream.headers, b":protocol")):
            self.app.take(stream)
            return
        target = self._settings.target(name) if name else None
        tunnel = ServedTunnel(
            stream,
            name or "",
            target,
            self._over,
            self._clock,
            half_closed_timeout_s=self._settings.half_closed_timeout_s,
        )
        self.open_tunnels += 1
        if target is None and method != b"CONNECT":  # which names no target of ours
            known = ", ".join([INBOUND_TARGET, SSHD_TARGET, *sorted(self._settings.targets)])
            tunnel.refuse(404, NoRouteError(f"no such target; known are {known}"))
        elif target is None or method != b"POST":
            tunnel.refuse(405, RefusedError("a tunnel is opened with POST"), [(b"allow", b"POST")])
        elif self.open_tunnels > self._settings.max_tunnels:
            most = self._settings.max_tunnels
            text = f"{most} tunnels are open, which is HBONE_MAX_TUNNELS"
            tunnel.refuse(UNAVAILABLE, LimitError(text, "HBONE_MAX_TUNNELS"))
        else:
            timeout_s = self._settings.dial_timeout_s
            tunnel.carry(lambda: dial(target, timeout_s), f"tunnel to {name}")

    def close(self) -> None:
        """Looks after open tunnels no more, and ends requests to the app."""
        self._clock.close()
        self.app.close()

    def _over(self, tunnel: ServedTunnel) -> None:
        self.open_tunnels -= 1
        if tunnel.record is not None:
            self._finished(tunnel.record)
