"""The session's dialogues, frame by frame: settings, requests and responses, bodies, ends, errors.

Windows and credit have `test_session_windows.py`, h2 as the peer `test_session_h2.py`, and whatever no one
thought of `test_session_fuzz.py`.
"""

from __future__ import annotations

import hpack
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import SettingsFrame

from shared.wire import frames
from shared.wire.session import (
    DATA_BYTES,
    ENCODER_TABLE_BYTES,
    REMEMBERED_RESETS,
    SMALL_BYTES,
    STREAMS_BEFORE_SETTINGS,
    Session,
    SessionError,
    SessionLimits,
)
from tests.shared.wire.dialogue import (
    CONNECT,
    GET,
    HEAD,
    MAX_STREAMS,
    OK,
    POST,
    PREFACE,
    TRAILERS,
    WINDOW,
    Dialogue,
    block,
    continuation,
    data,
    frame,
    goaway,
    headers,
    length,
    ping,
    read,
    reset,
    settings,
    settings_ack,
    told,
    window,
)

# Preface and settings.


def test_a_client_speaks_first() -> None:
    session = Session(client=True)
    wire = bytes(session.data_to_send())
    assert wire.startswith(PREFACE)
    assert read(wire.removeprefix(PREFACE)) == [
        "SETTINGS {2: 0, 3: 250, 4: 1048576, 5: 16384, 6: 65536}",
        "WINDOW_UPDATE 0 +16711681",
    ]
    assert session.data_to_send() == b""


def test_a_server_says_the_same_without_the_clients_settings() -> None:
    limits = SessionLimits(5, 70000, WINDOW, 20000, 10000)
    session = Session(client=False, limits=limits)
    assert read(bytes(session.data_to_send())) == ["SETTINGS {3: 5, 4: 70000, 5: 20000, 6: 10000}"]


def test_windows_that_a_peer_could_overrun_before_it_knows_them() -> None:
    with pytest.raises(ValueError, match="windows below 65535 bytes"):
        SessionLimits(stream_window_bytes=WINDOW - 1)
    with pytest.raises(ValueError, match="windows below 65535 bytes"):
        SessionLimits(connection_window_bytes=WINDOW - 1)


def test_settings_are_acknowledged() -> None:
    talk = Dialogue.server()
    assert talk.received(settings({MAX_STREAMS: 1})) == [("settings",)]
    assert talk.sent() == ["SETTINGS ACK"]
    assert talk.received(settings_ack()) == []
    assert talk.sent() == []


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


def test_http1_is_no_preface() -> None:
    session = Session(client=False)
    with pytest.raises(SessionError, match="not HTTP/2"):
        session.receive_data(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")


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


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({SettingsFrame.INITIAL_WINDOW_SIZE: 2**31}, "FLOW_CONTROL_ERROR"),
        ({SettingsFrame.MAX_FRAME_SIZE: 16383}, "PROTOCOL_ERROR"),
        ({SettingsFrame.ENABLE_PUSH: 2}, "PROTOCOL_ERROR"),
    ],
)
def test_settings_out_of_range(values: dict[int, int], code: str) -> None:
    assert Dialogue.server().broke(settings(values)).startswith(code)


def test_our_header_table_stays_small_whatever_a_peer_offers() -> None:
    talk = Dialogue.client()
    talk.received(settings({SettingsFrame.HEADER_TABLE_SIZE: 1 << 24}))
    talk.sent()
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 1 << 24
    for number in range(200):
        talk.session.open_stream([*POST, (b"x", b"%d" % number * 100)])
        talk.received(headers(2 * number + 1, OK, end=True), reset(2 * number + 1, 0))
        read(bytes(talk.session.data_to_send()), decoder)
    assert decoder.header_table_size == ENCODER_TABLE_BYTES


def test_a_header_table_smaller_than_ours() -> None:
    talk = Dialogue.client()
    talk.received(settings({SettingsFrame.HEADER_TABLE_SIZE: 0}))
    talk.session.open_stream(POST)
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 0
    read(bytes(talk.session.data_to_send()), decoder)
    assert decoder.header_table_size == 0


