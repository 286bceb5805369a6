"""The records of streams: what a body may still bring, and how those ended that are over."""

from __future__ import annotations

import pytest

from shared.http2.stream_state import (
    NO_ANSWER_TO_CONNECT_YET,
    NO_ANSWER_TO_HEAD_YET,
    NO_ANSWER_YET,
    REMEMBERED_STREAMS,
    End,
    PastStreams,
    StreamState,
)


def stream(body_left: int) -> StreamState:
    state = StreamState(1, 0, 0)
    state.body_left = body_left
    return state


def test_a_body_without_a_promise_may_bring_anything() -> None:
    assert StreamState(1, 0, 0).takes(1 << 40, ends=False)
    assert StreamState(1, 0, 0).takes(0, ends=True)


def test_a_body_brings_what_was_promised_and_then_ends() -> None:
    state = stream(5)
    assert state.takes(3, ends=False)
    assert state.takes(2, ends=False)
    assert state.takes(0, ends=True)
    assert not stream(5).takes(6, ends=False)
    assert not stream(5).takes(4, ends=True)
    assert not stream(0).takes(1, ends=True)


@pytest.mark.parametrize("awaited", [NO_ANSWER_YET, NO_ANSWER_TO_HEAD_YET, NO_ANSWER_TO_CONNECT_YET])
def test_nothing_comes_before_the_answer(awaited: int) -> None:
    assert not stream(awaited).takes(0, ends=True)
    assert not stream(awaited).takes(1, ends=False)


def test_how_streams_ended() -> None:
    past = PastStreams()
    past.ended(1)
    past.reset_here(3)
    past.reset_by_peer(5)
    assert past.end_of(1) == End.ENDED | End.CROSSED
    assert past.end_of(3) == End.RESET_HERE | End.CROSSED
    assert past.end_of(5) == End.RESET_BY_PEER
    assert not past.end_of(7)


def test_one_reset_may_have_crossed_the_end() -> None:
    past = PastStreams()
    past.reset_here(1)
    past.crossing_has_come(1)
    assert past.end_of(1) == End.RESET_HERE


def test_half_as_many_are_never_forgotten_and_more_are_never_kept() -> None:
    past = PastStreams()
    for number in range(3 * REMEMBERED_STREAMS):
        past.ended(number)
        assert len(past) <= REMEMBERED_STREAMS
        assert past.end_of(max(0, number - REMEMBERED_STREAMS // 2 + 1))
    assert not past.end_of(0)
