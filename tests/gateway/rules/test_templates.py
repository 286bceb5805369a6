from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rules.templates import (
    PLACEHOLDERS,
    Template,
    TunnelUrl,
    shown,
)
from shared.errors import NoRouteError

VALUES = {"service": "hello", "namespace": "demo", "port": "8080", "subset": "v1", "host": "hello.demo"}


def test_a_template_is_filled() -> None:
    template = Template.parse("https://{service}-{port}.a.run.app")
    assert template.expand(VALUES) == "https://hello-8080.a.run.app"
    assert not template.is_fixed
    assert Template.parse("https://fixed").is_fixed


def test_an_empty_value_is_refused_by_name() -> None:
    with pytest.raises(NoRouteError, match=r"the name has no subset, which \{subset\}\.x needs"):
        Template.parse("{subset}.x").expand(VALUES | {"subset": ""})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{servce}", "unknown placeholder {servce}, did you mean {service}?"),
        ("{x}", "unknown placeholder {x}, known are {service} {namespace} {port} {subset} {host}"),
        ("{service", "a brace has no partner: placeholders look like {service}"),
        ("a}b", "a brace has no partner: placeholders look like {service}"),
    ],
)
def test_a_wrong_template_says_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        Template.parse(text)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ftp://h/p", "must begin with https:// or http://"),
        ("https://h", "has no path: did you mean /_hbone/15003 at its end?"),
        ("https://h/p?q", "must have no query (?)"),
        ("https://h/p#f", "must have no fragment (#)"),
        ("https://user:secret@h/p", "must have no user information (@)"),
        ("https://h:0/p", "the port must be 1..65535 or {port}"),
        ("https://h/a/../b", "the path must have no . or .. segments"),
    ],
)
def test_a_wrong_url_says_why_and_repeats_no_secret(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        TunnelUrl.parse(text)
    assert str(caught.value) == reason


def test_a_url_s_parts() -> None:
    url = TunnelUrl.parse("https://{service}.a.run.app:{port}/_hbone/15003")
    assert (url.scheme, url.host.text, url.port.text, url.path.text) == (
        "https",
        "{service}.a.run.app",
        "{port}",
        "/_hbone/15003",
    )
    assert url.origin().text == "https://{service}.a.run.app"


@given(st.text())
def test_any_text_is_a_template_or_a_value_error(text: str) -> None:
    try:
        template = Template.parse(text)
    except ValueError:
        return
    assert set(template.pieces[1::2]) <= set(PLACEHOLDERS)
    assert template.is_fixed == (len(template.pieces) == 1)


@given(st.text())
def test_what_is_shown_of_a_name_is_short_and_visible(text: str) -> None:
    assert len(shown(text)) <= 100
    assert shown(text).isprintable()


def test_a_registered_name_and_its_path() -> None:
    url = TunnelUrl.parse_registered("{service}.mesh")
    assert (url.host.text, url.path.text) == ("{service}.mesh", "/_hbone/15003")
    assert TunnelUrl.parse_registered("a.mesh/_hbone/22").path.text == "/_hbone/22"


@pytest.mark.parametrize(
    "text", ["https://a.mesh/", "a.mesh:80", "10.0.0.1", "[::1]", "", "a b", "a.mesh/?x"]
)
def test_what_nobody_registers(text: str) -> None:
    with pytest.raises(ValueError):
        TunnelUrl.parse_registered(text)
