"""`hbone doctor --probe`: measures what lies between us and a krun that is a far end for probes.

Each probe has a connection of its own, so that what happens to one says nothing of another; they run at the
same time. The long ones wait for what a front end does to a request or a connection when time passes, for as
long as they are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from shared.doctor.far_text import one_line
from shared.doctor.service_path import Way
from shared.doctor.stream_bytes import StreamBytes
from shared.errors import HboneError, StreamResetError, UpstreamError
from shared.http2 import frames
from shared.http2.events import Headers
from shared.http2.header_rules import list_bytes
from shared.net.dial import dial_http2
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from shared.tasks import spawn
from shared.tunnel import tunnel_request
from shared.tunnel.tunnel_request import TUNNEL_PREFIX

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 20.0
"""For a probe's answer: more than the 5 s after which krun says that nothing has come."""

MOST_HEADER_BYTES = 256 << 10
HEADER_STEP_BYTES = 16
"""How closely the limit of headers is found."""

FIELD_BYTES = 4000
"""Of one field that fills a request: front ends have a limit for a single one, too."""

FILL = b"x-hbone-fill"

BUSY_S = 1.0
"""How often the stream that is not idle carries a byte; with less time to measure, twenty in it."""

ASK_S = 5.0
"""How often the connection whose age is measured carries a request."""

PING_S = 10.0
"""How often PINGs are sent to find out whether that is too often; with less time to measure, ten in it."""

SETTLE_S = 1.0
"""How long a stream whose server has ended first is watched."""

CALM = frames.ENHANCE_YOUR_CALM


@dataclass(slots=True)
class Measured:
    """What was measured; None: not known, for the reason that `unknown` has under the field's name."""

    probe_s: float
    """For how long it was watched."""

    max_streams: int | None = None
    """Streams on a connection that the front end allows (SETTINGS)."""

    stream_window_bytes: int | None = None
    connection_window_bytes: int | None = None
    """What we may send on a new stream, and on a new connection."""

    announced_header_bytes: int | None = None
    """Header list that the front end announces."""

    header_bytes: int | None = None
    """The largest header list (RFC 9113 section 6.5.2) that reached krun."""

    header_refusal: str = ""
    """What was said to a larger one."""

    first_flight: bool | None = None
    """The first bytes of a request reach krun before it has answered."""

    early_answer: bool | None = None
    """An answer comes before the request has ended."""

    client_end: bool | None = None
    """The request's end reaches krun while the answer goes on."""

    server_end: str = ""
    """What becomes of a request whose answer has ended first."""

    connect_answer: str = ""
    """What is said to a plain CONNECT (RFC 9113 section 8.5)."""

    extended_connect: bool | None = None
    """CONNECT may name a protocol, as a WebSocket does (RFC 8441)."""

    request_timeout_s: float | None = None
    """When a request that is never idle was ended by somebody."""

    stream_idle_s: float | None = None
    """When one without a byte was, if that was sooner."""

    connection_age_s: float | None = None
    """When a connection in use was told to end (GOAWAY)."""

    connection_idle_s: float | None = None
    """When one without requests was."""

    ping_every_s: float = 0.0
    """How often PINGs were sent."""

    ping_refused_s: float | None = None
    """When that was too often."""

    unknown: dict[str, str] = field(default_factory=dict)
    """Why something could not be measured."""


async def measure(way: Way, probe_s: float) -> Measured:
    """Measures for some `probe_s` seconds."""
    prober = _Prober(way, probe_s)
    tasks = [spawn(prober.noted(name, probe), name=f"probe {name}") for name, probe in prober.probes.items()]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    prober.compare()
    return prober.measured


