"""A connection to an app, or another server, that speaks HTTP/1.1: it carries one exchange after the other
(RFC 9112).

The rules:

1. It is used again only after an answer that was whole and said so, to a request that had been sent to its
   end, with nothing after it.
2. A request goes out as it comes, and the answer comes back as the app sends it, at the same time. A side
   that does not read stops the other. While the app does not read, what the client may still send is kept
   here as plain bytes, and framed when there is room: little more than a window of its stream.
3. A client that breaks off resets the connection: half a request must not look like a whole one.
4. A WebSocket (extended CONNECT, RFC 8441) is asked for by `Upgrade`. Nothing that its client sends reaches
   the app before that has agreed, for it would be another request; from then on it is a tunnel, and the
   connection is gone from here.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Protocol

from agent.proxy import websocket
from agent.proxy.downstream import Downstream
from agent.proxy.exchange import Exchange
from agent.proxy.fields import Field, request_trailers, response_fields, response_trailers
from agent.proxy.http1_messages import (
    LENGTH_CHUNKED,
    LENGTH_UNTIL_END,
    Chunks,
    Http1Error,
    ResponseHead,
    chunk,
    end_of_head,
    last_chunk,
    read_head,
    request_bytes,
)
from shared.errors import HboneError
from shared.net.legs.contract import Buffer, Leg

_WEBSOCKET_VERSION = (b"sec-websocket-version", b"13")
_HTTP2_BEGINS = b"\x00\x00"
"""The length of a server's first SETTINGS, its first two bytes: no text has them."""

PIECE_BYTES = 256 << 10
"""Of a request that waits for the app, what is written at once. When no more than that is left, the client
may send on."""

UNSENT_BYTES = 256 << 10
"""What the kernel keeps of an upload that the app does not read, or twice as much. That is memory of the
container, too, and on loopback more makes nothing faster."""

LEAVE_S = 5.0
"""How long an app that has answered may take for the rest of its request, which it may never read."""

CLOSED_EARLY = "the app closed the connection before its answer was complete"


class OriginLeg(Leg, Protocol):
    """The leg to the app: a `TcpLeg`, or what stands for one."""

    @property
    def unsent_bytes(self) -> int:
        """What the app has not taken."""

    def keep_little(self, most_bytes: int) -> None:
        """Has no more than about `most_bytes` kept for the app below here."""

    def unread(self) -> bytes:
        """While `failed` is told: what had come before the app broke off."""


class _State(Enum):
    IDLE = "no exchange"
    HEAD = "the answer's head is to come"
    LENGTH = "its body of known length"
    CHUNKED = "its body in chunks"
    UNTIL_END = "its body up to the end of the connection"
    LEAVING = "the answer is whole, and the app has yet to read the end of its request"
    OVER = "not ours any more"


