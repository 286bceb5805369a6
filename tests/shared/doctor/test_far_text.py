"""What a far side says, as one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.doctor.far_text import MAX_LINE, one_line, without_secrets, without_user
from tests.support.metadata_server import unsigned_token

GOOGLES_404 = b"""
<html><head>
<meta http-equiv="content-type" content="text/html;charset=utf-8">
<title>404 Page not found</title>
</head>
<body text=#000000 bgcolor=#ffffff>
<h1>Error: Page not found</h1>
<h2>The requested URL was not found on this server.</h2>
<h2></h2>
</body></html>
"""


@pytest.mark.parametrize(
    ("page", "line"),
    [
        (
            GOOGLES_404,
            "404 Page not found: Error: Page not found: The requested URL was not found on this server",
        ),
        (b"<title>Error 404 (Not Found)!!1</title><style>p{a:b}</style>", "Error 404 (Not Found)!!1"),
        (b"<h1>Hello</h1><script>alert(1)</script>", "Hello"),
        (b"<b>No</b> headings &amp; such", "No headings & such"),
        (b"<title>Same</title><h1>Same.</h1>", "Same"),
        (b"<h1", "< h1"),
        (b"", ""),
    ],
)
def test_html(page: bytes, line: str) -> None:
    assert one_line(page, is_html=True) == line


def test_plain_text_is_one_printable_line() -> None:
    assert one_line(b"a\r\n b\x1b[31m\xff") == "a b?[31m\ufffd"
    assert one_line(b"x" * 1000) == "x" * MAX_LINE + "..."


def test_secrets_are_taken_out() -> None:
    token = unsigned_token(aud="a", exp=1)
    assert one_line(f"you sent Bearer {token}!".encode()) == "you sent Bearer [secret]!"
    assert one_line(b"opaque-thing here", secret="opaque-thing") == "[secret] here"
    assert one_line(b"ends in opaque-th", secret="opaque-thing") == "ends in [secret]"
    assert without_secrets("ya29.abc-def x") == "[secret] x"
    assert without_secrets("-----BEGIN EC PRIVATE KEY-----\nabc") == "[secret]"


def test_proxies_lose_their_users() -> None:
    assert without_user("http://me:pass@proxy.example:3128") == "http://proxy.example:3128"
    assert without_user("me:pass@proxy.example") == "proxy.example"
    assert without_user("http://proxy.example") == "http://proxy.example"


@given(st.binary(max_size=500), st.booleans())
def test_anything_makes_one_short_printable_line(data: bytes, is_html: bool) -> None:
    line = one_line(data, is_html=is_html)
    assert len(line) <= MAX_LINE + 3
    assert line.isprintable()


@given(
    st.text(max_size=50), st.text(alphabet="abcdefXYZ0189-_", min_size=12, max_size=40), st.integers(8, 200)
)
def test_a_secret_that_is_cut_off_does_not_show(before: str, secret: str, cut: int) -> None:
    shown = without_secrets(f"{before} {secret}"[: len(before) + 1 + cut], secret)
    assert secret[:8] not in shown or secret[:8] in before
