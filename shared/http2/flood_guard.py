"""Counts what a peer asks of us that costs it next to nothing, and ends the connection when it is too much.

RFC 9113 itself lets a peer send a hundred thousand PINGs, and open and reset streams as fast as it can
(section 10.5 leaves limits to us). Each budget is far above what an honest peer needs. A peer that uses one
up gets GOAWAY with ENHANCE_YOUR_CALM, and only that connection ends. If the peer is a front end whose
connection many clients share, streams opened in vain may be one client's doing: then it is first given notice
(`Faults`).

Small DATA frames have no budget, on purpose: what is received is either passed on at once or kept as bytes
within the window, so a small frame costs us no more than its bytes. A guard against them has ended real
database connections elsewhere (ztunnel#2100).
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.http2 import frames
from shared.http2.budget import Budget


@dataclass(frozen=True)
class FloodLimits:
    """Bursts, and rates a second, per connection."""

    control_frames: float = 1000
    """PING, SETTINGS, PRIORITY, GOAWAY, unknown frames, and whatever comes on streams that are over: each is
    work or an answer (CVE-2019-9512, -9513, -9515). Envoy and nghttp2 allow as many."""

    control_frames_per_s: float = 100
    """gRPC's keepalive is one PING in ten seconds; bandwidth probes send one a round trip."""

    resets: float = 200
    """Streams that the peer resets before we have answered (CVE-2023-44487), or makes us reset or refuse
    (CVE-2025-8671); header lists of hundreds of fields count here too. A front end that loses an instance's
    clients may reset all its 100 streams at once."""

    resets_per_s: float = 20
    """A client that gives up while its target is dialled."""

    front_end: bool = False
    """The peer may pass on what its clients do: `resets` used up is answered with GOAWAY NO_ERROR, which
    breaks no open tunnel; as many streams again after that end the connection."""

    empty_data: float = 100
    """DATA frames with nothing in them that do not end the stream (CVE-2019-9518)."""

    empty_data_per_s: float = 10
    """None is ever needed."""

    window_updates: float = 1000
    """WINDOW_UPDATE frames beyond those that our own DATA calls for."""

    window_updates_per_data_frame: float = 10
    """As Envoy counts: a peer may credit stream and connection several times a frame."""

    header_block_bytes: int = 64 << 10
    """HEADERS with all its CONTINUATIONs, compressed: no more than the list may be when decoded
    (CVE-2024-27316)."""


STREAMS_PER_CONTROL_FRAME = 10
"""Streams whose windows SETTINGS may change for the price of one control frame: what it costs us."""


class FloodError(Exception):
    """The peer asks for too much of something."""


class FloodGuard:
    """Counts for one connection; every method raises FloodError when a budget is used up."""

    __slots__ = (
        "_control",
        "_empty",
        "_header_bytes",
        "_limits",
        "_resets",
        "_updates",
        "data_frames",
        "now",
    )

    def __init__(self, limits: FloodLimits) -> None:
        self._limits = limits
        self._control = Budget(limits.control_frames, limits.control_frames_per_s)
        self._resets = Budget(limits.resets, limits.resets_per_s)
        self._empty = Budget(limits.empty_data, limits.empty_data_per_s)
        self._updates = Budget(limits.window_updates, 0)
        self._header_bytes = 0
        self.now = 0.0
        """The time of a steady clock, in seconds; set at each read."""
        self.data_frames = 0
        """DATA frames that we have sent since the last WINDOW_UPDATE came; the sender counts them here."""

    def control_frame(self, kind: int, flags: int, length: int) -> None:
        """A frame that is no DATA has come; `length` is its payload's in bytes."""
        if kind in (frames.HEADERS, frames.CONTINUATION):
            self._header_block(kind, length)
        elif kind == frames.WINDOW_UPDATE:
            self._updates.earn(self.data_frames * self._limits.window_updates_per_data_frame)
            self.data_frames = 0
            if not self._updates.spend(self.now):
                raise FloodError("too many WINDOW_UPDATE frames")
        elif kind != frames.RST_STREAM:
            self._spend(1)

    def stale(self) -> None:
        """A frame has come on a stream that is over, and has to be judged."""
        self._spend(1)

    def stream_windows(self, streams: int) -> None:
        """SETTINGS change the windows of so many streams."""
        self._spend(streams / STREAMS_PER_CONTROL_FRAME)

    def empty_data(self) -> None:
        """A DATA frame without payload, not the stream's last, has come."""
        if not self._empty.spend(self.now):
            raise FloodError("too many empty DATA frames")

    def stream_wasted(self, units: float = 1.0) -> None:
        """A stream was opened in vain: reset before the answer, refused, or reset for the peer's fault; or
        something was as much work as `units` of these."""
        if not self._resets.spend(self.now, units):
            raise FloodError("too many streams opened in vain")

    def forgive_resets(self) -> None:
        """The peer has been given notice: it may open as many streams again until it has seen that."""
        self._resets = Budget(self._limits.resets, self._limits.resets_per_s)

    def _spend(self, units: float) -> None:
        if not self._control.spend(self.now, units):
            raise FloodError("too many control frames")

    def _header_block(self, kind: int, length: int) -> None:
        self._header_bytes = length if kind == frames.HEADERS else self._header_bytes + length
        if self._header_bytes > self._limits.header_block_bytes:
            raise FloodError(f"a header block of more than {self._limits.header_block_bytes} bytes")
