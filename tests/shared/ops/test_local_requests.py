"""Requests that a web page may have sent to a port of this machine, and those that none can have sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ops.local_requests import FAULTS, OTHER_HOST, OTHER_SITE, fault

CROSS = (b"sec-fetch-site", b"cross-site")
SAME = (b"sec-fetch-site", b"same-origin")
TYPED = (b"sec-fetch-site", b"none")
FOLLOWED = (b"sec-fetch-mode", b"navigate")


def host(name: str) -> tuple[bytes, bytes]:
    return b"host", name.encode("latin-1")


@pytest.mark.parametrize(
    "name",
    [
        "localhost",
        "LocalHost:15000",
        "localhost.",
        "localhost.:15000",
        "127.0.0.1",
        "127.0.0.1:15000",
        "127.255.1.2:80",
        "[::1]",
        "[::1]:15000",
        "[0:0:0:0:0:0:0:1]:15000",
        "[::ffff:127.0.0.1]:15000",
        "",
    ],
)
def test_hosts_that_are_this_machine(name: str) -> None:
    assert fault(b"GET", b"/", [host(name)]) == ""
    assert fault(b"POST", b"/", [host(name)]) == ""


@pytest.mark.parametrize(
    "name",
    [
        "rebound.example",
        "rebound.example:15000",
        "127.0.0.1.rebound.example:15000",
        "127.rebound.example",
        "localhost.rebound.example",
        "a.localhost",
        "localhost:80@rebound.example",
        "localhost..",
        "128.0.0.1",
        "10.0.0.1:15000",
        "0.0.0.0:15000",
        "[::]:15000",
        "[::2]",
        "[::1",
        "[::1]x:1",
        "::1",
        "127.1",
        "0x7f000001",
        "2130706433",
        "127.0.0.1:15000:1",
        "\xe9\xff",
    ],
)
def test_hosts_that_are_not(name: str) -> None:
    assert fault(b"GET", b"/", [host(name)]) == OTHER_HOST


def test_the_address_that_the_client_has_connected_to() -> None:
    for own, name in (
        ("10.0.0.5", "10.0.0.5:15000"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("fd00::5", "[fd00::5]:15000"),
    ):
        assert fault(b"GET", b"/", [host(name)], own) == ""
    assert fault(b"GET", b"/", [host("10.0.0.6")], "10.0.0.5") == OTHER_HOST
    assert fault(b"GET", b"/", [host("pod.example")], "10.0.0.5") == OTHER_HOST


def test_no_host_at_all() -> None:
    """HTTP/1.0, which no browser speaks."""
    assert fault(b"GET", b"/", []) == ""


def test_a_target_in_absolute_form() -> None:
    assert fault(b"GET", b"http://localhost:15000/x", [host("localhost:15000")]) == ""
    assert fault(b"GET", b"http://rebound.example/x", [host("localhost:15000")]) == OTHER_HOST
    assert fault(b"GET", b"http://[/x", [host("localhost")]) == OTHER_HOST
    assert fault(b"GET", b"/x?u=http://rebound.example/", [host("localhost")]) == ""


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_reading_from_another_site(method: bytes) -> None:
    local = host("127.0.0.1:15000")
    assert fault(method, b"/", [local, CROSS]) == OTHER_SITE
    assert fault(method, b"/", [local, (b"sec-fetch-site", b"same-site")]) == OTHER_SITE
    assert fault(method, b"/", [local, CROSS, FOLLOWED]) == "", "a link in a wiki"
    assert fault(method, b"/", [local, SAME]) == fault(method, b"/", [local, TYPED]) == ""


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE"])
def test_changing_from_another_site(method: bytes) -> None:
    local = host("127.0.0.1:15463")
    own = (b"origin", b"http://127.0.0.1:15463")
    assert fault(method, b"/", [local]) == fault(method, b"/", [local, own, SAME]) == "", (
        "a program, our page"
    )
    for origin in (b"http://a.example", b"null", b"http://127.0.0.1:8080", b"https://127.0.0.1:15463", b""):
        assert fault(method, b"/", [local, (b"origin", origin)]) == OTHER_SITE
    assert fault(method, b"/", [local, own, (b"origin", b"http://a.example")]) == OTHER_SITE
    assert fault(method, b"/", [local, CROSS]) == OTHER_SITE
    assert fault(method, b"/", [local, CROSS, FOLLOWED]) == OTHER_SITE, "a form"


def test_each_fault_says_what_it_is() -> None:
    assert set(FAULTS) == {OTHER_HOST, OTHER_SITE}


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_anything_else(name: bytes, target: bytes) -> None:
    assert fault(b"GET", target, [(b"host", name)]) in ("", OTHER_HOST)
