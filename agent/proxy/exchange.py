"""One request to the app and its answer, seen from the client's stream.

The rules:

1. An exchange ends once, by `finish`, `fail`, `abort` or `end`, and its owner is told.
2. What is cut off never looks whole: before the answer has begun the client gets a status and why, after it
   RST_STREAM.
3. It may be sent to the app again, once, if the app cannot have dealt with it, or may do so twice; if nothing
   of an answer has come; and if what has been passed on of its body is still there (`REPEATED_BYTES`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Protocol

from agent.proxy.downstream import Caller, Downstream
from agent.proxy.fields import Field, RequestHead
from shared.address import Address
from shared.errors import Flag, HboneError
from shared.http2 import frames
from shared.net.http2.answers import answer
from shared.net.legs.contract import Buffer
from shared.tasks import spawn

REPEATED_BYTES = 64 << 10
"""Of a request's body that are kept in case it has to be sent again: most of gRPC's messages are smaller."""

MAX_INTERIM = 32
"""Interim answers to one request: a 100, and some 103; they pass windows by, and an app may be broken."""


class Carrier(Protocol):
    """What carries an exchange to the app."""

    @property
    def buffered_bytes(self) -> int:
        """What it holds for the app, and of the app's answer."""

    def drop(self) -> None:
        """Lets go at once: the client has left, or has been told of a failure."""


