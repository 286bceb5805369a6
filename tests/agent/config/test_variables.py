"""Kinds of values that an environment variable can have, and what is told of wrong ones."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.variables import (
    Variables,
    ip_address,
    loopback,
    none_or,
    number_in,
    one_of,
    owner,
    positive_seconds,
    seconds,
    size_in,
    target,
    whole_in,
    words,
)
from shared.address import Address
from shared.credentials.token_sources.token_settings import file_path
from shared.errors import UsageError

PARSERS: dict[str, Callable[[str], object]] = {
    "none_or": none_or(Address.parse),
    "one_of": one_of(("a", "b")),
    "words": lambda text: words(text, 2),
    "target": target,
    "ip_address": ip_address,
    "loopback": loopback("why"),
    "seconds": seconds,
    "positive_seconds": positive_seconds,
    "number_in": number_in(0.5, 2),
    "whole_in": whole_in(1, 16),
    "size_in": size_in(1024, 1 << 30),
    "owner": owner,
}


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_empty_counts_as_not_set(text: str) -> None:
    assert Variables({"A": text})("A", int, 3) == Variables({})("A", int, 3) == 3


def test_a_wrong_value_is_shown_in_one_short_line() -> None:
    for text, shown in [("x", "=x"), ("a\nb", "='a\\nb'"), ("x" * 70, f"={'x' * 60}...")]:
        with pytest.raises(UsageError) as caught:
            Variables({"A": text})("A", seconds, 0.0)
        assert str(caught.value) == f"invalid A{shown} (not a number of seconds)"


def test_what_may_be_a_secret_is_shown_nowhere() -> None:
    with pytest.raises(UsageError) as caught:
        Variables({"HBONE_CA_TOKEN_FILE": '{"k": "s3cret"}'})("HBONE_CA_TOKEN_FILE", file_path, None)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        ("none_or", "-", None),
        ("none_or", "a:1", Address("a", 1)),
        ("one_of", "B", "b"),
        ("words", " x, y,x ,", ["x", "y"]),
        ("target", "a:1", Address("a", 1)),
        ("ip_address", "[::1]:0", Address("::1", 0)),
        ("loopback", "127.0.0.2:1", Address("127.0.0.2", 1)),
        ("loopback", "[::1]:1", Address("::1", 1)),
        ("seconds", "0", 0.0),
        ("positive_seconds", ".5", 0.5),
        ("number_in", "2", 2.0),
        ("whole_in", "16", 16),
        ("owner", "65532", (65532, 65532)),
        ("owner", "1:2147483647", (1, 2147483647)),
    ],
)
def test_what_is_taken(parser: str, text: str, value: object) -> None:
    assert PARSERS[parser](text) == value


@pytest.mark.parametrize(
    ("parser", "text", "reason"),
    [
        ("one_of", "c", "choose one of a, b"),
        ("words", " ,", "nothing but commas"),
        ("words", "a,b,c", "3 are more than 2"),
        ("target", "a:0", "port 0 cannot be dialled"),
        ("target", "a", "no port"),
        ("ip_address", "a:1", "the host has to be an IP address"),
        ("loopback", "0.0.0.0:1", "it has to be a loopback address: why"),
        ("loopback", "localhost:1", "it has to be a loopback address: why"),
        ("seconds", "-1", "has to be 0 or more seconds"),
        ("seconds", "inf", "has to be 0 or more seconds"),
        ("positive_seconds", "0", "has to be more than 0 seconds"),
        ("number_in", "nan", r"has to be 0\.5\.\.2 seconds"),
        ("number_in", "x", "not a number of seconds"),
        ("whole_in", "0", r"has to be a whole number in 1\.\.16"),
        ("whole_in", "\u0661", r"has to be a whole number in 1\.\.16"),
        ("owner", "nobody-of-that-name", "no such user or group"),
        ("owner", "1:", "no such user or group"),
        ("owner", "2147483648", "ids are below 2147483648"),
        ("owner", "0:9999999999", "ids are below 2147483648"),
    ],
)
def test_what_is_refused(parser: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PARSERS[parser](text)


def test_a_port_can_be_left_out_where_there_is_a_customary_one() -> None:
    for text in ("a", "a:5", "[2001:db8::1]", "[2001:db8::1]:5"):
        assert target(text, 5).port == 5


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
        Variables({"A": text})("A", PARSERS[parser], None)
    except UsageError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1024", 1024), ("1KiB", 1024), ("16MiB", 16 << 20), ("1GiB", 1 << 30)]
)
def test_a_size(text: str, size: int) -> None:
    assert size_in(1024, 1 << 30)(text) == size


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1023", "has to be in 1024..1073741824 bytes, or 0"),
        ("2GiB", "has to be in 1024..1073741824 bytes, or 0"),
        ("1MB", "has to be a size such as 64KiB, 256MiB or 1GiB"),
        ("-1", "has to be a size such as"),
        ("1.5GiB", "has to be a size such as"),
    ],
)
def test_no_size(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        size_in(1024, 1 << 30)(text)
