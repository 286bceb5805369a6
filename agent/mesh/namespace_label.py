"""The namespace that a label `mesh-namespace` says: of the Cloud Run service, else of the project.

The original reads the project's. A project may have services of several namespaces, so the service's goes
over it. Both are optional: an account that may not read them gets one warning, and a start goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from agent.mesh.google_api import GoogleApi
from shared.credentials.kubernetes.kubernetes_names import check_namespace
from shared.errors import HboneError, StatusError

log = logging.getLogger("hbone.mesh")

LABEL = "mesh-namespace"

RUN, PROJECTS = "run.services.get", "resourcemanager.projects.get"
"""Permissions that the questions take."""

TIMEOUT_S = 3.0
"""For one answer: a start can do without."""


async def labelled_namespace(api: GoogleApi, places: Mapping[str, str]) -> str:
    """The first namespace that a label says; empty if none does. `places` are URLs of what has labels, by the
    permission that it takes to read them."""
    refused = []
    for permission, url in places.items():
        try:
            labels = (await api.ask(url, timeout_s=TIMEOUT_S)).get("labels")
        except HboneError as error:
            denied = isinstance(error, StatusError) and error.status == 403
            refused.append(f"{permission} is denied" if denied else str(error))
            continue
        namespace = labels.get(LABEL) if isinstance(labels, dict) else None
        if isinstance(namespace, str) and namespace:
            try:
                return check_namespace(namespace)
            except ValueError as error:
                refused.append(f"{url} has {namespace[:60]!r}: {error}")
    if refused:
        log.warning("no namespace by label %s: %s; set WORKLOAD_NAMESPACE", LABEL, "; ".join(refused))
    return ""
