"""What MESH may say: where the settings of the mesh are. The forms are the original's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FORMS = (
    "kubernetes, gke://[PROJECT[/LOCATION[/CLUSTER]]], file:///PATH, a GKE cluster's selfLink, td:NAME or -"
)

KUBERNETES = "kubernetes"
"""The cluster that KUBECONFIG, or the pod's own access, leads to."""

TRAFFIC_DIRECTOR = "td:"

_NAME = r"[A-Za-z0-9][A-Za-z0-9:._-]{0,99}"
_WHOLE_NAME = re.compile(_NAME)
_GKE = re.compile(rf"gke://(?:({_NAME})(?:/({_NAME})(?:/({_NAME}))?)?)?/?")
_RESOURCE = re.compile(
    rf"(?:https:)?//container\.googleapis\.com/(?:v1(?:beta1)?/)?"
    rf"projects/({_NAME})/(?:locations|zones)/({_NAME})/clusters/({_NAME})"
)


@dataclass(frozen=True, slots=True)
class GkeName:
    """A GKE cluster; what is empty is to be found out."""

    project: str = ""
    location: str = ""
    """A region or a zone."""
    cluster: str = ""


MeshName = GkeName | Path | str
"""A cluster, a file, KUBERNETES, `td:...`; empty for none."""


def parse(text: str) -> MeshName:
    """Raises ValueError if it has none of the forms."""
    if text in ("", "-"):
        return ""
    if text == KUBERNETES or (text.startswith(TRAFFIC_DIRECTOR) and text.isprintable()):
        return text
    if text.startswith("file:///"):
        return Path(text.removeprefix("file://"))
    found = _GKE.fullmatch(text) or _RESOURCE.fullmatch(text)
    if found is None:
        raise ValueError(f"must be {FORMS}")
    return GkeName(*(part or "" for part in found.groups()))


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