# Requests and responses.


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
    assert (stream.local_ended, stream.remote_ended, stream.over) == (True, False, False)
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


def test_a_connect_tunnel() -> None:
    talk = Dialogue.client()
    stream = talk.opened(CONNECT)
    assert talk.received(headers(1, [*OK, length(3)]), data(1, b"more than three")) == [
        ("response", 1, b"200"),
        ("data", 1, b"more than three"),
    ], "a tunnel has no content-length (RFC 9110 section 9.3.6)"
    assert not stream.over


def test_a_request_that_its_headers_end() -> None:
    talk = Dialogue.server()
    assert talk.received(headers(1, GET, end=True)) == [("request", 1, b"GET", True), ("ended", 1)]
    talk.session.send_headers(talk.stream(), OK, end_stream=True)
    assert talk.sent() == ["HEADERS 1 :status=200 END"]
    assert talk.session.streams == {}


def test_a_response_that_its_headers_end() -> None:
    talk = Dialogue.client()
    talk.opened(GET, end=True)
    assert talk.received(headers(1, [(b":status", b"204")], end=True)) == [
        ("response", 1, b"204"),
        ("ended", 1),
    ]
    assert talk.session.streams == {}


def test_trailers_both_ways() -> None:
    talk = Dialogue.server()
    stream = talk.asked()
    assert talk.received(data(1, b"body"), headers(1, TRAILERS, end=True)) == [
        ("data", 1, b"body"),
        ("trailers", 1, TRAILERS),
        ("ended", 1),
    ]
    talk.session.send_headers(stream, OK)
    talk.session.send_headers(stream, TRAILERS, end_stream=True)
    assert talk.sent() == ["HEADERS 1 :status=200", "HEADERS 1 grpc-status=0 END"]
    assert stream.over


def test_interim_responses_are_not_the_response() -> None:
    talk = Dialogue.client()
    talk.opened()
    assert talk.received(headers(1, [(b":status", b"100")]), headers(1, [(b":status", b"103")])) == []
    assert talk.received(headers(1, OK)) == [("response", 1, b"200")]


def test_headers_in_pieces() -> None:
    talk = Dialogue.server()
    whole = block(POST)
    pieces = frame(frames.HEADERS, 0, 1, whole[:5]), continuation(1, whole[5:9], whole=False)
    assert talk.received(*pieces) == []
    assert talk.received(continuation(1, whole[9:])) == [("request", 1, b"POST", False)]


def test_a_header_list_over_the_limit() -> None:
    talk = Dialogue.server(SessionLimits(max_header_list_bytes=1000))
    talk.asked(1, [*POST, (b"x", b"y" * 700)])
    talk.asked(3, [*POST, (b"x", b"y" * 1700)])  # over what we announced: the owner answers 431
    assert talk.broke(headers(5, [*POST, (b"x", b"y" * 2000)])).startswith(
        "ENHANCE_YOUR_CALM: Oversized header"
    )


MALFORMED = [
    [*POST, (b"X-Upper", b"1")],
    [*POST, (b"", b"")],
    [*POST, (b"x", b"a\nb")],
    [*POST, (b":late", b"1")],
    [*POST, (b"connection", b"close")],
    POST[1:],
    [],
]


@pytest.mark.parametrize("fields", MALFORMED)
def test_malformed_headers_cost_their_stream_and_nothing_else(fields: list[tuple[bytes, bytes]]) -> None:
    talk = Dialogue.server()
    talk.asked(1)
    assert talk.received(headers(3, fields), data(3, b"x"), data(1, b"fine")) == [("data", 1, b"fine")]
    assert talk.sent() == ["RST_STREAM 3 PROTOCOL_ERROR"]
    talk.asked(5)


def test_a_malformed_response_costs_its_stream_and_nothing_else() -> None:
    talk = Dialogue.client()
    talk.opened()
    talk.opened()
    assert talk.received(headers(1, [(b"no-status", b"1")]), headers(3, OK)) == [
        ("reset", 1, "PROTOCOL_ERROR", "by us"),
        ("response", 3, b"200"),
    ]
    assert talk.sent() == ["RST_STREAM 1 PROTOCOL_ERROR"]


