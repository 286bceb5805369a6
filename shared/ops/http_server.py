"""A small HTTP/1.1 server for the admin, health and metrics ports: h11 does the protocol (RFC 9112), this
is its thin asyncio side. No TLS, and nothing that a tunnel needs.

A connection is in one of these states, each with a deadline:

- READING   a request is on its way in, or awaited on a new connection
- HANDLING  its handler runs; reading is paused, so that pipelined requests wait in the kernel
- WRITING   the response leaves
- IDLE      between requests
- LINGERING we have sent our last byte and drop what still comes: closing at once would make the kernel reset
            the connection and could destroy the response (RFC 9112 section 9.6)
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import json
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import parse_qsl

import h11

from shared.address import Address
from shared.errors import HboneError
from shared.listen import bound_address, listen
from shared.ops import local_requests
from shared.ops.http_places import Activity, source_of, to_evict
from shared.ops.log import one_line
from shared.tasks import spawn

log = logging.getLogger("hbone.http")

TEXT = "text/plain; charset=utf-8"
MAX_QUERY_FIELDS = 100
LINGER_S = 1.0
"""For the client to take a response and close its side."""

TELL_EVERY_S = 60.0
"""Between two lines in the log about connections that had to go, or were turned away for the same reason."""

_ABSOLUTE_FORM = re.compile(r"\Ahttps?://[^/?#]*", re.IGNORECASE)  # RFC 9112 section 3.2.2


@dataclass(frozen=True, slots=True)
class Request:
    """What a handler is asked."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    """Decoded; of a repeated name the last, and an empty value for a name without one."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case; of a repeated name the last."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """What a handler answers."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def text(cls, status: int, text: str, headers: tuple[tuple[str, str], ...] = ()) -> Response:
        """A response of plain text, with a line end added."""
        return cls(status, TEXT, f"{text}\n".encode(), headers)

    @classmethod
    def json(cls, value: object) -> Response:
        """200 with `value` as JSON with line breaks."""
        return cls(200, "application/json", json.dumps(value, indent=2).encode() + b"\n")


Handler = Callable[[Request], Response | Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds for one client, and for all of them."""

    header_bytes: int = 16 * 1024
    """Request line and headers: what proxies commonly allow, far above what a scraper sends."""
    body_bytes: int = 64 * 1024
    """No admin request needs more than a few settings."""
    request_s: float = 5.0
    """Seconds for a request to arrive and be answered, and again for the response to be taken."""
    idle_s: float = 60.0
    """Seconds between requests: above the scrape interval of Prometheus' usual 15 or 30."""
    connections: int = 64
    """Served at once: a few scrapers, probes and people. As many again may be closing."""


DEFAULT_LIMITS = Limits()

FULL = "full"
REFUSALS = {FULL: "all places are taken by requests that are being answered", **local_requests.FAULTS}
"""Why requests are refused before their handler is called. The keys are the values of a metric's label."""


@dataclass(slots=True)
class Counts:
    """How often the bounds of one server have been reached."""

    evicted: int = 0
    """Connections that had to make room for others."""

    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))
    """Connections and requests turned away, by the reason."""


