"""From a client's sidecar through gateway, front end and krun to the app, with each kind of mTLS end."""

from __future__ import annotations

from collections import Counter

from tests.mesh.objects import manifest
from tests.mesh.places import run_in, until
from tests.mesh.workloads import SERVICE, Workloads, ask, run_client

EFFECT_S = 15.0
"""For what istiod has been told to reach an Envoy: a third of a second on an idle machine."""


def test_a_request_arrives(end: str) -> None:
    answer = ask("web", "/hello")
    assert answer.status == 200, answer.body
    assert answer.headers["host"].startswith("hello.demo.svc.cluster.local")


def test_a_body_of_a_mebibyte_arrives(end: str, mesh: Workloads) -> None:
    body = mesh.folder / "body"
    body.write_bytes(bytes(1 << 20))
    answer = ask("web", "/", "--data-binary", f"@{body}")
    assert (answer.status, '"body": 1048576' in answer.body) == (200, True)


def test_http2(end: str) -> None:
    """Envoy under pilot-agent has been told that the app speaks HTTP/1.1; the other ends ask the app."""
    answer = ask("web", "/", "--http2-prior-knowledge", port=8082)
    assert answer.status == 200, answer.body
    assert f'"version": "{"1.1" if end == "pilot-agent" else "2"}"' in answer.body


def test_a_websocket(end: str) -> None:
    assert run_client("web", "tests.mesh.websocket_client", "one", "two") == "one\ntwo\n"


def test_eight_hundred_requests(end: str) -> None:
    """None is lost, whatever the gateway and the sidecars do with their connections meanwhile."""
    told = ["-Z", "--parallel-max", "16", "-o", "/dev/null", "-w", "%{http_code}\n"]
    codes = run_in(
        "web", "curl", "-sS", *told, "-H", f"Host: {SERVICE}:8080", "http://127.0.0.1:8080/[1-800]"
    )
    assert Counter(codes.stdout.split()) == {"200": 800}, codes.stderr


def test_a_policy_takes_effect_and_its_removal_too(end: str, mesh: Workloads) -> None:
    """Of the ends only pilot-agent's Envoy has istiod's policies."""
    if end != "pilot-agent":
        return
    assert ask("guest").status == 200
    mesh.plane.objects.apply(manifest("deny"))
    until(lambda: True if ask("guest").status == 403 else None, EFFECT_S, "guest is refused")
    assert ask("web").status == 200
    mesh.plane.objects.delete(manifest("deny"))
    until(lambda: True if ask("guest").status == 200 else None, EFFECT_S, "guest is let in again")
