from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rules.routes import (
    MAX_CACHED_TARGETS,
    Inner,
    Route,
    RouteTable,
    Target,
    Token,
    TokenRule,
)
from gateway.rules.templates import Template, TunnelUrl, read_target
from shared.address import Address
from shared.errors import ALERT_UNRECOGNIZED_NAME, NoRouteError, SniError
from shared.name_globs import compile_glob
from shared.net.tls.mesh_tls import MeshIdentity
from shared.tls import istio_sni
from shared.tls.istio_sni import Destination

HELLO = Destination("hello.demo.svc.cluster.local", 8080, "v1", "outbound")
HELLO_NAME = "outbound_.8080_.v1_.hello.demo.svc.cluster.local"
BARE = Destination("hello.demo.svc.cluster.local", None, "", "")


def tunnel(host: str, url: str, audience: str = "", connect: Address | None = None) -> Route:
    token = TokenRule(audience=Template.parse(audience)) if audience else TokenRule()
    return Route(host, tunnel=TunnelUrl.parse(url), token=token, connect=connect)


def forward(host: str, line: int | None = None) -> Route:
    return Route(host, forward=Address("b", 1), line=line)


def refusal(table: RouteTable, destination: Destination) -> str:
    with pytest.raises(NoRouteError) as caught:
        table.match(destination)
    assert caught.value.alert == ALERT_UNRECOGNIZED_NAME
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_a_tunnel_s_target() -> None:
    route = Route(
        host="*.demo.svc.cluster.local",
        tunnel=TunnelUrl.parse("https://{service}.{namespace}.a.run.app/_hbone/{port}/{subset}/{host}"),
        connect=Address("127.0.0.1", 24443),
        ca=Path("/etc/ca.pem"),
        token=TokenRule(audience=Template.parse("https://{service}.a.run.app")),
        line=7,
    )
    target = RouteTable([forward("other"), route]).match(HELLO)
    assert target == Target(
        kind="tunnel",
        route=1,
        line=7,
        dial=Address("127.0.0.1", 24443),
        scheme="https",
        host="hello.demo.a.run.app",
        port=443,
        path="/_hbone/8080/v1/hello.demo.svc.cluster.local",
        authority="hello.demo.a.run.app",
        ca=Path("/etc/ca.pem"),
        token=Token("audience", "https://hello.a.run.app"),
        service="hello",
        namespace="demo",
        is_connect=True,
    )
    assert target.url == "https://hello.demo.a.run.app/_hbone/8080/v1/hello.demo.svc.cluster.local"


def test_a_registered_name() -> None:
    route = Route(
        host="**", reverse=TunnelUrl.parse_registered("{service}.{namespace}.mesh/_hbone/22"), line=3
    )
    target = RouteTable([route]).match(HELLO)
    assert target == Target(
        kind="reverse",
        route=0,
        line=3,
        dial=Address("hello.demo.mesh", 15441),
        scheme="reverse",
        host="hello.demo.mesh",
        path="/_hbone/22",
        authority="hello.demo.mesh",
    )
    assert target.url == "reverse://hello.demo.mesh/_hbone/22"
    assert RouteTable([route]).explain("outbound_.80_._.hello.demo.svc").splitlines()[-2:] == [
        "goes to    a workload that has registered hello.demo.mesh",
        "asks for   POST /_hbone/22",
    ]
    with pytest.raises(NoRouteError, match="needs a name of the form SERVICE"):
        RouteTable([route]).match(istio_sni.parse("hello"))


@pytest.mark.parametrize(
    ("url", "connect", "is_connect", "named_by_client"),
    [
        ("https://{service}.example/x", None, False, True),
        ("https://hello.example/{service}", None, False, False),
        ("https://{service}.example/x", "10.0.0.5:443", True, False),
    ],
)
def test_who_has_chosen_the_name_that_is_looked_up(
    url: str, connect: str | None, is_connect: bool, named_by_client: bool
) -> None:
    route = Route(host="**", tunnel=TunnelUrl.parse(url), connect=Address.parse(connect) if connect else None)
    target = RouteTable([route]).match(HELLO)
    assert (target.is_connect, target.named_by_client) == (is_connect, named_by_client)


