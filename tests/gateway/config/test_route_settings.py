"""`routes:` of the gateway's file, read with the rest of it. Mistakes in them: test_config.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gateway.config.config import GatewayConfig, parse
from gateway.config.route_settings import MAX_ROUTES
from gateway.rules.routes import Route, RouteTable, TokenRule
from gateway.rules.templates import Template
from shared.errors import ConfigError
from shared.net.tls.mesh_tls import MeshIdentity
from shared.trust.peer_patterns import TrustDomain

TUNNEL = "  tunnel: https://a.run.app/_hbone/15003"


def one_route(config: GatewayConfig) -> Route:
    (route,) = config.routes
    return route


@pytest.mark.parametrize(
    ("route", "most", "lifetime_s"),
    [
        ("{host: a, tunnel: 'https://a/b'}", None, 3300),
        ("{host: a, tunnel: 'https://a', method: CONNECT}", None, 0),
        ("{host: a, forward: 'b:1'}", None, 0),
        ("{host: a, tunnel: 'https://a/b', max_connections: 7, max_tunnel_lifetime: 4m}", 7, 240),
        ("{host: a, tunnel: 'https://a/b', max_connections: 0, max_tunnel_lifetime: 0}", 0, 0),
        ("{host: a, forward: 'b:1', max_connections: 7, max_tunnel_lifetime: 1h}", 7, 3600),
    ],
)
def test_limits_of_a_route(route: str, most: int | None, lifetime_s: float) -> None:
    config = parse(f"routes: [{route}]", "f.yaml")
    found = one_route(config)
    assert (found.max_connections, found.lifetime_s(config.limits.max_tunnel_lifetime_s)) == (
        most,
        lifetime_s,
    )


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ("tunnel: 'https://{service}.a.run.app/p'", "https://{service}.a.run.app"),
        ("tunnel: 'https://a.run.app:8443/p'", "https://a.run.app"),
        ("tunnel: 'https://[::1]:8443/p'", "https://[::1]"),
        ("tunnel: 'http://a.run.app/p'", None),
        ("tunnel: 'https://a.run.app/p'\n  token: none", None),
        ("tunnel: 'https://a.run.app/p'\n  token: {audience: any free text}", "any free text"),
        ("tunnel: 'http://127.0.0.1/p'\n  token: {audience: '{host}'}", "{host}"),
        ("tunnel: 'http://localhost/p'\n  token: {audience: '{host}'}", "{host}"),
        ("tunnel: 'http://a.run.app/p'\n  connect: '[::1]:80'\n  token: {audience: '{host}'}", "{host}"),
    ],
)
def test_the_audience(fields: str, token: str | None) -> None:
    rule = one_route(parse(f"routes:\n- host: a.b.svc\n  {fields}", "f.yaml")).token
    assert rule == TokenRule(audience=None if token is None else Template.parse(token))


def test_files_are_relative_to_the_file_that_names_them(folder: Path) -> None:
    text = f"routes:\n- host: a\n{TUNNEL}\n  ca: two.pem\n  token: {{file: run/token.jwt}}"
    route = one_route(parse(text, str(folder / "hgate.yaml")))
    assert route.ca == folder / "two.pem"
    # A token file may be written later.
    assert route.token == TokenRule(file=folder / "run" / "token.jwt")
    text = f"routes:\n- host: a\n{TUNNEL}\n  ca: {folder}/ca.pem\n  token: {{file: /run/token.jwt}}"
    route = one_route(parse(text, "f.yaml"))
    assert (route.ca, route.token.file) == (folder / "ca.pem", Path("/run/token.jwt"))


def test_a_token_file_for_an_audience(folder: Path) -> None:
    text = f"routes:\n- host: '*.a'\n{TUNNEL}\n  token: {{file: run/token.jwt, audience: 'https://{{host}}'}}"
    route = one_route(parse(text, str(folder / "hgate.yaml")))
    assert route.token == TokenRule(Template.parse("https://{host}"), folder / "run" / "token.jwt")
    explained = RouteTable([route]).explain("x.a").splitlines()[-1]
    assert explained == f"token      file {folder}/run/token.jwt, which has to be for https://x.a"


def test_paths_do_not_depend_on_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    route = one_route(parse(f"routes:\n- host: a\n{TUNNEL}\n  ca: ca.pem", "hgate.yaml"))
    assert route.ca == folder / "ca.pem"


def test_methods_and_case() -> None:
    text = "routes:\n- host: '*.Demo.SVC'\n  tunnel: https://ztunnel:15008\n  method: CONNECT"
    route = one_route(parse(text, "f.yaml"))
    assert (route.host, route.method, route.line) == ("*.demo.svc", "CONNECT", 2)


def test_as_many_routes_as_allowed() -> None:
    routes = "".join(f"- host: a{index}\n  forward: b:1\n" for index in range(MAX_ROUTES))
    assert len(RouteTable(parse("routes:\n" + routes, "f.yaml").routes).routes) == MAX_ROUTES


# A token in clear text.


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ("tunnel: http://a.run.app/p", "a.run.app"),
        ("tunnel: 'http://{service}.a.run.app/p'", "{service}.a.run.app"),
        ("tunnel: http://127.0.0.1/p\n  connect: 10.0.0.1:80", "10.0.0.1"),
        ("tunnel: http://a:15008\n  method: CONNECT", "a"),
    ],
)
@pytest.mark.parametrize("token", ["audience: https://a", "file: token.jwt"])
def test_a_token_does_not_go_in_clear_text(folder: Path, fields: str, where: str, token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"routes:\n- host: a.b.svc\n  token: {{{token}}}\n  {fields}", str(folder / "F"))
    assert str(caught.value) == (
        f"{folder}/F:3: routes[0].token: would go to {where} in clear text: use https, or token: none"
        " (http with a token is for loopback addresses only)"
    )


# What may be a mistake.


def warnings(folder: Path, routes: str) -> list[str]:
    return [
        text.removeprefix(f"{folder}/F:") for text in parse(f"routes:\n{routes}", str(folder / "F")).warnings
    ]


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (
            ["*.demo.svc", "hello.demo.svc"],
            ["4: routes[1]: is never reached: routes[0], *.demo.svc, matches every"],
        ),
        (["**.svc", "x.svc", "*.demo.svc"], ["4: routes[1]: is never", "6: routes[2]: is never"]),
        (["hello.demo.svc", "*.demo.svc"], []),
        (["*.demo.svc", "**.demo.svc"], []),
        (
            ["a-*.demo.svc", "a-b-*.demo.svc"],
            ["4: routes[1]: is never reached: routes[0], a-*.demo.svc, matches"],
        ),
    ],
)
def test_a_route_that_another_shadows(folder: Path, hosts: list[str], told: list[str]) -> None:
    routes = "".join(f"- host: '{host}'\n  forward: b:1\n" for host in hosts)
    found = warnings(folder, routes)
    assert len(found) == len(told)
    assert all(text.startswith(start) for text, start in zip(found, told, strict=True))


@pytest.mark.parametrize(
    ("host", "meant"),
    [
        ("*.svc.cluster.local", "**.svc.cluster.local"),
        ("*", "**"),
        ("hello.*", "hello.**"),
        ("*.cluster.local", "**.cluster.local"),
        ("api-*.*", "api-*.**"),
        ("*.demo.svc.cluster.local", None),
        ("*.example.net.invalid", None),
        ("istiod.istio-system.svc", None),
    ],
)
def test_a_star_that_was_meant_for_more_labels(folder: Path, host: str, meant: str | None) -> None:
    told = (
        "2: routes[0].host: matches no name of the form SERVICE.NAMESPACE.svc[.DOMAIN], for * is one label"
        f": did you mean {meant}?"
    )
    assert warnings(folder, f"- host: '{host}'\n  forward: b:1") == ([told] if meant else [])


@pytest.mark.parametrize(
    ("host", "template", "end"),
    [
        ("*.svc.cluster.local", "https://{service}.a.run.app/p", ": did you mean **.svc.cluster.local?"),
        ("hello.example.org.invalid", "https://a.run.app/{namespace}", ""),
    ],
)
def test_a_route_that_never_has_what_its_url_needs(host: str, template: str, end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"routes:\n- host: '{host}'\n  tunnel: '{template}'", "F")
    assert str(caught.value).startswith(
        "F:2: routes[0].host: matches no name of the form SERVICE.NAMESPACE.svc[.DOMAIN], which {"
    )
    assert str(caught.value).endswith(f" needs{end}")


def test_a_token_file_that_is_not_there(folder: Path) -> None:
    routes = f"- host: a\n{TUNNEL}\n  token: {{file: token.jwt}}"
    told, more = f"4: routes[0].token.file: {folder}/token.jwt cannot be read", "; it has to be there when it"
    assert warnings(folder, routes) == [f"{told}: No such file or directory{more} is needed"]
    os.mkfifo(folder / "token.jwt")
    assert warnings(folder, routes) == [f"{told}: it is a named pipe, not a regular file{more} is needed"]
    (folder / "token.jwt").unlink()
    (folder / "token.jwt").write_text("opaque")
    assert warnings(folder, routes) == []


def test_many_routes_are_looked_at_quickly() -> None:
    """Each against all before it."""
    routes = "".join(f"- host: '*.a{index}.**'\n  forward: b:1\n" for index in range(MAX_ROUTES))
    began = time.process_time()
    assert parse("routes:\n" + routes, "f.yaml").warnings == ()
    assert time.process_time() - began < 5.0, "half a second, if not beside others"


@pytest.mark.parametrize(
    ("fields", "first_flight", "warm"),
    [
        ("tunnel: 'https://a.run.app/p'", "with_request", False),
        ("tunnel: 'https://a.run.app/p'\n  first_flight: after_answer\n  warm: true", "after_answer", True),
        ("tunnel: 'https://a.run.app/_hbone/{port}'\n  warm: true", "with_request", True),
        ("forward: 'b:1'", "with_request", False),
    ],
)
def test_the_first_flight_and_a_warm_route(fields: str, first_flight: str, warm: bool) -> None:
    config = parse(f"routes:\n- host: a.b.svc\n  {fields}", "f.yaml")
    route = one_route(config)
    assert (route.first_flight, route.warm) == (first_flight, warm)
    targets = list(RouteTable(config.routes).warm())
    assert [target.authority for target in targets] == ["a.run.app"] * warm


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ("forward: 'b:1'\n  first_flight: with_request", "first_flight: has no meaning beside forward"),
        ("forward: 'b:1'\n  warm: true", "warm: has no meaning beside forward, only beside tunnel"),
        ("tunnel: 'https://a/b'\n  first_flight: late", "first_flight: must be with_request or after_answer"),
        ("tunnel: 'https://a/b'\n  warm: maybe", "warm: must be true or false"),
        (
            "tunnel: 'https://{service}.a.run.app/p'\n  warm: true",
            "warm: only a client's name says what {service}.a.run.app is: write it out",
        ),
        ("tunnel: 'https://a:{port}/p'\n  warm: true", "warm: only a client's name says what {port} is"),
        (
            "tunnel: 'https://a/p'\n  token: {audience: 'https://{service}'}\n  warm: true",
            "warm: only a client's name says what https://{service} is",
        ),
    ],
)
def test_what_cannot_stand_beside_a_route(fields: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"routes:\n- host: a.b.svc\n  {fields}", "f.yaml")
    assert text in str(caught.value)


# inner.

HBONE = "hbone: {certificates: ., rules: []}\n"
BY_CONNECT = "host: a, tunnel: 'https://a/_hbone/15008', inner: hbone"
BY_BOTH = "host: a, tunnel: 'https://a/_hbone/15003', inner: tls"
BY_NAME = "host: a, tunnel: 'https://a/_hbone/15003'"
PEER = "spiffe://demo.local/ns/demo/sa/hello"
PLAIN = f"host: a, tunnel: 'https://a/_hbone/15003', inner: none, peer: ['{PEER}']"


@pytest.mark.parametrize(
    ("route", "inner", "kinds"),
    [
        (BY_CONNECT, "hbone", (False, True)),
        (BY_BOTH, "tls", (True, True)),
        (PLAIN, "none", (True, True)),
        (BY_NAME, None, (True, False)),
    ],
)
def test_inner(route: str, inner: str | None, kinds: tuple[bool, bool]) -> None:
    found = one_route(config := parse(f"{HBONE}routes: [{{{route}}}]", "f.yaml"))
    assert found.inner == inner
    assert (found.takes_names, found.takes_connects) == kinds
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("head", "route", "error"),
    [
        ("", BY_CONNECT, "inner: needs a section hbone in the file, whose port takes CONNECTs"),
        (HBONE, f"{BY_CONNECT[:-5]}any", "inner: must be hbone, tls or none, not 'any'"),
        (HBONE, f"{BY_CONNECT[:-5]}none", "inner: none needs peer beside it: who has to end the TLS inside"),
        (HBONE, f"{BY_BOTH}, peer: ['{PEER}']", "peer: has a meaning only beside identity, or inner: none"),
        (HBONE, f"{BY_BOTH}, sni: none", "sni: has a meaning only beside identity, or inner: none"),
        (HBONE, PLAIN.replace("https", "http") + ", ca: ca.pem", "ca: has no meaning for an http tunnel"),
        (HBONE, PLAIN.replace(f"'{PEER}'", "'spiffe:'"), "peer[0]: "),
        (HBONE, f"{PLAIN}, sni: 'a b'", "sni: "),
        (HBONE, PLAIN.replace("/_hbone/15003", "") + ", method: CONNECT", "only beside method: POST"),
        (HBONE, "host: a, tunnel: 'https://a', method: CONNECT, inner: tls", "only beside method: POST"),
        (
            HBONE,
            "host: a, forward: 'a:1', inner: tls",
            "inner: has no meaning beside forward, only beside tunnel",
        ),
    ],
)
def test_a_mistaken_inner(head: str, route: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"{head}routes: [{{{route}}}]", "f.yaml")
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("route", "warning"),
    [
        (
            BY_CONNECT.replace("15008", "15003"),
            "leads to 15003, but inner: hbone is ended at 15008: did you mean /_hbone/15008?",
        ),
        (
            BY_BOTH.replace("15003", "15008"),
            "leads to 15008, but inner: tls is ended at 15003: did you mean /_hbone/15003?",
        ),
        (
            PLAIN.replace("15003", "15008"),
            "leads to 15008, but inner: none is ended at 15003: did you mean /_hbone/15003?",
        ),
    ],
)
def test_a_tunnel_to_the_other_end(route: str, warning: str) -> None:
    (told,) = parse(f"{HBONE}routes: [{{{route}}}]", "f.yaml").warnings
    assert told.endswith(warning)


def test_plain_members_by_default() -> None:
    """What hgate proves inside is what its HBONE port proves; the outer TLS is HTTPS with an ID token."""
    route = one_route(parse(f"{HBONE}routes: [{{{PLAIN}}}]", "/etc/hgate/f.yaml"))
    assert route.inner_identity == MeshIdentity(Path("/etc/hgate"), (PEER,), trust=TrustDomain())
    assert (route.inner_sni, route.identity, route.ca) == (None, None, None)
    assert route.token == TokenRule(audience=Template.parse("https://a"))


def test_all_about_plain_members(folder: Path) -> None:
    more = "identity: own, sni: hello.local, crl: crl.pem, ca: ca.pem"
    head = f"trust_domain: demo.local\n{HBONE}"
    route = one_route(parse(f"{head}routes: [{{{PLAIN}, {more}}}]", str(folder / "hgate.yaml")))
    trust = TrustDomain("demo.local")
    assert route.inner_identity == MeshIdentity(folder / "own", (PEER,), crl=folder / "crl.pem", trust=trust)
    assert (route.inner_sni, route.identity, route.ca) == ("hello.local", None, folder / "ca.pem")


def test_plain_members_without_a_server_name_or_outer_tls() -> None:
    text = PLAIN.replace("https", "http")
    route = one_route(parse(f"{HBONE}routes: [{{{text}, sni: none}}]", "f.yaml"))
    assert (route.inner_sni, route.token) == ("", TokenRule())


@pytest.mark.parametrize(
    ("host", "goal", "is_open"),
    [
        ("**", "{service}.a.run.app", True),
        ("*.prod.svc.**", "{service}-{namespace}.a.run.app", True),
        ("*.*.svc.cluster.*", "{service}.a.run.app", True),
        ("*.prod.svc.cluster.local", "{service}.a.run.app", False),
        ("**.svc.cluster.local", "{service}.a.run.app", False),
        ("**", "one.a.run.app", False),
        ("**", "{host}", False),
    ],
)
def test_a_service_with_a_name_in_each_domain(host: str, goal: str, is_open: bool) -> None:
    route = f"host: '{host}', tunnel: 'https://{goal}/_hbone/15008', inner: hbone"
    told = parse(f"{HBONE}routes: [{{{route}}}]", "f.yaml").warnings
    assert [text.endswith("End it with the cluster's domain") for text in told] == [True] * is_open
    by_sni = route.replace("15008", "15003").replace(", inner: hbone", "")
    assert not parse(f"routes: [{{{by_sni}}}]", "f.yaml").warnings


@pytest.mark.parametrize(
    ("first", "second", "is_reached"),
    [
        (BY_NAME, BY_CONNECT, True),
        (BY_CONNECT, BY_NAME, True),
        (BY_CONNECT, BY_CONNECT, False),
        (BY_BOTH, BY_NAME, False),
        (BY_NAME, BY_BOTH, False),
        (BY_BOTH, BY_CONNECT, False),
    ],
)
def test_one_host_for_both_kinds_of_client(first: str, second: str, is_reached: bool) -> None:
    text = f"{HBONE}routes: [{{{first}}}, {{{second}}}]"
    if is_reached:
        assert len(parse(text, "f.yaml").routes) == 2
        return
    with pytest.raises(ConfigError, match=r"routes\[1\]: is never reached: routes\[0\] has the same host"):
        parse(text, "f.yaml")


@pytest.mark.parametrize(
    ("first", "second", "warnings"),
    [(BY_NAME, BY_CONNECT, 0), (BY_CONNECT, BY_CONNECT, 1), (BY_NAME, BY_BOTH, 0), (BY_BOTH, BY_NAME, 1)],
)
def test_a_glob_that_covers_one_kind_of_client_only(first: str, second: str, warnings: int) -> None:
    text = f"{HBONE}routes: [{{{first.replace('host: a', 'host: **')}}}, {{{second}}}]".replace("**", "'**'")
    assert len(parse(text, "f.yaml").warnings) == warnings
