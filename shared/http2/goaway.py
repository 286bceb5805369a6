"""GOAWAY: what both ends have said of the end of the connection (RFC 9113 section 6.8)."""

from __future__ import annotations

from enum import Enum

from shared.http2 import frames
from shared.http2.output import Output
from shared.http2.streams import Streams

GOAWAY_PING = b"goaway\0\0"
"""In the PING behind the first of two GOAWAYs: its answer says that the peer has seen that GOAWAY. Our other
PINGs have other bytes."""


class GoAwayState(Enum):
    """What we have told the peer."""

    UNSENT = "unsent"

    ANNOUNCED = "announced"
    """It is to open no new stream. Those that it opened before it knew are still accepted."""

    FINAL = "final"
    """It knows the last stream that was accepted; further ones are refused."""


class GoAway:
    """A connection's GOAWAYs, sent and received."""

    def __init__(self, output: Output, streams: Streams, *, client: bool) -> None:
        self._output = output
        self._streams = streams
        self._client = client
        self._last_accepted: int | None = None  # what we have said: it may only fall
        self.state = GoAwayState.UNSENT
        self.received = False
        """The peer has sent one."""

    def announce(self) -> None:
        """Sends the first of two, by which no stream is lost that is on its way: it names no last stream, and
        the answer to the PING behind it tells when the peer has seen it. For a client, whose peer opens no
        streams, one GOAWAY says all."""
        if self._client:
            self.finish()
        elif self.state is GoAwayState.UNSENT:
            self.state = GoAwayState.ANNOUNCED
            self._output.send(frames.goaway(frames.MAX_STREAM_ID, frames.NO_ERROR) + frames.ping(GOAWAY_PING))

    def finish(self, code: int = frames.NO_ERROR) -> None:
        """Sends the last stream that was accepted, once."""
        if self.state is not GoAwayState.FINAL:
            self.send_final(code)

    def send_final(self, code: int) -> None:
        """The same, whatever was said before."""
        self.state = GoAwayState.FINAL
        if self._last_accepted is None:
            self._last_accepted = 0 if self._client else max(self._streams.newest, 0)
        self._output.send(frames.goaway(self._last_accepted, code))
