"""Settings of krun about finding the mesh; `agent.mesh` reads them before all others are there."""

from __future__ import annotations

from typing import Any

from agent.config import mesh_name
from shared.config.fields import Setting
from shared.config.kinds import Parsed


def _mesh(text: str) -> str:
    mesh_name.parse(text)
    return text


def _https(text: str) -> str:
    if not text.startswith("https://") or not text.isascii() or " " in text:
        raise ValueError("must begin with https://, for it is shown our token")
    return text.rstrip("/")


MESH: Setting[str] = Setting(
    Parsed(_mesh, mesh_name.FORMS),
    "",
    "where the mesh's settings are: a cluster with a ConfigMap mesh-env, or a file",
    "krun reads mesh-env in the workload's namespace, then in istio-system, before all else. With td: it "
    "reads none, and the app's gRPC gets a file that leads to Traffic Director. Without MESH nothing is "
    "looked for.",
    unset="nowhere",
    variable="MESH",
)

QUOTA_PROJECT: Setting[str] = Setting(
    Parsed(mesh_name.name, "name"),
    "",
    "project that requests to Google's APIs are charged to",
    unset="the cluster's",
    variable="GOOGLE_CLOUD_QUOTA_PROJECT",
)
GKE_URL: Setting[str] = Setting(
    Parsed(_https, "https://HOST"),
    "https://container.googleapis.com",
    "address of the GKE API",
    variable="HBONE_GKE_URL",
)

RUN_URL: Setting[str] = Setting(
    Parsed(_https, "https://HOST"),
    "https://run.googleapis.com",
    "address of the Cloud Run API, which tells the service's label mesh-namespace",
    variable="HBONE_RUN_URL",
)
PROJECTS_URL: Setting[str] = Setting(
    Parsed(_https, "https://HOST"),
    "https://cloudresourcemanager.googleapis.com",
    "address of the Resource Manager API, which tells the project's label mesh-namespace",
    variable="HBONE_PROJECTS_URL",
)

SETTINGS: tuple[Setting[Any], ...] = (
    MESH,
    QUOTA_PROJECT,
    GKE_URL,
    RUN_URL,
    PROJECTS_URL,
)
"""PROJECT_ID, CLUSTER_LOCATION and CLUSTER_NAME, of which the token exchange is told, count for MESH, too."""
