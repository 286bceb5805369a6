"""Which routes objects make, and what keeps them from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster import service_routes
from gateway.cluster.service_routes import ObjectError, ServiceRoutes, routes_of
from gateway.rules.cluster_rules import ClusterRule, JudgedRoutes, ServiceRoute
from gateway.rules.routes import Method, Route, RouteTable
from gateway.rules.templates import TunnelUrl
from shared.address import Address
from shared.cluster.service_annotations import (
    ACCOUNT,
    AMBIENT_NETWORK,
    AUDIENCE,
    METHOD,
    ORIGINAL_LABEL,
    TARGET_PORT,
    URL,
    CloudOrigin,
)

CALLER = "caller@project.iam.gserviceaccount.com"
RULES = [
    ClusterRule(
        "demo", ("hello-*.a.run.app", "*-uc.a.run.app"), ("123456789",), (CALLER,), audiences=("custom-*",)
    ),
    ClusterRule("team-*", ("api.example.com",)),
]
DOMAIN = "cluster.local"


def service(name: str = "hello", namespace: str = "demo", **told: str) -> dict[str, Any]:
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "annotations": told, "uid": name},
    }


def annotated(url: str = "https://hello-x1.a.run.app", **told: str) -> dict[str, Any]:
    return service(**{URL: url, **told})


def test_a_service_with_a_url() -> None:
    (route,) = routes_of(annotated(), RULES, DOMAIN)
    assert route == ServiceRoute(
        host="hello.demo.svc.cluster.local",
        url="https://hello-x1.a.run.app/_hbone/15003",
        audience="https://hello-x1.a.run.app",
        method="POST",
        service_account="",
        namespace="demo",
        source="Service demo/hello",
    )


def test_what_annotations_change() -> None:
    told = {AUDIENCE: "custom-1", ACCOUNT: CALLER, TARGET_PORT: "db", METHOD: "POST"}
    (route,) = routes_of(annotated(**told), RULES, DOMAIN)
    assert route.url == "https://hello-x1.a.run.app/_hbone/db"
    assert (route.audience, route.service_account) == ("custom-1", CALLER)
    (route,) = routes_of(annotated(**{METHOD: "CONNECT"}), RULES, DOMAIN)
    assert route.url == "https://hello-x1.a.run.app"
    table_route = route.judged(RULES)
    assert table_route.method == "CONNECT"


AMBIENT = {AMBIENT_NETWORK: "cloud-run", TARGET_PORT: "db", AUDIENCE: "custom-1"}


def test_a_service_with_ambient_clients() -> None:
    """Each kind of client has a route of its own, to another end in the container."""
    by_name, by_connect = routes_of(annotated(**AMBIENT), RULES, DOMAIN)
    assert (by_name.url, by_name.inner) == ("https://hello-x1.a.run.app/_hbone/db", "")
    assert (by_connect.url, by_connect.inner) == ("https://hello-x1.a.run.app/_hbone/15008", "hbone")
    assert by_name.audience == by_connect.audience == "custom-1"
    table = RouteTable([by_name.judged(RULES), by_connect.judged(RULES)])
    assert table.find(by_name.host).url == by_name.url
    assert table.find_connect(Address(by_name.host, 80)).url == by_connect.url
    assert len(routes_of(annotated(**AMBIENT, **{METHOD: "CONNECT"}), RULES, DOMAIN)) == 1


def test_the_file_s_route_for_ambient_clients_comes_first() -> None:
    url = TunnelUrl.parse("https://a.run.app/_hbone/15008")
    of_file = RouteTable([Route("*.demo.svc.cluster.local", tunnel=url, inner="hbone")])
    routes, refused = ServiceRoutes().table([annotated(**AMBIENT)], RULES, DOMAIN, of_file)
    assert ([route.inner for route in routes], refused) == ([""], {})


def test_ambient_clients_that_come_later() -> None:
    made = ServiceRoutes()
    assert [route.inner for route in made.table([annotated()], RULES, DOMAIN)[0]] == [""]
    assert [route.inner for route in made.table([annotated(**AMBIENT)], RULES, DOMAIN)[0]] == ["", "hbone"]


@pytest.mark.parametrize(("inner", "method"), [("tls", "POST"), ("hbone", "CONNECT")])
def test_what_ambient_clients_cannot_have(inner: str, method: Method) -> None:
    """The process at the API server may be somebody else's by now."""
    (route,) = routes_of(annotated(), RULES, DOMAIN)
    url = "https://hello-x1.a.run.app" if method == "CONNECT" else route.url
    with pytest.raises(ValueError, match="carries nothing that the HBONE port"):
        replace(route, inner=inner, method=method, url=url).judged(RULES)


