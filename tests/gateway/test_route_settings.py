"""`routes:` of the gateway's file, read with the rest of it. Mistakes in them: test_config.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import GatewayConfig, parse
from gateway.route_settings import MAX_ROUTES
from gateway.routes import Route, RouteTable, TokenRule
from gateway.templates import Template

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
        ("tunnel: 'http://a.run.app/p'\n  token: {audience: '{host}'}", "{host}"),
    ],
)
def test_the_audience(fields: str, token: str | None) -> None:
    rule = one_route(parse(f"routes:\n- host: a\n  {fields}", "f.yaml")).token
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
