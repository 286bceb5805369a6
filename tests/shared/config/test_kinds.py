"""Kinds of values, and the reasons why a text is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import Address
from shared.config.kinds import (
    ADDRESS,
    TARGET,
    BoundError,
    Choice,
    Count,
    Duration,
    FilePath,
    FormError,
    Kind,
    List,
    Number,
    OrNone,
    Size,
    Switch,
    target,
)

KINDS: dict[str, Kind[Any]] = {
    "address or -": OrNone(ADDRESS),
    "address or off": OrNone(ADDRESS, "off"),
    "choice": Choice(("a", "B")),
    "count": Count(1, 16),
    "duration": Duration(0.001, 3600),
    "duration or 0": Duration(1, 60, off=True),
    "timeout": Duration(0.001),
    "any duration": Duration(),
    "file": FilePath(),
    "list": List(str, 2, "words"),
    "number": Number(0.2, 0.9),
    "size": Size(1 << 10, 1 << 30),
    "size or 0": Size(1 << 10, 1 << 30, off=True),
    "switch": Switch(),
    "target": TARGET,
}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("address or -", "-", None),
        ("address or -", "a:1", Address("a", 1)),
        ("address or off", "off", None),
        ("choice", "A", "a"),
        ("choice", "b", "B"),
        ("count", "16", 16),
        ("duration", "10s", 10.0),
        ("duration", "500ms", 0.5),
        ("duration", "5m", 300.0),
        ("duration", "1h", 3600.0),
        ("duration", "1.5", 1.5),
        ("duration", ".5", 0.5),
        ("duration or 0", "0", 0.0),
        ("duration or 0", "0s", 0.0),
        ("any duration", "0", 0.0),
        ("any duration", "9999999999", 9999999999.0),
        ("list", " x, y,x ,", ("x", "y")),
        ("number", "0.9", 0.9),
        ("size", "1024", 1024),
        ("size", "16MiB", 16 << 20),
        ("size", "1GiB", 1 << 30),
        ("size or 0", "0", 0),
        ("switch", "1", True),
        ("switch", "0", False),
        ("file", "/a/b", Path("/a/b")),
        ("target", "[::1]:80", Address("::1", 80)),
    ],
)
def test_a_value(kind: str, text: str, value: object) -> None:
    assert KINDS[kind].parse(text) == value


DURATION = "must be a duration such as 10s, 500ms or 5m"
SIZE = "must be a size such as 64KiB, 256MiB or 1GiB"


@pytest.mark.parametrize(
    ("kind", "text", "error", "reason"),
    [
        ("choice", "c", FormError, "must be a or B"),
        ("count", "many", FormError, "must be a whole number"),
        ("count", "1e1", FormError, "must be a whole number"),
        ("count", "-1", FormError, "must be a whole number"),
        ("count", "010", FormError, "must be a whole number"),
        ("count", "\u0661", FormError, "must be a whole number"),
        ("count", "17", BoundError, "must be in 1..16"),
        ("duration", "soon", FormError, DURATION),
        ("duration", "-1", FormError, DURATION),
        ("duration", "nan", FormError, DURATION),
        ("duration", "1 s", FormError, DURATION),
        ("duration", "1d", FormError, DURATION),
        ("duration", ".", FormError, DURATION),
        ("duration", "0", BoundError, "must be between 0.001s and 3600s"),
        ("duration", "2h", BoundError, "must be between 0.001s and 3600s"),
        ("timeout", "0", BoundError, "must be 0.001s at least"),
        ("duration or 0", "500ms", BoundError, "must be 0 or between 1s and 60s"),
        ("list", " ,", ValueError, "nothing but commas"),
        ("list", "a,b,c", ValueError, "3 are more than 2"),
        ("number", "x", FormError, "must be a number"),
        ("number", "nan", BoundError, "must be in 0.2..0.9"),
        ("size", "half", FormError, SIZE),
        ("size", "1MB", FormError, SIZE),
        ("size", "-1", FormError, SIZE),
        ("size", "1.5GiB", FormError, SIZE),
        ("size", "2GiB", BoundError, "must be in 1024..1073741824 bytes"),
        ("size", "0", BoundError, "must be in 1024..1073741824 bytes"),
        ("size or 0", "1", BoundError, "must be 0 or in 1024..1073741824 bytes"),
        ("target", "a:0", ValueError, "port 0 cannot be dialled"),
        ("target", "a", ValueError, "no port"),
        ("switch", "yes", FormError, "must be 0 or 1"),
        ("file", '{"private_key": 1}', ValueError, "has to be a file's path; this looks like what should be"),
        (
            "file",
            "eyJhbGciOiJSUzI1NiJ9.x",
            ValueError,
            "has to be a file's path; this looks like what",
        ),
    ],
)
def test_no_value(kind: str, text: str, error: type[ValueError], reason: str) -> None:
    with pytest.raises(error) as caught:
        KINDS[kind].parse(text)
    assert str(caught.value).startswith(reason)


@given(st.sampled_from(sorted(KINDS)), st.text())
def test_any_text_is_taken_or_refused(kind: str, text: str) -> None:
    try:
        KINDS[kind].parse(text)
    except ValueError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("duration", 0.5, "500ms"),
        ("duration", 10.0, "10s"),
        ("duration", 90.0, "90s"),
        ("duration", 3300.0, "55m"),
        ("any duration", 7200.0, "2h"),
        ("any duration", 0.0, "0"),
        ("size", 65535, "65535"),
        ("size", 1 << 20, "1MiB"),
        ("size or 0", 0, "0"),
        ("switch", False, "0"),
        ("address or -", None, "-"),
        ("address or off", Address("a", 1), "a:1"),
        ("list", ("a", "b"), "a,b"),
        ("count", 3, "3"),
    ],
)
def test_a_value_is_shown_as_it_is_written(kind: str, value: object, shown: str) -> None:
    assert KINDS[kind].show(value) == shown
    assert KINDS[kind].parse(shown) == value


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("address or -", "HOST:PORT, or -"),
        ("choice", "a or B"),
        ("count", "whole number, 1 to 16"),
        ("duration", "duration, 1ms to 1h"),
        ("duration or 0", "duration, 0 or 1s to 1m"),
        ("any duration", "duration, 0 or more"),
        ("size or 0", "size, 0 or 1KiB to 1GiB"),
        ("number", "number, 0.2 to 0.9"),
    ],
)
def test_how_a_value_is_written(kind: str, form: str) -> None:
    assert KINDS[kind].form() == form


def test_a_port_can_be_left_out_where_there_is_a_customary_one() -> None:
    for text in ("a", "a:5", "[2001:db8::1]", "[2001:db8::1]:5"):
        assert target(text, 5).port == 5
