"""A client's connection in HTTP/1.1: each of its requests does as a stream of HTTP/2 does (`Downstream`).

h11 reads and writes it: its framing, what closes a connection, what is malformed. The rules:

1. One request at a time. What a client sends ahead of an answer is not read.
2. A client that has ended its side still gets its answer.
3. An answer that is cut off ends the connection with RST, so that it does not look whole. So does one whose
   length is not what it said.
4. CONNECT for what is a service is answered at once: what follows is as on a new connection. So gRPC's C core
   asks a proxy, and goes on in HTTP/2.
5. A connection without a request is closed after `IDLE_S`, and one that has not said its first in whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h11

from agent.proxy.downstream import Downstream
from agent.proxy.fields import HOP_BY_HOP
from shared.errors import HboneError, StreamResetError
from shared.http2.events import Headers
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer, Leg, RelayEnd
from shared.net.legs.tcp import TcpLeg
from shared.net.legs.tcp_end import FIN_ON_CLOSE, set_end

MAX_HEAD_BYTES = 64 << 10

IDLE_S = 60.0
"""As long as runsd kept one."""

EARLY_BYTES = 64 << 10
"""Of a body that nobody takes yet; the rest is not read."""

_MALFORMED = b"krun, the proxy to services: the request is malformed\n"


class Http1Client:
    """A connection, as the `RelayEnd` of its leg. `request(it)` is called for each request, `gone(self)` once
    at the end. `is_service(authority)` says whether a CONNECT leads anywhere; `renewed(transport, early)`
    takes the connection over then, with the first bytes that have come on it."""

    def __init__(
        self,
        leg: TcpLeg,
        *,
        request: Callable[[Downstream], None],
        gone: Callable[[Http1Client], None],
        is_service: Callable[[bytes], bool],
        renewed: Callable[[asyncio.Transport, bytes], None],
    ) -> None:
        self.leg = leg
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._request = request
        self._is_service = is_service
        self._renewed = renewed
        self._gone: Callable[[Http1Client], None] | None = gone
        self._current: _Request | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._advancing = False
        self._wait_for_request()
        leg.join(self)

    def close(self) -> None:
        """Ends it in order."""
        self._over()
        self.leg.close()

    def abort(self) -> None:
        """Ends it with RST."""
        self._over()
        self.leg.abort()

    # RelayEnd of the leg.

    def received(self, leg: Leg, data: Buffer) -> None:
        self._take(bytes(data))

    def ended(self, leg: Leg) -> None:
        self._take(b"")

    def failed(self, leg: Leg, error: HboneError) -> None:
        current, self._current = self._current, None
        self._over()
        if current is not None:
            current.break_off(error)

    def full(self, leg: Leg) -> None:
        if self._current is not None:
            self._current.leg_full(True)

    def drained(self, leg: Leg) -> None:
        if self._current is not None:
            self._current.leg_full(False)

    # Requests.

    def _take(self, data: bytes) -> None:
        try:
            self.http.receive_data(data)
        except RuntimeError:  # more after its end
            self.abort()
            return
        self.advance()

    def advance(self) -> None:
        """Goes through what has come."""
        if self._advancing or self._gone is None:
            return
        self._advancing = True
        try:
            while self._gone is not None and self._next():
                pass
        except h11.RemoteProtocolError:
            self._malformed()
        finally:
            self._advancing = False

    def _next(self) -> bool:
        """One event; False if there is none."""
        event = self.http.next_event()
        if event is h11.NEED_DATA:
            return False
        if event is h11.PAUSED:
            self.leg.pause_reading()
            return False
        if isinstance(event, h11.ConnectionClosed):
            if self._current is None:
                self.close()
            return False
        if isinstance(event, h11.Request):
            self._stop_timer()
            if event.method == b"CONNECT" and self._is_service(event.target):
                self._connect()
                return False
            current = self._current = _Request(self, event)
            if current.bodiless:
                self.http.next_event()  # its end, which is known: it may be answered at once
                current.request_ended([])
            self._request(current)
        elif self._current is not None:
            if isinstance(event, h11.Data):
                self._current.came(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._current.request_ended(list(event.headers))
        return True

    def _connect(self) -> None:
        self.http.next_event()  # the end of its request
        self.leg.write(self.http.send(h11.Response(status_code=200, headers=[])) or b"")
        early = self.http.trailing_data[0]
        transport = self.leg.release()
        set_end(transport, FIN_ON_CLOSE)
        self._over()
        self._renewed(transport, early)

    def answered(self) -> None:
        """The answer to the current request is whole."""
        self._current = None
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
            self._wait_for_request()
            self.leg.resume_reading()
            self.advance()
        else:
            self.close()

    def _malformed(self) -> None:
        current, self._current = self._current, None
        if current is None and self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            fields = [("content-type", "text/plain"), ("content-length", str(len(_MALFORMED)))]
            answer = h11.Response(status_code=400, headers=[*fields, ("connection", "close")])
            for event in (answer, h11.Data(data=_MALFORMED), h11.EndOfMessage()):
                self.leg.write(self.http.send(event) or b"")
            self.close()
            return
        self.abort()
        if current is not None:
            current.break_off(StreamResetError("the client's request is malformed", CANCEL))

    # Ends.

    def _wait_for_request(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        self._stop_timer()
        gone, self._gone = self._gone, None
        if gone is not None:
            gone(self)


class _Request:
    """One request of a connection (`Downstream`)."""

    def __init__(self, client: Http1Client, event: h11.Request) -> None:
        self._client = client
        self._relay: RelayEnd | None = None
        self._early = bytearray()
        self._request_over = False
        self._error: HboneError | None = None
        self._trailers_to_send: Headers = ()
        self._is_chunked = False  # the answer
        self._paused = False
        self._leg_full = False
        self.over = False
        self._method = event.method
        fields = list(event.headers)
        told = dict(fields)
        self.bodiless = b"transfer-encoding" not in told and int(told.get(b"content-length", b"0")) == 0
        self.is_http10 = event.http_version == b"1.0"
        self.trailers: Headers | None = None
        self.on_gone: Callable[[StreamResetError], None] | None = None
        self.headers: Headers = [(b":method", event.method), (b":path", event.target), *fields]

    # Its connection tells.

    def came(self, data: bytes) -> None:
        """Some of the body."""
        if self._relay is not None:
            self._relay.received(self, data)
        elif not self.over:
            self._early += data
            if len(self._early) >= EARLY_BYTES:
                self._client.leg.pause_reading()

    def request_ended(self, trailers: list[tuple[bytes, bytes]]) -> None:
        """The body is whole."""
        self._request_over = True
        self.trailers = trailers or None
        if self._relay is not None:
            self._relay.ended(self)

    def break_off(self, error: HboneError) -> None:
        """The client has gone."""
        if self.over:
            return
        self.over = True
        broken = error if isinstance(error, StreamResetError) else StreamResetError(str(error), CANCEL)
        self._error = broken
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.failed(self, broken)
        elif self.on_gone is not None:
            self.on_gone(broken)

    def leg_full(self, is_full: bool) -> None:
        """The client does not read, or does so again."""
        self._leg_full = is_full
        if self._relay is not None:
            (self._relay.full if is_full else self._relay.drained)(self)

    # Downstream.

    @property
    def unsent_bytes(self) -> int:
        return self._client.leg.buffered_bytes

    @property
    def held_bytes(self) -> int:
        return len(self._early) + self._client.leg.buffered_bytes

    @property
    def buffered_bytes(self) -> int:
        return self.held_bytes

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            relay.received(self, early)
            if not self._paused:
                self._client.leg.resume_reading()
        if self._leg_full:
            relay.full(self)
        if self._request_over:
            relay.ended(self)
        if self._error is not None:
            relay.failed(self, self._error)

    def leave(self) -> None:
        self._relay = None

    def respond(self, headers: Headers, *, end_stream: bool = False) -> None:
        status, fields = _answer_of(headers)
        has_length = any(name == b"content-length" for name, _ in fields)
        self._is_chunked = not (has_length or end_stream or self.is_http10)
        if end_stream and not has_length and status not in (204, 304) and self._method != b"HEAD":
            fields.append((b"content-length", b"0"))
        self._send(h11.Response(status_code=status, headers=fields))
        if end_stream:
            self._finish()

    def inform(self, headers: Headers) -> None:
        status, fields = _answer_of(headers)
        if not self.is_http10:  # which knows none (RFC 9110 section 15.2)
            self._send(h11.InformationalResponse(status_code=status, headers=fields))

    def write(self, data: Buffer) -> None:
        if data:
            self._send(h11.Data(data=bytes(data)))

    def end_with_trailers(self, trailers: Headers) -> None:
        self._trailers_to_send = trailers
        self.write_eof()

    def write_eof(self) -> None:
        """With `close`, for HTTP/1.1 has no half of an exchange."""

    def pause_reading(self) -> None:
        self._paused = True
        self._client.leg.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self.over:
            self._client.leg.resume_reading()

    def close(self) -> None:
        if not self.over:
            self._finish()

    def abort(self) -> None:
        self.reset(CANCEL)

    def reset(self, code: int) -> None:
        if not self.over:
            self.over = True
            self._relay = None
            self._client.abort()

    def _send(self, event: h11.Event) -> None:
        if self.over:
            return
        try:
            self._client.leg.write(self._client.http.send(event) or b"")
        except h11.LocalProtocolError:  # more, or less, than the answer's length
            self.reset(CANCEL)

    def _finish(self) -> None:
        trailers = self._trailers_to_send if self._is_chunked else ()
        self._send(h11.EndOfMessage(headers=list(trailers)))
        if not self.over:
            self.over = True
            self._relay = None
            self._client.answered()


def _answer_of(headers: Headers) -> tuple[int, list[tuple[bytes, bytes]]]:
    status, fields = 502, []
    for name, value in headers:
        if name == b":status":
            status = int(value)
        elif name not in HOP_BY_HOP:
            fields.append((name, value))
    return status, fields
