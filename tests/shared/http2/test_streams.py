"""How streams end: resets both ways, what crosses them, what is forgotten, GOAWAY."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.http2 import frames
from shared.http2.past_streams import REMEMBERED_STREAMS
from shared.http2.session import Session
from shared.http2.session_stream import StreamState
from tests.shared.http2.dialogue import (
    LAST_OF_ALL,
    OK,
    POST,
    Dialogue,
    data,
    frame,
    goaway_seen,
    headers,
    ping,
    reset,
    window,
)


def test_the_states_of_a_stream() -> None:
    talk = Dialogue.server()
    ours_first, theirs_first, broken = talk.asked(1), talk.asked(3), talk.asked(5)
    assert ours_first.state is StreamState.OPEN
    talk.session.send_headers(ours_first, OK, end_stream=True)
    assert ours_first.state is StreamState.HALF_CLOSED_LOCAL
    talk.received(data(1, end=True), data(3, end=True))
    assert ours_first.state is StreamState.CLOSED
    assert theirs_first.state is StreamState.HALF_CLOSED_REMOTE
    talk.session.end_stream(theirs_first)
    assert theirs_first.state is StreamState.CLOSED
    talk.session.reset(broken, frames.CANCEL)
    assert broken.state is StreamState.RESET
    assert talk.session.streams == {}


def test_a_lost_connection_ends_all_streams_without_a_word() -> None:
    talk = Dialogue.server()
    streams = [talk.asked(1), talk.asked(3)]
    talk.sent()
    assert talk.session.break_off() == streams
    assert [stream.state for stream in streams] == [StreamState.RESET] * 2
    assert talk.session.break_off() == talk.sent() == []


ANNOUNCED = [f"GOAWAY {LAST_OF_ALL} NO_ERROR", "PING b'goaway\\x00\\x00'"]


def test_a_reset_by_the_peer() -> None:
    talk = Dialogue.server()
    stream = talk.asked()
    assert talk.received(data(1, b"abc"), reset(1, frames.CANCEL)) == [
        ("data", 1, b"abc"),
        ("reset", 1, "CANCEL", "by the peer"),
    ]
    assert stream.over
    talk.session.send_headers(stream, OK)
    assert talk.session.send_data(stream, b"late") == 4
    talk.session.end_stream(stream)
    talk.session.reset(stream, frames.CANCEL)
    assert talk.sent() == []


def test_a_response_in_full_and_then_a_reset() -> None:
    talk = Dialogue.client()
    talk.opened()
    assert talk.received(headers(1, OK), data(1, b"all", end=True), reset(1, frames.NO_ERROR)) == [
        ("response", 1, b"200"),
        ("data", 1, b"all"),
        ("ended", 1),
        ("reset", 1, "NO_ERROR", "by the peer"),
    ]


def test_what_was_on_its_way_when_we_reset() -> None:
    talk = Dialogue.server()
    stream = talk.asked()
    talk.session.reset(stream, frames.CANCEL)
    assert talk.sent() == ["RST_STREAM 1 CANCEL"]
    assert (
        talk.received(data(1, b"late"), window(1, 5), reset(1, frames.CANCEL), data(1, b"x", end=True)) == []
    )
    assert talk.sent() == []


def test_resets_that_are_forgotten() -> None:
    talk = Dialogue.server()
    for number in range(1, 2 * REMEMBERED_STREAMS + 4, 2):
        talk.session.reset(talk.asked(number), frames.CANCEL)
    talk.sent()
    assert talk.received(data(1, b"late"), data(2 * REMEMBERED_STREAMS + 3, b"late")) == []
    assert talk.sent() == ["RST_STREAM 1 STREAM_CLOSED"]


def test_our_goaway_lets_open_streams_go_on() -> None:
    talk = Dialogue.server()
    stream = talk.asked(5)
    talk.session.goaway()
    talk.session.goaway()
    assert talk.sent() == ["GOAWAY 5 NO_ERROR"]
    assert talk.received(headers(7, POST), data(5, b"x"), data(7, b"y")) == [("data", 5, b"x")]
    assert talk.sent() == ["RST_STREAM 7 REFUSED_STREAM"]
    talk.session.send_headers(stream, OK)
    assert talk.session.send_data(stream, b"z") == 1
    assert talk.sent() == ["HEADERS 5 :status=200", "DATA 5 b'z'"]


@pytest.mark.parametrize("say", [Session.goaway, Session.announce_goaway], ids=["at once", "in two steps"])
def test_a_client_has_taken_no_stream_and_says_it_once(say: Callable[[Session], None]) -> None:
    talk = Dialogue.client()
    talk.opened()
    say(talk.session)
    assert talk.sent() == ["GOAWAY 0 NO_ERROR"]


# GOAWAY in two steps (RFC 9113 section 6.8).


def test_streams_that_were_on_their_way_are_taken() -> None:
    talk = Dialogue.server()
    talk.asked(1)
    talk.session.announce_goaway()
    talk.session.announce_goaway()
    assert talk.sent() == ANNOUNCED
    assert talk.received(headers(3, POST), goaway_seen()) == [
        ("request", 3, b"POST", False),
        ("goaway seen",),
    ]
    talk.session.goaway()
    talk.session.announce_goaway()
    talk.session.goaway()
    assert talk.sent() == ["GOAWAY 3 NO_ERROR"]
    assert talk.received(headers(5, POST), data(3, b"x")) == [("data", 3, b"x")]
    assert talk.sent() == ["RST_STREAM 5 REFUSED_STREAM"]


def test_other_pings_say_nothing_of_goaway() -> None:
    talk = Dialogue.server()
    assert talk.received(goaway_seen()) == [], "nothing was announced"
    talk.session.announce_goaway()
    assert talk.received(ping(bytes(8), ack=True), ping(b"goaway\0\0")) == []
    assert talk.sent() == [*ANNOUNCED, "PING ACK b'goaway\\x00\\x00'"]
    talk.session.goaway()
    assert talk.received(goaway_seen()) == [], "said already, as it took too long"
    assert talk.sent() == ["GOAWAY 0 NO_ERROR"]


def test_a_fault_in_between_ends_it_with_the_last_stream() -> None:
    talk = Dialogue.server()
    talk.asked(1)
    talk.session.announce_goaway()
    talk.asked(3)
    talk.sent()
    assert talk.broke(frame(frames.DATA, 0, 0, b"x")) == "PROTOCOL_ERROR: DATA on stream 0"
