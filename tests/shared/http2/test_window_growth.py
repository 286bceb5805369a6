"""How several streams share what windows may grow by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.http2.session_stream import SessionStream
from shared.http2.window_growth import IDLE_S, LEAST_BYTES, WindowGrowth

MIB = 1 << 20
MOST = 96 * MIB


def streams(count: int) -> list[SessionStream]:
    return [SessionStream(2 * number + 1, 0, 0, 0) for number in range(count)]


def test_a_stream_gets_what_it_wants_up_to_half_of_what_is_left() -> None:
    growth = WindowGrowth(lambda: MOST)
    first, second, third = streams(3)
    assert growth.ask(first, 10 * MIB, 0.0) == 10 * MIB
    assert growth.ask(second, MOST, 0.0) == 43 * MIB
    assert growth.ask(third, MOST, 0.0) == 21.5 * MIB
    assert growth.granted_bytes == 74.5 * MIB


def test_streams_that_ask_again_and_again_end_up_alike() -> None:
    growth = WindowGrowth(lambda: MOST)
    asking = streams(5)
    for _ in range(20):
        parts = [growth.ask(stream, MOST, 0.0) for stream in asking]
    assert max(parts) - min(parts) < MIB
    assert abs(parts[0] - MOST // 6) < MIB


def test_a_part_too_small_to_be_of_use_is_none() -> None:
    growth = WindowGrowth(lambda: 2 * LEAST_BYTES - 2)
    (stream,) = streams(1)
    assert growth.ask(stream, 5 * MIB, 0.0) == 0
    assert growth.ask(stream, 1000, 0.0) == 1000, "it was all that was wanted"


def test_what_is_released_is_there_for_others() -> None:
    growth = WindowGrowth(lambda: MOST)
    first, second = streams(2)
    growth.ask(first, MOST, 0.0)
    growth.release(first)
    growth.release(first)
    assert growth.granted_bytes == 0
    assert growth.ask(second, MOST, 0.0) == MOST // 2


def test_a_bound_that_falls_takes_parts_as_they_ask_again() -> None:
    most = MOST
    growth = WindowGrowth(lambda: most)
    first, second = streams(2)
    growth.ask(first, MOST, 0.0)
    growth.ask(second, 8 * MIB, 0.0)
    most = 0
    assert growth.granted_bytes == 56 * MIB, "a window cannot be taken back"
    assert growth.ask(first, MOST, 0.0) == growth.ask(second, MOST, 0.0) == 0
    assert growth.granted_bytes == 0


def test_an_idle_stream_gives_its_part_to_one_that_needs_it() -> None:
    growth = WindowGrowth(lambda: MOST)
    idle, busy = streams(2)
    growth.ask(idle, MOST, 0.0)
    assert growth.ask(busy, MOST, IDLE_S - 0.1) == 24 * MIB
    assert growth.ask(busy, MOST, IDLE_S) == 48 * MIB


def test_a_stream_whose_reader_stands_still_is_not_idle() -> None:
    growth = WindowGrowth(lambda: MOST)
    stalled, busy = streams(2)
    growth.ask(stalled, MOST, 0.0)
    stalled.held = 1
    assert growth.ask(busy, MOST, 2 * IDLE_S) == 24 * MIB
    assert growth.granted_bytes == 72 * MIB


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-MIB, 2 * MOST), st.integers(0, 8)), max_size=50))
def test_the_bound_holds_whoever_asks(asked: list[tuple[int, int, int]]) -> None:
    growth = WindowGrowth(lambda: MOST)
    asking = streams(6)
    now, parts = 0.0, dict.fromkeys(asking, 0)
    for pick, wanted, wait_s in asked:
        now += wait_s
        parts[asking[pick]] = part = growth.ask(asking[pick], wanted, now)
        assert 0 <= part <= max(wanted, 0)
        assert 0 <= growth.granted_bytes <= min(MOST, sum(parts.values()))