class Exchange:
    """A request of `caller`, if an mTLS end has let it in. `over(self)` is called at its end, `repeat(self)`
    where it is to be sent once more, and `failed(status, text)` where the client is told these in place of
    the app's answer, or of its rest."""

    __slots__ = (
        "_body",
        "_failed",
        "_interim",
        "_over",
        "_repeat",
        "answered",
        "caller",
        "carrier",
        "failure",
        "head",
        "is_over",
        "received_bytes",
        "sent_bytes",
        "started_s",
        "status",
        "stream",
    )

    def __init__(
        self,
        stream: Downstream,
        head: RequestHead,
        over: Callable[[Exchange], None],
        repeat: Callable[[Exchange], None],
        failed: Callable[[int, str], None] = lambda status, text: None,
        caller: Caller | None = None,
    ) -> None:
        self.stream = stream
        self.head = head
        self.caller = caller
        self.started_s = time.monotonic()
        self.sent_bytes = 0
        """Of the request's body, passed on to the app; of a tunnel, once it is over."""
        self.received_bytes = 0
        """Of the answer's."""
        self.status = 0
        """Of the answer; 0: there was none."""
        self.failure: tuple[Flag, str] | None = None
        """How and why it failed, if not by an answer of the app's."""
        self.answered = False
        """The final answer has begun."""
        self.is_over = False
        self.carrier: Carrier | None = None
        """None while none is found, or dialled."""
        self._body: bytearray | None = bytearray()  # passed on so far; None: more than may be kept
        self._interim = 0
        self._over = over
        self._failed = failed
        self._repeat: Callable[[Exchange], None] | None = repeat
        self.wait()

    @property
    def upstream_name(self) -> str:
        """Who carries out its request, for messages."""
        return "the app"

    # Its request.

    def wait(self) -> None:
        """From now on what the client sends is kept by its stream, until a carrier joins it."""
        self.carrier = None
        self.stream.on_gone = lambda error: self.end(error)

    def sent(self, data: Buffer, *, keep: bool) -> None:
        """`data` of the body is passed on to the app; `keep`: it may have to be sent again."""
        self.sent_bytes += len(data)
        if keep and self._body is not None:
            if len(self._body) + len(data) <= REPEATED_BYTES:
                self._body += data
            else:
                self._body = None

    @property
    def sent_before(self) -> bytes:
        """What of the body a carrier before this one has passed on."""
        return bytes(self._body or b"")

    def repeat(self, *, dealt_with: bool) -> bool:
        """Has it sent once more if it may be; else False. `dealt_with`: the app may have acted on it."""
        repeat, self._repeat = self._repeat, None
        if repeat is None or self.answered or self._interim or self.is_over or self._body is None:
            return False
        if dealt_with and not self.head.is_idempotent:
            return False
        self.stream.leave()
        self.stream.resume_reading()
        self.wait()
        repeat(self)
        return True

    # Its answer.

    def inform(self, status: int, fields: list[Field]) -> None:
        """Passes on an interim answer; those beyond MAX_INTERIM are dropped."""
        self._interim += 1
        if not self.answered and self._interim <= MAX_INTERIM:
            self.stream.inform([(b":status", b"%d" % status), *fields])

    def respond(self, status: int, fields: list[Field], *, end: bool = False) -> None:
        """Passes on the head of the final answer; `end`: there is no more of it."""
        self.answered = True
        self.status = status
        self._repeat = self._body = None
        self.stream.respond([(b":status", b"%d" % status), *fields], end_stream=end)

    def write(self, data: Buffer) -> None:
        """Passes on some of its body."""
        self.received_bytes += len(data)
        self.stream.write(data)

    def finish(self) -> None:
        """The answer is whole; the carrier has let go."""
        if not self.is_over:
            self.carrier = None
            self.stream.close()
            self._end()

    def fail(
        self, status: int, text: str, code: int = frames.INTERNAL_ERROR, flag: Flag = Flag.UPSTREAM_RESET
    ) -> None:
        """There is no answer, or no more of it: the client is told `status` and `text`, or RST_STREAM with
        `code` if the answer has begun. `flag` is for the record."""
        if not self.is_over:
            self._failed(status, f"the answer was cut off: {text}" if self.answered else text)
            self._fail(status, text, code, flag)

    def _fail(self, status: int, text: str, code: int, flag: Flag) -> None:
        self.failure = (flag, text)
        if self.answered:
            self.stream.reset(code)
        else:
            self.status = status
            answer(self.stream, status, text)
        self._end()

    def unreachable(self, error: HboneError, app: Address, origin: object) -> None:
        """There is no way to the app; `error` names it as `origin`, the client is told it as `app`."""
        self.carrier = None
        text = str(error).replace(f"connect to {origin}", f"app at {app}", 1)
        self.fail(HTTPStatus.SERVICE_UNAVAILABLE, text, flag=error.flag)

    def end(self, error: HboneError) -> None:
        """The client has left."""
        if not self.is_over:
            self.failure = (Flag.DOWNSTREAM_RESET, f"the client broke off: {error}")
            self._end()

    def tunnel_over(self, sent_bytes: int, received_bytes: int, error: HboneError | None) -> None:
        """The tunnel that it has become is over."""
        if not self.is_over:
            self.sent_bytes, self.received_bytes = sent_bytes, received_bytes
            if error is not None:
                self.failure = (error.flag, str(error))
            self._end()

    # A holder of `shared.net.relay.memory_budget`.

    @property
    def buffered_bytes(self) -> int:
        """What is held for it."""
        carried = 0 if self.carrier is None else self.carrier.buffered_bytes
        # What has come and is not credited is with the stream, or with the carrier, which counts it, too.
        held = max(self.stream.held_bytes, self.stream.buffered_bytes + carried)
        return held + len(self._body or b"")

    def abort(self, error: HboneError) -> None:
        """Ends it, for it holds too much; or drops the end of an answer that the client does not read."""
        if self.is_over:
            self.stream.reset(frames.ENHANCE_YOUR_CALM)
        else:
            self._fail(HTTPStatus.SERVICE_UNAVAILABLE, str(error), frames.ENHANCE_YOUR_CALM, error.flag)

    def _end(self) -> None:
        self.is_over = True
        self.stream.on_gone = None
        carrier, self.carrier = self.carrier, None
        self._repeat = self._body = None
        if carrier is not None:
            carrier.drop()
        self._over(self)


class Waiting:
    """Carries an exchange while `work` gets what carries it further, such as a connection."""

    def __init__(self, exchange: Exchange, work: Coroutine[Any, Any, None], name: str) -> None:
        exchange.carrier = self
        self._task = spawn(work, name=name)

    @property
    def buffered_bytes(self) -> int:
        """Nothing: what the client sends meanwhile stays with its stream."""
        return 0

    def drop(self) -> None:
        """Cancels `work`."""
        self._task.cancel()
