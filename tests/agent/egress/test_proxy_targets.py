"""What a client of the proxy asks for, in all the ways in which it can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.egress.proxy_targets import connect_target, plain_head, plain_target
from shared.address import Address
from shared.errors import BadRequestError


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        (b"db.prod.svc:5432", Address("db.prod.svc", 5432)),
        (b"DB.Prod.svc.:5432", Address("db.prod.svc", 5432)),
        (b"10.0.0.1:1", Address("10.0.0.1", 1)),
        (b"[2001:DB8::1]:443", Address("2001:db8::1", 443)),
    ],
)
def test_the_target_of_a_connect(asked: bytes, target: Address) -> None:
    assert connect_target(asked) == target


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        (b"http://a.b", Address("a.b", 80)),
        (b"HTTP://A.B/", Address("a.b", 80)),
        (b"http://a.b?c:d@e", Address("a.b", 80)),
        (b"http://a.b:81/c:82", Address("a.b", 81)),
        (b"http://[::1]/", Address("::1", 80)),
        (b"http://[::1]:81", Address("::1", 81)),
    ],
)
def test_the_target_of_a_url(asked: bytes, target: Address) -> None:
    assert plain_target(asked) == target


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (b"/", "a proxy is asked for"),
        (b"", "a proxy is asked for"),
        (b"*", "a proxy is asked for"),
        (b"https://a.b/", "with CONNECT"),
        (b"http:/a.b", "a proxy is asked for"),
        (b"http://", "no host"),
        (b"http://:80/", "no host"),
        (b"http://a.b:/", "port '' is not"),
        (b"http://a.b:0/", "port 0"),
        (b"http://a.b:65536/", "not in 0..65535"),
        (b"http://a:b@c/", "the URL has a user's name"),
        (b"http://::1/", "no IPv6|brackets|no host name"),
        (b"http://[::1/", "not closed"),
        (b"http://[fe80::1%25eth0]/", "zone"),
        (b"http://1.2/", "reads as an IPv4 address"),
        (b"http://\xff/", "not ASCII"),
        (b"http://a b/", "out of place"),
        (b"http://a\r\nb/", "out of place"),
        (b"http://" + b"a" * 301, "over 300 bytes"),
    ],
)
def test_urls_that_are_refused(asked: bytes, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        plain_target(asked)


def test_what_is_sent() -> None:
    target = Address("a.b", 81)
    headers = [
        *((b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"a.b:81"), (b":path", b"/c?d")),
        *((b"host", b"a.b:81"), (b"content-length", b"3"), (b"proxy-authorization", b"x"), (b"x", b"y")),
    ]
    head = plain_head(b"http://a.b:81/c?d", headers, target)
    assert (head.method, head.path, head.authority, head.has_length) == (b"POST", b"/c?d", b"a.b:81", True)
    assert head.fields == [(b"content-length", b"3"), (b"x", b"y"), (b"via", b"1.1 krun")]


def test_options_about_a_whole_server() -> None:
    headers = [(b":method", b"OPTIONS"), (b":path", b"/")]
    assert plain_head(b"http://[::1]", headers, Address("::1", 80)).path == b"*"
    assert plain_head(b"http://[::1]", headers, Address("::1", 80)).authority == b"[::1]"
    assert plain_head(b"http://a/", headers, Address("a", 80)).path == b"/"


PIECES = st.sampled_from(
    [
        b"http://",
        b"a",
        b"A.b",
        b".",
        b":",
        b"80",
        b"0",
        b"@",
        b"/",
        b"?",
        b"#",
        b"[",
        b"]",
        b"::1",
        b"%",
        b"\xff",
        b" ",
    ]
)


@given(st.lists(PIECES, max_size=8).map(b"".join) | st.binary(max_size=400))
@example(b"a.:80")
@example(b"http://a..:80")
def test_any_bytes_are_a_target_or_are_refused(asked: bytes) -> None:
    """What is accepted is what every reader of the text sees: host and port stand in it, and nothing else."""
    for read in (connect_target, plain_target):
        try:
            target = read(asked)
        except BadRequestError:
            continue
        assert 0 < target.port < 65536
        assert target.host == target.host.lower()
        assert not target.host.endswith(".")
        assert not set(target.host) & set("@/?#%[] ")
        assert Address.parse(str(target)) == target
        if ":" not in target.host:
            assert target.host in asked.decode("latin-1").lower()
