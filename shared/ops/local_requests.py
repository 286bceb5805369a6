"""Whether a request to a port for this machine only may have been sent by a web page in somebody's browser.

A web page can have its browser send requests to loopback addresses. It reads no answers, unless its own name
leads to a loopback address as well (DNS rebinding), for then the browser takes both for the same site. But
the Host header has that name, and newer browsers say which site a request comes from (Fetch Metadata).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

SAFE_METHODS = frozenset({b"GET", b"HEAD"})
"""They change nothing (RFC 9110 section 9.2.1)."""

OTHER_HOST = "host"
OTHER_SITE = "site"
FAULTS = {
    OTHER_HOST: "the request is for another host: this port answers to localhost, 127.0.0.1 and [::1]",
    OTHER_SITE: "the request comes from a web page of another site",
}
"""What is told of each fault; the keys are the values of a metric's label."""

_AUTHORITY = re.compile(r"(?:\[(?P<bracketed>[0-9a-f:.]+)\]|(?P<host>[^:\[\]@]+))(?::[0-9]*)?")

Fields = Iterable[tuple[bytes, bytes]]


def fault(method: bytes, target: bytes, fields: Fields, own_address: str = "") -> str:
    """Why a request is refused, a key of FAULTS; "" if it is not. `fields` have names in lower case, as h11
    gives them; `own_address` is the IP address that the client has connected to.

    - Host, and the host of a target in absolute form, have to be loopback or `own_address`. A request without
      a Host is HTTP/1.0's, and no browser's.
    - A request that may change something must not come from another site (Origin, Sec-Fetch-Site), and any
      other only where somebody has followed a link.
    """
    known = [(name, value.decode("latin-1").strip().lower()) for name, value in fields]
    hosts = [value for name, value in known if name == b"host" and value]
    authority = _absolute(target.decode("latin-1"))
    if authority is not None:
        hosts.append(authority)
    if not all(_is_own(host, own_address) for host in hosts):
        return OTHER_HOST
    sites = {value for name, value in known if name == b"sec-fetch-site"}
    is_foreign = not sites <= {"same-origin", "none"}
    if method in SAFE_METHODS:
        is_link = (b"sec-fetch-mode", "navigate") in known
        return OTHER_SITE if is_foreign and not is_link else ""
    origins = {value for name, value in known if name == b"origin"}
    if is_foreign or not origins <= {f"http://{host}" for host in hosts}:
        return OTHER_SITE
    return ""


def _absolute(target: str) -> str | None:
    """The authority of a target in absolute form (RFC 9112 section 3.2.2), None for any other."""
    try:
        return urlsplit(target).netloc.lower() if not target.startswith("/") and "://" in target else None
    except ValueError:  # such as a bracket that nobody closes
        return ""


def _is_own(authority: str, own_address: str) -> bool:
    """Whether HOST or HOST:PORT means this machine without asking DNS."""
    split = _AUTHORITY.fullmatch(authority)
    if split is None:
        return False
    host = split["bracketed"] or split["host"]
    if host in ("localhost", "localhost."):
        return True
    address = _address(host)
    return address is not None and (address.is_loopback or address == _address(own_address))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
