"""One request to the API server: what it carries, what a refusal says, how long it may take."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from shared.credentials.kubernetes.kubernetes_access import Access, Pem
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi, rbac_rule
from shared.credentials.kubernetes.kubernetes_config import GivenToken
from shared.errors import ConflictError, DialError, StatusError, UpstreamError
from tests.support.api_server import LocalApiServer, access, status
from tests.support.metadata_server import closed_port, unsigned_token

PATH = "/api/v1/namespaces/demo/configmaps/mesh-env"


@pytest.fixture
async def server() -> AsyncIterator[LocalApiServer]:
    async with LocalApiServer() as server:
        server.answer = lambda _: (200, b'{"kind": "ConfigMap"}')
        yield server


async def test_a_question(server: LocalApiServer) -> None:
    assert await KubernetesApi(access(server)).ask("GET", PATH) == {"kind": "ConfigMap"}
    [asked] = server.asked
    assert (asked.method, asked.path, asked.body) == ("GET", PATH, b"")
    assert asked.headers["authorization"] == f"Bearer {server.allowed}"
    assert asked.headers["accept"] == "application/json"
    assert "content-type" not in asked.headers


async def test_an_object_to_be_created(server: LocalApiServer) -> None:
    await KubernetesApi(access(server)).ask("POST", PATH, {"a": "ü"})
    [asked] = server.asked
    assert asked.headers["content-type"] == "application/json"
    assert json.loads(asked.body) == {"a": "ü"}


class Renewed:
    """A token that has a successor, as the kubelet's file does."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = list(tokens)

    async def token(self) -> str:
        return self.tokens[0]

    def invalidate(self, rejected: str | None = None) -> None:
        if self.tokens[0] == rejected and len(self.tokens) > 1:
            del self.tokens[0]


async def test_a_rejected_token_is_replaced_once(server: LocalApiServer) -> None:
    server.answer = lambda asked: None if "old" in asked.headers["authorization"] else (200, b"{}")
    ca = Pem("ca", given=server.ca_pem)
    api = KubernetesApi(Access(server.url, Renewed("old-1", "new"), authority=ca))
    assert await api.ask("GET", PATH) == {}
    assert [asked.headers["authorization"] for asked in server.asked] == ["Bearer old-1", "Bearer new"]
    api = KubernetesApi(Access(server.url, Renewed("old-1", "old-2", "new"), authority=ca))
    with pytest.raises(StatusError, match="answered 401 Unauthorized; it does not know our token"):
        await api.ask("GET", PATH)


# What a refusal says.


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            status(403, "Forbidden", "not you"),
            "403 Forbidden: not you; a Role has to allow us the verb get on ",
        ),
        (status(401, "Unauthorized", "Unauthorized"), "401 Unauthorized; it does not know our token"),
        (status(404, "", ""), "404$"),
        (status(409, "Conflict", "a\nb\x1b[31m"), r"409 Conflict: a\\nb\\x1b\[31m$"),
        ((403, b"<html>front end</html>"), "403; a Role"),
        ((500, b'{"kind": "Status", "reason": 7, "message": []}'), "500$"),
        ((502, b'{"kind": "Pod", "reason": "x"}'), "502$"),
        ((302, b""), "302$"),
    ],
)
async def test_a_refusal(server: LocalApiServer, answer: tuple[int, bytes], told: str) -> None:
    server.answer = lambda _: answer
    with pytest.raises(StatusError, match=f"^{server.url} answered {told}") as error:
        await KubernetesApi(access(server)).ask("GET", PATH)
    assert error.value.status == answer[0]


async def test_a_message_is_cut_and_has_no_token(server: LocalApiServer) -> None:
    leaked = unsigned_token(sub="somebody", aud=["x"])
    server.answer = lambda _: status(400, "R" * 500, f"bad token {leaked} " + "x" * 5000)
    with pytest.raises(StatusError) as error:
        await KubernetesApi(access(server)).ask("GET", PATH)
    text = str(error.value)
    assert "bad token [redacted]" in text and "eyJ" not in text
    assert len(text) < 500