def test_malformed_trailers_cost_their_stream_and_nothing_else() -> None:
    talk = Dialogue.server()
    talk.asked(1)
    talk.asked(3)
    assert talk.received(headers(1, [(b":status", b"200")], end=True), data(3, b"x")) == [
        ("reset", 1, "PROTOCOL_ERROR", "by us"),
        ("data", 3, b"x"),
    ]


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


def test_a_header_block_without_end() -> None:
    talk = Dialogue.server()
    flood = b"".join(continuation(1, b"x", whole=False) for _ in range(64))
    text = talk.broke(headers(1, POST, whole=False), flood)
    assert text == "PROTOCOL_ERROR: Too many continuation frames received."


# Bodies.


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


def test_headers_after_the_end() -> None:
    talk = Dialogue.server()
    stream = talk.asked(1, GET, end=True)
    assert talk.received(headers(1, TRAILERS, end=True)) == [("reset", 1, "STREAM_CLOSED", "by us")]
    assert talk.sent() == ["RST_STREAM 1 STREAM_CLOSED"]
    assert stream.over


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
        assert error == "PROTOCOL_ERROR: Invalid frame during header block."


def test_data_within_a_header_block_on_a_stream_that_we_have_reset() -> None:
    talk = Dialogue.server()
    talk.session.reset(talk.asked(1), frames.CANCEL)
    assert talk.broke(headers(3, POST, whole=False), data(1, b"x")).startswith("PROTOCOL_ERROR")


@pytest.mark.parametrize("wire", [window(0, 1), ping(b"12345678"), goaway(0), frame(0xFF, 0, 0), settings()])
def test_nothing_may_come_within_a_header_block(wire: bytes) -> None:
    talk = Dialogue.server()
    assert talk.broke(headers(1, POST, whole=False), wire).startswith("PROTOCOL_ERROR")


def test_a_continuation_of_nothing() -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.broke(continuation(1, whole=False)).startswith("PROTOCOL_ERROR")


def test_a_continuation_on_a_stream_that_we_have_reset_opens_no_header_block() -> None:
    talk = Dialogue.server()
    talk.asked(3)
    talk.session.reset(talk.asked(5), frames.CANCEL)
    talk.asked(7)  # h2 forgets closed streams when it looks for a new one
    talk.sent()
    assert talk.received(continuation(5, whole=False), data(3, b"kept"), goaway(0)) == [
        ("data", 3, b"kept"),
        ("goaway", 0, "NO_ERROR"),
    ]


def test_data_before_the_response() -> None:
    talk = Dialogue.client()
    stream = talk.opened()
    assert talk.received(data(1, b"early")) == [("reset", 1, "PROTOCOL_ERROR", "by us")]
    assert talk.sent() == ["RST_STREAM 1 PROTOCOL_ERROR"]
    assert stream.over


# content-length.


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


def test_headers_that_promise_a_body_and_end() -> None:
    talk = Dialogue.server()
    assert talk.received(headers(1, [*POST, length(5)], end=True)) == [
        ("request", 1, b"POST", True),
        ("reset", 1, "PROTOCOL_ERROR", "by us"),
    ]
    talk = Dialogue.client()
    talk.opened(GET, end=True)
    assert talk.received(headers(1, [*OK, length(5)], end=True)) == [
        ("response", 1, b"200"),
        ("reset", 1, "PROTOCOL_ERROR", "by us"),
    ]


@pytest.mark.parametrize(("request_fields", "status"), [(HEAD, b"200"), (GET, b"304"), (GET, b"204")])
def test_a_length_that_is_of_another_responses_body(
    request_fields: list[tuple[bytes, bytes]], status: bytes
) -> None:
    talk = Dialogue.client()
    talk.opened(request_fields, end=True)
    answer = headers(1, [(b":status", status), length(1000)], end=True)
    assert talk.received(answer) == [("response", 1, status), ("ended", 1)]


@pytest.mark.parametrize("value", [b"x", b"-1", b"+1", b"1 2", b""])
def test_a_length_that_is_none(value: bytes) -> None:
    talk = Dialogue.server()
    fields = [*POST, (b"content-length", value)]
    assert talk.received(headers(1, fields)) == [("reset", 1, "PROTOCOL_ERROR", "by us")]
    assert talk.sent() == ["RST_STREAM 1 PROTOCOL_ERROR"]


