"""What a leg is: one of the two ends of a tunnel inside a process, whatever carries it.

A relay joins two of them. The rules:

1. A leg pushes what it receives: `relay.received(leg, data)` with a view that is valid only during the call,
   then `relay.ended(leg)` once its peer has finished sending (FIN, END_STREAM, close_notify), or
   `relay.failed(leg, error)` once when it broke (RST, RST_STREAM, a lost connection). After `failed` it
   pushes nothing more. Before a relay is joined a leg keeps what arrives, up to its bound.
2. `write` accepts all it is given and keeps no reference to the view. A leg that holds more than its mark
   calls `relay.full(leg)`, and `relay.drained(leg)` when it has room again; the relay pauses and resumes
   the other leg. This is the only back pressure, so a leg's buffer is bounded by its mark and what a paused
   leg may still push: one read of a socket, one window of an HTTP/2 stream.
3. `write_eof` ends this leg's sending side after all that was written; receiving goes on.
4. `close` gives everything written a chance to leave, ends the sending side if that is still open, and lets
   go of both; it pushes nothing more, and what the peer still sends meanwhile is dropped. `abort` lets go at
   once and tells the peer that it was no orderly end (RST, RST_STREAM).
5. All calls are made on the event loop's thread; none blocks; none raises on a leg that is already gone.
"""

from __future__ import annotations

from typing import Protocol

from shared.errors import HboneError

Buffer = bytes | bytearray | memoryview


class Leg(Protocol):
    """One end of a tunnel."""

    @property
    def buffered_bytes(self) -> int:
        """What this process holds for the leg's peer and to be pushed; asked now and then, for all legs."""

    def join(self, relay: RelayEnd) -> None:
        """From now on pushes to `relay`, first of all what has arrived so far."""

    def write(self, data: Buffer) -> None:
        """Sends `data` to the leg's peer (rule 2)."""

    def write_eof(self) -> None:
        """Tells the peer that no more data will come (rule 3)."""

    def pause_reading(self) -> None:
        """Makes the peer stop sending before long; what was allowed to come by then may still be pushed."""

    def resume_reading(self) -> None:
        """Undoes `pause_reading`."""

    def close(self) -> None:
        """Lets go in good order (rule 4)."""

    def abort(self) -> None:
        """Lets go at once, as a reset (rule 4)."""


class RelayEnd(Protocol):
    """What a leg sees of the relay it is joined to."""

    def received(self, leg: Leg, data: Buffer) -> None:
        """`leg` received `data`."""

    def ended(self, leg: Leg) -> None:
        """`leg`'s peer has finished sending."""

    def failed(self, leg: Leg, error: HboneError) -> None:
        """`leg` broke: it will neither push nor send anything more."""

    def full(self, leg: Leg) -> None:
        """`leg` holds more unsent data than its mark."""

    def drained(self, leg: Leg) -> None:
        """`leg` has room again."""
