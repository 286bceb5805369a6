"""Requests to the app: how many there may be, what they hold, and how their failures are logged.

One too many, or one that comes while too much is held for all peers, is answered with 503. If all together
hold far too much, those that hold most are ended, as tunnels are: with 503 if the app has not answered yet,
else with a reset.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus

from agent.config.settings import Settings
from agent.proxy.downstream import Caller, Downstream
from agent.proxy.request_record import RequestRecord, refused_record
from agent.tunnels.app_proxy import AppProxy
from shared.errors import HboneError, LimitError, RefusedError
from shared.net.http2.answers import answer
from shared.net.legs.stream import header_value
from shared.net.relay.memory_budget import Holder
from shared.net.relay.tunnel_clock import TunnelClock
from shared.ops.repeated_log import RepeatedLog

log = logging.getLogger("hbone.app")


_WHAT_TO_DO: dict[int, str] = {
    HTTPStatus.BAD_GATEWAY: "the app's own log may say more; HBONE_APP_PROTOCOL says what it speaks",
    HTTPStatus.SERVICE_UNAVAILABLE: (
        "is the app up, and does it listen on the PORT that it is given, or on HBONE_APP?"
    ),
}
"""By what the client is told."""


class BoundedRequests:
    """All requests to the app of all connections."""

    def __init__(
        self,
        settings: Settings,
        most: int,
        refusal: Callable[[], LimitError | None] = lambda: None,
        *,
        clock: TunnelClock | None = None,
        finished: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        """`most` requests may be open at once; `refusal()` says why none is accepted now, if so. `clock`
        watches those that have become tunnels. `finished` gets the records of requests through the mTLS end,
        as far as HBONE_REQUEST_LOG wants them."""
        self.most_requests = most
        self.failures: Counter[int] = Counter()
        """Requests answered in the app's place, or cut off, by status."""
        self._speaks_http = settings.app_protocol != "tcp"
        self._refusal = refusal
        self._wanted = settings.request_log
        self._finished = finished
        self._proxy = AppProxy(
            settings.app,
            settings.dial_timeout_s,
            "auto" if settings.app_protocol == "tcp" else settings.app_protocol,
            clock=clock,
            half_closed_timeout_s=settings.half_closed_timeout_s,
            failed=self._failed,
            finished=self._record,
        )
        self._warnings = RepeatedLog(log)
        self._closing = False

    @property
    def open_requests(self) -> int:
        """Those whose answers have not ended."""
        return self._proxy.open_requests

    @property
    def buffered_bytes(self) -> int:
        """What is held for all of them, both ways; looks at each."""
        return self._proxy.buffered_bytes

    @property
    def shared_bytes(self) -> int:
        """Of that, what is held for none of them in particular."""
        return self._proxy.shared_bytes

    def serve(self, stream: Downstream, caller: Caller | None = None) -> None:
        """Passes a request on, and the answer back. `caller` has sent it through the mTLS end; None: it came
        through Cloud Run's front end."""
        if not self._speaks_http:
            text = "no tunnel, and the app speaks no HTTP (HBONE_APP_PROTOCOL=tcp)"
            answer(stream, HTTPStatus.NOT_FOUND, text)
            return
        is_connect = header_value(stream.headers, b":method") == b"CONNECT"
        if is_connect and not header_value(stream.headers, b":protocol"):
            # An app that knows CONNECT would take the client's bytes for what they are; others for a fault.
            self._refuse_connect(stream, caller)
            return
        refusal = self._refusal()
        if refusal is None and self.open_requests >= self.most_requests:
            text = f"{self.most_requests} requests to the app are open, which is HBONE_MAX_REQUESTS"
            refusal = LimitError(text, "HBONE_MAX_REQUESTS")
        if refusal is not None:
            self.failures[HTTPStatus.SERVICE_UNAVAILABLE] += 1
            answer(stream, HTTPStatus.SERVICE_UNAVAILABLE, str(refusal))
            self._warnings.warning(
                refusal.limit, f"{HTTPStatus.SERVICE_UNAVAILABLE} to a request to the app: {refusal}"
            )
            if caller is not None:
                self._record(refused_record(stream, caller, HTTPStatus.SERVICE_UNAVAILABLE, refusal))
            return
        self._proxy.take(stream, caller)

    def holders(self) -> Iterator[HeldRequest]:
        """Whatever holds bytes for a request, for the budget."""
        return (HeldRequest(holder, self._warnings) for holder in self._proxy.holders())

    def close(self) -> None:
        """Ends what is left, and tells what has not been told yet."""
        self._closing = True
        self._proxy.close()
        self._warnings.close()

    def _refuse_connect(self, stream: Downstream, caller: Caller | None) -> None:
        if caller is None:
            answer(stream, HTTPStatus.METHOD_NOT_ALLOWED, "no tunnels here")
            return
        error = RefusedError("no tunnels here: for inner HBONE the tunnel URL ends in /_hbone/15008")
        answer(stream, HTTPStatus.METHOD_NOT_ALLOWED, str(error))
        self._record(refused_record(stream, caller, HTTPStatus.METHOD_NOT_ALLOWED, error))
        self._warnings.warning("connect", f"CONNECT of {caller.identity} at the mTLS end: {error}")

    def _record(self, record: RequestRecord) -> None:
        if self._wanted == "all" or (self._wanted == "failed" and record.error is not None):
            self._finished(record)

    def _failed(self, status: int, text: str) -> None:
        """A request was answered with `status` in place of the app, or cut off, and why."""
        self.failures[status] += 1
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and not self._closing:
            hint = None if "HBONE_" in text else _WHAT_TO_DO.get(status)
            self._warnings.warning(str(status), f"{status}: {text}" + (f": {hint}" if hint else ""))


class HeldRequest:
    """One of the holders, as the budget sees it."""

    __slots__ = ("_holder", "_warnings")

    def __init__(self, holder: Holder, warnings: RepeatedLog) -> None:
        self._holder = holder
        self._warnings = warnings

    @property
    def buffered_bytes(self) -> int:
        """What is held for its client, either way."""
        return self._holder.buffered_bytes

    def abort(self, error: HboneError) -> None:
        """Ends it; nothing if it is over."""
        self._holder.abort(error)
        self._warnings.warning(error.flag, f"a request to the app was ended: {error}")
