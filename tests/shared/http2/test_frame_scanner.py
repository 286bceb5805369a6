"""Where frames begin and end: the preface, frames in pieces, frames too large."""

from __future__ import annotations

import pytest

from shared.http2 import frames
from shared.http2.session import Session, SessionError
from tests.shared.http2.dialogue import (
    POST,
    PREFACE,
    Dialogue,
    continuation,
    data,
    headers,
    ping,
    read,
    settings,
    told,
)


def test_a_preface_in_pieces() -> None:
    session = Session(client=False)
    for byte in PREFACE + settings():
        assert session.events() == []
        session.receive_data(bytes((byte,)))
    assert told(session.events()) == [("settings",)]


@pytest.mark.parametrize("cut", range(len(PREFACE)))
def test_a_wrong_preface(cut: int) -> None:
    session = Session(client=False)
    session.data_to_send()
    session.receive_data(PREFACE[:cut])
    with pytest.raises(SessionError, match="not HTTP/2: no connection preface") as caught:
        session.receive_data(b"\xff" + PREFACE[cut + 1 :])
    assert caught.value.code == frames.PROTOCOL_ERROR
    assert read(bytes(session.data_to_send())) == ["GOAWAY 0 PROTOCOL_ERROR"]


def test_half_a_frame_has_a_time_until_it_is_whole() -> None:
    session = Dialogue.server().session
    wire = headers(1, POST)
    session.receive_data(wire[:12], 2.0)
    session.receive_data(wire[12:-1], 5.0)
    assert session.unfinished_since == 2.0
    session.receive_data(wire[-1:] + ping(b"12345678")[:3], 6.0)
    assert session.unfinished_since == 6.0
    session.receive_data(ping(b"12345678")[3:], 7.0)
    assert session.unfinished_since is None


def test_half_a_header_block_has_a_time_until_it_is_whole() -> None:
    session = Dialogue.server().session
    session.receive_data(ping(b"12345678") + headers(1, POST, whole=False), 2.0)
    session.receive_data(continuation(1, whole=False), 5.0)
    assert session.unfinished_since == 2.0
    session.receive_data(continuation(1), 6.0)
    assert session.unfinished_since is None


def test_half_a_data_frame_has_no_time() -> None:
    """It may stop in the middle for as long as the network does."""
    talk = Dialogue.server()
    talk.asked()
    talk.session.receive_data(data(1, b"x" * 100)[:50], 2.0)
    assert talk.session.unfinished_since is None


@pytest.mark.parametrize("kind", [frames.DATA, frames.HEADERS, frames.SETTINGS, 0xFF])
def test_frames_larger_than_announced(kind: int) -> None:
    talk = Dialogue.server()
    talk.asked()
    header = frames.header(16385, kind, 0, 0 if kind == frames.SETTINGS else 1)
    assert talk.broke(header) == "FRAME_SIZE_ERROR: frame larger than we announced", (
        "before its body has come"
    )


def test_a_header_block_begins_when_its_first_frame_is_whole() -> None:
    session = Dialogue.server().session
    wire = headers(1, POST, whole=False)
    session.receive_data(wire[:5], 2.0)
    session.receive_data(wire[5:], 4.0)
    assert session.unfinished_since == 4.0
