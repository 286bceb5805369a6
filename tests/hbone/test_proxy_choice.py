"""Which proxy leads where, by curl's variables."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.proxy_choice import for_address, for_url, is_excepted
from shared.address import Address
from shared.errors import UsageError
from shared.net.http_proxy import HttpProxy

HOST = Address("hello.a.run.app", 443)


def chosen(**environ: str) -> str:
    found = for_address(HOST, environ)
    return "" if found is None else str(found.address)


def test_the_first_variable_that_is_set() -> None:
    assert chosen() == ""
    assert chosen(ALL_PROXY="http://d:1") == "d:1"
    assert chosen(ALL_PROXY="http://d:1", all_proxy="http://c:1") == "c:1"
    assert chosen(ALL_PROXY="http://d:1", HTTPS_PROXY="http://b:1") == "b:1"
    assert chosen(HTTPS_PROXY="http://b:1", https_proxy="http://a:1") == "a:1"
    assert chosen(HTTPS_PROXY="http://b:1", https_proxy="") == "b:1", "to curl an empty one is not set"
    assert chosen(HTTPS_PROXY="", ALL_PROXY=" ") == ""
    assert chosen(HTTP_PROXY="http://h:1", http_proxy="http://h:1") == "", "that is for http"
    assert chosen(HTTPS_PROXY="http://b:1", NO_PROXY="run.app") == ""
    assert chosen(HTTPS_PROXY="http://b:1", NO_PROXY="run.app", no_proxy="x") == "b:1"
    assert chosen(HTTPS_PROXY="http://b:1", NO_PROXY="run.app", no_proxy="") == ""


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://p.example:3128", "p.example:3128"),
        ("http://p.example:3128/", "p.example:3128"),
        ("p.example:3128", "p.example:3128"),
        ("p.example", "p.example:1080"),
        ("HTTP://P.example", "p.example:1080"),
        ("http://[2001:db8::1]:3128", "[2001:db8::1]:3128"),
        ("127.0.0.1:8080", "127.0.0.1:8080"),
    ],
)
def test_a_proxy_s_url(text: str, address: str) -> None:
    assert chosen(https_proxy=text) == address


def test_a_user_and_a_password() -> None:
    found = for_address(HOST, {"https_proxy": "http://me:p%40ss%3A@p:1"})
    assert found == HttpProxy(Address("p", 1), f"Basic {base64.b64encode(b'me:p@ss:').decode()}")
    found = for_address(HOST, {"https_proxy": "http://me:\udcff@p:1"})
    assert found == HttpProxy(Address("p", 1), f"Basic {base64.b64encode(b'me:' + bytes([255])).decode()}")
    found = for_address(HOST, {"https_proxy": "me@p:1"})
    assert found is not None and found.authorization == f"Basic {base64.b64encode(b'me:').decode()}"


@pytest.mark.parametrize(
    "text",
    [
        *("https://me:s3cret@p:1", "socks5://me:s3cret@p:1", "http://", "http://me:s3cret@", "http://p:x"),
        *(
            "http://p/s3cret",
            "http://p?s3cret",
            "http://p#s3cret",
            "http://me:s3cret@p:70000",
            "http://p:0x1",
        ),
        *("http://me:s3cret@p p:1", "http://[s3cret", "me:s3cret@", "http://me:s3cret@p..q:1"),
        # Python quotes all before the path where a letter becomes one of a URL's marks.
        *("http://me:s3cret@p\uff1a1", "http://me:s3cret\u2100@p:1"),
    ],
)
def test_what_is_no_proxy_of_ours_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(UsageError, match=r"^invalid HTTPS_PROXY \(.+\)$") as caught:
        chosen(HTTPS_PROXY=text)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


NAMED = {
    "*": {"h.example", "10.1.2.3", "::1"},
    "example": {"h.example", "example", "H.Example."},
    ".example": {"h.example", "example"},
    "*.example": {"h.example"},
    "h.example.": {"h.example"},
    "x, h.example ,y": {"h.example"},
    "x h.example": {"h.example"},
    "h.example:443": {"h.example"},
    "10.1.2.3": {"10.1.2.3"},
    "10.1.2.3:443": {"10.1.2.3"},
    "10.0.0.0/8": {"10.1.2.3"},
    "10.1.2.3/24": {"10.1.2.9"},
    "2001:db8::/32": {"2001:db8::5"},
    "[2001:db8::5]": {"2001:db8::5"},
    "[2001:db8::5]:443": {"2001:db8::5"},
    "2001:0db8::5": {"2001:db8::5"},
}

NOT_NAMED = {
    "": {"h.example"},
    ",": {"h.example"},
    ".": {"h.example"},
    "xample": {"h.example"},
    "h.example:80": {"h.example"},
    "example.h": {"h.example"},
    "10.1.2": {"10.1.2.3"},
    "10.1.2.3:80": {"10.1.2.3"},
    "11.0.0.0/8": {"10.1.2.3"},
    "10.0.0.0/99": {"10.1.2.3"},
    "2001:db9::/32": {"2001:db8::5"},
    "3": {"10.1.2.3"},
}


@pytest.mark.parametrize("exceptions", NAMED)
def test_what_is_reached_without(exceptions: str) -> None:
    assert all(is_excepted(Address(host, 443), exceptions) for host in NAMED[exceptions])


@pytest.mark.parametrize("exceptions", NOT_NAMED)
def test_what_is_not(exceptions: str) -> None:
    assert not any(is_excepted(Address(host, 443), exceptions) for host in NOT_NAMED[exceptions])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "localhost.", "a.localhost"])
def test_this_machine_is_reached_without(host: str) -> None:
    assert for_address(Address(host, 443), {"https_proxy": "http://p:1"}) is None


def test_of_a_url() -> None:
    environ = {"https_proxy": "http://p:1", "no_proxy": "x:444"}
    assert for_url("https://x/y", environ) == HttpProxy(Address("p", 1))
    assert for_url("https://x:444/y", environ) is for_url("http://x/y", environ) is None


@given(st.text(), st.sampled_from(["h.example", "10.1.2.3", "2001:db8::5"]))
def test_any_text_is_read(text: str, host: str) -> None:
    assert is_excepted(Address(host, 443), text) in (True, False)
    try:
        found = for_address(HOST, {"https_proxy": text})
    except UsageError as error:
        assert str(error).isprintable()
    else:
        assert found is None or found.address.port > 0
