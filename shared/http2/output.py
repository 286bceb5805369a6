"""Where the parts of a session put frames for the network and events for the owner."""

from __future__ import annotations

from shared.http2.events import Event


class Output:
    """Both in the order of the calls."""

    __slots__ = ("broken", "events", "wire")

    def __init__(self, wire: bytes) -> None:
        self.wire = bytearray(wire)
        """Frames to send. What every stream sends is appended without a call of `send`, where it is known
        that nothing is broken: a stream of 1 KiB each way would cost 3 % more."""
        self.events: list[Event] = []
        """What the owner is to be told."""
        self.broken = False
        """After a connection error: everything else to be sent is dropped."""

    def send(self, frame: bytes | bytearray) -> None:
        """Appends a whole frame, or several."""
        if not self.broken:
            self.wire += frame
