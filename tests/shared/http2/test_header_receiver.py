"""Header blocks as they come: requests, answers, trailers, in pieces, malformed, out of place."""

from __future__ import annotations

import pytest

from shared.http2 import frames
from shared.http2.events import ResponseReceived
from shared.http2.session import SessionLimits
from tests.shared.http2.dialogue import (
    CONNECT,
    GET,
    HEAD,
    OK,
    POST,
    TRAILERS,
    Dialogue,
    block,
    continuation,
    data,
    frame,
    goaway,
    headers,
    length,
    ping,
    settings,
    window,
)


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
    assert talk.received(headers(1, [(b":status", b"100")]), headers(1, [(b":status", b"103")])) == [
        ("interim", 1, b"100"),
        ("interim", 1, b"103"),
    ]
    assert talk.received(headers(1, OK)) == [("response", 1, b"200")]


def test_interim_responses_of_ours() -> None:
    talk = Dialogue.server()
    stream = talk.asked()
    talk.session.send_interim(stream, [(b":status", b"103"), (b"link", b"</a>")])
    talk.session.send_headers(stream, OK, end_stream=True)
    talk.session.send_interim(stream, [(b":status", b"103")])
    assert talk.sent() == ["HEADERS 1 :status=103 link=</a>", "HEADERS 1 :status=200 END"]


@pytest.mark.parametrize("end", [True, False])
def test_a_response_says_whether_it_is_all(end: bool) -> None:
    talk = Dialogue.client()
    talk.opened()
    talk.session.receive_data(headers(1, OK, end=end))
    response = next(event for event in talk.session.events() if isinstance(event, ResponseReceived))
    assert response.ended is end


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
        "ENHANCE_YOUR_CALM: header list of more than 2000 bytes"
    )


@pytest.mark.parametrize(
    ("fields", "fault"),
    [(POST[1:], "no :method"), ([], "the headers of a trailers"), (OK, "the headers of a response")],
)
def test_malformed_headers_cost_their_stream_and_nothing_else(
    fields: list[tuple[bytes, bytes]], fault: str
) -> None:
    talk = Dialogue.server()
    talk.asked(1)
    assert talk.received(headers(3, fields), data(3, b"x"), data(1, b"fine")) == [
        ("malformed", 3, fault),
        ("data", 1, b"fine"),
    ]
    assert talk.sent() == ["RST_STREAM 3 PROTOCOL_ERROR"]
    talk.asked(5)


@pytest.mark.parametrize(
    "response",
    [
        headers(1, [(b"no-status", b"1")]),
        headers(1, [(b":status", b"20")]),
        headers(1, [(b":status", b"103")], end=True),
    ],
    ids=["no status", "malformed status", "interim and the end"],
)
def test_a_wrong_response_costs_its_stream_and_nothing_else(response: bytes) -> None:
    talk = Dialogue.client()
    talk.opened()
    talk.opened()
    (ended, fine) = talk.received(response, headers(3, OK))
    assert (ended, fine) == (("reset", 1, "PROTOCOL_ERROR", "by us"), ("response", 3, b"200"))
    assert talk.sent() == ["RST_STREAM 1 PROTOCOL_ERROR"]


@pytest.mark.parametrize(
    "trailers", [headers(1, OK, end=True), headers(1, TRAILERS)], ids=["malformed", "without the end"]
)
def test_wrong_trailers_cost_their_stream_and_nothing_else(trailers: bytes) -> None:
    talk = Dialogue.server()
    talk.asked(1)
    talk.asked(3)
    assert talk.received(trailers, data(3, b"x")) == [
        ("reset", 1, "PROTOCOL_ERROR", "by us"),
        ("data", 3, b"x"),
    ]


def test_a_header_block_without_end() -> None:
    talk = Dialogue.server()
    flood = b"".join(continuation(1, b"x", whole=False) for _ in range(64))
    text = talk.broke(headers(1, POST, whole=False), flood)
    assert text == "PROTOCOL_ERROR: a header block of more than 64 frames"


def test_headers_after_the_end() -> None:
    talk = Dialogue.server()
    stream = talk.asked(1, GET, end=True)
    assert talk.received(headers(1, TRAILERS, end=True)) == [("reset", 1, "STREAM_CLOSED", "by us")]
    assert talk.sent() == ["RST_STREAM 1 STREAM_CLOSED"]
    assert stream.over


@pytest.mark.parametrize("wire", [window(0, 1), ping(b"12345678"), goaway(0), frame(0xFF, 0, 0), settings()])
def test_nothing_may_come_within_a_header_block(wire: bytes) -> None:
    talk = Dialogue.server()
    assert talk.broke(headers(1, POST, whole=False), wire).startswith("PROTOCOL_ERROR")


def test_a_continuation_of_nothing() -> None:
    talk = Dialogue.server()
    talk.asked()
    assert talk.broke(continuation(1, whole=False)).startswith("PROTOCOL_ERROR")


def test_a_continuation_of_nothing_on_a_stream_that_we_have_reset() -> None:
    """No crossing makes one: what belongs to a CONTINUATION goes before it (RFC 9113 section 6.10)."""
    talk = Dialogue.server()
    talk.session.reset(talk.asked(5), frames.CANCEL)
    talk.sent()
    assert talk.broke(continuation(5, whole=False)) == "PROTOCOL_ERROR: CONTINUATION of nothing"


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


def test_a_push_is_refused() -> None:
    talk = Dialogue.client()
    talk.opened()
    push = frame(frames.PUSH_PROMISE, 0x4, 1, (2).to_bytes(4, "big") + block(GET))
    assert talk.broke(push) == "PROTOCOL_ERROR: PUSH_PROMISE, which nobody has allowed"


def test_a_server_opens_no_streams() -> None:
    talk = Dialogue.client()
    assert talk.broke(headers(2, GET)) == "PROTOCOL_ERROR: the peer opened a stream that is not its to open"


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


def test_a_continuation_of_another_streams_block() -> None:
    talk = Dialogue.server()
    talk.asked(1)
    error = talk.broke(headers(3, POST, whole=False), continuation(1))
    assert error == "PROTOCOL_ERROR: CONTINUATION of another stream's header block"