def test_a_connect_s_target() -> None:
    identity = MeshIdentity(Path("/etc/certs"), ("spiffe://demo.local/**",))
    route = Route(
        host="**",
        tunnel=TunnelUrl.parse_origin("https://ztunnel.{namespace}:15008"),
        method="CONNECT",
        identity=identity,
    )
    target = RouteTable([route]).match(HELLO)
    assert target == Target(
        kind="tunnel",
        route=0,
        line=None,
        dial=Address("ztunnel.demo", 15008),
        scheme="https",
        host="ztunnel.demo",
        port=15008,
        authority="ztunnel.demo:15008",
        method="CONNECT",
        connect_target="hello.demo.svc.cluster.local:8080",
        identity=identity,
        service="hello",
        namespace="demo",
        named_by_client=True,
    )
    assert target.url == "https://ztunnel.demo:15008"
    assert RouteTable([route]).explain("outbound_.80_._.hello.demo.svc").splitlines()[-6:] == [
        "goes to    CONNECT https://ztunnel.demo:15008",
        "asks for   hello.demo.svc:80",
        "dials      ztunnel.demo:15008",
        "proves     /etc/certs",
        "trusts     spiffe://demo.local/**",
        "token      none",
    ]


@pytest.mark.parametrize(
    ("authority", "asked"),
    [
        ("{host}:{port}", "hello.demo.svc.cluster.local:8080"),
        ("{service}.{namespace}.svc:{port}", "hello.demo.svc:8080"),
        ("10.1.2.3:80", "10.1.2.3:80"),
        ("[2001:db8::1]:{port}", "[2001:db8::1]:8080"),
    ],
)
def test_what_a_connect_asks_for(authority: str, asked: str) -> None:
    url = TunnelUrl.parse_origin("http://a:15009")
    table = RouteTable([Route("**", tunnel=url, method="CONNECT", authority=read_target(authority))])
    assert table.match(HELLO).connect_target == asked


def test_a_bare_name_has_no_port_to_ask_for() -> None:
    route = Route("**", tunnel=TunnelUrl.parse_origin("http://a:1"), method="CONNECT")
    assert "the name has no port, which {host}:{port} needs" in refusal(
        RouteTable([route]), Destination("hello.demo", None, "", "")
    )


def test_a_forward_s_target() -> None:
    target = RouteTable([forward("**", line=3)]).match(HELLO)
    assert target == Target("forward", route=0, line=3, dial=Address("b", 1), istio_alpn=True)
    assert "lets in    who offers ALPN istio, istio-h2," in RouteTable([forward("**")]).explain(HELLO_NAME)


def test_a_forward_that_lets_anybody_in() -> None:
    table = RouteTable([Route("**", forward=Address("b", 1), alpn="any")])
    assert not table.match(HELLO).istio_alpn
    assert "lets in" not in table.explain(HELLO_NAME)
    assert not RouteTable([forward("**")]).match(BARE).istio_alpn, "a bare name is no mesh client's"


@pytest.mark.parametrize(
    ("url", "authority", "dial"),
    [
        ("https://a.run.app/p", "a.run.app", Address("a.run.app", 443)),
        ("https://a.run.app:443/p", "a.run.app", Address("a.run.app", 443)),
        ("https://a.run.app:8443/p", "a.run.app:8443", Address("a.run.app", 8443)),
        ("https://a.run.app:{port}/p", "a.run.app:8080", Address("a.run.app", 8080)),
        ("http://A.run.app/p", "a.run.app", Address("a.run.app", 80)),
        ("http://a.run.app:443/p", "a.run.app:443", Address("a.run.app", 443)),
        ("https://127.0.0.1:8443/p", "127.0.0.1:8443", Address("127.0.0.1", 8443)),
        ("https://[::1]/p", "[::1]", Address("::1", 443)),
        ("https://[::1]:8443/p", "[::1]:8443", Address("::1", 8443)),
        ("https://{subset}---{service}.a.run.app/p", "v1---hello.a.run.app", None),
        ("http://{host}:{port}/p", "hello.demo.svc.cluster.local:8080", None),
    ],
)
def test_where_a_url_leads(url: str, authority: str, dial: Address | None) -> None:
    target = RouteTable([tunnel("**", url)]).match(HELLO)
    assert target.authority == authority
    assert target.dial == (dial or Address(target.host, target.port))
    assert target.url == f"{target.scheme}://{authority}/p"


