"""The tunnel request of one target, made once for all its tunnels.

Owned here: the origin that it goes to, and its headers as far as they are the same for every tunnel. What
differs is the trace, the client behind a CONNECT, and now and then the token. A request is asked for by
`opening.py`.
"""

from __future__ import annotations

from gateway.rules.routes import Target
from shared.http2.events import Headers
from shared.net.dial import Origin
from shared.tunnel import request_context, tunnel_request


class TargetRequest:
    """What is sent to ask `target` for a tunnel."""

    __slots__ = ("_head", "_is_connect", "_token", "origin", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.origin = Origin(
            target.scheme, target.host, target.dial, target.ca, target.identity, target.is_connect
        )
        self._is_connect = target.method == "CONNECT"
        self._token: str | None = None
        self._head = self._make_head()

    def headers(self, peer: str, traceparent: bytes, token: str | None) -> Headers:
        """Those for a tunnel of the client `peer` (HOST:PORT), with this trace and, unless it is None, this
        token."""
        if token != self._token:
            self._token = token
            self._head = self._make_head()
        if self._is_connect:
            forwarded = (b"forwarded", request_context.forwarded(peer))
            return [*self._head, forwarded, (b"traceparent", traceparent)]
        return [*self._head, (b"traceparent", traceparent)]

    def _make_head(self) -> Headers:
        target = self.target
        if not self._is_connect:
            return tunnel_request.post(target.scheme, target.authority, target.path, self._token)
        baggage = request_context.baggage(target.namespace, target.service)
        told = [(b"baggage", baggage)] if baggage else []
        return tunnel_request.connect(target.connect_target, self._token, told)
