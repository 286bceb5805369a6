"""Every spelling of a tunnel's URL, right and wrong."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone import target
from hbone.target import TunnelTarget
from shared.address import Address
from shared.errors import EXIT_USAGE, UsageError

RIGHT = {
    # What is written: the URL that it means, and what is dialled.
    "https://h.example/_hbone/22": ("https://h.example/_hbone/22", "h.example:443"),
    "https://h.example:443/_hbone/22": ("https://h.example/_hbone/22", "h.example:443"),
    "https://h.example:8443/_hbone/22": ("https://h.example:8443/_hbone/22", "h.example:8443"),
    "http://h.example/_hbone/db": ("http://h.example/_hbone/db", "h.example:80"),
    "http://127.0.0.1:15009/_hbone/22": ("http://127.0.0.1:15009/_hbone/22", "127.0.0.1:15009"),
    "HTTPS://H.Example/_hbone/Name": ("https://h.example/_hbone/Name", "h.example:443"),
    "https://[2001:db8::1]/_hbone/22": ("https://[2001:db8::1]/_hbone/22", "[2001:db8::1]:443"),
    "https://[::1]:8443/_hbone/22": ("https://[::1]:8443/_hbone/22", "[::1]:8443"),
    "https://h.example/any/path?and=query": ("https://h.example/any/path?and=query", "h.example:443"),
    "h.example:22": ("https://h.example/_hbone/22", "h.example:443"),
    "[::1]:22": ("https://[::1]/_hbone/22", "[::1]:443"),
    "127.0.0.1:22": ("https://127.0.0.1/_hbone/22", "127.0.0.1:443"),
    # The original made /_hbone/443/_hbone/22 of this one, and its README had a variable without the scheme.
    "h.example:443/_hbone/22": ("https://h.example/_hbone/22", "h.example:443"),
    "h.example/_hbone/22": ("https://h.example/_hbone/22", "h.example:443"),
    "h.example:8443/_hbone/22": ("https://h.example:8443/_hbone/22", "h.example:8443"),
    # The dot keeps resolvers from their search list; it is in no certificate and in no audience.
    "h.example.:22": ("https://h.example/_hbone/22", "h.example.:443"),
}

WRONG = {
    "": "write HOST:PORT or a URL such as https://HOST/_hbone/22",
    "h.example": "write HOST:PORT or a URL such as https://HOST/_hbone/22",
    "[::1]": "write HOST:PORT or a URL such as https://HOST/_hbone/22",
    "/_hbone/22": "write HOST:PORT or a URL",
    "https://": "write HOST:PORT or a URL",
    "https:///_hbone/22": "write HOST:PORT or a URL",
    "https://h.example": "no path; for ssh write https://h.example/_hbone/22",
    "https://h.example/": "no path; for ssh write https://h.example/_hbone/22",
    "http://h.example:8080/": "no path; for ssh write http://h.example:8080/_hbone/22",
    "h.example:22/": "no path; for ssh write https://h.example:22/_hbone/22",
    "ssh://h.example/_hbone/22": "the scheme must be https or http, not ssh",
    "://h.example/_hbone/22": "the scheme must be https or http, not empty",
    "h.example:": "port '' is not in 0..65535",
    "h.example:ssh": "port 'ssh' is not in 0..65535",
    "h.example:65536": "port '65536' is not in 0..65535",
    "h.example:-1": "port '-1' is not in 0..65535",
    "h.example:0": "port 0 cannot be connected to",
    "https://h.example:0/_hbone/22": "port 0 cannot be connected to",
    ":22": "no host",
    "::1:22": "an IPv6 address needs brackets",
    "[::1:22": "the bracket of the IPv6 address is not closed",
    "[h.example]:22": "is no IPv6 address",
    "https://[::1]8443/_hbone/22": "write [IPV6]:PORT",
    "https://me@h.example/_hbone/22": "has a character out of place",
    "https://h.example?x/_hbone/22": "has a character out of place",
    "-h.example:22": "has a character out of place",
    "h..example:22": "has an empty label",
    f"{'a' * 64}.example:22": "a label has 64 characters",
    "256.0.0.1:22": "reads as an IPv4 address",
    "https://h.example/a b": "spaces, ",
    "https://h.example/_hbone/22#top": "# and",
    "https://h.example/_hbone/22\n": "spaces, ",
    "https://h.example/_hbone/22\r\nx: y": "spaces, ",
    "https://h.example/caf\u00e9": "beyond ASCII",
    "b\u00fccher.example:22": "beyond ASCII",
}

WORD = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=20).map(lambda word: f"h{word}")
PORT = st.integers(1, 65535)
PATH = st.text(string.ascii_letters + string.digits + "/-._~%?=&", min_size=1, max_size=40)


@pytest.mark.parametrize("text", RIGHT)
def test_right_spellings(text: str) -> None:
    found = target.parse(text)
    assert (str(found), str(found.address)) == RIGHT[text]


@pytest.mark.parametrize("text", WRONG, ids=ascii)
def test_wrong_spellings(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(WRONG[text])) as caught:
        target.parse(text)
    assert caught.value.exit_code == EXIT_USAGE
    assert str(caught.value).isprintable(), "one line, whatever was written"


@pytest.mark.parametrize(
    ("text", "authority", "audience"),
    [
        ("h.example:22", "h.example", "https://h.example"),
        ("https://h.example:8443/x", "h.example:8443", "https://h.example"),
        ("http://h.example:443/x", "h.example:443", "http://h.example"),
        ("https://h.example:80/x", "h.example:80", "https://h.example"),
        ("[::1]:22", "[::1]", "https://[::1]"),
        ("https://[::1]:8443/x", "[::1]:8443", "https://[::1]"),
        ("h.example.:22", "h.example", "https://h.example"),
        ("https://h.example.:8443/x", "h.example:8443", "https://h.example"),
    ],
)
def test_authority_and_audience(text: str, authority: str, audience: str) -> None:
    found = target.parse(text)
    assert (found.authority, found.audience) == (authority, audience)


@given(st.text())
def test_any_text_is_a_target_or_a_usage_error_of_one_line(text: str) -> None:
    try:
        found = target.parse(text)
    except UsageError as error:
        assert str(error).isprintable()
    else:
        assert found.path.startswith("/")


@given(st.sampled_from(["https", "http"]), WORD, PORT, PATH)
def test_a_url_is_taken_as_it_is(scheme: str, host: str, port: int, path: str) -> None:
    found = target.parse(f"{scheme}://{host}:{port}/{path}")
    assert found == TunnelTarget(scheme, Address(host, port), f"/{path}")
    assert target.parse(str(found)) == found


@given(WORD, PORT)
def test_host_and_port_mean_the_tunnel_of_that_port(host: str, port: int) -> None:
    assert target.parse(f"{host}:{port}") == target.parse(f"https://{host}/_hbone/{port}")
