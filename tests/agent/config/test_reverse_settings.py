"""The variables that begin with HBONE_REVERSE."""

from __future__ import annotations

import pytest

from agent.config.reverse_settings import ReverseSettings
from agent.config.settings import from_env
from shared.address import Address
from shared.errors import UsageError

LEAST = {"HBONE_REVERSE": "hgate.example", "HBONE_REVERSE_NAME": "hello.svc"}


def read(**environ: str) -> ReverseSettings:
    found = from_env(LEAST | environ).reverse
    assert found is not None
    return found


def test_the_least() -> None:
    assert read() == ReverseSettings((Address("hgate.example", 15441),), ("hello.svc",))


def test_everything() -> None:
    assert read(
        HBONE_REVERSE="a.example:1, [2001:db8::1]:2 ,[2001:db8::1],10.0.0.1,a.example:1",
        HBONE_REVERSE_NAME="Hello.svc, b.svc",
        HBONE_REVERSE_PEER="spiffe://a/**,spiffe://b/ns/x/sa/y",
        HBONE_REVERSE_GATEWAYS="2",
        HBONE_REVERSE_KEEPALIVE="1.5",
        HBONE_REVERSE_STREAMS="10",
    ) == ReverseSettings(
        (
            Address("a.example", 1),
            Address("2001:db8::1", 2),
            Address("2001:db8::1", 15441),
            Address("10.0.0.1", 15441),
        ),
        ("hello.svc", "b.svc"),
        ("spiffe://a/**", "spiffe://b/ns/x/sa/y"),
        2,
        1.5,
        10,
    )


def test_the_own_trust_domain_if_it_is_told() -> None:
    assert read(TRUST_DOMAIN="demo.local").peers == ("spiffe://demo.local/**",)


def test_without_a_gateway_there_is_none() -> None:
    assert from_env({"HBONE_REVERSE_NAME": "hello.svc"}).reverse is None


def test_a_gateway_without_a_name() -> None:
    with pytest.raises(UsageError, match="HBONE_REVERSE is set, but not HBONE_REVERSE_NAME"):
        from_env({"HBONE_REVERSE": "hgate.example"})


def test_no_port_of_its_own() -> None:
    assert from_env(LEAST | {"HBONE_LISTEN": "-"}).listen is None
    with pytest.raises(UsageError, match=r"^invalid HBONE_LISTEN=- \(without HBONE_REVERSE nobody"):
        from_env({"HBONE_LISTEN": "-"})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("HBONE_REVERSE", "hgate.example:0", "port 0 cannot be dialled"),
        ("HBONE_REVERSE", "a:b:c", "an IPv6 address needs brackets"),
        ("HBONE_REVERSE", ", ,", "nothing but commas"),
        ("HBONE_REVERSE", ",".join(f"a{n}" for n in range(17)), "17 are more than 16"),
        ("HBONE_REVERSE_NAME", "hello_.*", "a character out of place"),
        ("HBONE_REVERSE_NAME", "10.0.0.1", "reads as an IPv4 address"),
        ("HBONE_REVERSE_PEER", "hgate", "does not start with spiffe://"),
        ("HBONE_REVERSE_GATEWAYS", "0", "must be in 1..16"),
        ("HBONE_REVERSE_KEEPALIVE", "0", "must be between 0.05s and 3600s"),
        ("HBONE_REVERSE_STREAMS", "10001", "must be in 1..10000"),
    ],
)
def test_mistakes(name: str, text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_env({**LEAST, name: text})
    assert str(caught.value).startswith(f"invalid {name}={text} (")
    assert reason in str(caught.value)
