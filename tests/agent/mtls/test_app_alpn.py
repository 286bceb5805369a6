"""What is offered by ALPN for each kind of app; tests/path/test_alpn.py has real clients and apps."""

from __future__ import annotations

import pytest

from agent.config.settings import APP_PROTOCOLS, AppProtocol
from agent.mtls.app_alpn import alpn_offer, http_offer

CURL = ("h2", "http/1.1")
GRPC = ("h2",)
OLD = ("http/1.1",)
ISTIO_HTTP1 = ("istio-http/1.1", "istio", "http/1.1")
ISTIO_HTTP2 = ("istio-h2", "istio", "h2")
ISTIO_TCP = ("istio-peer-exchange", "istio")


def agreed(protocol: AppProtocol, offered: tuple[str, ...]) -> str:
    return next((name for name in alpn_offer(protocol) if name in offered), "")


@pytest.mark.parametrize(
    ("protocol", "offered", "name"),
    [
        ("http1", CURL, "http/1.1"),
        ("http1", GRPC, ""),
        ("http1", OLD, "http/1.1"),
        ("h2c", CURL, "h2"),
        ("h2c", GRPC, "h2"),
        ("h2c", OLD, ""),
        ("auto", CURL, "http/1.1"),
        ("auto", GRPC, "h2"),
        ("auto", OLD, "http/1.1"),
    ],
)
def test_a_client_agrees_to_what_the_app_speaks(
    protocol: AppProtocol, offered: tuple[str, ...], name: str
) -> None:
    assert agreed(protocol, offered) == name


@pytest.mark.parametrize("protocol", APP_PROTOCOLS)
@pytest.mark.parametrize("offered", [ISTIO_HTTP1, ISTIO_HTTP2, ISTIO_TCP])
def test_istio_s_clients_agree_to_bytes(protocol: AppProtocol, offered: tuple[str, ...]) -> None:
    assert agreed(protocol, offered) == "istio"


@pytest.mark.parametrize("protocol", APP_PROTOCOLS)
def test_nobody_is_talked_into_a_preamble(protocol: AppProtocol) -> None:
    assert agreed(protocol, ("istio-peer-exchange",)) == ""


@pytest.mark.parametrize("offered", [CURL, OLD, GRPC, ISTIO_HTTP1, ISTIO_HTTP2])
@pytest.mark.parametrize(
    ("protocol", "preferred"), [("http1", "http/1.1"), ("h2c", "h2"), ("auto", "http/1.1")]
)
def test_where_http_is_served_every_client_of_http_is_told_what_it_speaks(
    protocol: AppProtocol, preferred: str, offered: tuple[str, ...]
) -> None:
    name = next(name for name in http_offer(protocol) if name in offered)
    assert name == preferred or preferred not in offered
