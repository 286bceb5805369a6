"""DATA as it comes: joined, padded, of the wrong length, on streams that may not have it."""

from __future__ import annotations

import pytest

from shared.http2 import frames
from shared.http2.data_receiver import SMALL_BYTES
from shared.http2.events import DataReceived
from shared.http2.frame_rules import SessionError
from shared.http2.session_limits import SessionLimits
from tests.shared.http2.dialogue import (
    GET,
    HEAD,
    OK,
    POST,
    TRAILERS,
    Dialogue,
    data,
    frame,
    headers,
    length,
    ping,
    told,
)


def test_small_frames_that_follow_each_other_are_one_event() -> None:
    talk = Dialogue.server()
    stream = talk.asked(1)
    talk.asked(3)
    pieces = [data(1, b"a"), data(1, b"bc"), data(1, b"d" * SMALL_BYTES), data(3, b"e"), data(1, b"f")]
    talk.session.receive_data(b"".join(pieces))
    happened = talk.session.events()
    assert [told([event])[0][1:] for event in happened] == [
        (1, b"abc" + b"d" * SMALL_BYTES),
        (3, b"e"),
        (1, b"f"),
    ]
    assert stream.held == 4 + SMALL_BYTES


def test_large_frames_are_not_copied_together() -> None:
    talk = Dialogue.server()
    talk.asked(1)
    talk.session.receive_data(data(1, b"a" * (SMALL_BYTES + 1)) + data(1, b"b"))
    assert len(talk.session.events()) == 2


@pytest.mark.parametrize("odd", ["larger than announced", "beyond the window", "on an idle stream"])
def test_what_is_odd_behind_plain_frames_is_judged_as_ever(odd: str) -> None:
    """Frames of several streams are taken in one go: nothing slips through behind others."""
    talk = Dialogue.server(SessionLimits(stream_window_bytes=1 << 16))
    first, second = talk.asked(1), talk.asked(3)
    plain = data(1, b"a") + data(3, b"b" * 10) + data(1, b"c")
    last = {
        "larger than announced": data(3, bytes(talk.session.limits.max_frame_bytes + 1)),
        "beyond the window": data(3, bytes(16384)) * 4,
        "on an idle stream": data(5, b"d"),
    }[odd]
    if odd == "beyond the window":
        talk.session.receive_data(plain + last)
        assert second.over and not first.over
    else:
        with pytest.raises(SessionError):
            talk.session.receive_data(plain + last)
    taken = [event for event in talk.session.events() if isinstance(event, DataReceived)]
    assert [(event.stream.id, bytes(event.data[:10])) for event in taken[:3]] == [
        (1, b"a"),
        (3, b"b" * 10),
        (1, b"c"),
    ]


@pytest.mark.parametrize("cut", range(1, 40))
def test_plain_frames_of_several_streams_wherever_a_read_ends(cut: int) -> None:
    talk = Dialogue.server()
    streams = [talk.asked(number) for number in (1, 3, 257)]  # 257 and 1 have the last byte in common
    pieces = data(1, b"ab") + data(257, b"c") + data(3, b"def") + data(3, b"g")
    got = {1: b"", 3: b"", 257: b""}
    for part in (pieces[:cut], pieces[cut:]):
        talk.session.receive_data(part)
        for event in talk.session.events():
            assert isinstance(event, DataReceived)
            got[event.stream.id] += event.data
    assert got == {1: b"ab", 3: b"defg", 257: b"c"}
    assert [stream.held for stream in streams] == [2, 4, 1]


@pytest.mark.parametrize("pad", [0, 1, 255])
def test_padding_is_no_payload(pad: int) -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.received(data(1, b"abc", pad=pad), data(1, b"def", pad=pad, end=True)) == [
        ("data", 1, b"abcdef"),
        ("ended", 1),
    ]


def test_padding_and_nothing_else() -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.received(data(1, pad=0), data(1, pad=200)) == []
    assert talk.received(data(1, pad=7, end=True)) == [("ended", 1)]


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (frame(frames.DATA, 0x8, 1), "FRAME_SIZE_ERROR: padded DATA without a pad length"),
        (frame(frames.DATA, 0x8, 1, b"\x01"), "PROTOCOL_ERROR: more padding than DATA"),
        (frame(frames.DATA, 0x8, 1, b"\x05abcd"), "PROTOCOL_ERROR: more padding than DATA"),
        (frame(frames.DATA, 0, 0, b"x"), "PROTOCOL_ERROR: DATA on stream 0"),
        (frame(frames.DATA, 0, 0), "PROTOCOL_ERROR: DATA on stream 0"),
    ],
)
def test_malformed_data(wire: bytes, error: str) -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.broke(wire) == error


