"""What passes of headers and trailers; with whole requests `tests/agent/tunnels/test_app_proxy.py` asks the
same."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.proxy.fields import (
    RequestHead,
    request_head,
    request_trailers,
    response_fields,
    response_trailers,
)

PSEUDO = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"app"), (b":path", b"/")]

OURS = ("x-forwarded-client-cert", "x-serverless-authorization", "transfer-encoding", "proxy-connection")


@pytest.mark.parametrize(
    ("kind", "is_grpc"),
    [
        (b"application/grpc", True),
        (b"application/grpc+proto", True),
        (b"application/grpc;x=y", True),
        (b"application/grpc-web", False),
        (b"application/grpc-web+proto", False),
        (b"application/json", False),
    ],
)
def test_grpc_is_known_by_its_content_type(kind: bytes, is_grpc: bool) -> None:
    head = request_head([*PSEUDO, (b"content-type", kind)], bodiless=False)
    assert (head.is_grpc, head.fields) == (is_grpc, [(b"content-type", kind)])


def test_pseudo_headers() -> None:
    head = request_head([*PSEUDO, (b":protocol", b"websocket"), (b"te", b"trailers")], bodiless=False)
    assert head == RequestHead(
        method=b"POST",
        scheme=b"https",
        authority=b"app",
        path=b"/",
        protocol=b"websocket",
        takes_trailers=True,
    )


def test_a_host_stands_in_for_the_authority() -> None:
    assert request_head([(b":method", b"GET"), (b"host", b"x")], bodiless=True).authority == b"x"


@pytest.mark.parametrize(
    ("method", "may"),
    [
        (b"GET", True),
        (b"HEAD", True),
        (b"PUT", True),
        (b"DELETE", True),
        (b"OPTIONS", True),
        (b"TRACE", True),
        (b"POST", False),
        (b"PATCH", False),
        (b"CONNECT", False),
        (b"PROPFIND", False),
    ],
)
def test_what_may_be_done_twice(method: bytes, may: bool) -> None:
    assert RequestHead(method=method).is_idempotent is may


def merged(name: bytes) -> str:
    """What apps make of a name: CGI's HTTP_*, with every character that is no letter or digit as "_"."""
    letters = string.ascii_letters + string.digits
    return "".join(char if char in letters else "_" for char in name.decode("latin-1")).upper()


@given(st.sampled_from(OURS), st.data())
def test_no_app_can_take_a_clients_field_for_ours(ours: str, data: st.DataObject) -> None:
    """Whatever characters stand where the real name has a "-"."""
    pieces = ours.split("-")
    between = st.sampled_from("-_.!#$%&'*+^`|~")
    name = pieces[0] + "".join(data.draw(between) + piece for piece in pieces[1:])
    field = (name.encode(), b"forged")
    head = request_head([*PSEUDO, field], bodiless=False)
    trailers = request_trailers([field])
    taken_for_ours = {merged(ours.encode())}
    assert not taken_for_ours & {merged(name) for name, _ in [*head.fields, *trailers]}


@given(st.text("abcxyz019-_.", min_size=1).map(str.encode))
def test_other_fields_pass(name: bytes) -> None:
    field = (name, b"1")
    assert request_head([*PSEUDO, field], bodiless=True).fields == [field]
    assert request_trailers([field]) == [field]
    assert response_fields([field]) == [field]


@pytest.mark.parametrize(
    "name",
    [
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"cookie",
        b"expect",
        b"host",
        b"te",
        b"trailer",
        b"transfer_encoding",
        b"x-forwarded-for",
        b"x_forwarded_client_cert",
        b"x_forwarded_for",
    ],
)
def test_what_is_no_trailer_of_a_request(name: bytes) -> None:
    assert request_trailers([(name, b"1"), (b"x-sum", b"2")]) == [(b"x-sum", b"2")]


def test_no_trailers() -> None:
    assert request_trailers(None) == response_trailers(None) == []


def test_an_answer_loses_what_its_connection_names() -> None:
    fields = [
        (b"connection", b"x-hop, Keep-Alive"),
        (b"x-hop", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"upgrade", b"h2c"),
        (b"proxy-connection", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"x_underscored", b"stays"),
    ]
    assert response_fields(fields) == [(b"x_underscored", b"stays")]
    assert response_trailers([(b"grpc-status", b"0"), (b"content-length", b"1"), (b"connection", b"x")]) == [
        (b"grpc-status", b"0")
    ]
