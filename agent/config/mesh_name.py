"""What MESH may say: where the settings of the mesh are. The forms are the original's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FORMS = (
    "kubernetes, gke://[PROJECT[/LOCATION[/CLUSTER]]], file:///PATH, a GKE cluster's selfLink, td:[MESH] or -"
)

KUBERNETES = "kubernetes"
"""The cluster that KUBECONFIG, or the pod's own access, leads to."""

TRAFFIC_DIRECTOR = "td:"

TRAFFIC_DIRECTOR_FORMS = "td:, td:MESH, or td: with projects=, meshes=, networks= or scopes=, & between them"

_NAME = r"[A-Za-z0-9][A-Za-z0-9:._-]{0,99}"
_WHOLE_NAME = re.compile(_NAME)
_GKE = re.compile(rf"gke://(?:({_NAME})(?:/({_NAME})(?:/({_NAME}))?)?)?/?")
_RESOURCE = re.compile(
    rf"(?:https:)?//container\.googleapis\.com/(?:v1(?:beta1)?/)?"
    rf"projects/({_NAME})/(?:locations|zones)/({_NAME})/clusters/({_NAME})"
)

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}")  # as its own generator of such files checks a mesh's name
_TRAFFIC_DIRECTOR = {
    "projects": ("project_number", re.compile(r"[0-9]{1,20}"), ""),
    "networks": ("network", _LABEL, ""),
    "meshes": ("network", _LABEL, "mesh:"),
    "scopes": ("network", _LABEL, "scope:"),
}
"""Keys behind td: with the field, what a value may be, and what stands before it."""


@dataclass(frozen=True, slots=True)
class GkeName:
    """A GKE cluster; what is empty is to be found out."""

    project: str = ""
    location: str = ""
    """A region or a zone."""
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class TrafficDirector:
    """A mesh of Google's Traffic Director."""

    project_number: str = ""
    """Empty: to be found out."""

    network: str = "default"
    """What its node names have as network: a VPC network, `mesh:NAME` or `scope:NAME`."""


MeshName = GkeName | TrafficDirector | Path | str
"""A cluster, Traffic Director, a file, KUBERNETES; empty for none."""


def parse(text: str) -> MeshName:
    """Raises ValueError if it has none of the forms."""
    if text in ("", "-"):
        return ""
    if text == KUBERNETES:
        return text
    if text.startswith(TRAFFIC_DIRECTOR):
        return _traffic_director(text.removeprefix(TRAFFIC_DIRECTOR))
    if text.startswith("file:///"):
        return Path(text.removeprefix("file://"))
    found = _GKE.fullmatch(text) or _RESOURCE.fullmatch(text)
    if found is None:
        raise ValueError(f"must be {FORMS}")
    return GkeName(*(part or "" for part in found.groups()))


def _traffic_director(text: str) -> TrafficDirector:
    """`text` is MESH, or KEY=VALUE with & between them; the original has projects and scopes."""
    found: dict[str, str] = {}
    for part in filter(None, text.split("&")):
        key, equals, value = part.rpartition("=")
        known = _TRAFFIC_DIRECTOR.get(key if equals else "meshes")
        if known is None or known[0] in found or not known[1].fullmatch(value):
            raise ValueError(f"must be {TRAFFIC_DIRECTOR_FORMS}")
        found[known[0]] = known[2] + value
    return TrafficDirector(**found)


def name(text: str) -> str:
    """The name of a project, a location or a cluster. Raises ValueError if it can be none."""
    if not _WHOLE_NAME.fullmatch(text):
        raise ValueError("a name has letters, digits, hyphens, dots and colons only")
    return text


def of_context(context: str) -> GkeName | None:
    """The cluster that a kubeconfig's context names, as gcloud writes them: gke_PROJECT_LOCATION_CLUSTER, or
    connectgateway_PROJECT_[LOCATION_]CLUSTER for a Fleet's Connect gateway; None: it names none."""
    kind, _, rest = context.partition("_")
    parts = rest.split("_")
    if kind == "gke" and len(parts) == 3:
        return GkeName(*parts)
    if kind == "connectgateway" and len(parts) in (2, 3):
        return GkeName(parts[0], parts[1] if len(parts) == 3 else "", parts[-1])
    return None