class _Prober:
    """One measurement: a method for each probe."""

    def __init__(self, way: Way, probe_s: float) -> None:
        self.measured = Measured(probe_s)
        self._way = way
        self._probe_s = probe_s
        self._idle_ended_s: float | None = None
        self.probes: dict[str, Callable[[], Awaitable[None]]] = {
            "settings": self._settings,
            "header_bytes": self._header_bytes,
            "first_flight": self._first_flight,
            "early_answer": self._early_answer,
            "server_end": self._server_end,
            "connect_answer": self._connect,
            "request_timeout_s": self._request_timeout,
            "stream_idle_s": self._stream_idle,
            "connection_age_s": self._connection_age,
            "connection_idle_s": self._connection_idle,
            "ping_refused_s": self._pings,
        }

    async def noted(self, name: str, probe: Callable[[], Awaitable[None]]) -> None:
        """Runs a probe; that it could not be done is noted."""
        try:
            await probe()
        except (HboneError, TimeoutError) as error:
            self.measured.unknown[name] = one_line((str(error) or "no answer in time").encode())

    def compare(self) -> None:
        """An idle stream that ends with the busy one has met the request timeout, not an idle one."""
        idle_s, busy_s = self._idle_ended_s, self.measured.request_timeout_s
        if idle_s is not None and (busy_s is None or idle_s < busy_s - max(1.0, busy_s / 10)):
            self.measured.stream_idle_s = idle_s

    # What they are made of.

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[_Watched]:
        """A connection of its own, whose SETTINGS have come."""
        watched = _Watched()
        await dial_http2(self._way.origin, CONNECT_TIMEOUT_S, watched.make)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await watched.until(lambda: watched.connection.speaks_http2 or watched.connection.lost)
            yield watched
        finally:
            watched.connection.close()
            await watched.connection.wait_closed(SETTLE_S)

    async def _headers(self, method: bytes, kind: str = "", extra: Headers = ()) -> Headers:
        path = f"{TUNNEL_PREFIX}?probe={kind}" if kind else TUNNEL_PREFIX
        token = await self._way.token.token()
        post = tunnel_request.post(self._way.origin.scheme, self._way.authority, path, token)
        return [(b":method", method), *post[1:], *extra]

    @asynccontextmanager
    async def _probing(self, kind: str, first: bytes = b"") -> AsyncIterator[tuple[_Watched, Stream, int]]:
        """A probe whose answer has come, and its status; `first` is sent with the request."""
        async with self._connected() as watched:
            stream = watched.connection.open(await self._headers(b"POST", kind))
            if first:
                stream.write(first)
            yield watched, stream, await stream.response(ANSWER_TIMEOUT_S)

    # Moments.

    async def _settings(self) -> None:
        async with self._connected() as watched:
            session, measured = watched.connection.session, self.measured
            told = session.peer_settings
            unlimited = 1 << 31
            measured.max_streams = None if told.max_streams >= unlimited else told.max_streams
            measured.stream_window_bytes = told.initial_window_bytes
            measured.extended_connect = told.extended_connect
            listed = told.header_list_bytes
            measured.announced_header_bytes = None if listed >= unlimited else listed
            stream = watched.connection.open(await self._headers(b"GET"), end_stream=True)
            await stream.response(ANSWER_TIMEOUT_S)  # by now a WINDOW_UPDATE has come, if one does
            measured.connection_window_bytes = session.send_window

    async def _header_bytes(self) -> None:
        """Doubles until a request is refused, then halves the distance."""
        good, bad = 0, 4096
        while bad <= MOST_HEADER_BYTES and await self._passes(bad):
            good, bad = bad, bad * 2
        if not good:
            good = 512  # less than any token needs
        while bad - good > HEADER_STEP_BYTES:
            middle = (good + bad) // 2
            if await self._passes(middle):
                good = middle
            else:
                bad = middle
        self.measured.header_bytes = good

    async def _passes(self, size: int) -> bool:
        """Whether a request with a header list of `size` bytes reaches krun."""
        headers = _filled(await self._headers(b"GET"), size)
        async with self._connected() as watched:
            try:
                stream = watched.connection.open(headers, end_stream=True)
                status = await stream.response(ANSWER_TIMEOUT_S)
            except UpstreamError as error:
                self.measured.header_refusal = self.measured.header_refusal or str(error)
                return False
            if status == 200:
                return True
            body = await _body(stream)
            self.measured.header_refusal = self.measured.header_refusal or f"answered {status}: {body}"
            return False

    async def _first_flight(self) -> None:
        async with self._probing("wait", first=b"flight") as (_, stream, status):
            _demand(status)
            self.measured.first_flight = await _body(stream) == "flight"

    async def _early_answer(self) -> None:
        """`echo` answers at once; the end is sent when the answer has come, or will not."""
        async with self._connected() as watched:
            stream = watched.connection.open(await self._headers(b"POST", "echo"))
            try:
                _demand(await stream.response(ANSWER_TIMEOUT_S / 4))
            except StreamResetError:
                raise
            except UpstreamError:
                self.measured.early_answer = self.measured.client_end = False
                return
            self.measured.early_answer = True
            reader = StreamBytes(stream, 1000)
            stream.write(b"?")
            stream.write_eof()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                self.measured.client_end = await reader.until(b"?ended\n")

    async def _server_end(self) -> None:
        async with self._probing("end") as (_, stream, status):
            _demand(status)
            reader = StreamBytes(stream, 1000)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                got = await reader.rest()
            if got != b"bye\n" or not reader.has_ended:
                self.measured.server_end = f"the answer was lost: {reader.error}"
                return
            stream.write(b"still here")
            try:
                async with asyncio.timeout(SETTLE_S):
                    error = await reader.broken()
                self.measured.server_end = f"the request is ended: {error}"
            except TimeoutError:
                self.measured.server_end = "the request goes on"

    async def _connect(self) -> None:
        """krun itself answers 405."""
        token = await self._way.token.token()
        async with self._connected() as watched:
            try:
                stream = watched.connection.open(tunnel_request.connect(self._way.authority, token))
                status = await stream.response(ANSWER_TIMEOUT_S)
            except StreamResetError as error:
                self.measured.connect_answer = str(error)
                return
            by = "krun" if await _body(stream) == "a tunnel is opened with POST" else "the front end"
            self.measured.connect_answer = f"answered {status}, by {by}"

    # Durations.

    async def _request_timeout(self) -> None:
        self.measured.request_timeout_s = await self._ended_after(min(BUSY_S, self._probe_s / 20))

    async def _stream_idle(self) -> None:
        self._idle_ended_s = await self._ended_after(None)

    async def _ended_after(self, every_s: float | None) -> float | None:
        """When a stream with a byte each `every_s` seconds, or none at all, is ended; None: it is not."""
        loop = asyncio.get_running_loop()
        async with self._connected() as watched:
            headers = await self._headers(b"POST", "echo")
            began = loop.time()
            stream = watched.connection.open(headers)
            _demand(await stream.response(ANSWER_TIMEOUT_S))
            reader = StreamBytes(stream, 1 << 20)
            while not reader.over:
                left_s = began + self._probe_s - loop.time()
                if left_s <= 0:
                    return None
                if every_s is not None:
                    stream.write(b".")
                try:
                    async with asyncio.timeout(min(left_s, every_s or left_s)):
                        while not reader.over:
                            await reader.more()
                except TimeoutError:
                    continue
            return loop.time() - began

    async def _connection_age(self) -> None:
        async with self._connected() as watched:
            self.measured.connection_age_s = await watched.told_to_end(
                self._probe_s, ASK_S, lambda: self._ask(watched.connection)
            )

    async def _ask(self, connection: Connection) -> None:
        stream = connection.open(await self._headers(b"GET"), end_stream=True)
        await stream.response(ANSWER_TIMEOUT_S)

    async def _connection_idle(self) -> None:
        async with self._connected() as watched:
            self.measured.connection_idle_s = await watched.told_to_end(self._probe_s, self._probe_s, None)

    async def _pings(self) -> None:
        """With a stream open, as tunnels are watched."""
        every_s = self.measured.ping_every_s = min(PING_S, self._probe_s / 10)
        async with self._probing("echo") as (watched, _, status):
            _demand(status)

            async def ping() -> None:
                watched.connection.ping()

            ended_s = await watched.told_to_end(self._probe_s, every_s, ping)
            if watched.connection.goaway_code == CALM:
                self.measured.ping_refused_s = ended_s


