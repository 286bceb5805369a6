"""The dumps of the admin port, without a running gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.config.config import GatewayConfig, parse
from gateway.ops import admin
from shared.net.pool.pool import Pool
from shared.ops.http_server import Response
from shared.ops.token_counts import TokenStatus
from tests.support.wall_clock import START


def shown(response: Response) -> Any:
    assert (response.status, response.content_type) == (200, "application/json")
    return json.loads(response.body)


def test_the_configuration_with_all_kinds_of_values(tmp_path: Path) -> None:
    text = """
listen: ["[::1]:0"]
admin: off
routes:
  - host: "a.b.svc"
    tunnel: "https://{service}.example/_hbone/1"
    token: {file: token.jwt}
    connect: "10.0.0.5:1"
"""
    config = shown(admin.config(parse(text, str(tmp_path / "hgate.yaml"))))
    assert (config["listen"], config["admin"], config["health"]) == (["[::1]:0"], None, "0.0.0.0:15021")
    (route,) = config["routes"]
    assert route["tunnel"]["host"] == "{service}.example"
    assert route["token"] == {"audience": None, "file": str(tmp_path / "token.jwt"), "service_account": ""}
    assert (route["connect"], route["method"]) == ("10.0.0.5:1", "POST")
    assert config["limits"]["drain_delay_s"] is None


def test_workloads_that_have_registered() -> None:
    row = {"origin": "reverse://hello.svc", "streams": 1, "room": 2}
    assert shown(admin.connections(Pool(), 0.0, [row])) == [row]


def test_a_dump_is_for_people_too() -> None:
    assert Response.json({"a": [1]}).body == b'{\n  "a": [\n    1\n  ]\n}\n'
    assert b'"routes": []' in admin.config(GatewayConfig(routes=())).body


def test_tokens_are_told_of_and_not_told() -> None:
    tokens = [
        TokenStatus("me", "a", START - 60, START + 3540, "", None),
        TokenStatus("me", "b", None, None, "no token from there: no", START - 2, accepted=False),
    ]
    assert json.loads(admin.tokens(tokens, START).body) == [
        {
            "identity": "me",
            "audience": "a",
            "accepted": True,
            "age_s": 60,
            "expires": "2026-09-21T15:12:20Z",
            "expires_in_s": 3540,
            "last_failure": None,
            "failed_s_ago": None,
        },
        {
            "identity": "me",
            "audience": "b",
            "accepted": False,
            "age_s": None,
            "expires": None,
            "expires_in_s": None,
            "last_failure": "no token from there: no",
            "failed_s_ago": 2,
        },
    ]