def test_tokens() -> None:
    table = RouteTable(
        [
            Route("a", tunnel=TunnelUrl.parse("https://b/p")),
            Route(
                "b", tunnel=TunnelUrl.parse("https://b/p"), token=TokenRule(file=Path("/run/{service}.jwt"))
            ),
            tunnel("c", "https://b/p", audience="{host}:{port}"),
        ]
    )
    assert table.match(Destination("a", None, "", "")).token == Token("none")
    assert table.match(Destination("b", None, "", "")).token == Token("file", "/run/{service}.jwt")
    assert table.match(Destination("c", 80, "", "outbound")).token == Token("audience", "c:80")


@pytest.mark.parametrize(
    ("host", "audience", "expected"),
    [
        ("*.demo.svc", "https://{service}.a.run.app", True),
        ("*.demo.svc", "https://{namespace}.a.run.app", True),
        ("*.demo.svc", "https://a.run.app", False),
        ("hello.demo.svc", "https://{service}.a.run.app", False),
        ("hello.demo.svc", "{host}", False),
        ("hello.demo.svc", "{host}:{port}", True),
        ("hello.demo.svc", "{subset}", True),
    ],
)
def test_audiences_that_clients_choose(host: str, audience: str, expected: bool) -> None:
    table = RouteTable([tunnel(host, "https://b/p", audience)])
    target = table.match(Destination("hello.demo.svc", 80, "v1", "outbound"))
    assert target.token.is_of_client == expected


def test_the_first_match_decides_even_if_it_refuses() -> None:
    table = RouteTable(
        [
            tunnel("hello.**", "https://a.run.app:{port}/p"),
            forward("*.demo.svc.cluster.local", line=9),
        ]
    )
    assert table.match(HELLO).route == 0
    assert table.match(Destination("other.demo.svc.cluster.local", None, "", "")).route == 1
    assert refusal(table, BARE) == (
        "routes[0] cannot take hello.demo.svc.cluster.local: the name has no port, which {port} needs"
    )


def test_no_route() -> None:
    assert refusal(RouteTable([]), BARE) == (
        "no route for hello.demo.svc.cluster.local: none of 0 matches its host"
    )
    assert refusal(RouteTable([forward("a"), forward("b")]), HELLO) == (
        "no route for outbound_.8080_.v1_.hello.demo.svc.cluster.local: none of 2 matches its host"
    )


def test_a_name_is_repeated_only_in_part_and_visibly() -> None:
    text = refusal(RouteTable([]), Destination("é\x1b[2J\n" + "a" * 5000, None, "", ""))
    assert text.startswith(f"no route for ??[2J?{'a' * 91}...: ")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("{service}", "{service} in "),
        ("{namespace}", "{namespace} in "),
        ("{subset}", "the name has no subset, which "),
        ("{port}", "the name has no port, which "),
    ],
)
def test_a_value_that_a_name_does_not_have(missing: str, reason: str) -> None:
    destination = Destination("hello", None, "", "")
    for route in (
        tunnel("**", f"https://{missing}.a.run.app/p"),
        tunnel("**", f"https://a.run.app/p/{missing}"),
        tunnel("**", "https://a.run.app/p", audience=f"https://{missing}.a.run.app"),
    ):
        assert reason in refusal(RouteTable([route]), destination)


@pytest.mark.parametrize("host", ["hello.demo.svc", "hello.demo.svc.cluster.local", "hello.svc.svc.local"])
def test_the_name_of_a_service(host: str) -> None:
    table = RouteTable([tunnel("**", "https://{service}-{namespace}.run.app/p")])
    namespace = host.split(".")[1]
    assert table.match(istio_sni.parse(host)).host == f"hello-{namespace}.run.app"


