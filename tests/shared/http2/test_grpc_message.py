"""What gRPC adds to HTTP/2: headers, the five bytes, and which status an answer comes to."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.http2.grpc_message import (
    CODES,
    framed,
    request_headers,
    status,
    unframed,
)

GRPC = (b":status", b"200"), (b"content-type", b"application/grpc+proto")


def test_codes_are_those_of_grpc() -> None:
    assert {code.value[0]: code.name for code in grpc.StatusCode} == dict(enumerate(CODES))


# Requests.


def test_headers_of_a_call() -> None:
    headers = request_headers("istiod.example", "/a.B/C", {"clusterid": "one"}, 2.5)
    assert list(headers) == [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", b"/a.B/C"),
        (b":authority", b"istiod.example"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"hbone"),
        (b"grpc-timeout", b"2500m"),
        (b"clusterid", b"one"),
    ]


@pytest.mark.parametrize(("seconds", "sent"), [(0, b"1m"), (10, b"10000m"), (1e9, b"99999999m")])
def test_the_deadline_fits_into_its_header(seconds: float, sent: bytes) -> None:
    assert (b"grpc-timeout", sent) in request_headers("a", "/b/c", {}, seconds)


@pytest.mark.parametrize("value", ["Bearer two\r\nlines", "Bearer t\x00ken", "Bearer tökén"])
def test_a_value_that_no_header_can_carry_is_not_shown(value: str) -> None:
    with pytest.raises(ValueError) as caught:
        request_headers("a", "/b/c", {"authorization": value}, 1)
    assert str(caught.value) == "authorization has characters that no header can carry"


# Messages.


@given(st.binary(max_size=100))
def test_a_message_comes_back(message: bytes) -> None:
    assert unframed(framed(message)) == message


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "there is no message"),
        (b"\0\0\0\0", "there is no message"),
        (b"\1\0\0\0\1x", "compressed"),
        (b"\0\0\0\0\2x", "not one whole message"),
        (framed(b"one") + framed(b"two"), "not one whole message"),
        (b"<html>no</html>", "compressed"),
    ],
)
def test_no_message(body: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"no gRPC answer: .*{complaint}"):
        unframed(body)


# Statuses.


def test_a_status_in_trailers() -> None:
    assert status(GRPC, [(b"grpc-status", b"0")]) == ("OK", "")
    said = [(b"grpc-status", b"16"), (b"grpc-message", b"no%20token: 100%")]
    assert status(GRPC, said) == ("UNAUTHENTICATED", "no token: 100%")


def test_a_status_in_headers_which_are_all_there_is() -> None:
    assert status([*GRPC, (b"grpc-status", b"14"), (b"grpc-message", b"%C3%BCber")], None) == (
        "UNAVAILABLE",
        "über",
    )


@pytest.mark.parametrize("code", [b"17", b"999", b"-1", b"OK", b"\xb2", b"1" * 5000])
def test_unknown_codes(code: bytes) -> None:
    assert status(GRPC, [(b"grpc-status", code)]) == ("UNKNOWN", "")


def test_an_answer_that_breaks_off() -> None:
    assert status(GRPC, None) == ("UNKNOWN", "the answer broke off: it has no grpc-status")
    assert status(GRPC, []) == ("UNKNOWN", "the answer broke off: it has no grpc-status")


@pytest.mark.parametrize(
    ("http", "code"),
    [(b"401", "UNAUTHENTICATED"), (b"404", "UNIMPLEMENTED"), (b"503", "UNAVAILABLE"), (b"302", "UNKNOWN")],
)
def test_a_proxy_answers_in_its_place(http: bytes, code: str) -> None:
    assert status([(b":status", http), (b"grpc-status", b"0")], None) == (code, f"HTTP status {int(http)}")


def test_a_web_server_answers_in_its_place() -> None:
    html = [(b":status", b"200"), (b"content-type", b"text/html"), (b"grpc-status", b"0")]
    assert status(html, None) == ("UNKNOWN", "not the answer of a gRPC server")


@given(st.binary(max_size=2000))
def test_any_text_is_taken_and_bounded(text: bytes) -> None:
    _, said = status(GRPC, [(b"grpc-status", b"2"), (b"grpc-message", text)])
    assert len(said) <= 1000
