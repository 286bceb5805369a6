"""HBONE_EGRESS*: what is read, what is refused, and what may be reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config.egress_settings import EgressSettings, GatewayUrl, LocalTarget
from agent.config.settings import from_env
from shared.address import Address
from shared.errors import DeniedError, UsageError

GATEWAY = {"HBONE_EGRESS_GATEWAY": "hgate.example"}


def read(**environ: str) -> EgressSettings:
    settings = from_env({**GATEWAY, **environ}).egress
    assert settings is not None
    return settings


def test_there_is_none_unless_it_is_asked_for() -> None:
    assert from_env({}).egress is None
    assert from_env({"HBONE_EGRESS_DENY": "*:1"}).egress is None


def test_local_ports() -> None:
    settings = read(HBONE_EGRESS="8081=DB.prod.svc.:5432, 127.0.0.2:0=10.0.0.1:1,[::1]:8083=[2001:db8::1]:2")
    assert settings.local == (
        LocalTarget(Address("127.0.0.1", 8081), Address("db.prod.svc", 5432)),
        LocalTarget(Address("127.0.0.2", 0), Address("10.0.0.1", 1)),
        LocalTarget(Address("::1", 8083), Address("2001:db8::1", 2)),
    )
    assert settings.gateway == Address("hgate.example", 15008)
    assert not settings.has_proxy


@pytest.mark.parametrize(
    ("text", "address", "authority"),
    [
        ("https://egress.example/_hbone/15008", Address("egress.example", 443), "egress.example"),
        ("https://Egress.example.:8443/x?y", Address("egress.example", 8443), "egress.example:8443"),
        ("http://10.0.0.1:15009/_hbone/15008", Address("10.0.0.1", 15009), "10.0.0.1:15009"),
        ("http://[::1]/_hbone/15008", Address("::1", 80), "[::1]"),
    ],
)
def test_a_gateway_by_post(text: str, address: Address, authority: str) -> None:
    url = read(HBONE_EGRESS="1=a:1", HBONE_EGRESS_GATEWAY=text).gateway
    assert isinstance(url, GatewayUrl)
    assert (url.address, url.authority) == (address, authority)
    assert GatewayUrl.parse(str(url)) == url


def test_a_token_and_roots_for_the_front_end() -> None:
    settings = read(
        HBONE_EGRESS="1=a:1",
        HBONE_EGRESS_GATEWAY="https://e.test/x",
        HBONE_EGRESS_CA="/roots.pem",
        HBONE_EGRESS_AUDIENCE="https://e.test",
        GCE_METADATA_HOST="127.0.0.1:1",
    )
    assert (settings.ca, settings.audience) == (Path("/roots.pem"), "https://e.test")
    assert settings.metadata_host == "127.0.0.1:1"


@pytest.mark.parametrize("url", ["https://user:hunter2@h/x", "https://user:hunter2@h", "ftp://u:hunter2@h/x"])
def test_a_password_in_the_url_is_shown_to_nobody(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(HBONE_EGRESS="1=a:1", HBONE_EGRESS_GATEWAY=url)
    assert "hunter2" not in str(refused.value) and "://...@h" in str(refused.value)


def test_the_proxy_is_there_with_an_allow_list() -> None:
    settings = read(HBONE_EGRESS_ALLOW="*.prod.svc:80")
    assert (settings.has_proxy, settings.proxy) == (True, Address("127.0.0.1", 15007))
    with pytest.raises(UsageError, match="neither"):
        read(HBONE_EGRESS_ALLOW="*.prod.svc:80", HBONE_EGRESS_PROXY="-")


def test_peers_are_our_trust_domain_s() -> None:
    assert read(HBONE_EGRESS="1=a:1", TRUST_DOMAIN="demo.local").peers == ("spiffe://demo.local/**",)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"HBONE_EGRESS": "8081"}, "must be PORT=HOST:PORT"),
        ({"HBONE_EGRESS": "8081=db"}, "no port"),
        ({"HBONE_EGRESS": "8081=db:0"}, "port 0"),
        ({"HBONE_EGRESS": "x=db:1"}, "no port"),
        ({"HBONE_EGRESS": "70000=db:1"}, "not in 0..65535"),
        ({"HBONE_EGRESS": "0.0.0.0:1=db:1"}, "has to be a loopback address"),
        ({"HBONE_EGRESS": "1=a:1,1=b:1"}, "one port leads to two targets"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_DENY": "a:*"}, "HBONE_EGRESS_DENY has a:\\*"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_GATEWAY": ""}, "not HBONE_EGRESS_GATEWAY"),
        ({"HBONE_EGRESS_GATEWAY": "h:1"}, "what is to go there"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_GATEWAY": "ftp://h/x"}, "scheme must be https or http"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_GATEWAY": "https://h"}, "no path: hgate takes https://h/_h"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_GATEWAY": "https:///x"}, "no host"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_GATEWAY": "https://u:p@h/x"}, "HBONE_EGRESS_GATEWAY"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_GATEWAY": "https://h/x y"}, "write %XX"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_CA": "/x"}, "is no URL, which it would be for"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_AUDIENCE": "x"}, "is no URL, which it would be for"),
        (
            {
                "HBONE_EGRESS": "1=a:1",
                "HBONE_EGRESS_GATEWAY": "http://h/x",
                "HBONE_EGRESS_AUDIENCE": "x",
            },
            "has no TLS: write https",
        ),
        ({"HBONE_EGRESS_ALLOW": "a:1", "HBONE_EGRESS_PROXY": "0.0.0.0:1"}, "has to be a loopback address"),
        ({"HBONE_EGRESS": "1=a:1", "HBONE_EGRESS_APP_PROXY": "1"}, "no proxy without HBONE_EGRESS_ALLOW"),
        (
            {
                "HBONE_EGRESS_ALLOW": "a:1",
                "HBONE_EGRESS_APP_PROXY": "1",
                "HBONE_SERVICES": "127.0.0.1:15005",
            },
            "the app has one HTTP_PROXY",
        ),
    ],
)
def test_what_is_refused(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        from_env({**GATEWAY, **environ})


def test_deny_comes_before_allow() -> None:
    settings = read(HBONE_EGRESS_ALLOW="*.prod.svc:*", HBONE_EGRESS_DENY="db.prod.svc:5432")
    settings.check_proxy(Address("web.prod.svc", 80))
    settings.check_proxy(Address("db.prod.svc", 80))
    with pytest.raises(DeniedError, match=r"HBONE_EGRESS_DENY has db\.prod\.svc:5432"):
        settings.check_proxy(Address("db.prod.svc", 5432))
    with pytest.raises(DeniedError, match="HBONE_EGRESS_ALLOW does not have it"):
        settings.check_proxy(Address("web.test.svc", 80))


def test_an_address_inside_another_is_denied_as_well() -> None:
    settings = read(HBONE_EGRESS_ALLOW="*:*", HBONE_EGRESS_DENY="10.0.0.0/8:*")
    settings.check_proxy(Address("64:ff9b::808:808", 80))
    with pytest.raises(DeniedError, match=r"HBONE_EGRESS_DENY has 10\.0\.0\.0/8"):
        settings.check_proxy(Address("64:ff9b::a01:203", 80))
