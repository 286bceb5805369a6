"""Kinds of values that several groups of krun's variables have in common."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from shared.address import Address
from shared.config.kinds import Kind, Parsed
from shared.trust.peer_patterns import split_patterns

MAX_ID = 2**31
"""User and group ids are below it; for chown(2) the largest one means "leave it as it is"."""

_ID = r"[0-9]{1,10}"


# How values are read. Each raises ValueError with the reason.


def ip_address(text: str) -> Address:
    """An IP address with a port."""
    address = Address.parse(text)
    try:
        ipaddress.ip_address(address.host)
    except ValueError as error:
        raise ValueError("the host has to be an IP address") from error
    return address


def loopback(reason: str) -> Callable[[str], Address]:
    """An address that only this machine reaches; `reason` says what for."""

    def parse(text: str) -> Address:
        address = Address.parse(text)
        if not address.is_loopback:
            raise ValueError(f"it has to be a loopback address: {reason}")
        return address

    return parse


def owner(text: str) -> tuple[int, int]:
    """USER or USER:GROUP, by name or number, as user and group id; without a group the user's own."""
    import grp
    import pwd

    user, colon, group = text.partition(":")
    try:
        if re.fullmatch(_ID, user):
            uid, gid = int(user), int(user)  # a number need not be in the image's /etc/passwd
        else:
            uid, gid = (known := pwd.getpwnam(user)).pw_uid, known.pw_gid
        if colon:
            gid = int(group) if re.fullmatch(_ID, group) else grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ValueError("no such user or group") from error
    if max(uid, gid) >= MAX_ID:
        raise ValueError(f"user and group ids are below {MAX_ID}")
    return uid, gid


IP_ADDRESS: Kind[Address] = Parsed(ip_address, "IP:PORT")
PEER_PATTERNS: Kind[tuple[str, ...]] = Parsed(split_patterns, "SPIFFE ID patterns, with commas between them")
OWNER: Kind[tuple[int, int]] = Parsed(owner, "USER or USER:GROUP")
