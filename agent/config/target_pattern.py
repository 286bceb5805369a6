"""HOST:PORT as a pattern: which targets in the mesh the app may have krun ask a gateway for. No I/O.

HOST is a glob on names as in hgate's rules (`*` is one label or a part of one, `**` any number of labels), an
address, a network (IPv6 in brackets), or a lone `*` for all of these. PORT is a number or `*`. A name is
compared as it is written, without a dot at its end: krun never looks one up. An IPv4 address inside an IPv6
one counts as in hgate's rules: to deny, one of several is enough; to allow, all have to match.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from shared.address import MAX_PORT, Address
from shared.address_forms import MAPPED, IpAddress, IpNetwork, contains, plain
from shared.name_globs import compile_glob

ANY = "*"

_PORT = re.compile(r"[1-9][0-9]{0,4}")
_NUMERIC = re.compile(r"[0-9.*]*[0-9][0-9.*]*")
"""What nobody means with a glob: an address, or a part of one."""


@dataclass(frozen=True, slots=True)
class TargetPattern:
    """One pattern; made by `parse`."""

    text: str
    _port: int | None = field(repr=False, compare=False, default=None)
    _network: IpNetwork | None = field(repr=False, compare=False, default=None)
    _glob: re.Pattern[str] | None = field(repr=False, compare=False, default=None)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> TargetPattern:
        """Reads HOST:PORT. Raises ValueError with the reason."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or "]" in port:
            raise ValueError("must be HOST:PORT, with * for any")
        number = None if port == ANY else _read_port(port)
        network = _read_network(host)
        glob = None
        if network is None and host != ANY:
            if _NUMERIC.fullmatch(host):
                raise ValueError("addresses are written as 10.0.0.1 or 10.0.0.0/8")
            glob = compile_glob(host)
        return cls(text, number, network, glob)

    def matches(self, target: Address, *, deny: bool) -> bool:
        """Whether `target` is one of those that are meant, by a pattern that denies or by one that allows; a
        name in lower case."""
        if self._port is not None and self._port != target.port:
            return False
        if self._network is None and self._glob is None:
            return True
        address = _address(target.host)
        if self._network is not None:
            return address is not None and contains(self._network, address, any_form=deny)
        assert self._glob is not None
        return address is None and self._glob.fullmatch(target.host.removesuffix(".")) is not None


def _read_port(text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > MAX_PORT:
        raise ValueError(f"the port must be 1..{MAX_PORT} or *")
    return int(text)


def _read_network(host: str) -> IpNetwork | None:
    """The network of an address or a CIDR; None for a glob."""
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    if not bracketed:
        if ":" in host:
            raise ValueError("an IPv6 address needs brackets: write [2001:db8::/32]:PORT")
        if "/" not in host and _address(host) is None:
            return None
    try:
        network = ipaddress.ip_network(inner)
    except ValueError:
        raise ValueError(f"{inner[:40]!r} is no address, and no network such as 10.0.0.0/8") from None
    if bracketed != (network.version == 6):
        raise ValueError("brackets are for IPv6 addresses")
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
        raise ValueError(f"{inner[:40]!r} is an IPv4 address in IPv6: write the IPv4 address")
    return network


def _address(host: str) -> IpAddress | None:
    """The address that `host` is, as the kernel connects it; None for a name."""
    try:
        return plain(ipaddress.ip_address(host))
    except ValueError:
        return None
