"""What an IP address leads to: the IPv4 addresses inside IPv6 ones, and which addresses are near.

No I/O. A rule about an address has to hold for all of its spellings: a NAT64 or 6to4 router, or the kernel,
turns an IPv6 spelling into the IPv4 address again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import lru_cache

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""What the kernel connects as IPv4 (RFC 4291 section 2.5.5.2)."""

MAX_REMEMBERED = 4096
"""Addresses whose forms are kept; making them costs 15 µs."""

_NEAR = tuple(
    map(
        ipaddress.ip_network,
        (
            # This machine and its link.
            "127.0.0.0/8",
            "::1/128",
            "0.0.0.0/8",  # Linux connects 0.0.0.0 to itself; of the rest nothing can be reached
            "::/128",
            "169.254.0.0/16",  # with the metadata servers of most clouds
            "fe80::/10",
            "224.0.0.0/4",
            "ff00::/8",
            "255.255.255.255/32",
            # Metadata servers elsewhere, which give the machine's credentials to whoever asks from it.
            "fd20:ce::254/128",  # Google
            "fd00:ec2::/32",  # Amazon: 254, and EKS's at 23
            "168.63.129.16/32",  # Azure's wire server
            "100.100.100.200/32",  # Alibaba
            "192.0.0.192/32",  # Oracle
            "fd00:42::42/128",  # Scaleway
            "fd00:a9fe:a9fe::1/128",  # Linode
        ),
    )
)

_STAND_INS = (ipaddress.ip_network("240.240.0.0/16"), ipaddress.ip_network("2001:2::/48"))
"""What Istio gives ServiceEntries that have no address (PILOT_ENABLE_IP_AUTOALLOCATE)."""

_Inside = Callable[[bytes], tuple[bytes, ...]]

_NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")

_WRAPPED: tuple[tuple[ipaddress.IPv6Network, _Inside], ...] = (
    (MAPPED, lambda ip: (ip[12:],)),
    (ipaddress.IPv6Network("::/96"), lambda ip: (ip[12:],)),  # compatible, RFC 4291 section 2.5.5.1
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), lambda ip: (ip[12:],)),  # translated, RFC 2765 section 2.1
    (ipaddress.IPv6Network("64:ff9b::/96"), lambda ip: (ip[12:],)),  # NAT64, RFC 6052 section 2.1
    # NAT64 with a prefix of the network's own, /48 to /96 (RFC 8215): the address is at one of these places.
    (_NAT64_LOCAL, lambda ip: (ip[6:8] + ip[9:11], ip[7:8] + ip[9:12], ip[9:13], ip[12:])),
    (ipaddress.IPv6Network("2002::/16"), lambda ip: (ip[2:6],)),  # 6to4, RFC 3056 section 2
    # Teredo, RFC 4380 section 4: its server, and the client with its bits turned.
    (ipaddress.IPv6Network("2001::/32"), lambda ip: (ip[4:8], bytes(byte ^ 0xFF for byte in ip[12:]))),
)

_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")
"""Bytes 8 to 12 of any prefix (RFC 5214 section 6.1); the IPv4 address is behind them."""


def plain(address: IpAddress) -> IpAddress:
    """The IPv4 address of an IPv4-mapped one, which the kernel connects as IPv4; others as they are."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@lru_cache(maxsize=MAX_REMEMBERED)
def inside(address: IpAddress) -> tuple[ipaddress.IPv4Address, ...]:
    """The IPv4 addresses that the IPv6 one `address` may lead to; none for most."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    packed = address.packed
    found = [each for network, inner in _WRAPPED if address in network for each in inner(packed)]
    if packed[8:12] in _ISATAP:
        found.append(packed[12:])
    if address in _NAT64_LOCAL:
        # The wrong places hold padding, and 0.0.0.0/8 leads nowhere.
        found = [each for each in found if each[0]] or [bytes(4)]
    return tuple(dict.fromkeys(map(ipaddress.IPv4Address, found)))


def forms(address: IpAddress) -> tuple[IpAddress, ...]:
    """`address`, and all that are inside it."""
    return (address, *inside(address))


def is_stand_in(address: IpAddress) -> bool:
    """Whether it is one that a mesh has made up for a name: nobody can be reached there."""
    return any(address in network for network in _STAND_INS)


@lru_cache(maxsize=MAX_REMEMBERED)
def is_near(address: IpAddress) -> bool:
    """Whether it, in any form, is this machine, its link, or a cloud's metadata server."""
    return any(form in network for form in forms(address) for network in _NEAR)


@lru_cache(maxsize=MAX_REMEMBERED)
def is_about_near(network: IpNetwork) -> bool:
    """Whether `network` is meant for near addresses: one of their networks, a part of one, or a single
    address. A wide network, such as 0.0.0.0/0 or fd00::/8, only happens to contain some."""
    if network.prefixlen == network.max_prefixlen:
        return True
    return any(each.version == network.version and network.subnet_of(each) for each in _NEAR)  # type: ignore[arg-type]


def contains(network: IpNetwork, address: IpAddress, *, any_form: bool) -> bool:
    """Whether `network` contains `address`, or the addresses inside it: one of these with `any_form`, or else
    all."""
    if address in network:
        return True
    found = inside(address)
    return bool(found) and (any if any_form else all)(each in network for each in found)
