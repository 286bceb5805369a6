"""What a session sends: frames of DATA, how many streams it may open, its own header blocks, PING."""

from __future__ import annotations

import hpack
import pytest
from hyperframe.frame import SettingsFrame

from shared.http2 import frames
from shared.http2.session import DATA_BYTES, STREAMS_BEFORE_SETTINGS, Session
from tests.shared.http2.dialogue import (
    MAX_STREAMS,
    POST,
    Dialogue,
    goaway,
    ping,
    read,
    settings,
    window,
)


def test_data_is_framed_to_fill_one_tls_record() -> None:
    talk = Dialogue.client()
    talk.received(
        settings({SettingsFrame.INITIAL_WINDOW_SIZE: 1 << 20, SettingsFrame.MAX_FRAME_SIZE: 1 << 20})
    )
    stream = talk.opened()
    payload = bytes(range(256)) * 128  # 32 KiB
    assert talk.session.send_data(stream, memoryview(payload)) == len(payload)
    wire = bytes(talk.session.data_to_send())
    lengths = []
    body = b""
    while wire:
        size, kind, flags, number = frames.read_header(wire, 0)
        assert (kind, flags, number) == (frames.DATA, 0, 1)
        lengths.append(size)
        body += wire[9 : 9 + size]
        wire = wire[9 + size :]
    assert lengths == [DATA_BYTES, DATA_BYTES, 18]
    assert body == payload


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_can_be_sent(kind: type) -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    assert talk.session.send_data(stream, kind(b"abc")) == 3
    assert talk.session.send_data(stream, kind(b"")) == 0
    assert talk.sent() == ["DATA 1 b'abc'"]


def test_room_before_and_after_the_peers_settings() -> None:
    session = Session(client=True)
    assert session.room == STREAMS_BEFORE_SETTINGS
    first = session.open_stream(POST)
    assert session.room == STREAMS_BEFORE_SETTINGS - 1
    session.receive_data(settings({MAX_STREAMS: 2}))
    assert session.room == 1
    session.open_stream(POST)
    assert session.room == 0
    session.receive_data(settings({MAX_STREAMS: 1}))
    assert session.room == -1
    session.reset(first, frames.CANCEL)
    assert session.room == 0
    session.receive_data(settings({MAX_STREAMS: 100}))
    assert session.room == 99


def test_no_room_when_the_stream_numbers_are_used_up() -> None:
    session = Session(client=True)
    session._streams.newest = 2**31 - 5
    assert session.open_stream(POST).id == 2**31 - 3
    assert session.room == 0


def test_a_header_table_smaller_than_ours() -> None:
    talk = Dialogue.client()
    talk.received(settings({SettingsFrame.HEADER_TABLE_SIZE: 0}))
    talk.session.open_stream(POST)
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 0
    read(bytes(talk.session.data_to_send()), decoder)
    assert decoder.header_table_size == 0


def test_a_ping_of_ours() -> None:
    talk = Dialogue.client()
    talk.session.ping(b"01234567")
    assert talk.session.data_to_send() == ping(b"01234567")
    talk.session.receive_data(ping(b"01234567", ack=True), 7.0)
    assert (talk.session.events(), talk.session.heard_at) == ([], 7.0)
    talk.session.receive_data(goaway(0), 8.0)
    talk.session.ping(b"01234567")
    assert talk.session.data_to_send() == ping(b"01234567"), "streams that are open go on"


def test_no_ping_on_a_broken_connection() -> None:
    talk = Dialogue.client()
    talk.broke(window(0, 0))
    talk.session.data_to_send()
    talk.session.ping(b"01234567")
    assert talk.session.data_to_send() == b""