@pytest.mark.parametrize(
    "host",
    [
        "admin.prod.demo.svc.cluster.local",
        "admin.prod.svc.demo.svc.cluster.local",
        "admin.prod.svc.x.demo.svc.cluster.local",
        "demo.svc.cluster.local",
    ],
)
@pytest.mark.parametrize("template", ["{service}-{namespace}", "{service}", "{namespace}"])
def test_a_name_does_not_cross_namespaces(host: str, template: str) -> None:
    """The second label of a longer name is no namespace, whatever the name ends with."""
    for glob in ("*.demo.svc.cluster.local", "**.demo.svc.cluster.local", "**.cluster.local"):
        for url, audience in (
            (f"https://{template}.run.app/p", ""),
            ("https://hello.run.app/p", f"https://{template}.run.app"),
        ):
            said = refusal(RouteTable([tunnel(glob, url, audience)]), Destination(host, 80, "", "outbound"))
            if compile_glob(glob).fullmatch(host):
                assert f" in {audience or url[8:-2]} needs a name of the form SERVICE.NAMESPACE.svc" in said
            else:
                assert "none of 1 matches its host" in said
    wide = RouteTable([tunnel("**.cluster.local", "https://hello.run.app/p/{host}")])
    assert wide.match(Destination(host, 80, "", "outbound")).path == f"/p/{host}"


# What a client might try in order to lead a token elsewhere, or to reach another path.
INJECTIONS = [
    "evil.com/",
    "evil.com#",
    "evil.com?",
    "evil.com:443/",
    "a@evil.com",
    "a%2fb",
    "a\\b",
    "a b",
    "a\r\nhost: evil.com",
    "a\0",
    "{port}",
    "..",
    "../..",
    "\u212a",  # the Kelvin sign, "k" in lower case
    "evil\u3002com",  # an ideographic full stop, "." to IDNA
    "[::1]",
    "-a",
]
EVERYWHERE = RouteTable(
    [
        tunnel(
            "**",
            "https://{service}.{subset}.{namespace}.run.app:{port}/_hbone/{subset}/{host}",
            audience="https://{service}.{subset}.run.app",
        )
    ]
)


@pytest.mark.parametrize("text", INJECTIONS, ids=ascii)
def test_a_name_cannot_change_a_url(text: str) -> None:
    refusal(EVERYWHERE, Destination(f"{text}.demo.svc.local", 80, "v1", "outbound"))
    refusal(EVERYWHERE, Destination(f"hello.{text}.svc.local", 80, "v1", "outbound"))
    refusal(EVERYWHERE, Destination(f"hello.demo.svc.{text}", 80, "v1", "outbound"))
    refusal(EVERYWHERE, Destination("hello.demo.svc.local", 80, text, "outbound"))


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "hello.1", "0x7f000001", "2130706433", ""])
def test_a_name_cannot_be_an_ip_address(host: str) -> None:
    refusal(RouteTable([tunnel("**", "http://{host}/p")]), Destination(host, None, "", ""))


def test_labels_that_only_together_make_an_ip_address() -> None:
    table = RouteTable([tunnel("**", "http://10.0.{namespace}.{service}/p")])
    assert "its tunnel URL has no valid host: '10.0.2.1'" in refusal(
        table, Destination("1.2.svc", None, "", "")
    )


def test_a_subset_is_one_label() -> None:
    assert "its subset evil.com is no DNS label" in refusal(
        EVERYWHERE, Destination("hello.demo.svc.local", 80, "evil.com", "outbound")
    )


def test_an_expanded_host_may_be_too_long() -> None:
    table = RouteTable([tunnel("**", "https://{service}x.run.app/p"), tunnel("b", "https://{host}.{host}/p")])
    assert table.match(Destination("a" * 62 + ".a.svc", None, "", "")).host == "a" * 62 + "x.run.app"
    assert "a label has 64 characters" in refusal(table, Destination("a" * 63 + ".a.svc", None, "", ""))
    table = RouteTable([tunnel("**", "https://{host}.{host}/p")])
    long = ".".join(["a" * 50] * 3)
    assert "the host name has 305 characters" in refusal(table, Destination(long, None, "", ""))


def test_a_port_is_in_range() -> None:
    table = RouteTable([tunnel("**", "https://a.run.app:{port}/p")])
    for port in (0, 65536, -1):
        assert f"its port {port} is not in 1..65535" in refusal(table, Destination("a", port, "", "outbound"))


LABEL_TEXT = st.text(string.ascii_letters + string.digits, max_size=70) | st.text(
    "aZ09-_./:@%{}\\ é\u212a\n", max_size=8
)


