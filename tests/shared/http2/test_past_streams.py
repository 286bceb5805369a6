"""How streams ended, and how long that is remembered."""

from __future__ import annotations

from shared.http2.past_streams import (
    ENDED,
    REMEMBERED_STREAMS,
    RESET_BY_PEER,
    RESET_HERE,
    End,
    PastStreams,
)


def test_how_streams_ended() -> None:
    past = PastStreams()
    past.remember(1, ENDED)
    past.remember(3, RESET_HERE)
    past.remember(5, RESET_BY_PEER)
    assert past.end_of(1) == End.ENDED | End.CROSSED
    assert past.end_of(3) == End.RESET_HERE | End.CROSSED
    assert past.end_of(5) == End.RESET_BY_PEER
    assert not past.end_of(7)


def test_one_reset_may_have_crossed_the_end() -> None:
    past = PastStreams()
    past.remember(1, RESET_HERE)
    past.crossing_came(1)
    assert past.end_of(1) == End.RESET_HERE


def test_half_as_many_are_never_forgotten_and_more_are_never_kept() -> None:
    past = PastStreams()
    for number in range(3 * REMEMBERED_STREAMS):
        past.remember(number, ENDED)
        assert len(past) <= REMEMBERED_STREAMS
        assert past.end_of(max(0, number - REMEMBERED_STREAMS // 2 + 1))
    assert not past.end_of(0)
