"""Which service a name is, and which names are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.services.service_names import ServiceName, parse
from shared.errors import NoRouteError


@pytest.mark.parametrize(
    ("authority", "service", "region"),
    [
        ("hello", "hello", ""),
        ("Hello:80", "hello", ""),
        ("hello-2.us-central1", "hello-2", "us-central1"),
        ("hello.northamerica-northeast2.run.internal", "hello", "northamerica-northeast2"),
        ("hello.us-central1.run.internal.:80", "hello", "us-central1"),
        ("hello.run.internal", "hello", ""),
    ],
)
def test_services(authority: str, service: str, region: str) -> None:
    assert parse(authority) == ServiceName(service, region)


@pytest.mark.parametrize(
    "authority",
    [
        *(
            "",
            "localhost",
            "metadata",
            "metadata.google.internal",
            "example.com",
            "10.0.0.1",
            "[::1]",
            "8080",
        ),
        *("hello.demo.svc.cluster.local", "hello.us-central1.run.app", "hello.us-central1.evil.example"),
        *(
            "a_b",
            "-a",
            "a-",
            "1a",
            "a" * 64,
            "hello.us-central1/x",
            "hello@evil.example",
            "hello.us-central1#x",
        ),
        *("hello-1.us-central1.run.app", "hello.", ".us-central1", "hello..us-central1", "hello.us central1"),
    ],
)
def test_others(authority: str) -> None:
    if authority == "hello.":  # absolute
        assert parse(authority) == ServiceName("hello", "")
        return
    with pytest.raises(NoRouteError, match=r"is no SERVICE or SERVICE\.REGION"):
        parse(authority)


@pytest.mark.parametrize(("port", "hint"), [("443", "https needs no help"), ("8080", "leave the port out")])
def test_other_ports(port: str, hint: str) -> None:
    with pytest.raises(NoRouteError, match=f"hello:{port}: services are reached on port 80 here: {hint}"):
        parse(f"hello:{port}")


def test_the_host_of_the_url() -> None:
    assert ServiceName("hello", "").host("123", "us-east1") == "hello-123.us-east1.run.app"
    assert ServiceName("hello", "us-west1").host("123", "us-east1") == "hello-123.us-west1.run.app"
    with pytest.raises(NoRouteError, match="more than 63 characters"):
        ServiceName("a" * 60, "").host("12345", "us-east1")


@given(st.text() | st.from_regex(r"[a-z0-9.:-]{1,40}"))
def test_no_name_leads_out_of_the_project(text: str) -> None:
    try:
        host = parse(text).host("123456", "us-east1")
    except NoRouteError:
        return
    label, region, *domain = host.split(".")
    assert label.endswith("-123456") and domain == ["run", "app"]
    assert region.replace("-", "").isalnum()
