"""Floods against a session, each answered by ending that connection, and what must not look like one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.http2 import frames
from shared.http2.flood_guard import FloodLimits
from shared.http2.header_receiver import FIELDS_PER_STREAM, FREE_FIELDS
from shared.http2.session import SessionLimits
from tests.shared.http2 import dialogue
from tests.shared.http2.dialogue import (
    INITIAL_WINDOW,
    OK,
    POST,
    Dialogue,
    data,
    headers,
    ping,
    settings,
)

CALM = "ENHANCE_YOUR_CALM"
FEW = FloodLimits(
    control_frames=5,
    control_frames_per_s=1,
    resets=5,
    resets_per_s=1,
    empty_data=5,
    empty_data_per_s=1,
    window_updates=5,
    window_updates_per_data_frame=2,
    header_block_bytes=1000,
)


def server(limits: FloodLimits = FEW, max_streams: int = 250) -> Dialogue:
    return Dialogue.server(SessionLimits(max_streams=max_streams, floods=limits))


def reset(number: int) -> bytes:
    return dialogue.reset(number, frames.CANCEL)


def priority(number: int) -> bytes:
    return frames.header(5, frames.PRIORITY, 0, number) + bytes((0, 0, 0, 0, 16))


@pytest.mark.parametrize(
    "frame",
    [
        ping(b"12345678"),
        settings({}),
        priority(7),
        frames.header(3, 0xFA, 0, 0) + b"new",
        frames.goaway(0, frames.NO_ERROR),
    ],
    ids=["PING", "SETTINGS", "PRIORITY", "unknown", "GOAWAY"],
)
def test_control_frames(frame: bytes) -> None:
    talk = server()
    for _ in range(4):  # the preface's SETTINGS was the first
        talk.received(frame)
    talk.sent()
    assert talk.broke(frame) == f"{CALM}: too many control frames"


def test_requests_on_a_stream_that_is_over() -> None:
    talk = server()
    talk.session.send_headers(talk.asked(1), OK)
    talk.received(reset(1))
    for _ in range(5):
        talk.received(headers(1, POST))
    talk.sent()
    assert talk.broke(headers(1, POST)) == f"{CALM}: too many streams opened in vain"


@pytest.mark.parametrize("late", [reset(1), data(1, b"x")], ids=["RST_STREAM", "DATA"])
def test_frames_on_a_stream_that_is_over(late: bytes) -> None:
    talk = server()
    talk.session.send_headers(talk.asked(1), OK)
    talk.received(reset(1))
    for _ in range(4):
        talk.received(late)
    talk.sent()
    assert talk.broke(late) == f"{CALM}: too many control frames"


def test_answers_that_cross_our_resets_are_no_flood() -> None:
    """A gateway's clients leave early by the hundred, and the service has answered already."""
    talk = Dialogue.client(SessionLimits(floods=FEW))
    for _ in range(50):
        stream = talk.opened()
        talk.session.reset(stream, frames.CANCEL)
        talk.received(headers(stream.id, OK), data(stream.id, b"x"), reset(stream.id))
    assert not talk.session.broken


def test_resets_that_cross_the_end_of_their_streams_are_no_flood() -> None:
    """Clients of a front end leave just as their answers end."""
    talk = server()
    for number in range(1, 101, 2):
        stream = talk.asked(number, end=True)
        talk.session.send_headers(stream, OK, end_stream=True)
        talk.received(reset(number))
    for _ in range(4):
        talk.received(reset(99))
    assert talk.broke(reset(99)) == f"{CALM}: too many control frames"


def test_interim_responses_without_end() -> None:
    talk = Dialogue.client(SessionLimits(floods=FEW))
    talk.opened()
    early = headers(1, [(b":status", b"103")])
    for _ in range(4):
        talk.received(early)
    assert talk.broke(early) == f"{CALM}: too many control frames"


def test_settings_that_change_many_windows_count_more() -> None:
    talk = server()
    for number in range(1, 61, 2):
        talk.asked(number)
    wider = settings({INITIAL_WINDOW: 70000})
    talk.sent()
    assert talk.broke(wider + settings({INITIAL_WINDOW: 65535})) == f"{CALM}: too many control frames"


def test_control_frames_at_a_walking_pace() -> None:
    talk = server()
    for second in range(1, 100):
        talk.session.receive_data(ping(b"12345678"), float(second))
    assert len(talk.sent()) == 99


def test_rapid_reset() -> None:
    talk = server()
    for number in range(1, 11, 2):
        talk.received(headers(number, POST), reset(number))
    assert talk.broke(headers(11, POST) + reset(11)) == f"{CALM}: too many streams opened in vain"


def test_resets_of_answered_streams_are_an_honest_end() -> None:
    talk = server()
    for number in range(1, 201, 2):
        talk.session.send_headers(talk.asked(number), OK)
        talk.received(reset(number))
    talk.asked(201)


# A front end, which passes on what its clients do.


def front_end() -> Dialogue:
    return server(replace(FEW, front_end=True))


def spent(talk: Dialogue) -> None:
    """One client of the front end opens streams in vain until the budget is used up."""
    for number in range(3, 13, 2):
        talk.received(headers(number, POST), reset(number))


