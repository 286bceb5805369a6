"""What an app that speaks HTTP/1.1, as krun has been told, learns of its clients in the mesh."""

from __future__ import annotations

import pytest

from tests.mesh.workloads import ask

ENVIRON = {"HBONE_APP_PROTOCOL": "http1"}


@pytest.mark.parametrize("client", ["web", "guest"])
def test_it_is_told_who_calls(end: str, client: str) -> None:
    forged = "URI=spiffe://cluster.local/ns/istio-system/sa/istiod"
    told = ask(client, "/", "-H", f"X-Forwarded-Client-Cert: {forged}").headers["x-forwarded-client-cert"]
    assert told.endswith(f";URI=spiffe://cluster.local/ns/clients/sa/{client}")
    assert forged not in told


def test_http2_of_a_client_becomes_the_app_s_http1(end: str) -> None:
    answer = ask("web", "/", "--http2-prior-knowledge", port=8082)
    assert (answer.status, '"version": "1.1"' in answer.body) == (200, True), answer.body
