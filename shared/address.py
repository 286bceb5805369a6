"""One network address, HOST:PORT, as configuration files and command lines spell it.

What a host name may look like, IPv6 in brackets, the range of ports. Nothing is looked up or opened here.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import NamedTuple

MAX_PORT = 65535
"""The port field of TCP has 16 bits."""

MAX_NAME_CHARS = 253
"""A host name's 255 octets on the wire (RFC 1035 section 2.3.4) less the first length and the root label."""

MAX_LABEL_CHARS = 63
"""RFC 1035 section 2.3.4."""

# What of a wrong text an error repeats: enough to find it, not enough to fill a log.
_SHOWN_CHARS = 60

# Letters, digits and inner hyphens (RFC 1123 section 2.1), and "_", which resolvers and meshes take.
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?")
# Resolvers and URL parsers read a name that ends so as an IPv4 address (WHATWG URL, "ends in a number").
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_PORT = re.compile(r"[0-9]{1,5}")
# An IPv6 address with an optional zone, as in fe80::1%eth0 (RFC 4007 section 11).
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?")


class Address(NamedTuple):
    """A host and a TCP port. No dataclass: making one costs 0.4 ms of each start, and its hash is slower."""

    host: str
    """A host name in lower case, an IPv4 address, or an IPv6 address without brackets."""

    port: int
    """0..65535; 0 asks the system for any free port when listening."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address, so that nothing is to be looked up."""
        return ":" in self.host or is_ipv4(self.host)

    @property
    def is_loopback(self) -> bool:
        """Whether the host is an IP address of this machine's own network (RFC 1122 section 3.2.1.3)."""
        return self.host == "::1" or (self.host.startswith("127.") and is_ipv4(self.host))

    @property
    def absolute(self) -> Address:
        """The same with a name that no search list is tried with: it ends with a dot."""
        if self.host.endswith(".") or self.is_ip:
            return self
        return Address(f"{self.host}.", self.port)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `HOST:PORT`, `1.2.3.4:PORT` or `[IPV6]:PORT`.

        A host name may end with a dot, which keeps resolvers from trying their search list.
        Raises ValueError with the reason.
        """
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket:
                raise ValueError("the bracket of the IPv6 address is not closed")
            if not rest.startswith(":"):
                raise ValueError("no port: write [IPV6]:PORT")
            return cls(read_ipv6(host), _read_port(rest[1:]))
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ValueError("no port: write HOST:PORT")
        if not host:
            raise ValueError("no host: write HOST:PORT, 0.0.0.0 listens on every IPv4 address")
        if ":" in host:
            raise ValueError("an IPv6 address needs brackets: write [IPV6]:PORT")
        return cls(_read_host(host), _read_port(port))


def check_host_name(name: str) -> None:
    """Raises ValueError with the reason unless `name` is a host name that cannot be read as an address."""
    if not name:
        raise ValueError("the host name is empty")
    if len(name) > MAX_NAME_CHARS:
        raise ValueError(f"the host name has {len(name)} characters, more than {MAX_NAME_CHARS}")
    labels = name.split(".")
    for label in labels:
        if not label:
            raise ValueError(f"{_shown(name)} is no host name: it has an empty label")
        if not _LABEL.fullmatch(label):
            raise ValueError(f"{_shown(name)} is no host name: {_shown(label)} has a character out of place")
        if len(label) > MAX_LABEL_CHARS:
            raise ValueError(
                f"{_shown(name)} is no host name: a label has {len(label)} characters, "
                f"more than {MAX_LABEL_CHARS}"
            )
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{_shown(name)} is no host name: it reads as an IPv4 address")


def read_ipv6(text: str) -> str:
    """The IPv6 address `text`, without brackets, in its short form. Raises ValueError with the reason."""
    try:
        if not _IPV6.fullmatch(text):
            raise ValueError("characters that no address has")
        address = ipaddress.IPv6Address(text)
        if address.ipv4_mapped is None:
            return str(address)
        # As RFC 5952 section 5 recommends, and as Python writes it from 3.13 on.
        zone = f"%{address.scope_id}" if address.scope_id else ""
        return f"::ffff:{address.ipv4_mapped}{zone}"
    except ValueError as error:
        raise ValueError(f"{_shown(text)} is no IPv6 address") from error


NETWORK_BITS = 64
"""Addresses of an IPv6 network of this size count as one client: any machine may have all of them (RFC 4291
section 2.5.4)."""


def client_network(host: str) -> str:
    """What counts as one client: an IPv4 address, or the network of an IPv6 address, given without brackets.
    A host that is no address is returned as it is."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, NETWORK_BITS), strict=False))


@lru_cache(maxsize=1024)  # krun asks for each tunnel, of the few targets that it has
def is_ipv4(text: str) -> bool:
    """Whether `text` is an IPv4 address in its usual form, four decimal numbers."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _read_host(text: str) -> str:
    if is_ipv4(text):
        return text
    # Only here may a name end with a dot: server names have none (RFC 6066 section 3), URLs need none.
    check_host_name(text[:-1] if text.endswith(".") else text)
    return text.lower()


def _read_port(text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > MAX_PORT:
        raise ValueError(f"port {_shown(text)} is not in 0..{MAX_PORT}")
    return int(text)


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


def is_own_machine(host: str) -> bool:
    """Whether `host` is a loopback address, or `localhost`, to which things may be said in the clear."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