def test_h2_has_a_look_at_the_length_that_we_can_do_without() -> None:
    """The only private parts of h2 that session.py touches: an h2 without them must not go unnoticed."""
    plain = H2Connection(H2Configuration(client_side=False))
    plain.receive_data(PREFACE + settings() + headers(1, [*POST, length(5)]))
    assert plain.streams[1]._expected_content_length == 5

    talk = Dialogue.server()
    talk.asked(1, [*POST, length(5)])
    assert talk.stream().body_left == 5
    assert talk.session._h2.streams[1]._expected_content_length is None


# Resets.


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
    for number in range(1, 2 * REMEMBERED_RESETS + 4, 2):
        talk.session.reset(talk.asked(number), frames.CANCEL)
    talk.sent()
    assert talk.received(data(1, b"late"), data(2 * REMEMBERED_RESETS + 3, b"late")) == []
    assert talk.sent() == ["RST_STREAM 1 STREAM_CLOSED"]


def test_a_push_is_refused() -> None:
    talk = Dialogue.client()
    talk.opened()
    push = frame(frames.PUSH_PROMISE, 0x4, 1, (2).to_bytes(4, "big") + block(GET))
    assert talk.broke(push) == "PROTOCOL_ERROR: Received pushed stream"


def test_a_server_opens_no_streams() -> None:
    talk = Dialogue.client()
    assert talk.broke(headers(2, GET)) == "PROTOCOL_ERROR: the server opened a stream"


def test_streams_over_the_limit_are_refused_without_hurting_others() -> None:
    talk = Dialogue.server(SessionLimits(max_streams=2))
    talk.asked(1)
    talk.asked(3)
    assert talk.received(headers(5, POST), data(5, b"x"), data(3, b"y"), data(5, b"x", end=True)) == [
        ("data", 3, b"y")
    ]
    assert talk.sent() == ["RST_STREAM 5 REFUSED_STREAM"]
    talk.session.reset(talk.stream(1), frames.CANCEL)
    assert talk.received(headers(7, GET, end=True))[0] == ("request", 7, b"GET", True)
    assert talk.received(headers(9, GET, end=True)) == []
    assert talk.sent() == ["RST_STREAM 1 CANCEL", "RST_STREAM 9 REFUSED_STREAM"]


# GOAWAY, and how many streams there may be.


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


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (frame(frames.GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR: GOAWAY on a stream"),
        (frame(frames.GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR: GOAWAY too short"),
    ],
)
def test_a_malformed_goaway(wire: bytes, error: str) -> None:
    assert Dialogue.server().broke(wire) == error


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
    session._h2.highest_outbound_stream_id = 2**31 - 5
    assert session.open_stream(POST).id == 2**31 - 3
    assert session.room == 0


# Whatever else.


def test_pings_are_answered() -> None:
    talk = Dialogue.server()
    assert talk.received(ping(b"abcdefgh"), ping(b"12345678", ack=True)) == []
    assert talk.sent() == ["PING ACK b'abcdefgh'"]


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


@pytest.mark.parametrize("kind", [frames.DATA, frames.HEADERS, frames.SETTINGS, 0xFF])
def test_frames_larger_than_announced(kind: int) -> None:
    talk = Dialogue.server()
    talk.asked()
    header = frames.header(16385, kind, 0, 0 if kind == frames.SETTINGS else 1)
    assert talk.broke(header) == "FRAME_SIZE_ERROR: frame larger than we announced", (
        "before its body has come"
    )


def test_the_largest_frame() -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.received(data(1, bytes(16384))) == [("data", 1, bytes(16384))]


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


def test_what_came_before_an_error_is_told() -> None:
    talk = Dialogue.server()
    with pytest.raises(SessionError):
        talk.session.receive_data(headers(1, POST) + data(1, b"x") + frame(frames.DATA, 0, 0))
    assert told(talk.session.events()) == [("request", 1, b"POST", False), ("data", 1, b"x")]
    assert talk.session.room == 0


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
