from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.mesh_name import GkeName, MeshName, TrafficDirector, of_context, parse


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", ""),
        ("-", ""),
        ("kubernetes", "kubernetes"),
        ("td:", TrafficDirector()),
        ("td:shop", TrafficDirector(network="mesh:shop")),
        ("td:projects=123", TrafficDirector("123")),
        ("td:scopes=a", TrafficDirector(network="scope:a")),
        ("td:projects=123&scopes=a", TrafficDirector("123", "scope:a")),
        ("td:networks=vpc-1&projects=123", TrafficDirector("123", "vpc-1")),
        ("gke://", GkeName()),
        ("gke://p", GkeName("p")),
        ("gke://p/us-central1", GkeName("p", "us-central1")),
        ("gke://example.com:p/us-central1-b/c", GkeName("example.com:p", "us-central1-b", "c")),
        ("//container.googleapis.com/projects/p/locations/l/clusters/c", GkeName("p", "l", "c")),
        ("https://container.googleapis.com/v1/projects/p/zones/l/clusters/c", GkeName("p", "l", "c")),
        (
            "https://container.googleapis.com/v1beta1/projects/p/locations/l/clusters/c",
            GkeName("p", "l", "c"),
        ),
        ("file:///etc/mesh-env", Path("/etc/mesh-env")),
    ],
)
def test_the_forms(text: str, name: MeshName) -> None:
    assert parse(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "p/l/c",
        "gke://p/l/c/d",
        "gke://p//c",
        "gke://p/../c",
        "https://evil.example/v1/projects/p/locations/l/clusters/c",
        "//container.googleapis.com/projects/p/locations/l/clusters/c/nodePools/n",
        "file://etc/mesh-env",
    ],
)
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="must be kubernetes, gke://"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    ["td:a b", "td:a/../b", "td:1", "td:projects=shop", "td:zones=a", "td:meshes=a&scopes=b", "td:meshes="],
)
def test_a_wrong_name_of_traffic_director_s_is_refused_with_its_forms(text: str) -> None:
    with pytest.raises(ValueError, match="must be td:, td:MESH, or td: with projects="):
        parse(text)


@given(st.text(st.characters(codec="utf-8"), max_size=40) | st.from_regex(r"(\w+=[\w-]*&?)*", fullmatch=True))
def test_what_is_taken_as_a_name_of_traffic_director_s_is_safe_in_a_url(text: str) -> None:
    try:
        found = parse(f"td:{text}")
    except ValueError:
        return
    assert isinstance(found, TrafficDirector)
    assert re.fullmatch(r"[0-9]*", found.project_number)
    assert re.fullmatch(r"((mesh|scope):)?[A-Za-z][A-Za-z0-9-]*", found.network)


@pytest.mark.parametrize(
    ("context", "name"),
    [
        ("gke_p_us-central1_c", GkeName("p", "us-central1", "c")),
        ("connectgateway_p_c", GkeName("p", "", "c")),
        ("connectgateway_p_global_c", GkeName("p", "global", "c")),
        ("minikube", None),
        ("gke_p", None),
    ],
)
def test_contexts_that_gcloud_writes_name_a_cluster(context: str, name: GkeName | None) -> None:
    assert of_context(context) == name
