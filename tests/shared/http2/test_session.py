"""The session's dialogues as a whole: settings, tunnels from both sides, GOAWAY, PING, what is ignored.

The layers have tests of their own; windows and credit have `test_session_windows.py`, h2 as the peer
`test_session_h2.py`, and whatever no one thought of `test_session_fuzz.py`.
"""

from __future__ import annotations

import pytest

from shared.http2 import frames
from shared.http2.session import Session, SessionError
from shared.http2.session_stream import StreamState
from tests.shared.http2.dialogue import (
    MAX_STREAMS,
    OK,
    POST,
    PREFACE,
    Dialogue,
    data,
    frame,
    goaway,
    headers,
    ping,
    read,
    settings,
    settings_ack,
    told,
    window,
)


def test_settings_are_acknowledged() -> None:
    talk = Dialogue.server()
    assert talk.received(settings({MAX_STREAMS: 1})) == [("settings",)]
    assert talk.sent() == ["SETTINGS ACK"]
    assert talk.received(settings_ack()) == []
    assert talk.sent() == []


@pytest.mark.parametrize(
    "wire",
    [
        data(1, b"early"),
        data(1),
        headers(1, POST),
        window(0, 1),
        ping(b"12345678"),
        goaway(0),
        settings_ack(),
        frame(0xFF, 0, 0),
    ],
    ids=["data", "empty data", "headers", "window", "ping", "goaway", "settings ack", "unknown"],
)
@pytest.mark.parametrize("client", [True, False], ids=["client", "server"])
def test_the_first_frame_must_be_settings(client: bool, wire: bytes) -> None:
    session = Session(client=client)
    session.data_to_send()
    with pytest.raises(SessionError, match="the first frame is not SETTINGS"):
        session.receive_data(wire if client else PREFACE + wire)
    assert session.events() == []
    assert read(bytes(session.data_to_send())) == ["GOAWAY 0 PROTOCOL_ERROR"]


def test_a_tunnel_as_the_server_sees_it() -> None:
    talk = Dialogue.server()
    assert talk.received(headers(1, POST)) == [("request", 1, b"POST", False)]
    stream = talk.stream()
    talk.session.send_headers(stream, OK)
    assert talk.sent() == ["HEADERS 1 :status=200"]
    assert talk.received(data(1, b"hello"), data(1, b" world")) == [("data", 1, b"hello world")]
    assert talk.session.send_data(stream, b"hi") == 2
    talk.session.end_stream(stream)
    assert talk.sent() == ["DATA 1 b'hi'", "DATA 1 b'' END"]
    assert stream.state is StreamState.HALF_CLOSED_LOCAL
    assert talk.received(data(1, b"bye", end=True)) == [("data", 1, b"bye"), ("ended", 1)]
    assert stream.over
    assert talk.session.streams == {}


def test_a_tunnel_as_the_client_sees_it() -> None:
    talk = Dialogue.client()
    stream = talk.session.open_stream(POST)
    talk.session.send_data(stream, b"hi")
    assert talk.sent() == [
        "HEADERS 1 :method=POST :scheme=http :authority=a :path=/_hbone/15003",
        "DATA 1 b'hi'",
    ]
    talk.session.end_stream(stream)
    assert talk.sent() == ["DATA 1 b'' END"]
    assert talk.received(headers(1, OK), data(1, b"answer")) == [
        ("response", 1, b"200"),
        ("data", 1, b"answer"),
    ]
    assert talk.received(data(1, end=True)) == [("ended", 1)]
    assert stream.over
    assert talk.session.open_stream(POST).id == 3


def test_the_peers_goaway_lets_open_streams_go_on() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    assert talk.session.room > 0
    assert talk.received(goaway(2**31 - 1), goaway(1, frames.NO_ERROR), headers(1, OK), data(1, b"x")) == [
        ("goaway", 2**31 - 1, "NO_ERROR"),
        ("goaway", 1, "NO_ERROR"),
        ("response", 1, b"200"),
        ("data", 1, b"x"),
    ]
    assert talk.session.room == 0
    assert talk.session.send_data(stream, b"y") == 1
    talk.session.end_stream(stream)
    assert talk.sent() == ["DATA 1 b'y'", "DATA 1 b'' END"]


@pytest.mark.parametrize("kind", [0xA, 0xC, 0x10, 0xFF])
@pytest.mark.parametrize("number", [0, 1, 9])
def test_unknown_frames_are_ignored(kind: int, number: int) -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.received(frame(kind, 0xFF, number, b"whatever"), data(1, b"x")) == [("data", 1, b"x")]
    assert talk.sent() == []


def test_priority_is_ignored() -> None:
    talk = Dialogue.server()
    assert talk.received(frame(frames.PRIORITY, 0, 3, bytes(5)), headers(1, POST)) == [
        ("request", 1, b"POST", False)
    ]


def test_what_came_before_an_error_is_told() -> None:
    talk = Dialogue.server()
    with pytest.raises(SessionError):
        talk.session.receive_data(headers(1, POST) + data(1, b"x") + frame(frames.DATA, 0, 0))
    assert told(talk.session.events()) == [("request", 1, b"POST", False), ("data", 1, b"x")]
    assert talk.session.room == 0
