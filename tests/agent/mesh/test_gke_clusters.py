from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent.config.mesh_name import GkeName
from agent.mesh.gke_clusters import GkeClusters, reachable, region_of
from shared.credentials.certificates.authority import Authority
from shared.credentials.kubernetes.kubernetes_config import GivenToken
from shared.errors import StatusError, UnavailableError, UpstreamError
from tests.support.api_server import LocalApiServer
from tests.support.gke_server import PROJECT, TOKEN, GkeServer, cluster
from tests.support.metadata_server import closed_port

FLEET: dict[str, Any] = {
    "fleet": {"membership": "//gkehub.googleapis.com/projects/123/locations/global/memberships/c"}
}


@pytest.fixture
async def server() -> AsyncIterator[GkeServer]:
    async with GkeServer(Authority.create("google.example")) as server:
        yield server


def clusters(server: GkeServer, token: str = TOKEN, quota_project: str = "") -> GkeClusters:
    return GkeClusters(GivenToken(token), url=server.url, quota_project=quota_project, tls=server.tls())


async def test_one_that_is_named_is_asked_for(server: GkeServer) -> None:
    server.clusters = [cluster("c"), cluster("d")]
    found = await clusters(server, quota_project="payer").find(GkeName(PROJECT, "us-central1", "d"))
    assert found["name"] == "d"
    assert server.requests == [f"/v1/projects/{PROJECT}/locations/us-central1/clusters/d"]
    assert server.headers["x-goog-user-project"] == "payer"


async def test_of_several_the_best_is_taken(server: GkeServer) -> None:
    far = cluster("istio-far", "europe-west1", resourceLabels={"mesh_id": "x"})
    plain, labelled = cluster("b"), cluster("c", resourceLabels={"mesh_id": "x"})
    istio, zonal = cluster("istio-2", "us-central1-b"), cluster("a", "us-central1-f")
    server.clusters = [far, plain, labelled, istio, zonal]
    order = []
    while server.clusters:
        found = await clusters(server).find(GkeName(PROJECT), "us-central1")
        order.append(found["name"])
        server.clusters = [one for one in server.clusters if one["name"] != found["name"]]
    assert order == ["istio-2", "c", "a", "b", "istio-far"]


async def test_a_name_without_a_place_is_found(server: GkeServer) -> None:
    server.clusters = [cluster("istio"), cluster("c", "europe-west1")]
    assert (await clusters(server).find(GkeName(PROJECT, "", "c"), "us-central1"))[
        "location"
    ] == "europe-west1"


async def test_there_is_none(server: GkeServer) -> None:
    with pytest.raises(UnavailableError, match=f"no GKE cluster in projects/{PROJECT}: set MESH to another"):
        await clusters(server).find(GkeName(PROJECT))
    with pytest.raises(UnavailableError, match=f"no cluster c in projects/{PROJECT}"):
        await clusters(server).find(GkeName(PROJECT, "", "c"))


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (403, "; the account needs the role container.clusterViewer"),
        (404, "; is its name in MESH right"),
        (500, ""),
    ],
)
async def test_a_refusal_says_what_to_do(server: GkeServer, status: int, hint: str) -> None:
    server.refusal = (status, "Kubernetes Engine API\nhas not been used")
    with pytest.raises(
        StatusError, match=rf"answered {status}: Kubernetes Engine API.*has not been used{hint}"
    ):
        await clusters(server).find(GkeName(PROJECT))


async def test_no_token_is_in_an_error(server: GkeServer) -> None:
    with pytest.raises(StatusError, match="401") as caught:
        await clusters(server, "ya29.wrong-t0ken").find(GkeName(PROJECT))
    assert "wrong-t0ken" not in str(caught.value)


async def test_an_answer_without_what_is_needed(server: GkeServer) -> None:
    for broken in (cluster("c", endpoint=""), {**cluster("c"), "masterAuth": {"clusterCaCertificate": "?"}}):
        with pytest.raises(UpstreamError, match="tells no endpoint, or no authority"):
            clusters(server).access(broken, "demo")


async def test_a_control_plane_out_of_reach_is_asked_through_the_fleet(server: GkeServer) -> None:
    async with LocalApiServer() as api:
        near = cluster("c", endpoint=api.url.removeprefix("https://"), ca_pem=api.ca_pem, **FLEET)
        away = cluster("c", endpoint=f"127.0.0.1:{closed_port()}", ca_pem=api.ca_pem, **FLEET)
        it = clusters(server)
        gateway = it.by_connect_gateway(near, "demo")
        assert gateway is not None
        assert gateway.server == (
            "https://connectgateway.googleapis.com/v1/projects/123/locations/global/gkeMemberships/c"
        )
        assert (await reachable(it.access(near, "demo"), gateway)).server == api.url
        assert await reachable(it.access(away, "demo"), gateway) is gateway
    assert it.by_connect_gateway(cluster("c"), "demo") is None
    alone = it.access(away, "demo")
    assert await reachable(alone, None) is alone


def test_the_region_of_a_zone() -> None:
    assert [region_of(name) for name in ("us-central1-b", "us-central1", "")] == [
        "us-central1",
        "us-central1",
        "",
    ]
