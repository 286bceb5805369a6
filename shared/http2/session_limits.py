"""What a session announces to its peer, and what it enforces."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.http2 import frames
from shared.http2.flood_guard import FloodLimits
from shared.http2.peer_settings import FIRST_WINDOW


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What we announce and enforce. No window may be below 65,535 bytes: a peer sends as many before it has
    seen our SETTINGS."""

    max_streams: int = 250
    """Streams that the peer may have open at once; one more is refused with REFUSED_STREAM."""

    stream_window_bytes: int = 1 << 20
    """What a peer may send on a new stream before we have passed it on: 1 MiB moves 100 MB/s at 10 ms."""

    most_stream_window_bytes: int = 64 << 20
    """The same on a stream whose reader keeps up, as far as `WindowGrowth` has room: 64 MiB move 400 MB/s at
    150 ms."""

    connection_window_bytes: int = 16 << 20
    """The same for all streams of the connection, as long as no window has grown. Sixteen stalled streams
    fill it; equal windows let one stalled stream stop all others (ztunnel#1538)."""

    max_frame_bytes: int = 16384
    """Largest frame that we accept; DATA is passed on as it arrives, so nothing is gained by more."""

    max_header_list_bytes: int = 64 << 10
    """Decoded header list that we announce, as RFC 9113 section 6.5.2 counts it. Cloud Run's own limit is
    about 60 KiB. Up to `READABLE_LISTS` times as much is still decoded, so that it can be answered with 431;
    beyond, the connection ends, and not a byte more is decoded."""

    extended_connect: bool = False
    """Server: whether we announce that CONNECT may name a protocol, as a WebSocket does (RFC 8441)."""

    floods: FloodLimits = field(default_factory=FloodLimits)
    """What costs the peer little and us much."""

    def __post_init__(self) -> None:
        if min(self.stream_window_bytes, self.connection_window_bytes) < FIRST_WINDOW:
            raise ValueError(f"windows below {FIRST_WINDOW} bytes")

    def announcement(self, *, client: bool) -> bytes:
        """The frames that say so, a client's connection preface in front of them (RFC 9113 section 3.4)."""
        announced = {
            frames.SETTING_MAX_CONCURRENT_STREAMS: self.max_streams,
            frames.SETTING_INITIAL_WINDOW_SIZE: self.stream_window_bytes,
            frames.SETTING_MAX_FRAME_SIZE: self.max_frame_bytes,
            frames.SETTING_MAX_HEADER_LIST_SIZE: self.max_header_list_bytes,
        }
        if self.extended_connect:
            announced[frames.SETTING_ENABLE_CONNECT_PROTOCOL] = 1
        if client:  # only a client may say it
            announced = {frames.SETTING_ENABLE_PUSH: 0, **announced}
        said = (frames.PREFACE if client else b"") + frames.settings(announced)
        more = self.connection_window_bytes - FIRST_WINDOW
        return said + frames.window_update(0, more) if more else said
