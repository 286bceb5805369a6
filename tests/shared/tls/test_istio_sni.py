from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import Address
from shared.errors import SniError
from shared.tls.istio_sni import ISTIO_ALPN, MAX_NAME_CHARS, Destination, parse, server_name

HOST = "hello.demo.svc.cluster.local"


def test_the_name_of_a_service_is_read_back() -> None:
    name = server_name(Address(HOST, 8080))
    assert name == f"outbound_.8080_._.{HOST}"
    assert parse(name) == Destination(HOST, 8080, "", "outbound")


@pytest.mark.parametrize(
    ("name", "destination"),
    [
        # Istio's key for a cluster, without and with a subset.
        (f"outbound_.8080_._.{HOST}", Destination(HOST, 8080, "", "outbound")),
        (f"outbound_.8080_.v1-canary_.{HOST}", Destination(HOST, 8080, "v1-canary", "outbound")),
        (f"inbound_.15003_._.{HOST}", Destination(HOST, 15003, "", "inbound")),
        ("outbound_.8080_._.h", Destination("h", 8080, "", "outbound")),
        ("outbound_.1_._.h", Destination("h", 1, "", "outbound")),
        ("outbound_.65535_._.h", Destination("h", 65535, "", "outbound")),
        # The host may contain the separator.
        ("outbound_.80_.v1_.a_.b_._c.demo", Destination("a_.b_._c.demo", 80, "v1", "outbound")),
        # Istio's fallback, the cluster name.
        (f"outbound|8080||{HOST}", Destination(HOST, 8080, "", "outbound")),
        (f"outbound|8080|v2|{HOST}", Destination(HOST, 8080, "v2", "outbound")),
        # Bare names, among them some that are only nearly Istio's.
        (HOST, Destination(HOST, None, "", "")),
        ("istiod.istio-system.svc", Destination("istiod.istio-system.svc", None, "", "")),
        ("hello", Destination("hello", None, "", "")),
        ("outbound", Destination("outbound", None, "", "")),
        ("outbound.example.com", Destination("outbound.example.com", None, "", "")),
        ("outbound_8080.example.com", Destination("outbound_8080.example.com", None, "", "")),
        # Names have no case.
        ("Outbound_.8080_._.Hello.Demo", Destination("hello.demo", 8080, "", "outbound")),
    ],
)
def test_names(name: str, destination: Destination) -> None:
    assert parse(name) == destination


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # Too few parts: this name crashed the original gateway.
        ("outbound_.x", "not of the form outbound_.PORT_.SUBSET_.HOST"),
        ("outbound_.", "not of the form"),
        ("outbound_.8080_.h", "not of the form"),
        ("inbound_.8080_._h", "not of the form"),
        ("outbound|8080|h", "not of the form outbound|PORT|SUBSET|HOST"),
        # Ports.
        ("outbound_._._.h", "port '' is not in 1..65535"),
        ("outbound_.0_._.h", "port '0'"),
        ("outbound_.65536_._.h", "port '65536'"),
        ("outbound_.99999999999999999999_._.h", "port '9"),
        ("outbound_.-1_._.h", "port '-1'"),
        ("outbound_.+80_._.h", "port '+80'"),
        ("outbound_.8_0_._.h", "port '8_0'"),
        ("outbound_.080_._.h", "port '080'"),
        ("outbound_.http_._.h", "port 'http'"),
        ("outbound_.80\n_._.h", r"port '80\n'"),
        ("outbound_.٨٠_._.h", "not ASCII"),
        # Subsets.
        ("outbound_.80_.v1.evil.example_.h", "subset 'v1.evil.example' is no DNS label"),
        ("outbound_.80_.-v1_.h", "subset '-v1'"),
        ("outbound|80|v/1|h", "subset 'v/1'"),
        # Hosts.
        ("outbound_.80_._.", "host '' is no DNS name"),
        ("inbound|8080||", "host ''"),
        ("", "host ''"),
        (".", "host '.'"),
        (".svc", "host '.svc'"),
        ("a..b", "host 'a..b'"),
        ("a.", "host 'a.'"),
        ("a\n", r"host 'a\n'"),
        ("sideways|80||h", "host 'sideways|80||h'"),
        # Hosts that would lead a URL made of them to another place.
        ("outbound_.80_._.evil.example/x.demo.svc", "is no DNS name"),
        ("outbound_.80_._.169254169254/.demo.svc", "is no DNS name"),
        ("user@evil.demo.svc", "is no DNS name"),
        ("evil:443.demo.svc", "is no DNS name"),
        ("evil?.demo.svc", "is no DNS name"),
        ("evil#.demo.svc", "is no DNS name"),
        ("%65vil.demo.svc", "is no DNS name"),
        ("{service}.demo.svc", "is no DNS name"),
        # The Kelvin sign, whose lower case is an ASCII k.
        ("\N{KELVIN SIGN}.demo.svc", "not ASCII"),
        ("h" * (MAX_NAME_CHARS + 1), "256 characters, more than 255"),
    ],
)
def test_refusals(name: str, reason: str) -> None:
    with pytest.raises(SniError) as refused:
        parse(name)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("host", "service", "namespace"),
    [
        (HOST, "hello", "demo"),
        ("hello.demo.svc", "hello", "demo"),
        ("hello.svc.svc.cluster.local", "hello", "svc"),
        ("svc.demo.svc.mesh.internal", "svc", "demo"),
        # No Services: too short, too long, or of another form.
        ("hello.demo", "", ""),
        ("hello", "", ""),
        ("demo.svc.cluster.local", "", ""),
        ("hello.example.com", "", ""),
        ("admin.prod.demo.svc.cluster.local", "", ""),
        ("admin.prod.svc.demo.svc.cluster.local", "", ""),
        ("hello.demo.svc.svc", "", ""),
    ],
)
def test_service_and_namespace(host: str, service: str, namespace: str) -> None:
    for destination in parse(host), parse(f"outbound_.8080_.v1_.{host}"):
        assert (destination.service, destination.namespace) == (service, namespace)


def test_alpn_names_of_the_mesh() -> None:
    assert "istio" in ISTIO_ALPN
    assert ISTIO_ALPN.isdisjoint({"h2", "http/1.1"})


NAMES = st.text(alphabet="abc01289_.|-/\n\x00é", max_size=40)
STARTS = st.sampled_from(
    ["", "outbound_.", "outbound|", "inbound_.80_.", "outbound_.80_._.", "outbound|80||"]
)


@given(STARTS, NAMES)
def test_any_text_is_a_destination_or_refused(start: str, rest: str) -> None:
    try:
        destination = parse(start + rest)
    except SniError as refused:
        assert str(refused).isprintable()
        return
    assert destination.host and not set(destination.host) & set("|/\n\x00é")
    assert destination.port is None or 1 <= destination.port <= 65535
    assert parse(start + rest) == destination


LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
HOSTS = st.lists(LABELS, min_size=1, max_size=5).map(".".join)


@given(HOSTS, st.integers(1, 65535), LABELS | st.just(""), st.sampled_from(["outbound", "inbound"]))
def test_what_istio_writes_is_read_back(host: str, port: int, subset: str, direction: str) -> None:
    destination = Destination(host, port, subset, direction)
    assert parse(f"{direction}_.{port}_.{subset}_.{host}") == destination
    assert parse(f"{direction}|{port}|{subset}|{host}") == destination
