"""Frames that are malformed by themselves."""

from __future__ import annotations

import pytest

from shared.wire import frames
from tests.shared.wire.dialogue import POST, Dialogue, block, frame


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (frame(frames.GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR: GOAWAY on a stream"),
        (frame(frames.GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR: GOAWAY too short"),
    ],
)
def test_a_malformed_goaway(wire: bytes, error: str) -> None:
    assert Dialogue.server().broke(wire) == error


@pytest.mark.parametrize(
    "wire",
    [
        frame(frames.PING, 0, 0, b"short"),
        frame(frames.PING, 0, 1, bytes(8)),
        frame(frames.RST_STREAM, 0, 1, b"abc"),
        frame(frames.RST_STREAM, 0, 0, bytes(4)),
        frame(frames.SETTINGS, 0, 0, b"abc"),
        frame(frames.SETTINGS, 1, 0, bytes(6)),
        frame(frames.SETTINGS, 0, 1, bytes(6)),
        frame(frames.WINDOW_UPDATE, 0, 0, b"abc"),
        frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)),
        frame(frames.WINDOW_UPDATE, 0, 9, b"\0\0\0\1"),
        frame(frames.HEADERS, 0x4, 0, block(POST)),
        frame(frames.HEADERS, 0x4, 2, block(POST)),
        frame(frames.HEADERS, 0xC, 3, b"\xff"),
        frame(frames.HEADERS, 0x4, 3, b"\xff\xff\xff\xff"),
        frame(frames.PRIORITY, 0, 1, b"abc"),
        frame(frames.CONTINUATION, 0x4, 0, b""),
    ],
)
def test_frames_that_end_the_connection(wire: bytes) -> None:
    talk = Dialogue.server()
    talk.asked()
    talk.broke(wire)
