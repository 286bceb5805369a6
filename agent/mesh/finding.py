"""Finds the mesh that MESH names, and reads its settings: the cluster first, then its mesh-env.

Everything is plain REST. Without MESH nothing is asked, and nothing of this is imported.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agent.config import mesh_name, mesh_settings
from agent.config.certificate_settings import CertificateSettings
from agent.config.kubernetes_settings import KubernetesSettings
from agent.config.layers import Layer, Layers
from agent.config.mesh_name import GkeName, MeshName, TrafficDirector, of_context
from agent.config.pilot_settings import K_SERVICE
from agent.mesh import mesh_env
from agent.mesh.gke_clusters import GkeClusters, reachable, region_of
from agent.mesh.google_api import GoogleApi
from agent.mesh.namespace_label import PROJECTS, RUN, labelled_namespace
from agent.mesh.patience import patiently
from agent.mesh.platform import Platform
from shared.config.fields import Environment, table_of
from shared.config.kinds import Parsed
from shared.credentials.kubernetes.kubernetes_access import Access
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_discovery import find_access
from shared.credentials.kubernetes.kubernetes_names import DEFAULT_NAMESPACE

log = logging.getLogger("hbone.mesh")

TIMEOUT_S = 30.0
"""For all of it: Cloud Run gives a container four minutes, and the app may need most of them."""

NAME = Parsed(mesh_name.name, "name")

KUBECONFIG, CLUSTER = "kubeconfig", "GKE"
"""Names of layers."""


class Found(NamedTuple):
    """What there is to know about the mesh."""

    layers: Layers
    access: Access | None = None
    """To the cluster that MESH names; None: it names none."""


async def find(layers: Layers, name: MeshName, *, timeout_s: float = TIMEOUT_S) -> Found:
    """`layers` with what the mesh `name` and the platform say below them.

    Raises UsageError for a value that is wrong; UnavailableError, ConfigError, StatusError, DialError,
    UpstreamError, TokenError: all that `mesh_env.read` and `GkeClusters.find` raise, after attempts for
    `timeout_s` seconds if that may pass.
    """
    if isinstance(name, Path):
        return Found(layers.over(mesh_env.read_file(name)))
    if isinstance(name, TrafficDirector) or name == "":
        return Found(layers)
    told = layers.merged()
    found, access = await patiently(lambda: _found(told, name), "MESH", log, timeout_s)
    return Found(layers.over(*found), access)


async def _found(told: Mapping[str, str], name: GkeName | str) -> tuple[list[Layer], Access]:
    read = Environment(told)
    platform = Platform(read(table_of(CertificateSettings)["metadata_host"]))
    if isinstance(name, GkeName):
        access, cluster = await _gke(read, name, platform)
    else:
        access = find_access(told)
        cluster = _layer(KUBECONFIG, of_context(access.context) or GkeName())
    namespace = _namespace(read) or access.namespace
    values = dict(cluster.values)
    if namespace != DEFAULT_NAMESPACE:
        values["WORKLOAD_NAMESPACE"] = namespace
    log.info("MESH: %s of %s for namespace %s", mesh_env.NAME, access.server, namespace)
    found = await mesh_env.read(KubernetesApi(access), namespace)
    return [*found, dataclasses.replace(cluster, values=values)], access


async def _gke(read: Environment, name: GkeName, platform: Platform) -> tuple[Access, Layer]:
    project = name.project or _name(read, "PROJECT_ID") or await platform.project()
    location = name.location or _name(read, "CLUSTER_LOCATION")
    asked = GkeName(project, location, name.cluster or _name(read, "CLUSTER_NAME"))
    region = region_of(location) or await platform.region()
    api = GoogleApi(platform.bearer, read(mesh_settings.QUOTA_PROJECT))
    namespace = _namespace(read) or await platform.namespace()
    if not namespace:
        namespace = await labelled_namespace(api, _labelled(read, project, region))
    clusters = GkeClusters(platform.bearer, url=read(mesh_settings.GKE_URL), quota_project=api.quota_project)
    cluster = await clusters.find(asked, region)
    access = clusters.access(cluster, namespace or DEFAULT_NAMESPACE)
    access = await reachable(access, clusters.by_connect_gateway(cluster, access.namespace))
    known = GkeName(project, str(cluster.get("location", "")), str(cluster.get("name", "")))
    return access, _layer(CLUSTER, known)


def _labelled(read: Environment, project: str, region: str) -> dict[str, str]:
    """What may have a label with the namespace, for `labelled_namespace`."""
    places = {PROJECTS: f"{read(mesh_settings.PROJECTS_URL)}/v3/projects/{project}"}
    service = _name(read, K_SERVICE)
    if not service:
        return places
    url = f"{read(mesh_settings.RUN_URL)}/v2/projects/{project}/locations/{region}/services/{service}"
    return {RUN: url, **places}


def _namespace(read: Environment) -> str:
    """The one that is set, or an empty text. Raises UsageError if it is no name."""
    namespace: str = read(table_of(KubernetesSettings)["namespace"])
    return namespace


def _name(read: Environment, variable: str) -> str:
    """Likewise of a project, a location or a cluster: it becomes part of a URL."""
    text = read.text(variable)
    return str(read.parsed(variable, NAME, text)) if text else ""


def _layer(place: str, name: GkeName) -> Layer:
    values = {"PROJECT_ID": name.project, "CLUSTER_LOCATION": name.location, "CLUSTER_NAME": name.cluster}
    return Layer(place, {key: value for key, value in values.items() if value})
