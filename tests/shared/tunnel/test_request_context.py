"""What a tunnel request says of where it comes from, written and read."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import check_host_name
from shared.trust.spiffe import MAX_URI_BYTES, SpiffeId
from shared.tunnel.request_context import (
    SHOWN_CHARS,
    TRACES_AT_ONCE,
    baggage,
    certified_client,
    client_certificate,
    forwarded,
    forwarded_for,
    forwarded_host,
    read_traceparent,
    traceparents,
    workload_baggage,
)

GOOD = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_traceparents_of_ours() -> None:
    made = list(itertools.islice(traceparents(), 2 * TRACES_AT_ONCE + 1))
    assert len(set(made)) == len(made)
    for value in made:
        assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-00", value)
        assert read_traceparent(value) == value.decode()


@pytest.mark.parametrize("value", [GOOD, b"cc" + GOOD[2:], b"01" + GOOD[2:] + b"-more"])
def test_a_peer_s_traceparent(value: bytes) -> None:
    """A later version may have more behind it (W3C Trace Context, section 3.2.4)."""
    assert read_traceparent(value) == value[:55].decode()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        GOOD.upper(),
        GOOD[:-1],
        GOOD + b"\n",
        b"ff" + GOOD[2:],
        b"00-" + b"0" * 32 + GOOD[35:],
        GOOD[:36] + b"0" * 16 + b"-01",
        GOOD.replace(b"-", b"_"),
    ],
)
def test_what_is_no_traceparent(value: bytes) -> None:
    assert read_traceparent(value) is None


@pytest.mark.parametrize(
    ("namespace", "service", "written"),
    [
        ("demo", "hello", b"k8s.namespace.name=demo,service.name=hello"),
        ("", "hello", b"service.name=hello"),
        ("demo", "", b"k8s.namespace.name=demo"),
        ("", "", b""),
    ],
)
def test_baggage(namespace: str, service: str, written: bytes) -> None:
    assert baggage(namespace, service) == written


@pytest.mark.parametrize("client", ["10.1.2.3:44312", "[2001:db8::1]:80"])
def test_what_is_forwarded_is_read_back(client: str) -> None:
    written = forwarded(client)
    assert written == f'for="{client}"'.encode()
    assert forwarded_for(written) == client
    assert forwarded_for(written + b";host=hello.demo.svc") == client


@pytest.mark.parametrize(
    ("value", "client"),
    [
        (b"for=10.1.2.3", "10.1.2.3"),
        (b'For="_hidden";proto=http', "_hidden"),
        (b"host=a;for=10.1.2.3", "10.1.2.3"),
        (b"proto=http, for=10.1.2.3, for=10.9.9.9", "10.1.2.3"),
        (b"", None),
        (b"host=a", None),
        (b"before=10.1.2.3", None),
        (b'for="a\nb"', None),
        (b'for="a\x1bb"', None),
        (b'for=""', None),
        (b"for=\xff", None),
    ],
)
def test_whom_a_forwarded_header_names(value: bytes, client: str | None) -> None:
    assert forwarded_for(value) == client


@given(st.binary() | st.builds(b"for=".__add__, st.binary()) | st.builds(b'for="%b"'.__mod__, st.binary()))
def test_whatever_comes_is_one_short_line_or_nothing(value: bytes) -> None:
    for found in (forwarded_for(value), read_traceparent(value)):
        assert found is None or (0 < len(found) <= SHOWN_CHARS and found.isascii() and found.isprintable())


def test_the_baggage_of_a_workload() -> None:
    told = workload_baggage("Kubernetes", "demo", "hello", "hello", "hello-00001")
    assert told == (
        b"k8s.cluster.name=Kubernetes,k8s.namespace.name=demo,k8s.deployment.name=hello,service.name=hello,"
        b"service.version=hello-00001"
    )
    assert workload_baggage("a,b=c d", "", "", "", "") == b"k8s.cluster.name=a%2Cb%3Dc%20d"
    assert workload_baggage("", "", "", "", "") == b""


@pytest.mark.parametrize(
    ("value", "host"),
    [
        (b'for="10.1.2.3:44312";host=db.prod.svc.cluster.local', "db.prod.svc.cluster.local"),
        (b"host=DB.Prod.svc.", "db.prod.svc"),
        (b'Host="db.prod.svc:5432";proto=http', "db.prod.svc"),
        (b"for=a, for=b;host=first.svc, for=c;host=second.svc", "first.svc"),
        (b"", None),
        (b"for=a", None),
        (b"host=", None),
        (b'host=""', None),
        (b"host=10.96.0.7", None),
        (b"host=db.prod.svc/path", None),
        (b"host=a..b", None),
        (b"virtualhost=db.prod.svc", None),
        (b"host=d\xc3\xb6.svc", None),
        (b'host="db.prod.svc', None),
    ],
)
def test_which_host_a_forwarded_header_names(value: bytes, host: str | None) -> None:
    assert forwarded_host(value) == host


@given(st.binary() | st.builds(b"host=".__add__, st.binary()) | st.builds(b'host="%b"'.__mod__, st.binary()))
def test_whatever_comes_is_a_host_name_or_nothing(value: bytes) -> None:
    host = forwarded_host(value)
    if host is not None:
        check_host_name(host)
        assert host == host.lower()


CLIENT = SpiffeId.of_workload("demo.local", "demo", "client")
OWN = "spiffe://demo.local/ns/istio-system/sa/hgate"


@pytest.mark.parametrize(
    ("own", "value"), [(OWN, f"By={OWN};URI={CLIENT}".encode()), ("", f"URI={CLIENT}".encode())]
)
def test_a_client_s_name_that_is_passed_on_is_read_back(own: str, value: bytes) -> None:
    assert client_certificate(own, CLIENT) == value
    assert certified_client(value) == str(CLIENT)


@pytest.mark.parametrize(
    ("value", "client"),
    [
        (f'By={OWN};Hash=ab;Subject="CN=\\"a,b\\";URI=x";URI={CLIENT};DNS=a.b', str(CLIENT)),
        (f'uri="{CLIENT}"', str(CLIENT)),
        (f"URI={CLIENT},URI=spiffe://other.local/a", str(CLIENT)),
        (f"By={OWN}", None),
        (f"By={OWN},URI={CLIENT}", None),
        ("URI=", None),
        ("URI=https://demo.local/ns/demo", None),
        ("URI=spiffe://demo.local/a b", None),
        ("URI=spiffe://demo.local/\n", None),
        (f'URI="{CLIENT}', None),
        (f"URI={CLIENT}" + "a" * MAX_URI_BYTES, None),
        (f"=;URI={CLIENT}", None),
        ("", None),
    ],
)
def test_whom_a_client_certificate_header_names(value: str, client: str | None) -> None:
    assert certified_client(value.encode()) == client


@given(
    st.binary()
    | st.builds(b"URI=".__add__, st.binary())
    | st.builds(b'URI="%b"'.__mod__, st.binary())
    | st.builds(b'By="%b";URI=spiffe://a/b'.__mod__, st.binary())
)
def test_whatever_comes_is_a_spiffe_id_or_nothing(value: bytes) -> None:
    found = certified_client(value)
    if found is not None:
        assert str(SpiffeId.parse(found)) == found


def test_a_long_client_certificate_header_is_read_quickly() -> None:
    for value in (b'A="' + b'\\"' * 100_000, b"A=" + b"b" * 200_000 + b'"', b"A=b;" * 50_000):
        began = time.process_time()
        assert certified_client(value) is None
        assert time.process_time() - began < 1.0, "some milliseconds, if not beside others"