@given(LABEL_TEXT, LABEL_TEXT, LABEL_TEXT, st.none() | st.integers(-1, 70_000))
def test_every_url_has_the_template_s_structure(
    service: str, namespace: str, subset: str, port: int | None
) -> None:
    destination = Destination(f"{service}.{namespace}.svc.local", port, subset, "outbound")
    try:
        target = EVERYWHERE.match(destination)
    except NoRouteError as error:
        assert str(error).isprintable()
        return
    service, namespace = destination.service, destination.namespace
    assert target.host == f"{service}.{subset}.{namespace}.run.app".lower()
    assert target.host.count(".") == 4
    assert target.path == f"/_hbone/{subset}/{destination.host}".lower()
    assert target.path.count("/") == 3
    assert set(target.url) <= set(string.ascii_lowercase + string.digits + "-_./:")
    assert target.token == Token("audience", f"https://{service}.{subset}.run.app".lower())


@given(st.text(max_size=300))
def test_any_server_name_is_routed_or_refused(name: str) -> None:
    assert EVERYWHERE.explain(name).isascii()
    try:
        EVERYWHERE.match(istio_sni.parse(name))
    except NoRouteError as error:
        assert str(error).isprintable()


def test_a_glob_that_is_none() -> None:
    with pytest.raises(ValueError, match="a host has only"):
        RouteTable([forward("a?")])


def test_targets_are_kept_up_to_a_bound() -> None:
    table = RouteTable([tunnel("**", "https://{host}.a.run.app/p")])
    first = table.match(Destination("s0", None, "", ""))
    assert table.match(Destination("s0", None, "", "")) is first
    for index in range(1, MAX_CACHED_TARGETS):
        table.match(Destination(f"s{index}", None, "", ""))
    assert table.match(Destination("s0", None, "", "")) is first
    table.match(Destination("one-more", None, "", ""))
    again = table.match(Destination("s0", None, "", ""))
    assert again == first
    assert again is not first


def test_names_are_kept_as_they_are_written() -> None:
    table = RouteTable([tunnel("**", "https://{host}.a.run.app/p")])
    name = "outbound_.80_._.hello.demo"
    first = table.find(name)
    assert table.find(name) is first
    assert table.find(name.upper()) is first
    assert table.match(Destination("hello.demo", 80, "", "outbound")) is first
    for index in range(MAX_CACHED_TARGETS):
        table.find(f"s{index}")
    assert table.find(name) == first
    with pytest.raises(SniError):
        table.find("outbound_.0_._.hello.demo")


def test_refused_names_do_not_push_targets_out() -> None:
    table = RouteTable([tunnel("hello", "https://a.run.app/p")])
    target = table.match(Destination("hello", None, "", ""))
    for index in range(MAX_CACHED_TARGETS + 1):
        with pytest.raises(NoRouteError):
            table.match(Destination(f"s{index}", None, "", ""))
    assert table.match(Destination("hello", None, "", "")) is target


