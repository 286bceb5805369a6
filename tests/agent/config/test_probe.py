from __future__ import annotations

import pytest

from agent.config.probe import Probe, parse, parse_http
from agent.config.settings import from_env
from shared.address import Address
from shared.errors import UsageError

APP = Address("127.0.0.1", 8080)
OTHER = Address("127.0.0.1", 9000)


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        ("-", Probe()),
        ("9000", Probe(OTHER)),
        ("10.0.0.1:9000", Probe(Address("10.0.0.1", 9000))),
        ("http://127.0.0.1:9000/ready?a=b", Probe(url="http://127.0.0.1:9000/ready?a=b")),
        ("http://localhost", Probe(url="http://localhost:80/")),
    ],
)
def test_the_forms(text: str, probe: Probe) -> None:
    assert parse(text) == probe


def test_the_original_s_form_of_a_url() -> None:
    assert parse_http("9000/ready").url == "http://127.0.0.1:9000/ready"
    assert parse_http("http://127.0.0.1:9000/ready").url == "http://127.0.0.1:9000/ready"


@pytest.mark.parametrize("text", ["", "app", "http://", "http://a b/", "http://:1/", "https://a/"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError):  # each for a reason of its own
        parse(text)


@pytest.mark.parametrize(
    ("environ", "app", "probe"),
    [
        ({}, APP, Probe(APP)),
        ({"HBONE_STARTUP_PROBE": "-"}, APP, Probe()),
        ({"startupProbe.tcp": "9000"}, APP, Probe(OTHER)),
        ({"startupProbe.http": "9000/r"}, APP, Probe(url="http://127.0.0.1:9000/r")),
        ({"startupProbe.tcp": "9000", "HBONE_STARTUP_PROBE": "-"}, APP, Probe()),
        ({"PORT_http": "9000"}, OTHER, Probe(OTHER)),
        ({"PORT_http": "9000", "HBONE_APP": "127.0.0.1:8080"}, APP, Probe(APP)),
        ({"PORT_http": "-"}, APP, Probe()),
    ],
    ids=str,
)
def test_the_original_s_names_count_where_ours_are_not_set(
    environ: dict[str, str], app: Address, probe: Probe
) -> None:
    settings = from_env(environ)
    assert (settings.app, settings.probe, settings.targets) == (app, probe, {})


def test_the_target_http_is_a_target_still() -> None:
    settings = from_env({"PORT_http": "10.0.0.1:80"})
    assert settings.targets == {"http": Address("10.0.0.1", 80)}
    assert settings.app == APP


def test_a_wrong_one_is_named() -> None:
    with pytest.raises(UsageError, match=r"invalid startupProbe\.tcp=x"):
        from_env({"startupProbe.tcp": "x"})
