"""What is told of a request that came through the mTLS end, once it is over."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from agent.proxy.downstream import Caller, Downstream
from agent.proxy.exchange import Exchange
from shared.address import Address
from shared.errors import Flag, HboneError
from shared.net.legs.stream import header_value
from shared.ops.access_log import AccessLog
from shared.tunnel.tunnel_record import TunnelRecord

FAILED_STATUS = 500
"""An answer of the app's with this status, or a higher one, counts as failed."""


@dataclass(slots=True)
class RequestRecord:
    """A request, and its line in the access log."""

    peer: str
    """The client's end of the connection, HOST:PORT."""
    identity: str
    """Its SPIFFE name."""
    app: str | None
    """Where the request went; None: nowhere."""
    method: str
    authority: str
    path: str
    """Without the query, which may have secrets."""
    status: int
    request_id: str | None
    sent_bytes: int
    """Of the request's body."""
    received_bytes: int
    """Of the answer's."""
    duration_s: float
    flag: Flag
    error: str | None

    def write(self, access_log: AccessLog) -> None:
        """Writes its line."""
        access_log.request(
            src_addr=self.peer,
            dst_addr=self.app,
            identity=self.identity,
            method=self.method,
            authority=self.authority,
            path=self.path,
            status=self.status,
            request_id=self.request_id,
            bytes_sent=self.sent_bytes,
            bytes_recv=self.received_bytes,
            duration_s=self.duration_s,
            flags=self.flag,
            error=self.error,
        )


Record = TunnelRecord | RequestRecord


def outcome(status: int) -> tuple[Flag, str | None]:
    """How a request ended that the app has answered with `status`, and why it counts as failed."""
    if status >= FAILED_STATUS:
        return Flag.STATUS, f"the app answered {status}"
    return Flag.NONE, None


def record_of(exchange: Exchange, caller: Caller, app: Address) -> RequestRecord:
    """That of `caller`'s request to `app`, which is over."""
    flag, error = exchange.failure or outcome(exchange.status)
    return _record(
        exchange.stream,
        caller,
        app=str(app),
        status=exchange.status,
        sent_bytes=exchange.sent_bytes,
        received_bytes=exchange.received_bytes,
        duration_s=time.monotonic() - exchange.started_s,
        flag=flag,
        error=error,
    )


def refused_record(request: Downstream, caller: Caller, status: int, error: HboneError) -> RequestRecord:
    """That of `caller`'s request, which was answered with `status` because of `error`."""
    return _record(
        request,
        caller,
        app=None,
        status=status,
        sent_bytes=0,
        received_bytes=0,
        duration_s=0.0,
        flag=error.flag,
        error=str(error),
    )


def _record(request: Downstream, caller: Caller, **rest: Any) -> RequestRecord:
    def text(name: bytes) -> str:
        return header_value(request.headers, name).decode("latin-1")

    is_upgrade = bool(text(b":protocol"))  # which HTTP/1.1 has a GET for
    return RequestRecord(
        peer=caller.peer,
        identity=caller.identity,
        method="GET" if is_upgrade else text(b":method"),
        authority=text(b":authority") or text(b"host"),
        path=text(b":path").partition("?")[0],
        request_id=text(b"x-request-id") or None,
        **rest,
    )