def test_a_front_end_is_given_notice_and_its_other_tunnels_go_on() -> None:
    talk = front_end()
    innocent = talk.asked(1)
    spent(talk)
    talk.sent()
    assert talk.received(headers(13, POST), reset(13))[-1] == ("notice",)
    assert talk.sent() == ["GOAWAY 13 NO_ERROR"]
    assert talk.received(headers(15, POST), data(1, b"fine")) == [("data", 1, b"fine")]
    assert talk.sent() == ["RST_STREAM 15 REFUSED_STREAM"]
    talk.session.send_headers(innocent, OK)
    assert talk.session.send_data(innocent, b"x") == 1


def test_a_front_end_that_goes_on_after_notice_is_ended() -> None:
    talk = front_end()
    talk.asked(1)
    spent(talk)
    talk.received(headers(13, POST), reset(13))
    for number in range(15, 25, 2):
        talk.received(headers(number, POST), reset(number))
    assert talk.broke(headers(25, POST)) == f"{CALM}: too many streams opened in vain"


def test_what_was_open_before_the_notice_may_be_reset_after_it() -> None:
    """Its clients leave one after the other: that is as many as were open, and no more."""
    talk = front_end()
    for number in range(31, 231, 2):
        talk.asked(number)
    for number in range(31, 231, 2):
        talk.received(reset(number))
    assert not talk.session.broken
    assert talk.sent() == ["GOAWAY 229 NO_ERROR"]


def test_a_front_end_without_other_tunnels_is_ended() -> None:
    talk = front_end()
    spent(talk)
    assert talk.broke(headers(13, POST) + reset(13)) == f"{CALM}: too many streams opened in vain"


def test_last_words_tell_why() -> None:
    talk = front_end()
    talk.asked(1)
    spent(talk)
    talk.received(headers(13, POST), reset(13))
    talk.sent()
    talk.received(reset(1))
    talk.session.explain_notice()
    talk.session.explain_notice()
    assert talk.sent() == [f"GOAWAY 13 {CALM}"]


def test_requests_of_many_fields() -> None:
    talk = server()
    talk.asked(1, [*POST, *[(b"x", b"y")] * (FREE_FIELDS + FIELDS_PER_STREAM * 4 - len(POST))])
    talk.asked(3, [*POST, *[(b"x", b"y")] * (FREE_FIELDS - len(POST))])
    many = [*POST, *[(b"x", b"y")] * (FREE_FIELDS + FIELDS_PER_STREAM * 2)]
    assert talk.broke(headers(5, many)) == f"{CALM}: too many streams opened in vain"


def test_malformed_requests_are_opened_in_vain() -> None:
    talk = server()
    for number in range(1, 11, 2):
        talk.received(headers(number, POST[1:]))
    assert talk.broke(headers(11, POST[1:])) == f"{CALM}: too many streams opened in vain"


def test_made_you_reset() -> None:
    talk = server(replace(FEW, window_updates=100))
    for number in range(1, 11, 2):
        talk.asked(number)
        talk.received(frames.window_update(number, frames.MAX_WINDOW))
    talk.asked(11)
    too_far = frames.window_update(11, frames.MAX_WINDOW)
    assert talk.broke(too_far) == f"{CALM}: too many streams opened in vain"


def test_streams_beyond_the_limit() -> None:
    talk = server(max_streams=1)
    talk.asked(1)
    for number in range(3, 13, 2):
        assert talk.received(headers(number, POST)) == []
    assert talk.broke(headers(13, POST)) == f"{CALM}: too many streams opened in vain"


@pytest.mark.parametrize("pad", [None, 2], ids=["empty", "nothing but padding"])
def test_data_without_a_byte(pad: int | None) -> None:
    talk = server()
    talk.asked()
    for _ in range(5):
        talk.received(data(1, pad=pad))
    assert talk.broke(data(1, pad=pad)) == f"{CALM}: too many empty DATA frames"


def test_window_updates_beyond_what_our_data_calls_for() -> None:
    talk = server()
    stream = talk.asked()
    talk.session.send_headers(stream, OK)
    talk.session.send_data(stream, b"x")  # calls for two more
    for _ in range(7):
        talk.received(frames.window_update(1, 1))
    talk.sent()
    assert talk.broke(frames.window_update(1, 1)) == f"{CALM}: too many WINDOW_UPDATE frames"


def test_continuation_flood() -> None:
    talk = server()
    block = frames.header(100, frames.HEADERS, 0, 1) + bytes(100)
    more = frames.header(100, frames.CONTINUATION, 0, 1) + bytes(100)
    talk.received(block, *[more] * 9)
    assert talk.broke(more) == f"{CALM}: a header block of more than 1000 bytes"


def test_a_million_one_byte_frames_that_are_read_pass() -> None:
    talk = server(FloodLimits())
    stream = talk.asked()
    batch = data(1, b"x") * 1000
    for _ in range(1000):
        talk.session.receive_data(batch)
        for event in talk.session.events():
            talk.session.consumed(stream, len(event.data))  # type: ignore[attr-defined]  # DATA only
    assert not talk.session.broken
    assert stream.held == 0


def test_a_client_is_not_blamed_for_what_the_server_resets() -> None:
    talk = Dialogue.client(SessionLimits(floods=FEW))
    for _ in range(100):
        stream = talk.opened()
        assert talk.received(reset(stream.id)) == [("reset", stream.id, "CANCEL", "by the peer")]
