from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.forward.flags import LocalForward, Place, RemoteForward, listening, local_forward, remote_forward
from shared.address import MAX_PORT, Address
from shared.errors import UsageError

HERE = Address("127.0.0.1", 5432)


@pytest.mark.parametrize(
    ("text", "listen", "target"),
    [
        ("5432:DB", HERE, "DB"),
        ("5432", HERE, ""),
        ("5432:22", HERE, "22"),
        ("127.0.0.1:5432:DB", HERE, "DB"),
        ("127.0.0.1:5432", HERE, ""),
        ("0.0.0.0:5432:DB", Address("0.0.0.0", 5432), "DB"),
        ("localhost:0:DB", Address("localhost", 0), "DB"),
        ("[::1]:5432:DB", Address("::1", 5432), "DB"),
        ("[::1]:5432", Address("::1", 5432), ""),
        ("/tmp/x.sock:DB", Path("/tmp/x.sock"), "DB"),
        ("./x.sock", Path("x.sock"), ""),
    ],
)
def test_places_here(text: str, listen: Place, target: str) -> None:
    assert local_forward(text) == LocalForward(listen, target)
    if not target:
        assert listening("-D", text) == listen


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no host"),
        ("65536:DB", "is no port"),
        ("5432:localhost:5432", "is no name that krun can have"),
        ("5432:a/b", "is no name that krun can have"),
        ("::1:5432:DB", "no host"),
        ("[::1:5432", "write [IPV6]:PORT"),
        ("a b:5432:DB", "no host name"),
        ("*:5432:DB", "no host name"),
        (f"/tmp/{'x' * 100}:DB", "103 bytes"),
        ("/tmp/\0:DB", "103 bytes"),
    ],
)
def test_what_is_no_place_here(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as raised:
        local_forward(text)
    assert str(raised.value).startswith(f"-L {text}: ")
    assert reason in str(raised.value)


def test_socks_has_no_target() -> None:
    with pytest.raises(UsageError, match=r"^-D 1080:DB: write \[ADDR:\]PORT or the path of a unix socket$"):
        listening("-D", "1080:DB")


@pytest.mark.parametrize(
    ("text", "port", "target"),
    [
        ("9229:localhost:9229", 9229, Address("localhost", 9229)),
        ("9229:80", 9229, Address("127.0.0.1", 80)),
        ("127.0.0.1:9229:80", 9229, Address("127.0.0.1", 80)),
        ("localhost:9229:[::1]:80", 9229, Address("::1", 80)),
        ("9229:/tmp/x.sock", 9229, Path("/tmp/x.sock")),
        ("9229:db.internal:5432", 9229, Address("db.internal", 5432)),
    ],
)
def test_places_there(text: str, port: int, target: Place) -> None:
    assert remote_forward(text) == RemoteForward(port, target)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.0.0.0:9229:80", "only 127.0.0.1 can be listened on"),
        ("0:80", "port 0"),
        ("9229:0", "port 0"),
        ("9229", "no target"),
        ("9229:", "no target"),
        ("9229:host", "no port"),
        ("localhost:80:", "no target"),
        ("99999:80", "is no port"),
    ],
)
def test_what_is_no_place_there(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as raised:
        remote_forward(text)
    assert reason in str(raised.value)


@given(st.text(max_size=300))
def test_any_text_is_a_place_or_a_wrong_flag(text: str) -> None:
    for read in (local_forward, remote_forward, lambda one: listening("-D", one)):
        try:
            read(text)
        except UsageError as error:
            assert str(error)


@given(st.integers(0, MAX_PORT), st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True))
def test_a_place_is_read_as_it_is_shown(port: int, target: str) -> None:
    address = Address("127.0.0.1", port)
    assert local_forward(f"{address}:{target}") == LocalForward(address, target)
