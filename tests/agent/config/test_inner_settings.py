"""The variables that begin with HBONE_INNER."""

from __future__ import annotations

import pytest

from agent.config.inner_settings import InnerSettings
from agent.config.settings import ENVIRONMENT, from_env
from shared.errors import UsageError


def read(**environ: str) -> InnerSettings:
    return from_env(environ).inner


def test_without_any() -> None:
    assert read() == InnerSettings()
    assert read().is_on
    assert read().ports(8080) == {80: 8080, 8080: 8080}
    assert read().ports(80) == {80: 80}


def test_everything() -> None:
    found = read(
        HBONE_INNER="0",
        HBONE_INNER_HOSTS="Hello.demo.svc.cluster.local, *.shop.example",
        HBONE_INNER_PORTS="80=8080, 443 = 8443",
        HBONE_INNER_IDLE_TIMEOUT="5m",
    )
    hosts = ("hello.demo.svc.cluster.local", "*.shop.example")
    assert found == InnerSettings(False, hosts, ((80, 8080), (443, 8443)), 300)
    assert found.ports(9000) == {80: 8080, 443: 8443}, "the app's own port is not among them"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("HBONE_INNER", "yes", "must be 0 or 1"),
        ("HBONE_INNER_HOSTS", ",", "nothing but commas"),
        ("HBONE_INNER_HOSTS", "a..b", "it has an empty label"),
        ("HBONE_INNER_HOSTS", "10.0.0.1", "it reads as an IPv4 address"),
        ("HBONE_INNER_HOSTS", "hello:80", "character out of place"),
        ("HBONE_INNER_PORTS", "80", "must be SERVICE_PORT=APP_PORT, such as 80=8080"),
        ("HBONE_INNER_PORTS", "80=0", "a port is in 1..65535"),
        ("HBONE_INNER_PORTS", "80=65536", "a port is in 1..65535"),
        ("HBONE_INNER_PORTS", "http=8080", "a port is in 1..65535"),
        ("HBONE_INNER_PORTS", "80=127.0.0.1:22", "a port is in 1..65535"),
        ("HBONE_INNER_PORTS", "80=8080,80=9090", "a service's port leads to one port of the app"),
        ("HBONE_INNER_IDLE_TIMEOUT", "-1", "must be a duration"),
    ],
)
def test_what_is_wrong(variable: str, value: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"invalid {variable}=.*{reason}"):
        from_env({variable: value})


def test_the_app_gets_none_of_them() -> None:
    assert {name for name in ENVIRONMENT if name.startswith("HBONE_INNER")} == {
        "HBONE_INNER",
        "HBONE_INNER_HOSTS",
        "HBONE_INNER_PORTS",
        "HBONE_INNER_IDLE_TIMEOUT",
    }