async def test_what_goes_wrong_on_the_way(server: LocalApiServer) -> None:
    ca = Pem("ca", given=server.ca_pem)
    nobody = Access(f"https://127.0.0.1:{closed_port()}", GivenToken("T0ken"), authority=ca)
    with pytest.raises(DialError, match="cannot connect"):
        await KubernetesApi(nobody).ask("GET", PATH)
    server.answer = lambda _: (200, b"x" * (1024 * 1024 + 1))
    with pytest.raises(UpstreamError, match="longer than 1048576 bytes"):
        await KubernetesApi(access(server)).ask("GET", PATH)
    with pytest.raises(UpstreamError, match="cannot ask"):
        await KubernetesApi(access(server)).ask("GET", "/a b")
    with pytest.raises(UpstreamError, match="malformed header") as error:
        await KubernetesApi(access(server, "T0ken\r\nx: y")).ask("GET", PATH)
    assert "T0ken" not in str(error.value)
    server.gate.clear()
    with pytest.raises(UpstreamError, match=r"no complete answer from 127\.0\.0\.1:\d+ within 0\.1 s"):
        await KubernetesApi(access(server), timeout_s=0.1).ask("GET", PATH)


@pytest.mark.parametrize(
    ("method", "path", "rule"),
    [
        (
            "POST",
            "/api/v1/namespaces/a/serviceaccounts/b/token",
            "verb create on serviceaccounts/token in namespace a",
        ),
        ("GET", "/api/v1/namespaces/a/pods?watch=1", "verb list on pods in namespace a"),
        ("GET", "/api/v1/namespaces/a/pods/b", "verb get on pods in namespace a"),
        ("GET", "/api/v1/nodes/n", "verb get on nodes"),
        ("GET", "/api/v1/namespaces/a", "verb get on namespaces"),
        (
            "DELETE",
            "/apis/apps/v1/namespaces/a/deployments/d",
            "verb delete on deployments of apps in namespace a",
        ),
        (
            "PUT",
            "/apis/apps/v1/namespaces/a/deployments/d/scale",
            "verb update on deployments/scale of apps in",
        ),
    ],
)
def test_the_rule_that_a_request_takes(method: str, path: str, rule: str) -> None:
    assert rbac_rule(method, path).startswith(rule)


# Server-side apply; with a real server: tests/kube/test_register.py.

SERVICE = {"kind": "Service", "metadata": {"name": "s", "namespace": "a"}}


async def test_apply(server: LocalApiServer) -> None:
    server.answer = lambda _: (200, b"{}")
    api = KubernetesApi(access(server))
    assert await api.apply("/api/v1/namespaces/a/services/s", SERVICE, "me") == {}
    assert await api.apply("/api/v1/namespaces/a/services/s", SERVICE, "me", dry_run=True) == {}
    real, dry = server.asked
    assert (real.method, real.headers["content-type"]) == ("PATCH", "application/apply-patch+yaml")
    assert real.path == "/api/v1/namespaces/a/services/s?fieldManager=me&force=false"
    assert dry.path == f"{real.path}&dryRun=All"
    assert json.loads(real.body) == SERVICE


def conflict(*causes: object) -> tuple[int, bytes]:
    return 409, json.dumps({"kind": "Status", "message": "no", "details": {"causes": causes}}).encode()


def cause(owner: str, field: object) -> dict[str, object]:
    return {"reason": "FieldManagerConflict", "message": f'conflict with "{owner}" using v1', "field": field}


@pytest.mark.parametrize(
    ("causes", "told"),
    [
        ([cause("kubectl", ".a")], ".a is kubectl's"),
        ([cause("x\ny", f".{'f' * 200}\x1b")], rf".{'f' * 99}... is x\ny's"),
        ([{**cause("x", ".a"), "message": None}], ".a is somebody's"),
        (
            [cause("x", f".{one}") for one in range(7)],
            ".0 is x's, .1 is x's, .2 is x's, .3 is x's, .4 is x's, and 2 more",
        ),
    ],
)
async def test_fields_of_others(server: LocalApiServer, causes: list[object], told: str) -> None:
    server.answer = lambda _: conflict(*causes)
    with pytest.raises(ConflictError) as error:
        await KubernetesApi(access(server)).apply(PATH, SERVICE, "me")
    assert str(error.value) == f"Service a/s is not written, for others own fields of it: {told}"


@pytest.mark.parametrize("causes", [[], ["x"], [{"reason": "other"}], "x"])
async def test_another_conflict(server: LocalApiServer, causes: object) -> None:
    server.answer = lambda _: (409, json.dumps({"kind": "Status", "details": {"causes": causes}}).encode())
    with pytest.raises(StatusError, match=r"answered 409$"):
        await KubernetesApi(access(server)).apply(PATH, SERVICE, "me")
