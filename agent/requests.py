"""What a stream on 15009 asks for: a tunnel to a target, or the app as an ordinary HTTP request.

`/_hbone/15003`, `/_hbone/22` and `/_hbone/NAME` are tunnels; any other path is the app's (`app_proxy.py`). A
target is dialled first and 200 said after, so that a 200 means a connected target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agent.app_proxy import AppProxy
from agent.settings import INBOUND_TARGET, SSHD_TARGET, Settings
from shared.errors import DOWNSTREAM_RESET, DialError, HboneError, NoRouteError, RefusedError
from shared.net.address import Address
from shared.net.answers import answer
from shared.net.dial import dial
from shared.net.relay import Relay
from shared.net.stream import Stream, header_value
from shared.tasks import spawn
from shared.wire.tunnel_request import target_name


@dataclass(slots=True)
class TunnelRecord:
    """What is known of a tunnel when it is over, for the log and the demo."""

    peer: str
    name: str
    target: Address | None
    status: int
    duration_s: float
    flag: str = "-"
    sent_bytes: int = 0
    received_bytes: int = 0
    error: HboneError | None = None


class Requests:
    """Takes the streams of all connections. `finished` is told about every tunnel request, taken or not."""

    def __init__(self, settings: Settings, finished: Callable[[TunnelRecord], None]) -> None:
        self._settings = settings
        self._finished = finished
        self._app = AppProxy(settings.app, settings.dial_timeout_s)

    def take(self, stream: Stream) -> None:
        """Answers a stream that a peer opened."""
        method = header_value(stream.headers, b":method")
        name = target_name(header_value(stream.headers, b":path"))
        if name is None and method != b"CONNECT":
            self._app.take(stream)
            return
        started = asyncio.get_running_loop().time()
        target = self._settings.target(name) if name else None
        if target is None and method != b"CONNECT":  # which names no target of ours
            known = ", ".join([INBOUND_TARGET, SSHD_TARGET, *sorted(self._settings.targets)])
            error: HboneError = NoRouteError(f"no such target; known are {known}")
            self._refuse(stream, name or "", None, 404, error, started)
        elif target is None or method != b"POST":
            error = RefusedError("a tunnel is opened with POST")
            self._refuse(stream, name or "", target, 405, error, started)
        else:
            spawn(self._carry(stream, name or "", target, started), name=f"tunnel to {target}")

    async def _carry(self, stream: Stream, name: str, target: Address, started: float) -> None:
        try:
            leg = await dial(target, self._settings.dial_timeout_s)
        except DialError as error:
            self._refuse(stream, name, target, 503, error, started)
            return
        stream.respond([(b":status", b"200")])
        peer = stream.connection.peer_name

        def over(relay: Relay) -> None:
            flag = "-" if relay.error is None else relay.error.flag
            self._finished(
                TunnelRecord(
                    peer,
                    name,
                    target,
                    status=200,
                    duration_s=asyncio.get_running_loop().time() - started,
                    flag=DOWNSTREAM_RESET if relay.broken is relay.downstream else flag,
                    sent_bytes=relay.sent_bytes,
                    received_bytes=relay.received_bytes,
                    error=relay.error,
                )
            )

        Relay(stream, leg, over).start()

    def _refuse(
        self,
        stream: Stream,
        name: str,
        target: Address | None,
        status: int,
        error: HboneError,
        started: float,
    ) -> None:
        answer(stream, status, str(error))
        duration_s = asyncio.get_running_loop().time() - started
        peer = stream.connection.peer_name
        self._finished(TunnelRecord(peer, name, target, status, duration_s, flag=error.flag, error=error))
