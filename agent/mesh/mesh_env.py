"""`mesh-env`: a ConfigMap with settings for all workloads of a namespace, or of the mesh (istio-system).

Its keys are krun's variables, as the original's were, and those that pilot-agent is passed. Those that say
which program runs, or how the cluster is reached, are the container's own to say, and are left out here; so
are keys that krun does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agent.config.layers import DEFAULT, FLAG, PROCESS, Layer, Layers
from agent.config.pilot_settings import PASSED
from agent.config.settings import ENVIRONMENT
from shared import regular_files
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import ConfigError, StatusError, UnavailableError, UsageError

log = logging.getLogger("hbone.mesh")

NAME = "mesh-env"
SYSTEM_NAMESPACE = "istio-system"

MAX_FILE_BYTES = 1 << 20
"""As much as a ConfigMap can hold."""

OWN = frozenset(
    {
        *("MESH", "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"),
        *("ENVOY_BIN", "HBONE_PILOT_AGENT", "ISTIO_BOOTSTRAP"),
        *("HBONE_LOG_LEVEL", "HBONE_LOG_FORMAT", "HBONE_CORE_DUMPS"),
        *("SSH_AUTH", "HBONE_SSH", "HBONE_SSH_FOLDER", "HBONE_SSH_USER", "HBONE_SSH_LISTEN"),
    }
)
"""Variables that only the container says."""


async def read(api: KubernetesApi, namespace: str) -> list[Layer]:
    """The mesh-env of `namespace` and that of istio-system, the stronger first; one that is not there, or
    that we may not read, is left out if there is the other.

    Raises:
        StatusError: we may read none of them.
        UnavailableError: there is none.
        DialError, UpstreamError, TokenError: the API server cannot be asked.
        ConfigError: one is malformed.
    """
    layers: list[Layer] = []
    refusals: list[StatusError] = []
    places = list(dict.fromkeys((namespace, SYSTEM_NAMESPACE)))
    for place in places:
        try:
            found = await api.ask("GET", f"/api/v1/namespaces/{place}/configmaps/{NAME}")
        except StatusError as error:
            if error.status not in (403, 404):
                raise
            refusals.append(error)
            continue
        where = f"{NAME} of {place}"
        layers.append(Layer(where, chosen(found.get("data") or {}, where)))
    denied = [error for error in refusals if error.status == 403]
    if not layers:
        if denied:
            raise denied[0]
        raise UnavailableError(
            f"no ConfigMap {NAME} in {' or '.join(places)} of {api.server}: create one, or leave MESH out"
        )
    for refusal in denied:
        log.warning("%s", refusal)
    return layers


def read_file(path: Path) -> Layer:
    """The same from a file: a ConfigMap's manifest, a mapping in YAML or JSON, or lines NAME=VALUE. Raises
    UnavailableError, ConfigError."""
    import yaml

    try:
        text = regular_files.read(path, MAX_FILE_BYTES).decode()
        content = yaml.safe_load(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise UnavailableError(f"MESH=file://{path}: {reason}") from error
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(str(path), None, "", "no valid YAML") from None
    if isinstance(content, str):
        content = _lines(path, text)
    elif isinstance(content, dict) and content.get("kind") == "ConfigMap":
        content = content.get("data")
    return Layer(str(path), chosen(content or {}, str(path)))


def chosen(data: object, place: str) -> dict[str, str]:
    """What counts of a mesh-env's data. Raises ConfigError if it is no mapping of texts."""
    if not isinstance(data, Mapping):
        raise ConfigError(place, None, "", "has to be a mapping of variables")
    values = {name: _value(place, name, value) for name, value in data.items()}
    known = {name: value for name, value in values.items() if _is_known(name)}
    if strange := sorted(values.keys() - known.keys()):
        log.info("%s: not used: %s", place, ", ".join(name[:60] for name in strange[:20]))
    return known


def _value(place: str, name: object, value: Any) -> str:
    if isinstance(name, str) and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(place, None, str(name)[:60], "has to be a text: put it into quotes")


def _is_known(name: str) -> bool:
    if name in OWN:
        return False
    return name.startswith(PASSED) or any(fnmatchcase(name, known) for known in ENVIRONMENT)


def _lines(path: Path, text: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.strip().partition("=")
        if name and not name.startswith("#"):
            if not equals:
                raise ConfigError(str(path), number, "", "has to be NAME=VALUE")
            found[name.strip()] = value.strip()
    return found


def blamed(error: UsageError, layers: Layers) -> UsageError:
    """`error` about a variable, with where its value is, if that is not the environment."""
    told = str(error)
    name = told.removeprefix("invalid ").partition("=")[0]
    origin = layers.origin(name)
    return error if origin in (FLAG, PROCESS, DEFAULT) else UsageError(f"{origin}: {told}")
