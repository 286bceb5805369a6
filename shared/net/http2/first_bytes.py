"""The first bytes of a connection to a port of HTTP/2 without TLS: HTTP/2, or HTTP/1.1, which is not served.

A front end speaks HTTP/1.1 to a port that was not declared as h2c, and so does any browser. Both get an
answer in HTTP/1.1 that says what to do. So nothing of HTTP/2 may be sent before: our preface follows the
peer's, which comes with its first bytes (RFC 9113 section 3.4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from shared.http2.frames import PREFACE_WORD
from shared.net.http2.connection import PREFACE_TIMEOUT_S, Connection
from shared.net.legs.read_buffer import READ_BUFFER
from shared.net.legs.tcp import peer_of

LINGER_S = 2.0
"""How long a client that has its answer may go on sending: closing over unread bytes sends RST, which can
overtake the answer (RFC 9112 section 9.6)."""

MAX_LINE_BYTES = 8192
"""Of a request line (RFC 9112 section 3 wants 8000 at least): what is longer is not waited for."""


def http1_answer(text: str) -> bytes:
    """A whole answer (505) to a request of HTTP/1.1, with one line of text."""
    body = text.encode() + b"\n"
    return (
        b"HTTP/1.1 505 HTTP Version Not Supported\r\n"
        b"content-type: text/plain; charset=utf-8\r\n"
        b"content-length: %d\r\n"
        b"connection: close\r\n\r\n" % len(body)
    ) + body


def _is_http1(early: bytes) -> bool | None:
    """Whether a connection that begins with `early` is one of HTTP/1; None: its first line is unfinished."""
    word = early[: len(PREFACE_WORD)]
    if len(word) < len(PREFACE_WORD):
        return None
    if word == PREFACE_WORD or not (word.isalpha() and word.isupper()):
        return False
    line, end, _ = early[:MAX_LINE_BYTES].partition(b"\n")
    if not end:
        return None if len(early) < MAX_LINE_BYTES else False
    return line.rstrip(b"\r").rpartition(b" ")[2].startswith(b"HTTP/1.")


class FirstBytes(asyncio.BufferedProtocol):
    """An accepted connection until it is known what it speaks: then it is the protocol that `connection`
    makes, or it gets `answer` (an `http1_answer`), `http1(peer)` is called and it ends. `decided(self)` is
    called once, when either is so or it is lost."""

    __slots__ = (
        "_answer",
        "_connection",
        "_decided",
        "_early",
        "_http1",
        "_serve_at_once",
        "_timer",
        "_transport",
    )

    def __init__(
        self,
        *,
        connection: Callable[[], Connection],
        answer: bytes,
        http1: Callable[[str], None],
        decided: Callable[[FirstBytes], None],
    ) -> None:
        self._connection = connection
        self._answer = answer
        self._http1 = http1
        self._decided: Callable[[FirstBytes], None] | None = decided
        self._early = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._serve_at_once = False

    def serve(self) -> None:
        """From now on it is HTTP/2, whatever may come. Does nothing if it is decided already."""
        if self._decided is None:
            return
        self._cancel_timer()
        if self._transport is None:
            self._serve_at_once = True
        else:
            self._hand_over(self._transport, self._early)
            self._end()

    def abort(self) -> None:
        """Ends the connection, of which nothing is known yet."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._end()

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        if self._decided is None:
            made.abort()  # as it was told before it had begun
        elif self._serve_at_once:
            self.serve()
        else:
            self._timer = asyncio.get_running_loop().call_later(PREFACE_TIMEOUT_S, made.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        transport = self._transport
        if self._decided is None or transport is None:
            return  # it has been answered
        early = self._early = self._early + bytes(READ_BUFFER[:nbytes])
        is_http1 = _is_http1(early)
        if is_http1 is None:
            return
        self._cancel_timer()
        if is_http1:
            self._refuse(transport, early)
        else:
            self._hand_over(transport, early)
        self._end()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._end()

    def _hand_over(self, transport: asyncio.Transport, early: bytes) -> None:
        """What is no HTTP at all is refused by HTTP/2."""
        connection = self._connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.feed(early)

    def _refuse(self, transport: asyncio.Transport, early: bytes) -> None:
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, transport.abort)
        head, end, _ = self._answer.partition(b"\r\n\r\n")
        transport.write(head + end if early.startswith(b"HEAD ") else self._answer)
        transport.write_eof()
        self._http1(peer_of(transport))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        decided, self._decided = self._decided, None
        if decided is not None:
            decided(self)
