"""Attacks that send little, or nothing more, and hold what they have: on an HTTP/2 port, and on hgate's.

Counterpart of `floods.py`; `attacker.py` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyperframe.frame import DataFrame, WindowUpdateFrame

from tests.support.attack_frames import (
    FRAME_BYTES,
    INITIAL_WINDOW,
    MAX_WINDOW,
    PREFACE,
    Requests,
    open_block,
    settings,
    stream,
)
from tests.support.hellos import NAME, hello

HANDSHAKE_S = 15.0
"""For a hello, a preface, the first SETTINGS: Envoy's deadline, the longest that others have."""

BLOCK_S = 30.0
"""For the rest of a header block or a frame: no honest peer stops in the middle of one."""

STALL_S = 75.0
"""For a reader that takes nothing: a stall timeout of 60 s, looked at now and then."""

TUNNELS = 64
"""Opened by those attacks that hold what they have."""


@dataclass(frozen=True, slots=True)
class Stall:
    """An attack that sends little, or nothing more, and holds what it has."""

    name: str
    why: str
    pieces: tuple[bytes, ...]
    ends_within_s: float | None
    """Seconds after which the server must have ended it; None: it may stay, and must cost little."""
    gap_s: float = 0.0
    """Between two pieces; silence after the last."""
    reads: bool = True


def stalls(path: bytes) -> dict[str, Stall]:
    """Those on an HTTP/2 port, by name; `path` is one whose POST opens a tunnel to an echo."""
    request = Requests(path)
    begun = PREFACE + settings({})
    requests = b"".join(request(number) for number in range(TUNNELS))
    shut = PREFACE + settings({INITIAL_WINDOW: 0}) + requests + _uploads(4)
    wide = PREFACE + settings({INITIAL_WINDOW: MAX_WINDOW})
    wide += WindowUpdateFrame(0, window_increment=MAX_WINDOW - 65535).serialize()
    unread = wide + requests + _uploads(15)
    slow = _bytewise(PREFACE * 2)
    found = [
        Stall("nothing said", "a connection for nothing", (b"",), HANDSHAKE_S),
        Stall("preface, a byte every half second", "slowloris", slow, HANDSHAKE_S, gap_s=0.5),
        Stall("no SETTINGS after the preface", "slowloris", (PREFACE,), HANDSHAKE_S),
        Stall("header block that never ends", "slowloris", (begun + open_block(b"\x82"),), BLOCK_S),
        Stall("half a frame", "slowloris", (begun + request(0)[:20],), BLOCK_S),
        Stall("SETTINGS, then silence", "half-open: the peer may be gone for good", (begun,), None),
        Stall("windows of 0", "CVE-2019-9517: echoes that nobody takes", (shut,), STALL_S),
        Stall("reads nothing", "the same with TCP's window", (unread,), STALL_S, reads=False),
    ]
    return {stall.name: stall for stall in found}


def slow_hellos() -> dict[str, Stall]:
    """What keeps hgate waiting for a ClientHello, by name."""
    said = hello(NAME)
    found = [
        Stall("no hello", "a connection for nothing", (b"",), HANDSHAKE_S),
        Stall("hello, a byte every half second", "slowloris", _bytewise(said), HANDSHAKE_S, gap_s=0.5),
        Stall("half a hello", "slowloris", (said[: len(said) // 2],), HANDSHAKE_S),
    ]
    return {stall.name: stall for stall in found}


def _uploads(frames: int) -> bytes:
    """As many full DATA frames on each of the first streams."""
    return b"".join(
        DataFrame(stream(number), bytes(FRAME_BYTES)).serialize()
        for number in range(TUNNELS)
        for _ in range(frames)
    )


def _bytewise(data: bytes) -> tuple[bytes, ...]:
    return tuple(bytes((byte,)) for byte in data)