class HttpServer:
    """Serves `routes`, from method and path to handler; a handler of GET answers HEAD as well.

    A handler is a plain function, which must not block, or a coroutine function. If it raises, the client
    gets a 500 of one line and the log gets the reason. In a turn of the loop one handler is begun, however
    many requests have come, so a flood of them holds up everything else for one answer only. The same holds
    for new connections: libuv accepts one in each turn.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        *,
        name: str = "admin",
        limits: Limits = DEFAULT_LIMITS,
        local_only: bool = False,
    ) -> None:
        """`name` says in errors and in the log what the port is for. `local_only` refuses requests that a web
        page may have sent."""
        self.name = name
        self.limits = limits
        self.local_only = local_only
        self.closing = False
        self.counts = Counts()
        self._turns: deque[Callable[[], bool]] = deque()
        self._told_at: dict[str, float] = {}
        self._routes = dict(routes)
        self._servers: list[asyncio.Server] = []
        self._connections: dict[_Connection, None] = {}
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    async def start(self, address: Address, *, shared: bool = False) -> Address:
        """Listens on `address`, and returns it with the port in place of 0. Can be called for several.

        `shared` lets other processes of the same user listen beside us (`listen`). Raises UnavailableError if
        the address cannot be had.
        """
        server = await listen(address, lambda: _Connection(self), purpose=self.name, shared=shared)
        self._servers.append(server)
        return bound_address(server)

    async def close(self, grace_s: float | None = None) -> None:
        """Stops listening, lets running requests end within `grace_s` seconds (None: their deadline), and
        closes all connections."""
        self.closing = True
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.finish_soon()
        try:
            async with asyncio.timeout(self.limits.request_s if grace_s is None else grace_s):
                await self._all_gone.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()
            await self._all_gone.wait()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    def find(self, method: str, path: str) -> Handler:
        """The handler of a request; for an unknown path or method one that says what there is."""
        handler = self._routes.get((method, path))
        if handler is None and method == "HEAD":
            handler = self._routes.get(("GET", path))
        if handler is not None:
            return handler
        methods = sorted({m for m, p in self._routes if p == path})
        if methods:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            refusal = Response.text(405, f"method not allowed; allowed: {allowed}", (("allow", allowed),))
        else:
            known = "".join(f"\n{m} {p}" for m, p in sorted(self._routes, key=lambda route: route[::-1]))
            refusal = Response.text(404, f"no such path; known paths:{known}")
        return lambda _: refusal

    @property
    def open_connections(self) -> int:
        """Those that have a place."""
        return sum(one.activity is not Activity.LEAVING for one in self._connections)

    def admit(self, connection: _Connection) -> bool:
        """Gives a new connection a place, for which another one may have to go. False: there is none."""
        self._connections[connection] = None
        self._all_gone.clear()
        self._end_leaving()
        loop = asyncio.get_running_loop()
        if self.open_connections <= self.limits.connections:
            return True
        evicted = to_evict(connection, self._connections, self.limits.connections, loop.time())
        if evicted is None:
            self.refused(FULL)
            return False
        self.counts.evicted += 1
        evicted.abort()
        self.forget(evicted)
        text = "all %d places were taken: a slow or idle connection made room, as %d have since the start"
        self._tell("evicted", text, self.limits.connections, self.counts.evicted)
        return True

    def refused(self, reason: str) -> None:
        """Counts a connection or request that was turned away; `reason` is a key of REFUSALS."""
        self.counts.refused[reason] += 1
        count = self.counts.refused[reason]
        self._tell(reason, "refused, %d times since the start: %s", count, REFUSALS[reason])

    def in_turn(self, step: Callable[[], bool]) -> None:
        """Calls `step` soon. A step returns whether it had something to do; a turn of the loop ends with the
        first that had."""
        self._turns.append(step)
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        has_begun = False
        while self._turns and not has_begun:
            has_begun = self._turns[0]()
            self._turns.popleft()
        if self._turns:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _end_leaving(self) -> None:
        """Ends the oldest of those that only wait for their client to close, if there are too many."""
        if len(self._connections) <= 2 * self.limits.connections:
            return
        leaving = [one for one in self._connections if one.activity is Activity.LEAVING]
        if leaving:
            oldest = min(leaving, key=lambda one: one.since)
            oldest.abort()
            self.forget(oldest)

    def _tell(self, kind: str, text: str, *arguments: object) -> None:
        """A warning, unless there was one of that kind a moment ago."""
        now = asyncio.get_running_loop().time()
        if now - self._told_at.get(kind, -TELL_EVERY_S) >= TELL_EVERY_S:
            self._told_at[kind] = now
            log.warning(f"%s: {text}", self.name, *arguments)

    def forget(self, connection: _Connection) -> None:
        """Counts a connection out."""
        self._connections.pop(connection, None)
        if not self._connections:
            self._all_gone.set()


class _State(enum.Enum):
    READING = enum.auto()
    HANDLING = enum.auto()
    WRITING = enum.auto()
    IDLE = enum.auto()
    LINGERING = enum.auto()


_ACTIVITIES = {
    _State.READING: Activity.MOVING,
    _State.HANDLING: Activity.WAITING,  # until its task has begun
    _State.WRITING: Activity.MOVING,
    _State.IDLE: Activity.IDLE,
    _State.LINGERING: Activity.LEAVING,
}


class _Connection(asyncio.Protocol):
    """One client."""

    _transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.state = _State.READING
        self.since = 0.0
        self.source = ""
        self._server = server
        self._limits = server.limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=server.limits.header_bytes)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[Response] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_is_paused = False
        self._peer_has_finished = False

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # High water 0: `pause_writing` then says that the response has not left yet.
        self._transport.set_write_buffer_limits(high=0)
        if self._server.closing:
            self._transport.abort()
            return
        self.source = source_of(transport.get_extra_info("peername"))
        self._enter(_State.READING, self._limits.request_s)
        if not self._server.admit(self):
            self._refuse(503, "no room for another connection")

    def data_received(self, data: bytes) -> None:
        if self.state is _State.LINGERING:
            return
        if self.state is _State.IDLE:
            self._enter(_State.READING, self._limits.request_s)
        self._h11.receive_data(data)
        self._read_events()

    def eof_received(self) -> bool:
        self._peer_has_finished = True
        if self.state is _State.IDLE or self.state is _State.LINGERING:
            return False
        self._h11.receive_data(b"")
        self._read_events()
        return True  # the peer may still wait for its response

    def pause_writing(self) -> None:
        self._write_is_paused = True

    def resume_writing(self) -> None:
        self._write_is_paused = False
        if self.state is _State.WRITING:
            self._written()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._task is not None:
            self._task.cancel()
        self._server.forget(self)

    # What the server asks and calls.

    @property
    def activity(self) -> Activity:
        return Activity.ANSWERING if self._task is not None else _ACTIVITIES[self.state]

    def finish_soon(self) -> None:
        """Closes after the request that is under way, or now if there is none."""
        if self.state in (_State.IDLE, _State.LINGERING) or not self._has_begun():
            self._transport.close()

    def abort(self) -> None:
        """Closes now."""
        self._transport.abort()

    # From request to response.

    def _read_events(self) -> None:
        """Takes from h11 what has arrived of one request. Called only while READING."""
        if self.state is not _State.READING:
            return
        try:
            while True:
                event = self._h11.next_event()
                if event is h11.NEED_DATA:
                    # Only now, so that pipelined requests cannot pile up in h11's buffer.
                    self._transport.resume_reading()
                    return
                if isinstance(event, h11.EndOfMessage):
                    self._handle()
                    return
                if isinstance(event, h11.Request):
                    self._check_head(event)
                    if self._server.local_only and (fault := self._fault(event)):
                        self._server.refused(fault)
                        self._refuse(403, local_requests.FAULTS[fault])
                        return
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > self._limits.body_bytes:
                        raise h11.RemoteProtocolError("request body too long", error_status_hint=413)
                else:
                    self._transport.close()
                    return
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"bad request: {error}")

    def _check_head(self, head: h11.Request) -> None:
        self._head = head
        size = len(head.target) + sum(len(name) + len(value) for name, value in head.headers)
        if size > self._limits.header_bytes:
            # h11 counts only what stays incomplete, not a long header that comes in one read.
            raise h11.RemoteProtocolError("request header too long", error_status_hint=431)
        for name, value in head.headers:
            if name == b"content-length" and int(value) > self._limits.body_bytes:
                raise h11.RemoteProtocolError("request body too long", error_status_hint=413)
        if self._h11.they_are_waiting_for_100_continue:
            self._transport.write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])))

    def _fault(self, head: h11.Request) -> str:
        own = self._transport.get_extra_info("sockname")
        own_address = str(own[0]) if isinstance(own, tuple) else ""
        return local_requests.fault(head.method, head.target, head.headers, own_address)

    def _handle(self) -> None:
        assert self._head is not None
        try:
            request = _request(self._head, bytes(self._body))
        except ValueError as error:
            self._refuse(400, f"bad request: {error}")
            return
        self._transport.pause_reading()
        self.state = _State.HANDLING  # with the deadline of READING
        self._server.in_turn(lambda: self._begin(request))

    def _begin(self, request: Request) -> bool:
        """Starts the handler. False: the deadline is over, or the client has gone."""
        if self.state is not _State.HANDLING or self._transport.is_closing():
            return False
        self._task = spawn(
            _answer(self._server.find(request.method, request.path), request),
            name=f"{self._server.name} {request.method} {one_line(request.path)}",
        )
        self._task.add_done_callback(self._answered)
        return True

    def _answered(self, task: asyncio.Task[Response]) -> None:
        self._task = None
        if self.state is not _State.HANDLING or self._transport.is_closing() or task.cancelled():
            return
        error = task.exception()  # `spawn` has logged what is not foreseeable
        if error is None:
            response = task.result()
        elif isinstance(error, HboneError):
            log.error("%s failed: %s", task.get_name(), error)
            response = Response.text(500, one_line(str(error)))
        else:
            response = Response.text(500, "internal error: the log says more")
        self._send(response, close=self._server.closing)

    def _refuse(self, status: int, text: str) -> None:
        """Answers what cannot be handled and closes."""
        self._send(Response.text(status, one_line(text)), close=True)

    def _send(self, response: Response, *, close: bool) -> None:
        self._enter(_State.WRITING, self._limits.request_s)
        self._transport.pause_reading()
        self._write(response, close=close)
        if not self._write_is_paused:
            self._written()

    def _write(self, response: Response, *, close: bool) -> None:
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())  # RFC 9110 section 6.6.1
        headers = [
            ("date", date),
            ("content-type", response.content_type),
            ("content-length", str(len(response.body))),
            *response.headers,
        ]
        if self._server.local_only:  # browsers read what such a port shows, and peers have chosen parts of it
            headers.append(("x-content-type-options", "nosniff"))
        if close:
            headers.append(("connection", "close"))
        data = self._h11.send(h11.Response(status_code=response.status, headers=headers))
        if self._head is None or self._head.method != b"HEAD":
            data += self._h11.send(h11.Data(data=response.body))
        data += self._h11.send(h11.EndOfMessage())
        self._transport.write(data)

    def _written(self) -> None:
        """The response has left: on to the next request, or to the end."""
        is_over = self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE
        if is_over or self._server.closing:
            self._linger()
            return
        self._h11.start_next_cycle()
        self._head = None
        self._body.clear()
        pipelined, _ = self._h11.trailing_data
        if pipelined or self._peer_has_finished:
            self._enter(_State.READING, self._limits.request_s)
            self._read_events()
        else:
            self._enter(_State.IDLE, self._limits.idle_s)
            self._transport.resume_reading()

    def _linger(self) -> None:
        if self._peer_has_finished:
            self._transport.close()
            return
        self._enter(_State.LINGERING, LINGER_S)
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection
            self._transport.abort()
        else:
            self._transport.resume_reading()

    # Deadlines.

    def _enter(self, state: _State, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.state = state
        self.since = loop.time()
        self._cancel_timer()
        self._timer = loop.call_later(seconds, self._too_late)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            self._transport.abort()
        elif self.state is _State.HANDLING:
            if self._task is not None:
                self._task.cancel()
            self._refuse(503, f"no answer within {self._limits.request_s:g} seconds")
        elif self.state is _State.READING and self._has_begun():
            self._refuse(408, f"request not complete within {self._limits.request_s:g} seconds")
        elif self.state is _State.IDLE or self.state is _State.READING:
            self._transport.close()
        else:
            self._transport.abort()

    def _has_begun(self) -> bool:
        """Whether a byte of the current request has come."""
        return self._head is not None or bool(self._h11.trailing_data[0])


async def _answer(handler: Handler, request: Request) -> Response:
    answer = handler(request)
    return await answer if inspect.isawaitable(answer) else answer


def _request(head: h11.Request, body: bytes) -> Request:
    """The request as handlers see it. Raises ValueError for a target or query that cannot be read."""
    target = _ABSOLUTE_FORM.sub("", head.target.decode("latin-1"), count=1)
    path, _, query = target.partition("?")
    path = path or "/"
    if not path.startswith("/"):
        raise ValueError("the request target is no path")
    return Request(
        method=head.method.decode("latin-1"),
        path=path,
        query=dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)),
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers},
        body=body,
    )