def test_the_original_s_label() -> None:
    found = service("fortio-cr-icq63pqnqq-uc")
    found["metadata"]["labels"] = {ORIGINAL_LABEL: "fortio-cr"}
    (route,) = routes_of(found, RULES, DOMAIN)
    assert route.host == "fortio-cr-icq63pqnqq-uc.demo.svc.cluster.local"
    assert route.url == "https://fortio-cr-icq63pqnqq-uc.a.run.app/_hbone/15003"
    found["metadata"]["name"] = "fortio-cr"
    with pytest.raises(ObjectError, match=r"set hbone\.dev/cloudrun-url"):
        routes_of(found, RULES, DOMAIN)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://other.a.run.app", "does not let namespace demo lead to other.a.run.app"),
        ("https://x-987654321.us-east1.run.app", "does not let"),
        ("https://x-123456789.us-east1.run.app.evil.com", "does not let"),
        ("https://evil.com/x-123456789.us-east1.run.app", "and no path"),
        ("http://hello-x1.a.run.app", "has to be https://HOST"),
        ("https://hello-x1.a.run.app:8443", "lead to hello-x1.a.run.app:8443"),
        ("https://x-123456789.us-east1.run.app:8443", "does not let"),
        ("https://hello-x1.a.run.app:99999", "port that is not in"),
        ("https://127.0.0.1", "host name"),
        ("https://{service}.a.run.app", "has to be https://HOST"),
        ("", "has to be https://HOST"),
    ],
)
def test_where_it_may_not_lead(url: str, why: str) -> None:
    with pytest.raises(ObjectError, match=why):
        routes_of(annotated(url), RULES, DOMAIN)


def test_another_port_where_the_rule_names_it() -> None:
    rules = [ClusterRule("demo", ("knative.example.com:8443",))]
    (route,) = routes_of(annotated("https://Knative.example.com:8443"), rules, DOMAIN)
    assert route.url == "https://knative.example.com:8443/_hbone/15003"
    with pytest.raises(ObjectError, match=r"lead to knative\.example\.com$"):
        routes_of(annotated("https://knative.example.com"), rules, DOMAIN)


def test_a_namespace_is_matched_as_a_whole() -> None:
    rules = [ClusterRule("team-*", ("**.run.app",))]
    for namespace in ("team-a", "team-b-c"):
        assert routes_of(service(namespace=namespace, **{URL: "https://a.run.app"}), [*rules], DOMAIN)
    with pytest.raises(ObjectError, match="no entry"):
        routes_of(service(namespace="my-team-a", **{URL: "https://a.run.app"}), rules, DOMAIN)


def test_services_of_a_project() -> None:
    assert routes_of(annotated("https://x-y-123456789.us-east1.run.app/"), RULES, DOMAIN)


def test_an_account_that_the_namespace_may_not_use() -> None:
    with pytest.raises(ObjectError, match="use the account admin@"):
        routes_of(annotated(**{ACCOUNT: "admin@project.iam.gserviceaccount.com"}), RULES, DOMAIN)


@pytest.mark.parametrize(
    "audience", ["https://pay-x1.a.run.app", "https://hello-x1.a.run.app/admin", "32555940559", "my-custom-1"]
)
def test_a_token_that_is_good_at_another_service(audience: str) -> None:
    with pytest.raises(ObjectError, match="does not let namespace demo use the audience"):
        routes_of(annotated(**{AUDIENCE: audience}), RULES, DOMAIN)


@pytest.mark.parametrize(
    "audience", ["https://hello-x2.a.run.app", "https://hello-123456789.us-east1.run.app", "custom-1"]
)
def test_a_token_that_is_good_where_the_namespace_may_lead(audience: str) -> None:
    (route,) = routes_of(annotated(**{AUDIENCE: audience}), RULES, DOMAIN)
    assert route.audience == audience


def test_a_namespace_that_no_rule_names() -> None:
    with pytest.raises(ObjectError, match="has no entry for namespace prod"):
        routes_of(service(namespace="prod", **{URL: "https://hello-x1.a.run.app"}), RULES, DOMAIN)


def test_a_service_entry_has_names_of_its_namespace_only() -> None:
    found = annotated()
    found["kind"] = "ServiceEntry"
    found["spec"] = {"hosts": ["a.demo.svc.cluster.local", "B.demo.svc.cluster.local"]}
    assert [route.host for route in routes_of(found, RULES, DOMAIN)] == [
        "a.demo.svc.cluster.local",
        "b.demo.svc.cluster.local",
    ]
    for host in (
        "api.prod.svc.cluster.local",
        "*.demo.svc.cluster.local",
        "example.com",
        "demo.svc.cluster.local",
    ):
        found["spec"] = {"hosts": [host]}
        with pytest.raises(ObjectError, match="a route is for these only"):
            routes_of(found, RULES, DOMAIN)