class Http1Connection:
    """A connection, as the `RelayEnd` of its leg and of the stream whose exchange it carries.

    `free(self)` is called when it can be used again, `gone(self)` once when it cannot. `upgraded(exchange,
    leg, early)` takes over what has become a tunnel, with the first bytes that the app has sent there;
    `http2()` is told where the app turns out to speak HTTP/2.
    """

    __slots__ = (
        "_app_full",
        "_chunked",
        "_chunks",
        "_exchange",
        "_free",
        "_gone",
        "_head",
        "_http2",
        "_keeps",
        "_key",
        "_left",
        "_leg",
        "_request_sent",
        "_state",
        "_stream",
        "_timer",
        "_unsent",
        "_upgraded",
        "_used",
        "idle_since",
    )

    def __init__(
        self,
        leg: OriginLeg,
        *,
        free: Callable[[Http1Connection], None],
        gone: Callable[[Http1Connection], None],
        upgraded: Callable[[Exchange, Leg, bytes], None],
        http2: Callable[[], None],
    ) -> None:
        self._leg = leg
        self._free = free
        self._gone = gone
        self._upgraded = upgraded
        self._http2 = http2
        self._state = _State.IDLE
        self._exchange: Exchange | None = None
        self._stream: Downstream | None = None
        self._used = False  # it has carried an exchange before
        self._chunked = False  # the request's body
        self._request_sent = False  # to its end
        self._unsent = bytearray()  # of the request's body, while the app does not read
        self._app_full = False
        self._head = bytearray()  # unfinished
        self._chunks: Chunks | None = None
        self._left = 0  # of a body of known length
        self._keeps = False
        self._timer: asyncio.TimerHandle | None = None
        self._key = b""  # of the WebSocket that was asked for
        self.idle_since = 0.0
        """The loop's time at which it became free."""
        leg.keep_little(UNSENT_BYTES)
        leg.join(self)

    @property
    def buffered_bytes(self) -> int:
        """What it holds for the app, the kernel's part included, and of the head of its answer."""
        return len(self._unsent) + len(self._head) + self._leg.unsent_bytes

    @property
    def is_usable(self) -> bool:
        """It waits for an exchange."""
        return self._state is _State.IDLE

    @property
    def is_leaving(self) -> bool:
        """It has no exchange any more, and still holds bytes for one."""
        return self._state is _State.LEAVING

    def carry(self, exchange: Exchange) -> None:
        """Carries an exchange; only while it is usable."""
        stream, head = exchange.stream, exchange.head
        upgrade: list[Field] = []
        self._chunked = not (head.has_length or stream.bodiless)
        if head.protocol:
            self._key = base64.b64encode(os.urandom(16))
            upgrade = _upgrade_fields(head.fields, self._key)
            self._chunked = False
        try:
            begin = request_bytes(head, chunked=self._chunked, upgrade=upgrade)
        except Http1Error:
            exchange.carrier = None
            exchange.fail(HTTPStatus.BAD_REQUEST, "a header of the request cannot be sent as HTTP/1.1")
            self._keeps = True
            self._release()
            return
        self._state = _State.HEAD
        self._exchange = exchange
        self._stream = stream
        self._request_sent = stream.bodiless
        exchange.carrier = self
        before = exchange.sent_before
        if before:
            begin += chunk(before) if self._chunked else before
        self._leg.write(begin)
        if not head.protocol:
            stream.on_gone = None
            stream.join(self)

    def drop(self) -> None:
        """The exchange is over before its answer was whole."""
        self._reset()

    def abort(self, error: HboneError) -> None:
        """Ends it at once, for it holds too much (`shared.net.relay.memory_budget`)."""
        if self.is_leaving:
            self._reset()

    def close(self) -> None:
        """Ends it in order; an exchange on it is cut off."""
        exchange = self._exchange
        if exchange is not None:
            exchange.fail(HTTPStatus.BAD_GATEWAY, "krun stops")
        elif self._state is not _State.OVER:
            self._end()

    # RelayEnd: what the stream tells.

    def received(self, leg: Leg, data: Buffer) -> None:
        if leg is self._leg:
            self._take(data)
        elif self._exchange is not None and not self._exchange.head.protocol:
            self._exchange.sent(data, keep=self._used)
            if self._app_full or self._unsent:
                self._unsent += data
            else:
                self._leg.write(self._framed(data))

    def ended(self, leg: Leg) -> None:
        if leg is self._leg:
            self._app_ended()
        elif not self._request_sent:
            self._request_sent = True
            if self._chunked and not self._unsent:
                self._leg.write(self._last_chunk())

    def failed(self, leg: Leg, error: HboneError) -> None:
        if leg is not self._leg:
            exchange = self._exchange
            self._reset()
            if exchange is not None:
                exchange.end(error)
            return
        if self._state in (_State.HEAD, _State.LENGTH, _State.CHUNKED):
            # It may have answered in full, and closed without having read the request to its end.
            words = self._leg.unread()
            if words:
                self._take(words)
        self._lost(f"the app broke off: {error}")

    def full(self, leg: Leg) -> None:
        if leg is self._leg:
            self._app_full = True
            if self._stream is not None:
                self._stream.pause_reading()
        else:
            self._leg.pause_reading()

    def drained(self, leg: Leg) -> None:
        if leg is not self._leg:
            self._leg.resume_reading()
            return
        self._app_full = False
        unsent = self._unsent
        while unsent and not self._app_full:
            piece = self._framed(unsent[:PIECE_BYTES])
            del unsent[:PIECE_BYTES]
            if not unsent and self._request_sent and self._chunked:
                piece = bytes(piece) + self._last_chunk()
            self._leg.write(piece)
        stream = self._stream
        if stream is not None:
            if len(unsent) <= PIECE_BYTES:
                stream.resume_reading()  # before the app has all, so that it need not wait for the client
            if self._app_full or unsent:
                stream.pause_reading()
        elif self._state is _State.LEAVING and not (self._app_full or unsent):
            self._release()

    def _framed(self, data: Buffer) -> Buffer:
        return chunk(data) if self._chunked else data

    def _last_chunk(self) -> bytes:
        assert self._exchange is not None
        return last_chunk(request_trailers(self._exchange.stream.trailers))

    # What the app sends.

    def _take(self, data: Buffer) -> None:
        state = self._state
        if state is _State.LENGTH and len(data) <= self._left:  # most reads of large bodies
            assert self._exchange is not None
            self._left -= len(data)
            self._exchange.write(data)
            if not self._left:
                self._finish()
            return
        if state is _State.HEAD:
            self._take_head(data)
        elif state is _State.IDLE or state is _State.LEAVING:
            self._reset()  # an answer to nothing, such as 408: to whatever comes next it would be a lie
        elif state is not _State.OVER:
            self._take_body(memoryview(data))

    def _take_head(self, data: Buffer) -> None:
        assert self._exchange is not None
        head = self._head
        known = len(head)
        head += data
        try:
            while self._state is _State.HEAD and (end := end_of_head(head, known)):
                response = read_head(bytes(head[:end]), method=self._exchange.head.method)
                rest = bytes(head[end:])
                head.clear()
                if response.status == HTTPStatus.SWITCHING_PROTOCOLS:
                    self._switched(response, rest)
                elif response.is_interim:
                    self._exchange.inform(response.status, response_fields(response.fields))
                    head += rest
                    known = 0
                else:
                    self._begin_answer(response, memoryview(rest))
        except Http1Error as error:
            if head.startswith(_HTTP2_BEGINS):
                self._http2()
                self._lost("the app speaks HTTP/2, not HTTP/1.1: set HBONE_APP_PROTOCOL=h2c")
            else:
                self._lost(f"the app does not speak HTTP/1.1: {error}")

    def _begin_answer(self, response: ResponseHead, rest: memoryview) -> None:
        exchange, stream = self._exchange, self._stream
        assert exchange is not None and stream is not None
        if exchange.head.protocol:
            if 200 <= response.status < 300:
                self._lost(f"the app does not take the WebSocket: it answered {response.status}")
                return
            stream.on_gone = None
        fields = response_fields(response.fields)
        self._keeps = response.keeps
        if response.length == 0:
            exchange.respond(response.status, fields, end=True)
            self._finish(rest=bool(rest))
            return
        exchange.respond(response.status, fields)
        if response.length == LENGTH_CHUNKED:
            self._state = _State.CHUNKED
            self._chunks = Chunks()
        elif response.length == LENGTH_UNTIL_END:
            self._state = _State.UNTIL_END
        else:
            self._state = _State.LENGTH
            self._left = response.length
        if exchange.head.protocol:
            stream.join(self)
        self._take_body(rest)

    def _take_body(self, data: memoryview) -> None:
        exchange = self._exchange
        if exchange is None or not data:
            return
        if self._state is _State.UNTIL_END:
            exchange.write(data)
        elif self._state is _State.LENGTH:
            body, rest = data[: self._left], data[self._left :]
            self._left -= len(body)
            exchange.write(body)
            if not self._left:
                self._finish(rest=bool(rest))
        elif self._state is _State.CHUNKED:
            assert self._chunks is not None
            try:
                pieces, rest = self._chunks.take(data)
            except Http1Error as error:
                self._lost(f"the app does not speak HTTP/1.1: {error}")
                return
            if len(pieces) == 1:
                exchange.write(pieces[0])
            elif pieces:
                exchange.write(b"".join(pieces))
            if self._chunks.ended:
                trailers = response_trailers(self._chunks.trailers)
                if trailers:
                    exchange.stream.end_with_trailers(trailers)
                self._finish(rest=bool(rest))

    def _switched(self, response: ResponseHead, early: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None
        fields = dict(response.fields)
        if not exchange.head.protocol:
            self._lost("the app switched to another protocol, which nobody has asked for")
        elif fields.get(b"upgrade", b"").lower() != websocket.NAME or fields.get(
            b"sec-websocket-accept"
        ) != websocket.accept(self._key):
            self._lost("the app switched to something else than the WebSocket that it was asked for")
        else:
            self._state = _State.OVER
            self._exchange = self._stream = None
            self._gone(self)
            kept = [item for item in response_fields(response.fields) if item[0] != b"sec-websocket-accept"]
            exchange.respond(HTTPStatus.OK, kept)
            self._upgraded(exchange, self._leg, early)

    def _app_ended(self) -> None:
        if self._state is _State.UNTIL_END:
            self._finish()
        elif self._state is _State.IDLE or self._state is _State.LEAVING:
            self._keeps = False
            if self._state is _State.IDLE:
                self._end()
        elif self._state is not _State.OVER:
            self._lost(CLOSED_EARLY)

    # Ends.

    def _finish(self, *, rest: bool = False) -> None:
        """The answer is whole; `rest`: something came after it."""
        exchange = self._exchange
        assert exchange is not None
        self._keeps = self._keeps and self._request_sent and not rest
        if self._request_sent and self._unsent and self._chunked:
            self._unsent[:], self._chunked = chunk(self._unsent) + self._last_chunk(), False
        self._exchange = self._stream = None
        exchange.finish()
        if self._request_sent and (self._app_full or self._unsent):
            self._state = _State.LEAVING
            self._leg.resume_reading()  # the client may have paused it
            self._timer = asyncio.get_running_loop().call_later(LEAVE_S, self._reset)
        else:
            self._release()

    def _release(self) -> None:
        """Nothing is left to do for the last exchange."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._keeps:
            self._end()
            return
        self._state = _State.IDLE
        self._used = True
        self._chunks = None
        self._leg.resume_reading()  # the client may have paused it
        self._free(self)

    def _lost(self, text: str) -> None:
        """The app broke off, or speaks something else."""
        exchange, state = self._exchange, self._state
        nothing_came = state is _State.HEAD and not self._head
        self._reset()
        if exchange is not None and not (self._used and nothing_came and exchange.repeat(dealt_with=True)):
            exchange.carrier = None
            exchange.fail(HTTPStatus.BAD_GATEWAY, text.replace("the app", exchange.upstream_name, 1))

    def _end(self) -> None:
        """Closes in order; what the app has not read of a request that it has answered is dropped."""
        if self._state is not _State.OVER:
            if self._app_full or self._unsent:
                self._reset()
                return
            self._state = _State.OVER
            self._leg.close()
            self._gone(self)

    def _reset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._state is not _State.OVER:
            self._state = _State.OVER
            self._exchange = self._stream = None
            self._unsent.clear()
            self._leg.abort()
            self._gone(self)


def is_upgradable(protocol: bytes) -> bool:
    """Whether an HTTP/1.1 app can be asked for `protocol` of an extended CONNECT."""
    # Others, such as h2c, would let a client past what we take out of requests.
    return protocol.lower() == websocket.NAME


def _upgrade_fields(fields: list[Field], key: bytes) -> list[Field]:
    upgrade = [(b"connection", b"Upgrade"), (b"upgrade", websocket.NAME), (b"sec-websocket-key", key)]
    if not any(name == _WEBSOCKET_VERSION[0] for name, _ in fields):
        upgrade.append(_WEBSOCKET_VERSION)
    return upgrade
