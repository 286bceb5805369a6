from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import (
    MAX_NAME_CHARS,
    Address,
    check_host_name,
    is_ipv4,
    read_ipv6,
)


@pytest.mark.parametrize(
    ("text", "address", "written"),
    [
        ("127.0.0.1:15000", Address("127.0.0.1", 15000), "127.0.0.1:15000"),
        ("0.0.0.0:0", Address("0.0.0.0", 0), "0.0.0.0:0"),
        ("Istiod.istio-system.svc:15012", Address("istiod.istio-system.svc", 15012), None),
        ("hello:65535", Address("hello", 65535), "hello:65535"),
        # A dot at the end: no search list.
        ("hello.demo.svc.cluster.local.:80", Address("hello.demo.svc.cluster.local.", 80), None),
        ("my_service:80", Address("my_service", 80), "my_service:80"),
        ("[::1]:80", Address("::1", 80), "[::1]:80"),
        ("[0:0:0:0:0:0:0:1]:80", Address("::1", 80), "[::1]:80"),
        ("[::ffff:10.0.0.1]:80", Address("::ffff:10.0.0.1", 80), "[::ffff:10.0.0.1]:80"),
        ("[::ffff:10.0.0.1%eth0]:80", Address("::ffff:10.0.0.1%eth0", 80), None),
        ("[fe80::1%eth0]:80", Address("fe80::1%eth0", 80), "[fe80::1%eth0]:80"),
    ],
)
def test_read_and_written(text: str, address: Address, written: str | None) -> None:
    assert Address.parse(text) == address
    assert str(address) == (written or text.lower())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no port: write HOST:PORT"),
        ("localhost", "no port: write HOST:PORT"),
        ("[::1]", "no port: write [IPV6]:PORT"),
        ("[::1]80", "no port: write [IPV6]:PORT"),
        (":80", "no host: write HOST:PORT, 0.0.0.0 listens on every IPv4 address"),
        ("::1:80", "an IPv6 address needs brackets: write [IPV6]:PORT"),
        ("http://a:80", "an IPv6 address needs brackets: write [IPV6]:PORT"),
        ("[::1:80", "the bracket of the IPv6 address is not closed"),
        ("[]:80", "'' is no IPv6 address"),
        ("[::g]:80", "'::g' is no IPv6 address"),
        ("[::1%]:80", "'::1%' is no IPv6 address"),
        ("[::1%\n]:80", r"'::1%\n' is no IPv6 address"),
        ("[1.2.3.4]:80", "'1.2.3.4' is no IPv6 address"),
        ("a:", "port '' is not in 0..65535"),
        ("a:http", "port 'http' is not in 0..65535"),
        ("a:65536", "port '65536' is not in 0..65535"),
        ("a:-1", "port '-1' is not in 0..65535"),
        ("a: 1", "port ' 1' is not in 0..65535"),
        ("a:\u0661", r"port '\u0661' is not in 0..65535"),
        ("a:" + "9" * 9999, f"port '{'9' * 60}...' is not in 0..65535"),
        ("*:80", "'*' is no host name: '*' has a character out of place"),
        ("a b:80", "'a b' is no host name: 'a b' has a character out of place"),
        ("-a:80", "'-a' is no host name: '-a' has a character out of place"),
        ("a-:80", "'a-' is no host name: 'a-' has a character out of place"),
        ("\u212a:80", r"'\u212a' is no host name: '\u212a' has a character out of place"),
        ("a..b:80", "'a..b' is no host name: it has an empty label"),
        ("a..:80", "'a.' is no host name: it has an empty label"),
        (".:80", "the host name is empty"),
        ("300.1.1.1:80", "'300.1.1.1' is no host name: it reads as an IPv4 address"),
        ("127.1:80", "'127.1' is no host name: it reads as an IPv4 address"),
        ("127.0.0.1.:80", "'127.0.0.1' is no host name: it reads as an IPv4 address"),
        ("0x7f000001:80", "'0x7f000001' is no host name: it reads as an IPv4 address"),
        ("2130706433:80", "'2130706433' is no host name: it reads as an IPv4 address"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        Address.parse(text)
    assert str(caught.value) == reason


def test_lengths() -> None:
    longest = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])
    assert len(longest) == MAX_NAME_CHARS
    check_host_name(longest)
    with pytest.raises(ValueError, match="the host name has 254 characters, more than 253"):
        check_host_name(longest + "d")
    with pytest.raises(ValueError, match="a label has 64 characters, more than 63"):
        check_host_name("a" * 64)


def test_addresses_as_hosts() -> None:
    assert is_ipv4("10.0.0.1")
    assert not is_ipv4("10.0.0.01")
    assert not is_ipv4("hello")
    assert read_ipv6("2001:DB8:0:0::1") == "2001:db8::1"


@given(st.text(max_size=80) | st.from_regex(r"\[?[a-f0-9.:%-]{0,20}\]?:[0-9]{0,6}", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except ValueError as error:
        assert str(error).isascii()
        assert str(error).isprintable()
        # Two excerpts of 60 characters, each up to ten long as an escape.
        assert len(str(error)) < 1300
    else:
        assert 0 <= address.port <= 65535
        assert Address.parse(str(address)) == address


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    address = Address.parse(str(Address(str(ip), port)))
    assert (ipaddress.ip_address(address.host), address.port) == (ip, port)
    assert Address.parse(str(address)) == address, "it is written as it is read"
    assert address.is_ip
    assert not Address(f"host{port}", port).is_ip


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1"])
def test_loopback(host: str) -> None:
    assert Address(host, 1).is_loopback


@pytest.mark.parametrize("host", ["128.0.0.1", "localhost", "127.example", "::2", "10.127.0.1"])
def test_not_loopback(host: str) -> None:
    assert not Address(host, 1).is_loopback


@pytest.mark.parametrize(
    ("host", "absolute"),
    [
        ("db.prod", "db.prod."),
        ("db.prod.", "db.prod."),
        ("localhost", "localhost."),
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
    ],
)
def test_names_that_no_search_list_is_tried_with(host: str, absolute: str) -> None:
    assert Address(host, 80).absolute == Address(absolute, 80)