def test_data_on_an_idle_stream() -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.broke(data(3, b"x")).startswith("PROTOCOL_ERROR")
    assert Dialogue.server().broke(data(1, b"x")).startswith("PROTOCOL_ERROR")


def test_data_after_the_end_resets_the_stream_and_nothing_else() -> None:
    talk = Dialogue.server()
    ended = talk.asked(1)
    talk.asked(3)
    assert talk.received(data(1, b"all", end=True)) == [("data", 1, b"all"), ("ended", 1)]
    assert talk.received(data(1, b"more"), data(3, b"x")) == [
        ("reset", 1, "STREAM_CLOSED", "by us"),
        ("data", 3, b"x"),
    ]
    assert talk.sent() == ["RST_STREAM 1 STREAM_CLOSED"]
    assert ended.over
    assert talk.received(data(1, b"and more")) == []
    assert talk.sent() == [], "it has been told already"
    talk.session.send_headers(ended, OK)
    talk.session.end_stream(ended)
    talk.session.reset(ended, frames.CANCEL)
    assert talk.sent() == []


def test_data_on_a_stream_that_both_have_ended() -> None:
    talk = Dialogue.server()
    stream = talk.asked(1, GET, end=True)
    talk.session.send_headers(stream, OK, end_stream=True)
    talk.sent()
    assert talk.received(data(1, b"x")) == []
    assert talk.sent() == ["RST_STREAM 1 STREAM_CLOSED"]


def test_data_within_a_header_block() -> None:
    for number in (1, 3):  # the stream itself, another one
        talk = Dialogue.server()
        talk.asked(1)
        error = talk.broke(headers(3, POST, whole=False), data(number, b"x"))
        assert error == "PROTOCOL_ERROR: DATA within a header block"


def test_data_within_a_header_block_on_a_stream_that_we_have_reset() -> None:
    talk = Dialogue.server()
    talk.session.reset(talk.asked(1), frames.CANCEL)
    assert talk.broke(headers(3, POST, whole=False), data(1, b"x")).startswith("PROTOCOL_ERROR")


def test_data_before_the_response() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    assert talk.received(data(1, b"early")) == [("reset", 1, "PROTOCOL_ERROR", "by us")]
    assert talk.sent() == ["RST_STREAM 1 PROTOCOL_ERROR"]
    assert stream.over


def test_a_response_to_head_has_no_body() -> None:
    talk = Dialogue.client()
    for number in (1, 3):
        talk.opened(HEAD, end=True)
        talk.received(headers(number, [*OK, length(7)]))
    assert talk.received(data(1, end=True)) == [("ended", 1)]
    assert talk.received(data(3, b"x")) == [("reset", 3, "PROTOCOL_ERROR", "by us")]


def test_a_body_of_the_promised_length() -> None:
    talk = Dialogue.server()
    talk.asked(1, [*POST, length(5)])
    assert talk.received(data(1, b"abc", pad=3), data(1, b"de", end=True)) == [
        ("data", 1, b"abcde"),
        ("ended", 1),
    ]


@pytest.mark.parametrize(
    ("promised", "bodies"),
    [
        (2, [data(1, b"abc")]),
        (2, [data(1, b"ab"), data(1, b"c")]),
        (2, [data(1, b"a", end=True)]),
        (0, [data(1, b"a")]),
        (2, [data(1, b"a"), data(1, end=True)]),
        (2, [data(1, b"a"), headers(1, TRAILERS, end=True)]),
    ],
)
@pytest.mark.parametrize("client", [True, False], ids=["response", "request"])
def test_a_body_of_another_length(client: bool, promised: int, bodies: list[bytes]) -> None:
    talk = Dialogue(client=client)
    if client:
        talk.opened(GET, end=True)  # with our end gone, END_STREAM closes the stream for h2 at once
        talk.received(headers(1, [*OK, length(promised)]))
    else:
        talk.asked(1, [*POST, length(promised)])
    assert talk.received(*bodies)[-1] == ("reset", 1, "PROTOCOL_ERROR", "by us")
    assert talk.session.streams == {}
    assert talk.received(ping(b"12345678")) == [], "the connection goes on"
    assert talk.sent()[-1] == "PING ACK b'12345678'"


@pytest.mark.parametrize(
    "wire",
    [data(1, b"abcdef", pad=9), data(1, b"abcdef", pad=9, end=True), data(1, pad=9, end=True)],
)
def test_what_a_wrong_frame_took_of_the_connections_window_is_given_back(wire: bytes) -> None:
    talk = Dialogue.server()
    talk.asked(1, [*POST, length(5)])
    talk.received(wire)
    session = talk.session
    assert session.streams == {}
    windows = session._windows
    assert windows.receive + windows.credit == session.limits.connection_window_bytes
