"""Frames that are malformed by themselves."""

from __future__ import annotations

import pytest

from shared.http2 import frames
from shared.http2.frame_rules import SessionError, check, field_block
from tests.shared.http2.dialogue import (
    POST,
    Dialogue,
    block,
    frame,
)


def test_a_malformed_goaway() -> None:
    assert (
        Dialogue.server().broke(frame(frames.GOAWAY, 0, 0, bytes(7))) == "FRAME_SIZE_ERROR: GOAWAY too short"
    )


@pytest.mark.parametrize(
    "wire",
    [
        frame(frames.PING, 0, 0, b"short"),
        frame(frames.RST_STREAM, 0, 1, b"abc"),
        frame(frames.SETTINGS, 0, 0, b"abc"),
        frame(frames.SETTINGS, 1, 0, bytes(6)),
        frame(frames.SETTINGS, 0, 0, b"\0\2\0\0\0\2"),  # ENABLE_PUSH 2
        frame(frames.WINDOW_UPDATE, 0, 0, b"abc"),
        frame(frames.WINDOW_UPDATE, 0, 9, b"\0\0\0\1"),
        frame(frames.HEADERS, 0x4, 2, block(POST)),
        frame(frames.HEADERS, 0xC, 3, b"\xff"),
        frame(frames.HEADERS, 0x4, 3, b"\xff\xff\xff\xff"),
        frame(frames.PRIORITY, 0, 1, b"abc"),
    ],
)
def test_frames_that_end_the_connection(wire: bytes) -> None:
    talk = Dialogue.server()
    talk.asked()
    talk.broke(wire)


# HEADERS without what stands around the block.


def test_a_block_alone() -> None:
    assert bytes(field_block(0, 1, memoryview(b"block"))) == b"block"


def test_a_block_with_padding_and_priority() -> None:
    padded, prioritized = frames.FLAG_PADDED, frames.FLAG_PRIORITY
    priority = (3).to_bytes(4, "big") + b"\x10"
    assert bytes(field_block(padded, 1, memoryview(b"\x02block\0\0"))) == b"block"
    assert bytes(field_block(padded, 1, memoryview(b"\x02\0\0"))) == b""
    assert bytes(field_block(prioritized, 1, memoryview(priority + b"block"))) == b"block"
    both = memoryview(b"\x01" + priority + b"block\0")
    assert bytes(field_block(padded | prioritized, 1, both)) == b"block"


@pytest.mark.parametrize(
    ("flags", "payload", "code"),
    [
        (frames.FLAG_PADDED, b"", frames.FRAME_SIZE_ERROR),
        (frames.FLAG_PADDED, b"\x01", frames.PROTOCOL_ERROR),
        (frames.FLAG_PADDED, b"\x06block", frames.PROTOCOL_ERROR),
        (frames.FLAG_PRIORITY, b"\0\0\0\x03", frames.FRAME_SIZE_ERROR),
        (frames.FLAG_PRIORITY, b"\0\0\0\x01\x10", frames.PROTOCOL_ERROR),
        (frames.FLAG_PRIORITY, b"\x80\0\0\x01\x10", frames.PROTOCOL_ERROR),
        (frames.FLAG_PADDED | frames.FLAG_PRIORITY, b"\x01\0\0\0\x03\x10", frames.PROTOCOL_ERROR),
    ],
)
def test_what_does_not_fit_around_a_block(flags: int, payload: bytes, code: int) -> None:
    with pytest.raises(SessionError) as caught:
        field_block(flags, 1, memoryview(payload))
    assert caught.value.code == code


@pytest.mark.parametrize("kind", range(1, len(frames.FRAME_NAMES)))
@pytest.mark.parametrize("number", [0, 1])
def test_frames_belong_to_a_stream_or_to_the_connection(kind: int, number: int) -> None:
    length = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.WINDOW_UPDATE: 4}.get(kind, 8)
    length = 6 if kind == frames.SETTINGS else length
    of_the_connection = kind in (frames.SETTINGS, frames.PING, frames.GOAWAY)
    if kind == frames.WINDOW_UPDATE or of_the_connection == (number == 0):
        check(kind, 0, number, length)
    else:
        with pytest.raises(SessionError, match=f"^{frames.FRAME_NAMES[kind]} on "):
            check(kind, 0, number, length)


def test_priority_of_a_stream_that_depends_on_itself() -> None:
    assert Dialogue.server().broke(frame(frames.PRIORITY, 0, 3, b"\0\0\0\x03\x10")) == (
        "PROTOCOL_ERROR: a stream that depends on itself"
    )
