"""What a CONNECT's `:authority` names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import MAX_PORT, Address, read_ipv6
from shared.errors import BadRequestError
from shared.tunnel.connect_target import FORBIDDEN_PORTS, MAX_AUTHORITY_BYTES, read_authority

ports = st.integers(1, MAX_PORT)
labels = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
names = st.lists(labels, min_size=1, max_size=5).map(".".join)


@given(names | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda ip: read_ipv6(str(ip))), ports)
def test_an_authority_is_read_back(host: str, port: int) -> None:
    wanted = Address(host, port)
    if port in FORBIDDEN_PORTS:
        with pytest.raises(BadRequestError, match=f"port {port}"):
            read_authority(str(wanted).encode())
    else:
        assert read_authority(str(wanted).encode()) == wanted


@pytest.mark.parametrize(
    ("authority", "target"),
    [
        (b"10.1.2.3:80", Address("10.1.2.3", 80)),
        (b"[2001:DB8:0::1]:443", Address("2001:db8::1", 443)),
        (b"Hello.Demo.svc.cluster.local:8080", Address("hello.demo.svc.cluster.local", 8080)),
        (b"hello.demo.svc.cluster.local.:8080", Address("hello.demo.svc.cluster.local.", 8080)),
        (b"localhost:1", Address("localhost", 1)),
    ],
)
def test_an_authority(authority: bytes, target: Address) -> None:
    assert read_authority(authority) == target


@pytest.mark.parametrize(
    ("authority", "reason"),
    [
        (b"", "no port"),
        (b"hello", "no port"),
        (b":80", "no host"),
        (b"hello:", "port '' is not in"),
        (b"hello:http", "port 'http' is not in"),
        (b"hello:0", "port 0 cannot be dialled"),
        (b"hello:65536", "is not in 0..65535"),
        (b"hello:-1", "is not in 0..65535"),
        (b"hello: 80", "is not in 0..65535"),
        (b"hello:\xd9\xa8\xd9\xa0", "not ASCII"),
        (b"h\xc3\xa9llo:80", "not ASCII"),
        (b"user@hello:80", "character out of place"),
        (b"hello/path:80", "character out of place"),
        (b"he llo:80", "character out of place"),
        (b"hello..demo:80", "empty label"),
        (b"2001:db8::1:80", "needs brackets"),
        (b"[2001:db8::1]80", "no port"),
        (b"[2001:db8::1", "not closed"),
        (b"[hello]:80", "no IPv6 address"),
        (b"[fe80::1%eth0]:80", "zone"),
        (b"127.1:80", "reads as an IPv4 address"),
        (b"0x7f000001:80", "reads as an IPv4 address"),
        (b"2130706433:80", "reads as an IPv4 address"),
        (b"127.0.0.1%25:80", "character out of place"),
        (b"a" * 300 + b":80", f"over {MAX_AUTHORITY_BYTES} bytes"),
    ],
)
def test_what_is_no_target(authority: bytes, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason) as caught:
        read_authority(authority)
    assert caught.value.flag == "BAD_REQUEST"


@pytest.mark.parametrize("port", [15001, 15006, 15008, 15080])
def test_the_ports_of_the_mesh_s_own_proxies(port: int) -> None:
    with pytest.raises(BadRequestError, match=f"no tunnel leads to port {port}"):
        read_authority(b"10.0.0.1:%d" % port)


@given(st.binary(max_size=400) | st.text(max_size=40).map(str.encode))
def test_whatever_comes_is_a_target_or_refused(authority: bytes) -> None:
    try:
        target = read_authority(authority)
    except BadRequestError as error:
        assert str(error).isprintable()
    else:
        assert 1 <= target.port <= MAX_PORT
        assert read_authority(str(target).encode()) == target
