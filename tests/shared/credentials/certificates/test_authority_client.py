"""What clients of all authorities share: no token, no certificates, no secret in what is repeated."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.authority_client import (
    bearer,
    certificates,
    left,
    quoted,
    to_pem,
)
from shared.errors import SigningError

SECRET = "eyJhbGciOiJSUzI1NiJ9.eyJzZWNyZXQiOjF9.c2lnbmF0dXJl"


# Tokens and deadlines.


async def test_an_empty_token() -> None:
    async def empty() -> str:
        return ""

    with pytest.raises(SigningError, match=r"^CA of tests: no token for it: the one to be sent is empty$"):
        await bearer(empty, "CA of tests", 5)


async def test_a_token_that_never_comes() -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    with pytest.raises(SigningError, match=r"^CA of tests: no token for it within 0\.05 s$"):
        await bearer(never, "CA of tests", 0.05)


async def test_what_is_left_is_never_nothing() -> None:
    now = asyncio.get_running_loop().time()
    assert left(now - 5) == 0.1
    assert 7.8 <= left(now + 8) <= 8


# Certificates.


def test_certificates_in_several_texts() -> None:
    first, second = Authority.create("a.local"), Authority.create("b.local")
    both = "text before\n" + first.root_pem.decode() + "\n\n" + second.root_pem.decode()
    found = certificates([both, first.root_pem.decode()], "CA", "its chain")
    assert found == [first.root, second.root, first.root]
    assert to_pem(found[:2]) == first.root_pem + second.root_pem


def test_what_is_passed_on_is_certificates_only() -> None:
    authority = Authority.create("a.local")
    pair = authority.issue(dns_names=["a"])
    text = (pair.key_pem + pair.certificate_pem).decode()
    assert to_pem(certificates([text], "CA", "its chain")) == pair.certificate_pem


@pytest.mark.parametrize("text", ["", "garbage", "<html>", "-----BEGIN CERTIFICATE-----\nAAAA\n", "\ud800"])
def test_texts_without_a_certificate(text: str) -> None:
    with pytest.raises(SigningError) as caught:
        certificates([text], "CA", "its chain")
    assert str(caught.value) == "CA: its chain cannot be read: it is no certificate in PEM"
    with pytest.raises(SigningError, match=r"^CA: its chain is empty$"):
        certificates([], "CA", "its chain")


def test_more_certificates_than_anybody_has() -> None:
    pem = Authority.create("a.local").root_pem.decode()
    assert len(certificates([pem] * 32, "CA", "its chain")) == 32
    for texts in ([pem] * 33, [pem * 33]):
        with pytest.raises(SigningError, match=r"^CA: its chain has more than 32 certificates$"):
            certificates(texts, "CA", "its chain")


# Quotes.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no such\n\taccount", "no such account"),
        ("a\x1b[31mred\x00", "a?[31mred?"),
        (f"token {SECRET} is bad", "token [secret] is bad"),
        (f"token={SECRET[:20]}...", "[secret]"),
        (f"token '{SECRET[-16:]}'", "token [secret]"),
        ("spiffe://demo.local/ns/demo/sa/hello", "spiffe://demo.local/ns/demo/sa/hello"),
        ("x" * 500, "x" * 400 + "..."),
    ],
)
def test_what_is_repeated_of_a_server(text: str, shown: str) -> None:
    assert quoted(text, SECRET) == shown


def test_a_secret_that_is_short() -> None:
    assert quoted("you said abc.", "abc") == "you said [secret]"
    assert quoted("you said abc.", "") == "you said abc."


@given(st.text(max_size=3000), st.integers(0, len(SECRET)), st.integers(12, len(SECRET)))
def test_whatever_it_says(text: str, start: int, size: int) -> None:
    piece = SECRET[start : start + size]
    shown = quoted(text + piece + text, SECRET)
    assert len(shown) <= 403
    assert shown.isprintable()
    if len(piece) >= 12:
        assert piece not in shown