EXPLAINED = RouteTable(
    [
        forward("istiod.istio-system.svc", line=6),
        Route(
            "*.demo.svc.cluster.local",
            tunnel=TunnelUrl.parse("https://{service}.a.run.app/_hbone/{port}"),
            token=TokenRule(audience=Template.parse("https://{service}.a.run.app")),
            line=8,
        ),
        Route("plain", tunnel=TunnelUrl.parse("http://127.0.0.1:15009/_hbone/15003")),
    ]
)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "outbound_.8080_._.hello.demo.svc.cluster.local",
            [
                "name       outbound_.8080_._.hello.demo.svc.cluster.local",
                "parsed     host hello.demo.svc.cluster.local, port 8080, subset none, service hello,"
                " namespace demo",
                "routes[0] (line 6): istiod.istio-system.svc: no",
                "routes[1] (line 8): *.demo.svc.cluster.local: matches",
                "goes to    POST https://hello.a.run.app/_hbone/8080",
                "dials      hello.a.run.app:443",
                "trusts     the system certificates",
                "token      audience https://hello.a.run.app",
            ],
        ),
        (
            "plain",
            [
                "name       plain",
                "parsed     host plain, port none, subset none, service none, namespace none",
                "routes[0] (line 6): istiod.istio-system.svc: no",
                "routes[1] (line 8): *.demo.svc.cluster.local: no",
                "routes[2]: plain: matches",
                "goes to    POST http://127.0.0.1:15009/_hbone/15003",
                "dials      127.0.0.1:15009",
                "token      none",
            ],
        ),
        (
            "istiod.istio-system.svc",
            [
                "name       istiod.istio-system.svc",
                "parsed     host istiod.istio-system.svc, port none, subset none, service istiod,"
                " namespace istio-system",
                "routes[0] (line 6): istiod.istio-system.svc: matches",
                "goes to    b:1, as it is, without a tunnel",
            ],
        ),
        (
            "other",
            [
                "name       other",
                "parsed     host other, port none, subset none, service none, namespace none",
                "routes[0] (line 6): istiod.istio-system.svc: no",
                "routes[1] (line 8): *.demo.svc.cluster.local: no",
                "routes[2]: plain: no",
                "refused    no route for other: none of 3 matches its host",
            ],
        ),
        (
            "hello.demo.svc.cluster.local",
            [
                "name       hello.demo.svc.cluster.local",
                "parsed     host hello.demo.svc.cluster.local, port none, subset none, service hello,"
                " namespace demo",
                "routes[0] (line 6): istiod.istio-system.svc: no",
                "routes[1] (line 8): *.demo.svc.cluster.local: matches",
                "refused    routes[1] (line 8) cannot take hello.demo.svc.cluster.local:"
                " the name has no port, which /_hbone/{port} needs",
            ],
        ),
        (
            "a b\n",
            ["name       a b?", "refused    server name 'a b\\n': host 'a b\\n' is no DNS name"],
        ),
    ],
)
def test_explanations(name: str, lines: list[str]) -> None:
    assert EXPLAINED.explain(name).splitlines() == lines


# CONNECTs of the HBONE port.


def inner(host: str, url: str = "https://{service}.a.run.app/_hbone/15008", kind: Inner = "hbone") -> Route:
    return Route(host, tunnel=TunnelUrl.parse(url), inner=kind, line=3)


BOTH = RouteTable(
    [
        inner("*.prod.svc.cluster.local"),
        tunnel("*.prod.svc.cluster.local", "https://{service}.a.run.app/_hbone/15003"),
        inner("any.example.com", "https://{host}:{port}/_hbone/15003", "tls"),
        inner("only.example.com", "https://a.run.app/_hbone/15008"),
        inner("needs.example.com"),
    ]
)


@pytest.mark.parametrize(
    ("authority", "url"),
    [
        (Address("db.prod.svc.cluster.local", 5432), "https://db.a.run.app/_hbone/15008"),
        (Address("any.example.com", 8443), "https://any.example.com:8443/_hbone/15003"),
    ],
)
def test_the_target_of_a_connect(authority: Address, url: str) -> None:
    assert BOTH.takes_connect(authority.host)
    assert BOTH.find_connect(authority).url == url
    assert BOTH.find_connect(authority) is BOTH.find_connect(Address(authority.host, authority.port)), "kept"


def test_clients_by_sni_do_not_see_the_routes_of_connects() -> None:
    assert BOTH.find("db.prod.svc.cluster.local").url == "https://db.a.run.app/_hbone/15003"
    assert BOTH.find("outbound_.8443_._.any.example.com").url == "https://any.example.com:8443/_hbone/15003"
    with pytest.raises(NoRouteError) as caught:
        BOTH.find("only.example.com")
    assert str(caught.value) == (
        "no route for only.example.com: routes[3] (line 3) is for CONNECTs of the HBONE port, inner: hbone; "
        "mTLS by SNI needs a route of its own"
    )


@pytest.mark.parametrize(
    ("authority", "reason"),
    [
        (Address("hello.demo.svc", 80), "no route for hello.demo.svc:80: none with inner matches its host"),
        (
            Address("needs.example.com", 80),
            "routes[4] (line 3) cannot take needs.example.com:80: {service} in {service}.a.run.app needs a "
            "name of the form SERVICE.NAMESPACE.svc[.DOMAIN]",
        ),
    ],
)
def test_a_connect_that_no_route_can_take(authority: Address, reason: str) -> None:
    with pytest.raises(NoRouteError) as caught:
        BOTH.find_connect(authority)
    assert str(caught.value) == reason


