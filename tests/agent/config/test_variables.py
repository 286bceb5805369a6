"""Kinds of values that several of krun's variables have."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.variables import ip_address, loopback, owner
from shared.address import Address

PARSERS: dict[str, Callable[[str], object]] = {
    "ip_address": ip_address,
    "loopback": loopback("why"),
    "owner": owner,
}


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        ("ip_address", "[::1]:0", Address("::1", 0)),
        ("loopback", "127.0.0.2:1", Address("127.0.0.2", 1)),
        ("loopback", "[::1]:1", Address("::1", 1)),
        ("owner", "65532", (65532, 65532)),
        ("owner", "1:2147483647", (1, 2147483647)),
    ],
)
def test_what_is_taken(parser: str, text: str, value: object) -> None:
    assert PARSERS[parser](text) == value


@pytest.mark.parametrize(
    ("parser", "text", "reason"),
    [
        ("ip_address", "a:1", "the host has to be an IP address"),
        ("loopback", "0.0.0.0:1", "it has to be a loopback address: why"),
        ("loopback", "localhost:1", "it has to be a loopback address: why"),
        ("owner", "nobody-of-that-name", "no such user or group"),
        ("owner", "1:", "no such user or group"),
        ("owner", "2147483648", "ids are below 2147483648"),
        ("owner", "0:9999999999", "ids are below 2147483648"),
    ],
)
def test_what_is_refused(parser: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PARSERS[parser](text)


def test_an_owner_by_name() -> None:
    own = pwd.getpwuid(os.getuid())
    assert owner(own.pw_name) == (own.pw_uid, own.pw_gid)
    assert owner(f"{own.pw_name}:7") == (own.pw_uid, 7)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_the_largest_owner_that_is_taken_can_own_files(tmp_path: Path) -> None:
    os.chown(tmp_path, *owner("2147483647"))
    assert tmp_path.stat().st_uid == 2**31 - 1


@given(st.sampled_from(sorted(PARSERS)), st.text())
def test_any_text_is_taken_or_refused(parser: str, text: str) -> None:
    try:
        PARSERS[parser](text)
    except ValueError as error:
        assert "\n" not in str(error)
