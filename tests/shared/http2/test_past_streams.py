"""How long it is remembered how streams ended; what follows from it is in `test_streams` and
`test_flood_guard`."""

from __future__ import annotations

from shared.http2.past_streams import ENDED, REMEMBERED_STREAMS, PastStreams


def test_half_as_many_are_never_forgotten_and_more_are_never_kept() -> None:
    past = PastStreams()
    for number in range(3 * REMEMBERED_STREAMS):
        past.remember(number, ENDED)
        assert len(past) <= REMEMBERED_STREAMS
        assert past.end_of(max(0, number - REMEMBERED_STREAMS // 2 + 1))
    assert not past.end_of(0)