def test_connects_are_kept_in_a_bounded_table() -> None:
    table = RouteTable([inner("**", "https://a.run.app/_hbone/15008")])
    for number in range(MAX_CACHED_TARGETS + 2):
        table.find_connect(Address(f"a{number}.example.com", 80))
    assert len(table._by_connect) == 2


def test_a_connect_is_explained() -> None:
    assert BOTH.explain_connect(Address("DB.prod.svc.cluster.local.", 5432)).splitlines() == [
        "authority  db.prod.svc.cluster.local:5432",
        "routes[0] (line 3): *.prod.svc.cluster.local: matches",
        "goes to    POST https://db.a.run.app/_hbone/15008",
        "dials      db.a.run.app:443",
        "trusts     the system certificates",
        "token      none",
        "carries    HBONE inside HBONE, which krun ends at 15008",
    ]
    assert "routes[1]: *.prod.svc.cluster.local: not for CONNECTs" in BOTH.explain_connect(
        Address("any.example.com", 80)
    )
    assert BOTH.explain_connect(Address("needs.example.com", 80)).splitlines()[-1].startswith("refused    ")
    assert BOTH.explain_connect(Address("hello.demo.svc", 80)).splitlines()[-1] == (
        "goes to    hello.demo.svc:80, which is looked up: no route with inner takes it"
    )
    assert "routes[0] (line 3): *.prod.svc.cluster.local: for CONNECTs of the HBONE port" in BOTH.explain(
        "any.example.com"
    )


OWN = MeshIdentity(Path("/etc/own"), ("spiffe://demo.local/ns/prod/sa/*",))
LONG = ".".join(["x" * 59] * 4)


def plain(host: str, sni: str | None) -> Route:
    """For CONNECTs whose bytes are plain."""
    url = TunnelUrl.parse("https://a.run.app/_hbone/15003")
    return Route(host, tunnel=url, inner="none", inner_identity=OWN, inner_sni=sni)


@pytest.mark.parametrize(
    ("sni", "name"),
    [(None, "outbound_.5432_._.db.prod.svc"), ("", ""), ("db.local", "db.local")],
)
def test_the_tls_inside_of_a_tunnel(sni: str | None, name: str) -> None:
    table = RouteTable([plain("**", sni)])
    target = table.find_connect(Address("db.prod.svc", 5432))
    assert (target.inner_identity, target.inner_sni) == (OWN, name)
    assert table.find("outbound_.5432_._.db.prod.svc").inner_identity is None, "which has TLS of its own"


def test_a_name_that_is_too_long_for_a_server_name() -> None:
    table = RouteTable([plain("**", None)])
    with pytest.raises(NoRouteError) as caught:
        table.find_connect(Address(LONG, 5432))
    assert str(caught.value).endswith("the server name of it has 257 characters, which TLS has no room for")
    assert RouteTable([plain("**", "")]).find_connect(Address(LONG, 5432)).inner_sni == ""


def test_the_tls_inside_is_explained() -> None:
    lines = RouteTable([plain("**", None)]).explain_connect(Address("db.prod.svc", 5432)).splitlines()
    assert lines[-4:] == [
        "carries    plain bytes, inside hgate's own mTLS, which the mTLS end at 15003 ends",
        "proves     /etc/own, inside",
        "trusts     spiffe://demo.local/ns/prod/sa/*, inside",
        "names      outbound_.5432_._.db.prod.svc, inside",
    ]
    unnamed = RouteTable([plain("**", "")]).explain_connect(Address("db.prod.svc", 5432))
    assert unnamed.endswith("names      nothing, inside")


def test_names_of_routes() -> None:
    assert [route.name for route in BOTH.routes[:3]] == [
        "hbone *.prod.svc.cluster.local",
        "*.prod.svc.cluster.local",
        "any.example.com",
    ]


def test_a_service_that_scales_to_zero() -> None:
    route = Route("hello.demo.svc", tunnel=TunnelUrl.parse("https://a.run.app/x"), cold_start_s=60.0)
    assert "waits      60 s for a service that starts" in RouteTable([route]).explain("hello.demo.svc")