class _Watched:
    """A connection, and when it is told to end."""

    connection: Connection

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def make(self) -> Connection:
        """For a dial."""
        self.connection = Connection(
            client=True, on_change=self._changed.set, on_lost=lambda _: self._changed.set()
        )
        return self.connection

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition()` holds, which is looked at when something changes."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def told_to_end(
        self, most_s: float, every_s: float, do: Callable[[], Awaitable[None]] | None
    ) -> float | None:
        """Seconds until GOAWAY, or the connection's end, comes; None: not within `most_s`. `do` is done each
        `every_s` seconds meanwhile."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self.connection.usable:
            left_s = began + most_s - loop.time()
            if left_s <= 0:
                return None
            if do is not None:
                try:
                    await do()
                except UpstreamError:
                    if self.connection.usable:
                        raise
                    break
            try:
                async with asyncio.timeout(min(left_s, every_s)):
                    await self.until(lambda: not self.connection.usable)
            except TimeoutError:
                continue
        return loop.time() - began


def _filled(headers: Headers, size: int) -> Headers:
    """`headers` with as many fields more as make a list of `size` bytes, each counted with 32 more (RFC 9113
    section 6.5.2); or without, if there is no room for one."""
    filled, left = list(headers), size - list_bytes(headers)
    least = len(FILL) + 32
    while left >= least:
        whole = FIELD_BYTES + least
        count = left if left < whole + least else whole  # the last one has what is left for no other
        filled.append((FILL, b"x" * (count - least)))
        left -= count
    return filled


def _demand(status: int) -> None:
    if status != HTTPStatus.OK:
        raise UpstreamError(f"the probe was answered with {status}")


async def _body(stream: Stream) -> str:
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        return one_line(await StreamBytes(stream, 1000).rest())
