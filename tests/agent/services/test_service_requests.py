"""What becomes of a request's head on its way to a service: for any head at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.services.service_requests import is_service, request_to_service
from shared.errors import NoRouteError, RefusedError

NAMES = st.sampled_from(
    [
        *(b":method", b":path", b":authority", b":scheme", b"host", b"te", b"connection", b"upgrade", b"x-a"),
        *(b"authorization", b"proxy-authorization", b"content-length", b"keep-alive", b"content-type"),
    ]
)
VALUES = st.sampled_from(
    [
        *(
            b"GET",
            b"CONNECT",
            b"/",
            b"/a?b",
            b"*",
            b"http://hello",
            b"http://hello?x",
            b"HTTP://hello.us-east1/",
        ),
        *(b"hello", b"hello:80", b"evil.example", b"x-a, Upgrade", b"trailers", b"application/grpc", b""),
    ]
)


@given(st.lists(st.tuples(NAMES, VALUES | st.binary(max_size=30))))
def test_any_head(headers: list[tuple[bytes, bytes]]) -> None:
    try:
        asked = request_to_service(headers)
    except RefusedError:
        return
    told = asked.headers("hello-1.us-east1.run.app", None if asked.is_authorized else "token")
    names = [name for name, _ in told]
    assert names[:4] == [b":method", b":scheme", b":path", b":authority"]
    assert not any(name.startswith(b":") for name in names[4:])
    assert dict(told)[b":authority"] == b"hello-1.us-east1.run.app"
    assert b"authorization" in names
    dropped = {b"host", b"connection", b"upgrade", b"keep-alive", b"proxy-authorization"}
    assert dropped.isdisjoint(names)
    assert dict(told)[b":path"][:1] in (b"/", b"*")


def test_where_a_request_leads() -> None:
    def path(target: bytes, **fields: bytes) -> tuple[str, bytes]:
        headers = [(b":method", b"GET"), (b":path", target)]
        asked = request_to_service([*headers, *((name.encode(), value) for name, value in fields.items())])
        return asked.name.service, asked.head.path

    assert path(b"http://hello/a?b") == ("hello", b"/a?b")
    assert path(b"http://hello?b") == ("hello", b"/?b")
    assert path(b"http://hello", host=b"other") == ("hello", b"/")
    assert path(b"/a", host=b"hello") == ("hello", b"/a")
    for target, host in ((b"/a", b""), (b"https://hello/", b"hello"), (b"http://u@hello/", b"hello")):
        try:
            path(target, host=host)
        except NoRouteError:
            continue
        raise AssertionError(target)
    assert (is_service(b"hello:80"), is_service(b"hello:443"), is_service(b"\xff")) == (True, False, False)
