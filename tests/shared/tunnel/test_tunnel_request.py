"""The requests that open a tunnel, as h2 sees them, and the paths under which one is taken."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.http2.session import Session
from shared.tunnel.tunnel_request import (
    TUNNEL_PREFIX,
    connect,
    listen_port,
    post,
    target_name,
)

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJ4In0.c2ln"
EXTRA = [(b"x-tun", b"10.1.2.3:80")]


def test_post() -> None:
    assert post("https", "hello.a.run.app", "/_hbone/15003", TOKEN, EXTRA) == [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", b"hello.a.run.app"),
        (b":path", b"/_hbone/15003"),
        (b"authorization", b"Bearer " + TOKEN.encode()),
        (b"x-tun", b"10.1.2.3:80"),
    ]


def test_connect_has_neither_scheme_nor_path() -> None:
    assert connect("10.1.2.3:80", TOKEN, EXTRA) == [
        (b":method", b"CONNECT"),
        (b":authority", b"10.1.2.3:80"),
        (b"authorization", b"Bearer " + TOKEN.encode()),
        (b"x-tun", b"10.1.2.3:80"),
    ]


@pytest.mark.parametrize("request_fields", [post("http", "a", "/"), connect("a:1")])
def test_without_a_token_there_is_no_authorization(request_fields: list[tuple[bytes, bytes]]) -> None:
    assert [name for name, _ in request_fields if not name.startswith(b":")] == []


@pytest.mark.parametrize(
    "request_fields", [post("https", "a", "/_hbone/15003", TOKEN), connect("svc.ns:8080", TOKEN)]
)
def test_a_strict_server_takes_them(request_fields: list[tuple[bytes, bytes]]) -> None:
    session = Session(client=True)
    session.open_stream(request_fields)
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    (request,) = [
        event
        for event in server.receive_data(bytes(session.data_to_send()))
        if isinstance(event, h2.events.RequestReceived)
    ]
    assert list(request.headers or ()) == request_fields


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (b"/_hbone/15003", "15003"),
        (b"/_hbone/22?x=/y", "22"),
        (b"/_hbone/my-db.v1_x", "my-db.v1_x"),
        (b"/_hbone/" + b"x" * 64, "x" * 64),
        # Below the prefix, and no name.
        (b"/_hbone", ""),
        (b"/_hbone/", ""),
        (b"/_hbone?15003", ""),
        (b"/_hbone/15003/", ""),
        (b"/_hbone/443/_hbone/22", ""),
        (b"/_hbone/" + b"x" * 65, ""),
        (b"/_hbone/a b", ""),
        (b"/_hbone/\xe4", ""),
        (b"/_hbone/\n15003", ""),
        (b"/_hbone/15003\n", ""),
        (b"/_hbone/%31", ""),
        # The app's.
        (b"/", None),
        (b"", None),
        (b"*", None),
        (b"/_hbonex/15003", None),
        (b"/x/_hbone/15003", None),
        (b"//_hbone/15003", None),
        (b"/_HBONE/15003", None),
        (b"http://a/_hbone/15003", None),
        (b"/\xff\xfe", None),
        (b"/?/_hbone/15003", None),
    ],
)
def test_target_name(path: bytes, name: str | None) -> None:
    assert target_name(path) == name


@given(st.binary(max_size=80))
def test_any_path_is_a_name_or_none(path: bytes) -> None:
    name = target_name(path)
    if name:
        assert TUNNEL_PREFIX + name == path.partition(b"?")[0].decode()


@pytest.mark.parametrize(
    ("path", "port"),
    [
        (b"/_hbone/listen/9229", 9229),
        (b"/_hbone/listen/9229?x=1", 9229),
        (b"/_hbone/listen/65535", 65535),
        (b"/_hbone/listen/65536", 0),
        (b"/_hbone/listen/0", 0),
        (b"/_hbone/listen/09", 0),
        (b"/_hbone/listen/", 0),
        (b"/_hbone/listen/\xff", 0),
        (b"/_hbone/listen", None),
        (b"/_hbone/22", None),
        (b"/listen/9229", None),
    ],
)
def test_a_port_to_listen_on(path: bytes, port: int | None) -> None:
    assert listen_port(path) == port
    if port is not None:
        assert target_name(path) == ""  # no target is called so