@pytest.mark.parametrize("label", ["a b", "a|b", "outbound_", "-a", "\u00fc", "a" * 64, "a\n"])
def test_a_host_that_no_service_can_have(label: str) -> None:
    found = annotated()
    found["kind"] = "ServiceEntry"
    found["spec"] = {"hosts": [f"{label}.demo.svc.cluster.local"]}
    routes, refused = ServiceRoutes().table([found], RULES, DOMAIN)
    assert routes == []
    assert [text.endswith("a route is for these only") for text in refused.values()] == [True]


@pytest.mark.parametrize("label", ["a b", "outbound_", "*", "**"])
def test_a_host_that_would_break_the_table_is_left_out_by_who_carries_tunnels(label: str) -> None:
    (good,) = routes_of(annotated(), RULES, DOMAIN)
    wanted = [replace(good, host=f"{label}.demo.svc.cluster.local"), good]
    table = RouteTable(JudgedRoutes().of(wanted, RULES, DOMAIN))
    assert [route.host for route in table.routes] == [good.host]


def test_one_object_has_not_all_the_names() -> None:
    found = annotated()
    found["kind"] = "ServiceEntry"
    found["spec"] = {"hosts": [f"a{number}.demo.svc.cluster.local" for number in range(10_000)]}
    routes, refused = ServiceRoutes().table([found], RULES, DOMAIN)
    assert routes == []
    assert list(refused.values()) == ["it has 10000 hosts, more than 256"]


def test_when_there_are_too_many_the_older_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_routes, "MAX_ROUTES", 2)
    objects = []
    for age, name in enumerate(("old", "z", "a")):
        objects.append(service(name, **{URL: "https://hello-x1.a.run.app"}))
        objects[-1]["metadata"]["creationTimestamp"] = f"2026-01-0{age + 1}"
    routes, refused = ServiceRoutes().table(objects, RULES, DOMAIN)
    assert [route.source for route in routes] == ["Service demo/old", "Service demo/z"]
    assert {str(name): text for name, text in refused.items()} == {
        "Service demo/a": "older objects have all of the 2 routes that there may be"
    }


def test_of_two_that_claim_a_name_the_older_has_it() -> None:
    old, new = annotated(), annotated("https://hello-x2.a.run.app")
    new["kind"] = "ServiceEntry"
    new["spec"] = {"hosts": ["hello.demo.svc.cluster.local"]}
    old["metadata"]["creationTimestamp"], new["metadata"]["creationTimestamp"] = "2026-01-01", "2026-01-02"
    routes, refused = ServiceRoutes().table([new, old, service("other")], RULES, DOMAIN)
    assert [route.url for route in routes] == ["https://hello-x1.a.run.app/_hbone/15003"]
    assert list(refused.values()) == ["hello.demo.svc.cluster.local is Service demo/hello's, which is older"]


def test_a_route_in_the_file_comes_first() -> None:
    of_file = RouteTable([Route("*.demo.svc.cluster.local", line=7)])
    routes, refused = ServiceRoutes().table([annotated()], RULES, DOMAIN, of_file)
    assert routes == []
    told = "*.demo.svc.cluster.local in hgate's file (line 7) matches hello.demo.svc.cluster.local first"
    assert list(refused.values()) == [told]


def test_what_changes_counts_at_once() -> None:
    routes = ServiceRoutes()
    found = annotated()
    assert [one.audience for one in routes.table([found], RULES, DOMAIN)[0]] == ["https://hello-x1.a.run.app"]
    found["metadata"]["annotations"] = {**found["metadata"]["annotations"], AUDIENCE: "custom-2"}
    assert [one.audience for one in routes.table([found], RULES, DOMAIN)[0]] == ["custom-2"]
    assert routes.table([found], RULES, DOMAIN) == routes.table([found], RULES, DOMAIN)
    assert routes.table([found], RULES[1:], DOMAIN)[0] == [], "and so does another rule"
    assert len(routes.table([found], RULES, DOMAIN)[0]) == 1
    found["metadata"]["annotations"] = {URL: "https://elsewhere.example"}
    assert routes.table([found], RULES, DOMAIN)[0] == []
    assert routes.table([], RULES, DOMAIN) == ([], {})


@given(st.text(max_size=80))
def test_whatever_a_url_is_it_leads_where_it_may_or_nowhere(url: str) -> None:
    try:
        (route,) = routes_of(annotated(url), RULES, DOMAIN)
    except ObjectError:
        return
    host = route.url.removeprefix("https://").partition("/")[0]
    assert host.endswith((".a.run.app", ".run.app")) and RULES[0].allows(CloudOrigin(host))
