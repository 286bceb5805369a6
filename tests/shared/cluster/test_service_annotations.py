"""Which values annotations may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cluster.service_annotations import (
    ACCOUNT,
    AMBIENT_NETWORK,
    AUDIENCE,
    COLD_START,
    EGRESS,
    METHOD,
    TARGET_PORT,
    URL,
    WORKLOAD,
    WORKLOAD_ACCOUNT,
    check_value,
    tunnel_of,
)

KEYS = (
    *(ACCOUNT, AMBIENT_NETWORK, AUDIENCE, COLD_START, EGRESS),
    *(METHOD, TARGET_PORT, WORKLOAD, WORKLOAD_ACCOUNT),
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (ACCOUNT, "gw@p.iam.gserviceaccount.com"),
        (AMBIENT_NETWORK, "cloud-run"),
        (AUDIENCE, "https://hello.example"),
        (COLD_START, "60s"),
        (COLD_START, "60"),
        (COLD_START, "10m"),
        (EGRESS, "~/*"),
        (EGRESS, "./*,istio-system/*,*/db.prod.svc.cluster.local"),
        (EGRESS, "none"),
        (METHOD, "CONNECT"),
        (TARGET_PORT, "15003"),
        (TARGET_PORT, "db"),
        (WORKLOAD, "hello"),
        (WORKLOAD_ACCOUNT, "hello"),
    ],
)
def test_right(key: str, value: str) -> None:
    assert check_value(key, value) == value


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (ACCOUNT, "hello", "e-mail"),
        (AUDIENCE, "a b", "a URL or a name"),
        (AUDIENCE, "https://{service}", "a URL or a name"),
        (AUDIENCE, "x" * 301, "300 characters"),
        (COLD_START, "", "such as 60s or 1m, 600s at most"),
        (COLD_START, "0", "600s at most"),
        (COLD_START, "601s", "600s at most"),
        (COLD_START, "11m", "600s at most"),
        (COLD_START, "1h", "a duration"),
        (COLD_START, "0.5s", "a duration"),
        (EGRESS, "", "NAMESPACE/HOST"),
        (EGRESS, "*", "NAMESPACE/HOST"),
        (EGRESS, "none,*/*", "NAMESPACE/HOST"),
        (METHOD, "GET", "POST or CONNECT"),
        (TARGET_PORT, "../22", "a port"),
        (WORKLOAD, "-", "label"),
        (WORKLOAD_ACCOUNT, "Hello", "service account"),
        (AMBIENT_NETWORK, "a b", "network"),
    ],
)
def test_wrong(key: str, value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_value(key, value)


@pytest.mark.parametrize("url", ["https://Hello.a.run.app", "https://hello.a.run.app/"])
def test_a_url_is_its_host(url: str) -> None:
    assert check_value(URL, url) == "https://hello.a.run.app"


@pytest.mark.parametrize(
    "url",
    [
        "http://h.example",
        "https://h.example:0",
        "https://h.example:65536",
        "https://h.example/x",
        "https://",
        "https://10.0.0.1",
    ],
)
def test_a_wrong_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"has to be https://HOST|host name|port"):
        check_value(URL, url)


def test_where_tunnels_lead() -> None:
    told = {URL: "https://h.example"}
    assert tunnel_of(told) == "https://h.example/_hbone/15003"
    assert tunnel_of({URL: "https://h.example:8443"}) == "https://h.example:8443/_hbone/15003"
    assert tunnel_of({**told, TARGET_PORT: "db"}) == "https://h.example/_hbone/db"
    assert tunnel_of({**told, METHOD: "CONNECT"}) == "https://h.example"


@given(st.sampled_from([URL, *KEYS]), st.text())
def test_any_text_has_a_verdict_and_no_line_breaks(key: str, text: str) -> None:
    try:
        value = check_value(key, text)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert value.isprintable() and " " not in value
