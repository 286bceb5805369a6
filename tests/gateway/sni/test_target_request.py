"""The tunnel request of a target: what is the same for all its tunnels, and what is not."""

from __future__ import annotations

from gateway.rules.routes import Target
from gateway.sni.upstream import TargetRequest
from shared.address import Address
from shared.credentials.tokens.tokens import NoToken

POST = Target(
    "tunnel",
    0,
    None,
    Address("10.0.0.1", 443),
    scheme="https",
    host="hello.example",
    path="/_hbone/15003",
    authority="hello.example",
)
CONNECT = Target(
    "tunnel",
    0,
    None,
    Address("10.0.0.1", 15008),
    scheme="https",
    host="hello.example",
    authority="hello.example",
    method="CONNECT",
    connect_target="hello.demo:8080",
    service="hello",
    namespace="demo",
)
TRACE, OTHER = b"00-trace-one", b"00-trace-two"


def test_a_post() -> None:
    request = TargetRequest(POST, NoToken())
    head = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", b"hello.example"),
        (b":path", b"/_hbone/15003"),
    ]
    assert request.headers("10.1.1.1:99", TRACE, None) == [*head, (b"traceparent", TRACE)]
    assert request.headers("10.1.1.1:99", OTHER, None) == [*head, (b"traceparent", OTHER)]


def test_a_connect_tells_of_each_client() -> None:
    request = TargetRequest(CONNECT, NoToken())
    for peer in ("10.1.1.1:99", "[::1]:99"):
        assert request.headers(peer, TRACE, None) == [
            (b":method", b"CONNECT"),
            (b":authority", b"hello.demo:8080"),
            (b"baggage", b"k8s.namespace.name=demo,service.name=hello"),
            (b"forwarded", f'for="{peer}"'.encode()),
            (b"traceparent", TRACE),
        ]


def test_a_new_token_replaces_the_old_one() -> None:
    request = TargetRequest(POST, NoToken())

    def sent(token: str | None) -> list[bytes]:
        return [value for name, value in request.headers("a:1", TRACE, token) if name == b"authorization"]

    assert sent("one") == sent("one") == [b"Bearer one"]
    assert sent("two") == [b"Bearer two"]
    assert sent(None) == []


def test_the_origin() -> None:
    origin = TargetRequest(POST, NoToken()).origin
    assert (origin.scheme, origin.host, origin.address) == ("https", "hello.example", POST.dial)
