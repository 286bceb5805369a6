"""What is a service and what is a host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.services.named_service import ServiceName, read

SERVICES = {
    "hello": ("hello", "", ""),
    "hello:22": ("hello", "", "22"),
    "hello:DB": ("hello", "", "DB"),
    "hello.demo": ("hello", "demo", ""),
    "Hello.Demo:5432": ("hello", "demo", "5432"),
    "hello.demo.svc": ("hello", "demo", ""),
    "hello.demo.svc.cluster.local:22": ("hello", "demo", "22"),
    "example.com:22": ("example", "com", "22"),
}

HOSTS = (
    *("https://hello.demo/_hbone/22", "hello.demo/_hbone/22", "hello/_hbone/22", "http://hello"),
    *("hello-abcdefghij-uc.a.run.app:22", "www.example.com", "hello.demo.svc.other.local:22"),
    *("hello.demo.", "hello.", "localhost", "localhost:22", "127.0.0.1:22", "127.1:22", "10:22", "0x7f.1"),
    *("[::1]:22", "::1", "he_llo:22", "-hello", "hello..demo", "", ":22", "hello:", "hello:22:23"),
    *("hello demo", "hello\n", "hello.demo:2 2", "h\u00e9llo", "a" * 64, "\u212aelvin"),
)


@pytest.mark.parametrize("text", SERVICES)
def test_services(text: str) -> None:
    assert read(text) == ServiceName(*SERVICES[text])


@pytest.mark.parametrize("text", HOSTS, ids=ascii)
def test_hosts_and_what_is_neither(text: str) -> None:
    assert read(text) is None


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    found = read(text)
    if found is not None:
        assert text.lower().startswith(found.name)
        assert read(str(found)) == ServiceName(found.name, found.namespace)
