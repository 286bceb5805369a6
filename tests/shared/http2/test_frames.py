"""Frame headers and whole frames, compared with hyperframe's."""

from __future__ import annotations

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import frames
from tests.shared.http2.dialogue import parsed_frames

STREAM_IDS = st.integers(0, frames.MAX_STREAM_ID)


@given(st.integers(0, 2**24 - 1), st.integers(0, 255), st.integers(0, 255), STREAM_IDS)
def test_header(length: int, kind: int, flags: int, stream_id: int) -> None:
    header = frames.header(length, kind, flags, stream_id)
    assert len(header) == frames.HEADER_BYTES
    assert frames.read_header(b"xx" + header, 2) == (length, kind, flags, stream_id)
    assert frames.read_header(memoryview(header), 0) == (length, kind, flags, stream_id)


def test_header_as_hyperframe_reads_it() -> None:
    parsed, length = Frame.parse_frame_header(memoryview(frames.header(70000, frames.DATA, 0x9, 5)))
    assert (parsed.type, parsed.stream_id, sorted(parsed.flags), length) == (
        frames.DATA,
        5,
        ["END_STREAM", "PADDED"],
        70000,
    )


def test_the_reserved_bit_is_dropped() -> None:
    header = frames.header(0, frames.DATA, 0, 0x80000001)
    assert frames.read_header(header, 0) == (0, frames.DATA, 0, 1)


@given(STREAM_IDS, st.integers(1, frames.MAX_WINDOW))
def test_window_update(stream_id: int, increment: int) -> None:
    assert frames.window_update(stream_id, increment) == WindowUpdateFrame(stream_id, increment).serialize()


@given(STREAM_IDS, st.sampled_from(sorted(frames.ERROR_NAMES)))
def test_goaway(last_stream_id: int, code: int) -> None:
    assert frames.goaway(last_stream_id, code) == GoAwayFrame(0, last_stream_id, code).serialize()


@given(st.dictionaries(st.integers(1, 9), st.integers(0, 2**32 - 1)))
def test_settings(values: dict[int, int]) -> None:
    assert frames.settings(values) == SettingsFrame(0, values).serialize()


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0, "NO_ERROR"),
        (8, "CANCEL"),
        (13, "HTTP_1_1_REQUIRED"),
        (14, "error 0xe"),
        (2**32 - 1, "error 0xffffffff"),
    ],
)
def test_error_names(code: int, name: str) -> None:
    assert frames.error_name(code) == name


def test_the_names_are_those_of_the_constants() -> None:
    constants = {name: value for name, value in vars(frames).items() if name in frames.ERROR_NAMES.values()}
    assert {frames.ERROR_NAMES[value]: value for value in constants.values()} == constants


def test_headers_in_as_many_frames_as_every_peer_takes() -> None:
    for size in (0, 1, frames.MAX_PAYLOAD_BYTES, frames.MAX_PAYLOAD_BYTES + 1, 3 * frames.MAX_PAYLOAD_BYTES):
        block = bytes(range(256)) * (size // 256) + bytes(size % 256)
        for ends in (False, True):
            parsed = parsed_frames(frames.headers(7, block, end_stream=ends))
            assert (
                b"".join(each.data for each in parsed if isinstance(each, HeadersFrame | ContinuationFrame))
                == block
            )
            assert {each.stream_id for each in parsed} == {7}
            assert [type(each) for each in parsed] == [
                HeadersFrame,
                *[ContinuationFrame] * (max(0, size - 1) // frames.MAX_PAYLOAD_BYTES),
            ]
            assert ["END_HEADERS" in each.flags for each in parsed] == [False] * (len(parsed) - 1) + [True]
            assert ("END_STREAM" in parsed[0].flags) is ends


def test_small_frames_are_hyperframes() -> None:
    assert frames.rst_stream(5, frames.CANCEL) == RstStreamFrame(5, frames.CANCEL).serialize()
    assert frames.ping(b"12345678") == PingFrame(0, b"12345678").serialize()
    answer = PingFrame(0, b"12345678", flags=["ACK"]).serialize()
    assert frames.ping(memoryview(b"12345678"), ack=True) == answer
    assert frames.end_stream(3) == DataFrame(3, flags=["END_STREAM"]).serialize()
    assert SettingsFrame(0, flags=["ACK"]).serialize() == frames.SETTINGS_ACK
