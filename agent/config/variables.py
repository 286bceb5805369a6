"""Environment variables of krun: how one is read, what its value may be, what is said of a wrong one.

Owned here: the reader, and the kinds of values that several groups of settings have in common. Not owned: the
names and their defaults (`settings.py`, and `*_settings.py` for each group).

A variable that is set but empty counts as not set, for that is how manifests switch one off.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from shared.address import Address
from shared.credentials.token_sources import token_settings
from shared.errors import UsageError

T = TypeVar("T")
Choice = TypeVar("Choice", bound=str)

NONE = "-"
"""XDS_ADDR for no mesh, HBONE_LISTEN for no port, HBONE_CA_TOKEN_FILE for no token, and so on."""

HIDDEN = token_settings.HIDDEN | {"HBONE_CAS_URL", "HBONE_CA_TOKEN_FILE", "KUBECONFIG"}
"""Whose wrong values are not shown: who takes a token or a key for its file's path has it there."""

MAX_ID = 2**31
"""User and group ids are below it; for chown(2) the largest one means "leave it as it is"."""

_SIZE = re.compile(r"([0-9]{1,15})(KiB|MiB|GiB)?")
_UNIT_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_ID = re.compile(r"[0-9]{1,10}")


class Variables:
    """Reads single variables; a value that its parser refuses becomes a UsageError that names both."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __call__(self, name: str, parse: Callable[[str], T], default: T) -> T:
        text = self._environ.get(name, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            shown = token_settings.shown(name, text, HIDDEN)
            # Without the original where the value is hidden: its traceback may have it.
            raise UsageError(f"invalid {name}{shown} ({error})") from (error if shown else None)


# Kinds of values. Each raises ValueError with the reason.


def none_or(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """What `parse` makes of it, or None for NONE."""
    return lambda text: None if text == NONE else parse(text)


def one_of(choices: Sequence[Choice]) -> Callable[[str], Choice]:
    """One of `choices`, in capitals or not."""

    def parse(text: str) -> Choice:
        for choice in choices:
            if choice == text.lower():
                return choice
        raise ValueError(f"choose one of {', '.join(choices)}")

    return parse


def words(text: str, most: int) -> list[str]:
    """Words between commas, each once: one at least, `most` at most."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ValueError("nothing but commas")
    if len(found) > most:
        raise ValueError(f"{len(found)} are more than {most}")
    return found


def target(text: str, default_port: int | None = None) -> Address:
    """HOST:PORT that can be dialled; HOST alone, if there is a `default_port`."""
    if default_port is not None and ":" not in text.rpartition("]")[2]:
        text = f"{text}:{default_port}"
    address = Address.parse(text)
    if address.port == 0:
        raise ValueError("port 0 cannot be dialled")
    return address


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


def seconds(text: str) -> float:
    """0 or more seconds."""
    value = _number(text, "seconds")
    if not math.isfinite(value) or value < 0:
        raise ValueError("has to be 0 or more seconds")
    return value


def positive_seconds(text: str) -> float:
    """More than 0 seconds."""
    value = seconds(text)
    if value == 0:
        raise ValueError("has to be more than 0 seconds")
    return value


def number_in(least: float, most: float, unit: str = "seconds") -> Callable[[str], float]:
    """A number in `least`..`most`, both included."""

    def parse(text: str) -> float:
        value = _number(text, unit)
        if not math.isfinite(value) or not least <= value <= most:
            raise ValueError(f"has to be {least:.15g}..{most:.15g} {unit}")
        return value

    return parse


def whole_in(least: int, most: int, unit: str = "") -> Callable[[str], int]:
    """A whole number in `least`..`most`, both included."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
            of_what = f" of {unit}" if unit else ""
            raise ValueError(f"has to be a whole number{of_what} in {least}..{most}")
        return int(text)

    return parse


def size_in(least: int, most: int) -> Callable[[str], int]:
    """Bytes in `least`..`most`, both included, written as 64KiB, 256MiB, 1GiB or a plain number; or 0."""

    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError("has to be a size such as 64KiB, 256MiB or 1GiB")
        size = int(match[1]) * _UNIT_BYTES[match[2] or ""]
        if size and not least <= size <= most:
            raise ValueError(f"has to be in {least}..{most} bytes, or 0")
        return size

    return parse


def owner(text: str) -> tuple[int, int]:
    """USER or USER:GROUP, by name or number, as user and group id; without a group the user's own."""
    import grp
    import pwd

    user, colon, group = text.partition(":")
    try:
        if _ID.fullmatch(user):
            uid, gid = int(user), int(user)  # a number need not be in the image's /etc/passwd
        else:
            uid, gid = (known := pwd.getpwnam(user)).pw_uid, known.pw_gid
        if colon:
            gid = int(group) if _ID.fullmatch(group) else grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ValueError("no such user or group") from error
    if max(uid, gid) >= MAX_ID:
        raise ValueError(f"user and group ids are below {MAX_ID}")
    return uid, gid


def _number(text: str, unit: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"not a number of {unit}") from error
