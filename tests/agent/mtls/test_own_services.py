"""Which HOST:PORT is a service of this workload, and which port of the app that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mtls.own_services import OwnServices, default_host
from shared.address import MAX_PORT, Address
from shared.errors import DeniedError

APP = Address("127.0.0.1", 8080)
HELLO = "hello.demo.svc.cluster.local"
OURS = OwnServices((HELLO, "*.shop.example"), {80: 8080, 443: 8443}, APP)


@pytest.mark.parametrize(
    ("target", "app"),
    [
        (f"{HELLO}:80", "127.0.0.1:8080"),
        (f"{HELLO}.:80", "127.0.0.1:8080"),
        (f"{HELLO}:443", "127.0.0.1:8443"),
        ("a.shop.example:80", "127.0.0.1:8080"),
    ],
)
def test_what_is_ours(target: str, app: str) -> None:
    assert str(OURS.address(Address.parse(target))) == app


@pytest.mark.parametrize(
    ("target", "setting"),
    [
        (f"{HELLO}:8080", "HBONE_INNER_PORTS of krun has 80, 443"),
        (f"x{HELLO}:80", f"HBONE_INNER_HOSTS of krun has {HELLO}, *.shop.example"),
        (f"{HELLO}.example:80", "HBONE_INNER_HOSTS"),
        ("a.b.shop.example:80", "HBONE_INNER_HOSTS"),
        ("shop.example:80", "HBONE_INNER_HOSTS"),
        ("10.0.0.1:80", "HBONE_INNER_HOSTS"),
        ("[::1]:80", "HBONE_INNER_HOSTS"),
    ],
)
def test_what_is_not(target: str, setting: str) -> None:
    with pytest.raises(DeniedError) as caught:
        OURS.address(Address.parse(target))
    assert f"{target} is no service of this workload: {setting}" in str(caught.value)


def test_a_refusal_does_not_tell_long_lists() -> None:
    many = OwnServices([f"s{number}.demo" for number in range(64)], {80: 8080}, APP)
    with pytest.raises(DeniedError, match=r"has s0\.demo, .*, s4\.demo and 59 more$"):
        many.address(Address("other", 80))


@given(st.from_regex(r"[a-z0-9.-]{1,80}", fullmatch=True), st.integers(1, MAX_PORT))
def test_nothing_leads_elsewhere(host: str, port: int) -> None:
    try:
        found = OURS.address(Address(host, port))
    except DeniedError:
        return
    assert found in (Address("127.0.0.1", 8080), Address("127.0.0.1", 8443))


def test_the_name_by_default() -> None:
    assert default_host("Hello", "demo") == HELLO
