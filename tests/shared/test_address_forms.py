"""IPv4 inside of IPv6, and what is near; what rules make of it has test_hbone_rules.py."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address_forms import (
    contains,
    forms,
    inside,
    is_about_near,
    is_near,
    is_stand_in,
    plain,
)

V4 = st.ip_addresses(v=4)
V6 = st.ip_addresses(v=6)


def nat64(prefix: IPv6Network, address: IPv4Address) -> IPv6Address:
    """RFC 6052 section 2.2: the address behind the prefix, around byte 8, which is 0."""
    packed = bytearray(prefix.network_address.packed)
    at = prefix.prefixlen // 8
    for byte in address.packed:
        at += at == 8
        packed[at] = byte
        at += 1
    return IPv6Address(bytes(packed))


@given(V4, st.sampled_from([48, 56, 64, 96]))
def test_nat64_with_any_prefix_of_the_network_s_own(address: IPv4Address, bits: int) -> None:
    wrapped = nat64(ip_network(f"64:ff9b:1::/{bits}"), address)  # type: ignore[arg-type]
    if address.packed[0]:  # 0.0.0.0/8 is nowhere, and looks like what fills such an address up
        assert address in inside(wrapped)
        assert is_near(wrapped) or not is_near(address)


@given(V4)
def test_nat64_s_well_known_prefix(address: IPv4Address) -> None:
    assert inside(nat64(IPv6Network("64:ff9b::/96"), address)) == (address,)


@given(V4)
def test_6to4_and_mapped(address: IPv4Address) -> None:
    assert inside(IPv6Address(b"\x20\x02" + address.packed + bytes(10))) == (address,)
    mapped = IPv6Address(f"::ffff:{address}")
    assert inside(mapped) == (address,)
    assert plain(mapped) == address


@given(V4, V4)
def test_teredo(server: IPv4Address, client: IPv4Address) -> None:
    """As the standard library takes it apart."""
    turned = bytes(byte ^ 0xFF for byte in client.packed)
    address = IPv6Address(b"\x20\x01\0\0" + server.packed + bytes(4) + turned)
    assert address.teredo == (server, client)
    assert set(inside(address)) >= {server, client}


@pytest.mark.parametrize("text", ["2001:db8::1", "fd00::1", "2606:4700::1111", "64:ff9b:2::1", "10.0.0.1"])
def test_most_have_nothing_inside(text: str) -> None:
    assert inside(ip_address(text)) == ()
    assert forms(ip_address(text)) == (ip_address(text),)


@given(V4 | V6)
def test_what_python_calls_near_is_near(address: ipaddress.IPv4Address | IPv6Address) -> None:
    if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
        assert is_near(address)


@given(V6)
def test_what_has_a_near_form_is_near(address: IPv6Address) -> None:
    assert is_near(address) == any(map(is_near, forms(address)))


@pytest.mark.parametrize(
    ("network", "about"),
    [
        ("127.0.0.0/8", True),
        ("127.0.0.0/16", True),
        ("169.254.169.254/32", True),
        ("fe80::/64", True),
        ("fd00:ec2::/32", True),
        ("10.0.0.1/32", True),
        ("0.0.0.0/0", False),
        ("126.0.0.0/7", False),
        ("100.64.0.0/10", False),
        ("::/0", False),
        ("::/96", False),
        ("64:ff9b::/96", False),
        ("fd00::/8", False),
    ],
)
def test_networks_about_near_addresses(network: str, about: bool) -> None:
    assert is_about_near(ip_network(network)) is about


def test_one_form_or_all() -> None:
    teredo = ip_address("2001:0:1234:5678:0:ffff:f5fe:fdfc")
    assert set(inside(teredo)) == {IPv4Address("18.52.86.120"), IPv4Address("10.1.2.3")}
    ten = ip_network("10.0.0.0/8")
    assert contains(ten, teredo, any_form=True)
    assert not contains(ten, teredo, any_form=False)
    assert contains(ip_network("2001::/32"), teredo, any_form=False)
    assert not contains(ten, ip_address("2001:db8::1"), any_form=False)


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("240.240.0.1", True),
        ("240.241.0.1", False),
        ("2001:2::9", True),
        ("2001:2:1::9", False),
        ("10.0.0.1", False),
    ],
)
def test_what_a_mesh_makes_up_for_names(address: str, is_one: bool) -> None:
    assert is_stand_in(ipaddress.ip_address(address)) == is_one
