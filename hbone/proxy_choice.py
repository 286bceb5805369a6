"""Which HTTP proxy leads to a service, by the variables that curl knows.

https_proxy, then HTTPS_PROXY, all_proxy, ALL_PROXY: the first that is set and not empty,
http://[USER:PASSWORD@]HOST[:PORT], with port 1080 where it names none. no_proxy, then NO_PROXY, name what is
reached without: names, with all that end with .NAME, addresses, networks such as 10.0.0.0/8, and * for all.

Unlike curl, a port may be behind each, *.NAME is .NAME, and * may be one of several. This machine's own
addresses and localhost are never asked of a proxy: there they would be the proxy's own. Tunnels without TLS,
which are for this machine, go through none.
"""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urlsplit

from shared.address import MAX_PORT, Address
from shared.errors import UsageError
from shared.net.http_proxy import HttpProxy
from shared.ports import HTTPS

VARIABLES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
EXCEPTIONS = ("no_proxy", "NO_PROXY")

DEFAULT_PORT = 1080
"""curl's, where the URL of a proxy has none."""

_FORM = "has to be http://[USER:PASSWORD@]HOST[:PORT]"


def for_url(url: str, environ: Mapping[str, str]) -> HttpProxy | None:
    """The proxy that leads to a URL, None for one without TLS. Raises UsageError."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        return None
    return for_address(Address(parts.hostname, parts.port or HTTPS), environ)


def for_address(address: Address, environ: Mapping[str, str]) -> HttpProxy | None:
    """The proxy that leads to `address` for https; None: it is dialled itself. Raises UsageError if the
    variable is no URL of a proxy that we speak to; nothing of it is in the text, for it may be a password."""
    variable = _first_set(VARIABLES, environ)
    if not variable:
        return None
    exceptions = environ.get(_first_set(EXCEPTIONS, environ), "")
    if address.is_loopback or _is_local(address.host) or is_excepted(address, exceptions):
        return None
    try:
        return _parsed(environ[variable].strip())
    except ValueError as error:
        # Without the original: Python's texts quote what they could not read.
        raise UsageError(f"invalid {variable} ({error})") from None


def _first_set(names: Sequence[str], environ: Mapping[str, str]) -> str:
    """The first of the variables that has a value; empty: none has. To curl an empty one is not set."""
    return next((name for name in names if environ.get(name, "").strip()), "")


def is_excepted(address: Address, exceptions: str) -> bool:
    """Whether NO_PROXY's text names `address`."""
    host = address.host.removesuffix(".").lower()
    return any(_matches(entry, host, address.port) for entry in exceptions.replace(",", " ").split())


def _matches(entry: str, host: str, port: int) -> bool:
    if entry == "*":
        return True
    name = entry.lower()
    if (only := _port_behind(name)) is not None:
        name = name.rpartition(":")[0]
        if only != port:
            return False
    name = name.removeprefix("[").removesuffix("]")
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        name = name.removeprefix("*").strip(".")
        return bool(name) and (host == name or host.endswith(f".{name}"))
    try:
        return found in ipaddress.ip_network(name, strict=False)
    except ValueError:
        return False


def _port_behind(entry: str) -> int | None:
    """The port of HOST:PORT and [IPV6]:PORT."""
    host, _, port = entry.rpartition(":")
    is_one = port.isdecimal() and (":" not in host or host.endswith("]")) and bool(host)
    return int(port) if is_one and len(port) <= len(str(MAX_PORT)) else None


def _is_local(host: str) -> bool:
    name = host.removesuffix(".").lower()
    return name == "localhost" or name.endswith(".localhost")


def _parsed(text: str) -> HttpProxy:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
    except ValueError:  # its text may have the password
        raise ValueError(_FORM) from None
    if url.scheme != "http":
        raise ValueError(
            f"a proxy of kind {url.scheme[:20]!a}; HTTP proxies are supported, as http://HOST:PORT"
        )
    try:
        port = url.port
    except ValueError:
        raise ValueError("its port is none") from None
    if not url.hostname or url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(_FORM)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    try:
        address = Address.parse(f"{host}:{port or DEFAULT_PORT}")
    except ValueError:
        raise ValueError("its host is none") from None
    if url.username is None:
        return HttpProxy(address)
    told = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return HttpProxy(address, f"Basic {base64.b64encode(os.fsencode(told)).decode('ascii')}")
