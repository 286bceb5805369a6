"""How a stream's receive window follows its reader and its path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import frames
from shared.http2.session import SessionLimits, SessionStream
from shared.http2.windows import LONGEST_S, MOST_PART_BYTES, MOST_READ_BYTES, PARTS, part_of
from tests.shared.http2.dialogue import OK, Dialogue, data, headers, settings_ack

MIB = 1 << 20
FIRST = MIB
MOST = 64 * MIB
ROOM = 1 << 30

LIMITS = SessionLimits(max_frame_bytes=1 << 20)

ROUND_TRIP_S = 0.04
READ = 64 << 10


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Path:
    """A session whose peer is `round_trip_s` away and sends as much as it may."""

    def __init__(
        self,
        *,
        client: bool = False,
        growth_bytes: int = ROOM,
        round_trip_s: float | None = ROUND_TRIP_S,
        limits: SessionLimits = LIMITS,
    ) -> None:
        self.clock = Clock()
        self.talk = Dialogue(client=client, limits=limits, growth_bytes=growth_bytes, clock=self.clock)
        self.session = self.talk.session
        self.session.announced()
        if round_trip_s is not None:
            self.clock.now += round_trip_s
            self.talk.received(settings_ack())

    def stream(self) -> SessionStream:
        if not self.session.client:
            return self.talk.asked(len(self.session.streams) * 2 + 1)
        stream = self.talk.opened()
        self.talk.received(headers(stream.id, OK))
        return stream

    def arrives(self, stream: SessionStream, count: int) -> None:
        """`count` bytes of the stream."""
        for at in range(0, count, MIB):
            self.talk.received(data(stream.id, bytes(min(MIB, count - at))))

    def round_trip(self, stream: SessionStream, count: int, *, at_once: bool = False) -> int:
        """`count` bytes arrive and are passed on in a round trip: read by read, or all at once in the end.
        Returns the window after that."""
        reads = 1 if at_once else -(-count // READ)
        for number in range(reads):
            size = count if at_once else min(READ, count - number * READ)
            self.arrives(stream, size)
            self.clock.now += ROUND_TRIP_S / reads
            self.session.consumed(stream, size)
        self.talk.sent()
        return stream.window

    def quiet(self, seconds: float) -> None:
        self.clock.now += seconds


# A server's: it grows as the path needs.


def test_a_stream_begins_with_what_settings_say() -> None:
    path = Path()
    stream = path.stream()
    assert (stream.window, stream.receive_window) == (FIRST, FIRST)
    assert path.talk.sent() == []


def test_a_window_that_is_used_up_in_each_round_trip_grows_to_the_largest() -> None:
    path = Path()
    stream = path.stream()
    windows = [path.round_trip(stream, stream.receive_window) for _ in range(9)]
    assert windows == sorted(windows)
    assert windows[-1] == MOST
    assert stream.receive_window > MOST - 2 * MOST_PART_BYTES


def test_a_window_that_the_path_does_not_need_stays() -> None:
    path = Path()
    stream = path.stream()
    assert [path.round_trip(stream, FIRST // 4) for _ in range(9)] == [FIRST] * 9


def test_it_grows_to_no_more_than_four_times_what_a_round_trip_brings() -> None:
    path = Path()
    stream = path.stream()
    for _ in range(9):
        path.round_trip(stream, min(stream.receive_window, 5 * MIB))
    assert 2 * 5 * MIB <= stream.window <= 4 * 5 * MIB


def test_the_connection_s_window_has_as_much_more() -> None:
    path = Path()
    stream, other = path.stream(), path.stream()
    for _ in range(9):
        path.round_trip(stream, stream.receive_window)
    path.arrives(stream, stream.receive_window)  # and nobody reads it
    path.arrives(other, FIRST)
    path.session.consumed(other, FIRST)
    assert other.receive_window >= FIRST - FIRST // PARTS


def test_a_peer_that_does_not_acknowledge_settings_gets_no_more() -> None:
    path = Path(round_trip_s=None)
    stream = path.stream()
    for _ in range(20):
        path.round_trip(stream, stream.receive_window)
    assert stream.window == FIRST


def test_a_peer_that_is_late_to_acknowledge_is_as_far_as_the_longest_path() -> None:
    path = Path(round_trip_s=60.0)
    assert path.session._windows.round_trip_s == LONGEST_S
    path.talk.received(settings_ack())
    assert path.session._windows.round_trip_s == LONGEST_S


def test_without_room_it_stays() -> None:
    path = Path(growth_bytes=0)
    stream = path.stream()
    assert [path.round_trip(stream, FIRST) for _ in range(5)] == [FIRST] * 5


# Readers.


def test_a_reader_that_falls_behind_has_what_its_path_needs() -> None:
    path = Path()
    stream = path.stream()
    for _ in range(9):
        path.round_trip(stream, stream.receive_window)
    path.round_trip(stream, 20 * MIB, at_once=True)
    assert 30 * MIB < stream.window < 50 * MIB
    for _ in range(20):
        path.arrives(stream, stream.receive_window)
        path.quiet(10)
        path.session.consumed(stream, stream.held)
    assert stream.window == FIRST


def test_a_window_that_shrinks_gets_no_credit_until_enough_is_consumed() -> None:
    path = Path()
    stream = path.stream()
    for _ in range(9):
        path.round_trip(stream, stream.receive_window)
    path.arrives(stream, 20 * MIB)
    path.quiet(60)
    path.session.consumed(stream, 20 * MIB)
    assert stream.window == FIRST
    assert path.talk.sent() == []
    path.arrives(stream, stream.receive_window)
    path.session.consumed(stream, stream.held)
    assert stream.receive_window == FIRST - stream.credit


def test_a_pause_of_the_sender_is_not_the_reader_s_fault() -> None:
    path = Path()
    stream = path.stream()
    for _ in range(9):
        path.round_trip(stream, stream.receive_window)
    for _ in range(5):
        path.quiet(60)
        path.round_trip(stream, 4 * MIB)
    assert stream.window == MOST


# A client's: it begins with as much as there is.


def test_a_client_gives_a_new_stream_as_much_as_there_is() -> None:
    path = Path(client=True)
    stream = path.session.open_stream([(b":method", b"POST"), (b":path", b"/")])
    more = MOST - FIRST
    assert path.talk.sent()[1:] == [f"WINDOW_UPDATE 0 +{more}", f"WINDOW_UPDATE 1 +{more}"]
    assert (stream.window, stream.receive_window) == (MOST, MOST)


def test_what_a_stream_had_is_there_for_the_next() -> None:
    path = Path(client=True, growth_bytes=4 * MIB)
    stream = path.stream()
    assert stream.window == FIRST + 2 * MIB
    path.session.reset(stream, frames.CANCEL)
    assert path.stream().window == FIRST + 2 * MIB
    path.session.break_off()
    assert path.stream().window == FIRST + 2 * MIB


def test_a_client_s_window_shrinks_for_a_slow_reader_and_grows_for_one_that_keeps_up() -> None:
    path = Path(client=True)
    stream = path.stream()
    path.round_trip(stream, FIRST)
    for _ in range(20):
        path.arrives(stream, stream.receive_window)
        path.quiet(10)
        path.session.consumed(stream, stream.held)
    assert stream.window == FIRST
    for _ in range(40):
        path.round_trip(stream, FIRST // 2)
    assert stream.window == MOST


def test_a_connection_s_window_is_never_larger_than_may_be() -> None:
    limits = SessionLimits(connection_window_bytes=frames.MAX_WINDOW - 10 * MIB)
    path = Path(client=True, limits=limits)
    assert path.stream().window == FIRST + 10 * MIB
    assert path.stream().window == FIRST


# Whoever reads how.


@pytest.mark.parametrize("client", [False, True])
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3 * MOST_READ_BYTES), st.floats(0, 1), st.booleans()),
        max_size=60,
    )
)
def test_what_may_come_is_held_or_credited_is_the_window(
    client: bool, steps: list[tuple[int, int, float, bool]]
) -> None:
    path = Path(client=client, growth_bytes=12 * MIB)
    streams = [path.stream() for _ in range(3)]
    windows = path.session._windows
    for pick, count, seconds, reads in steps:
        stream = streams[pick]
        path.arrives(stream, min(count, stream.receive_window))
        path.quiet(seconds)
        if reads:
            path.session.consumed(stream, stream.held)
        for each in streams:
            assert each.receive_window + each.held + each.credit == each.window
            assert FIRST <= each.window <= FIRST + 6 * MIB
            assert each.part == part_of(each.window)
        grown = sum(each.window - FIRST for each in streams)
        assert grown <= 12 * MIB
        held = sum(each.held for each in streams)
        assert windows.receive + windows.credit + held == LIMITS.connection_window_bytes + grown
    for stream in streams:
        path.session.reset(stream, frames.CANCEL)
    assert windows.receive + windows.credit == LIMITS.connection_window_bytes
    assert windows._growth.granted_bytes == 0
