"""What the app speaks: HTTP/1.1, or HTTP/2 with prior knowledge (h2c).

Only a try can tell. When the first request has come, a connection of its own begins as an HTTP/2 client
does: a server of HTTP/2 sends its SETTINGS, a server of HTTP/1.1 answers that it does not understand (the
preface is made for that, RFC 9113 section 3.4), or closes. A server that is silent for `SILENCE_S` counts as
one of HTTP/1.1; then a gRPC request still goes out as HTTP/2, which it needs. The result is kept until the
app is seen to speak something else. An app that speaks both gets HTTP/2: bidirectional streams and trailers
are whole only there.

The app's log may show that connection as a refused request `PRI *`. HBONE_APP_PROTOCOL=http1 avoids it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from shared.address import Address
from shared.errors import HboneError
from shared.http2 import frames
from shared.http2.frame_rules import SessionError
from shared.http2.peer_settings import UNLIMITED, PeerSettings
from shared.http2.session_limits import SessionLimits
from shared.net.dial import dial
from shared.net.legs.contract import Buffer, Leg
from shared.tasks import spawn

log = logging.getLogger("hbone.app")

Spoken = Literal["http1", "h2c"]

SILENCE_S = 1.0
"""How long an app may take to answer the preface: on loopback this is long, and its first request waits."""

ANSWER_BYTES = 16 << 10
"""What is read of it: SETTINGS have some dozens of bytes."""

_GOODBYE = frames.SETTINGS_ACK + frames.goaway(0, frames.NO_ERROR)


class AppProtocol:
    """What the app at `app` speaks. `told` is what somebody has said; None: it is to be found out."""

    def __init__(self, app: Address, told: Spoken | None, dial_timeout_s: float) -> None:
        self._app = app
        self._told = told
        self._dial_timeout_s = dial_timeout_s
        self._asking: asyncio.Task[None] | None = None
        self.known: Spoken | None = "http1" if told == "http1" else None
        """None: nobody knows yet. An app that is said to speak h2c is asked, too, for its SETTINGS."""
        self.extended_connect = False
        """It accepts CONNECT with a protocol (RFC 8441)."""
        self.header_list_bytes = UNLIMITED
        """The largest header list that it accepts (SETTINGS_MAX_HEADER_LIST_SIZE)."""
        self.was_silent = False
        """It has not answered the preface, so `known` is a guess."""

    def forget(self) -> None:
        """The app has spoken something else: it is asked again."""
        if self._told != "http1" and self.known is not None:
            log.info("app at %s: no longer speaks %s", self._app, self.known)
            self.known = None
            self.was_silent = False

    async def find_out(self) -> None:
        """Asks the app; once for all who wait. Afterwards `known` is there.

        Raises:
            DialError: it cannot be connected.
        """
        if self._asking is None:
            self._asking = spawn(self._ask(), name=f"what {self._app} speaks")
            self._asking.add_done_callback(self._asked)
        # A caller that gives up leaves the answer to the others.
        await asyncio.shield(self._asking)

    def close(self) -> None:
        """Asks no more."""
        if self._asking is not None:
            self._asking.cancel()

    def _asked(self, _: asyncio.Task[None]) -> None:
        self._asking = None

    async def _ask(self) -> None:
        leg = await dial(self._app, self._dial_timeout_s)
        answer = _Answer()
        leg.join(answer)
        leg.write(SessionLimits().announcement(client=True))
        try:
            async with asyncio.timeout(SILENCE_S):
                await answer.read.wait()
        except TimeoutError:
            self.was_silent = True
        except asyncio.CancelledError:
            leg.abort()
            raise
        settings = answer.settings
        if settings is not None:
            leg.write(_GOODBYE)
        leg.close()
        self.known = "http1" if settings is None and self._told is None else "h2c"
        self.extended_connect = settings is not None and settings.extended_connect
        self.header_list_bytes = UNLIMITED if settings is None else settings.header_list_bytes
        if settings is not None:
            log.info("app at %s: speaks HTTP/2", self._app)
        elif self._told is not None:
            log.warning("app at %s: gives no answer in HTTP/2, which HBONE_APP_PROTOCOL says", self._app)
        else:
            how = "does not answer in HTTP/2" if self.was_silent else "does not speak HTTP/2"
            log.info("app at %s: %s, so it is asked in HTTP/1.1", self._app, how)


class _Answer:
    """The first that an app says (a leg's `RelayEnd`)."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.settings: PeerSettings | None = None
        """None: these are not SETTINGS."""
        self._data = bytearray()

    def received(self, leg: Leg, data: Buffer) -> None:
        if not self.read.is_set():
            self._data += data
            self._check()

    def ended(self, leg: Leg) -> None:
        self.read.set()

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.read.set()

    def full(self, leg: Leg) -> None: ...

    def drained(self, leg: Leg) -> None: ...

    def _check(self) -> None:
        data = self._data
        if len(data) < frames.HEADER_BYTES:
            if data[:1].isalpha():  # text
                self.read.set()
            return
        length, kind, flags, stream_id = frames.read_header(data, 0)
        if kind != frames.SETTINGS or flags or stream_id or length % 6 or length > ANSWER_BYTES:
            self.read.set()
        elif len(data) >= frames.HEADER_BYTES + length:
            settings = PeerSettings()
            try:
                settings.apply(memoryview(bytes(data[frames.HEADER_BYTES :][:length])), of_server=True)
                self.settings = settings
            except SessionError:
                pass  # nothing that we could speak with
            self.read.set()
