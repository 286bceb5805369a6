"""`reverse:` in the gateway's file, and routes that lead to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.config import config
from gateway.config.reverse_settings import ReverseSettings
from gateway.rules.reverse_rules import ReverseRule
from shared.address import Address
from shared.errors import ConfigError

RULES = 'rules: [{from: ["*"], names: ["*.svc"]}]'


def reverse(*lines: str, routes: str = "[]") -> str:
    return "\n".join([f"routes: {routes}", "reverse:", *(f"  {line}" for line in lines)])


def read(*lines: str, routes: str = "[]") -> ReverseSettings:
    found = config.parse(reverse(*lines, routes=routes), "/etc/hgate/hgate.yaml").reverse
    assert found is not None
    return found


def test_without_it_there_is_no_port() -> None:
    assert config.parse("routes: []", "f").reverse is None


def test_the_defaults() -> None:
    settings = read("certificates: certs", "rules: []")
    assert settings == ReverseSettings(Path("/etc/hgate/certs"), ())
    assert settings.listen == (Address("0.0.0.0", 15441),)
    assert not settings.tls12


def test_everything() -> None:
    settings = read(
        "certificates: /certs",
        'listen: ["127.0.0.1:0"]',
        "handshake_timeout: 1s",
        "keepalive: 500ms",
        "wait: 0",
        "max_connections: 2",
        "max_names: 3",
        "max_connections_per_name: 4",
        "rules:",
        '  - {from: ["spiffe://a/b"], names: ["x.svc", "{namespace}.svc"]}',
        '  - {from: ["*"], names: ["*"], deny: true}',
    )
    assert settings == ReverseSettings(
        Path("/certs"),
        (
            ReverseRule(("spiffe://a/b",), ("x.svc", "{namespace}.svc")),
            ReverseRule(("*",), ("*",), deny=True),
        ),
        (Address("127.0.0.1", 0),),
        handshake_timeout_s=1.0,
        keepalive_s=0.5,
        wait_s=0.0,
        max_connections=2,
        max_names=3,
        max_connections_per_name=4,
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (reverse(RULES), "reverse.certificates: missing"),
        (reverse("certificates: c", RULES, "name: x"), "reverse.name: unknown field"),
        (reverse("certificates: c", RULES, "wait: 2m"), "reverse.wait: must be between 0s and 60s"),
        (reverse("certificates: c", RULES, "max_names: 0"), "reverse.max_names: must be in 1..100000"),
        (
            reverse("certificates: c", 'rules: [{from: ["*"], names: ["{who}.svc"]}]'),
            "reverse.rules[0].names[0]: unknown placeholder {who}",
        ),
        (
            reverse("certificates: c", 'rules: [{from: ["x"], names: ["a.svc"]}]'),
            "reverse.rules[0].from[0]: pattern 'x' does not start with spiffe://",
        ),
        (
            reverse("certificates: c", 'rules: [{from: ["*"], names: []}]'),
            "reverse.rules[0].names: needs at least one pattern",
        ),
        (
            reverse("certificates: c", RULES, 'listen: ["0.0.0.0:15443"]'),
            "0.0.0.0:15443 is the address of both listen and reverse",
        ),
    ],
)
def test_mistakes(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "f")
    assert error in str(caught.value)


# Routes.

SECTION = ("certificates: c", RULES)


@pytest.mark.parametrize(
    ("written", "host", "path"),
    [
        ("true", "{host}", "/_hbone/15003"),
        ('"{host}"', "{host}", "/_hbone/15003"),
        ("hello.svc", "hello.svc", "/_hbone/15003"),
        ('"{service}.{namespace}.svc/_hbone/22"', "{service}.{namespace}.svc", "/_hbone/22"),
    ],
)
def test_a_route(written: str, host: str, path: str) -> None:
    text = reverse(*SECTION, routes=f'[{{host: "**.svc", reverse: {written}}}]')
    (route,) = config.parse(text, "f").routes
    assert route.reverse is not None
    assert (route.reverse.host.text, route.reverse.path.text) == (host, path)


@pytest.mark.parametrize(
    ("route", "error"),
    [
        ("reverse: hello.svc:80", "a host name without a port"),
        ("reverse: 10.0.0.1", "a host name without a port"),
        ('reverse: "https://hello.svc/"', "no URL"),
        ('reverse: "{name}"', "unknown placeholder {name}"),
        ("reverse: false", "must be a text"),
        ("reverse: true, token: none", "routes[0].token: has no meaning beside reverse, only beside tunnel"),
        ("reverse: true, forward: a.b:1", "forward"),
    ],
)
def test_mistakes_of_a_route(route: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(reverse(*SECTION, routes=f'[{{host: "*.svc", {route}}}]'), "f")
    assert error in str(caught.value)


def test_a_route_without_the_section() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse('routes: [{host: "*.svc", reverse: true}]', "f")
    assert "f:1: routes[0].reverse: needs a section reverse in the file" in str(caught.value)


def test_the_example_of_the_documents() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    section = page.partition("## The reverse port")[2]
    example = section.partition("```yaml\n")[2].partition("```")[0]
    found = config.parse(example, "/etc/hgate/hgate.yaml")
    assert found.reverse is not None and found.routes[0].reverse is not None
    everything = re.sub(r"^  # (\w+: )", r"  \1", example, flags=re.MULTILINE)
    assert everything != example
    told = config.parse(everything, "/etc/hgate/hgate.yaml")
    assert told == found, "what is commented out is the default"
