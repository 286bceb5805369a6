"""docs/original.md and the code agree about the variables of cloud-run-mesh."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from agent.config.pilot_settings import PASSED
from agent.config.settings import ENVIRONMENT

DOCUMENT = Path(__file__).parents[3] / "docs" / "original.md"

# The original's, by its source and its documents.
NAMES = [
    "MESH",
    "PROJECT_ID",
    "PROJECT_NUMBER",
    "CLUSTER_NAME",
    "CLUSTER_LOCATION",
    "KUBECONFIG",
    "GCE_METADATA_HOST",
    "WORKLOAD_NAMESPACE",
    "WORKLOAD_NAME",
    "WORKLOAD_SERVICE_ACCOUNT",
    "TRUST_DOMAIN",
    "XDS_ADDR",
    "CA_ADDR",
    "MESH_TENANT",
    "MCON_ADDR",
    "IMCON_ADDR",
    "CAROOT_ISTIOD",
    "CA_POOL",
    "CAS_POOL",
    "CAROOT_CAS",
    "MESH_DEBUG",
    "GATEWAY_NAME",
    "K8S_UID",
    "MESH_BASE_DIR",
    "PORT_*",
    "PORT",
    "startupProbe.http",
    "startupProbe.tcp",
    "OUTBOUND_IP_RANGES_INCLUDE",
    "OUTBOUND_PORTS_EXCLUDE",
    "SSH_AUTH",
    "KLOG_FLAGS",
    "PROXY_CONFIG",
    "ENVOY_LOG_LEVEL",
    "XDS_AGENT_DEBUG",
    "OSS_ISTIO",
    "MCP_CONFIG",
    "K_SERVICE",
    "K_REVISION",
    "GRPC_XDS_BOOTSTRAP",
    "ISTIO_META_*",
    "HTTP_PROXY",
]

ROWS = {
    name: (kind, text)
    for name, kind, text in re.findall(
        r"^\| `([\w.*]+)` \| (same|other|no) \| ?(.*)\|$", DOCUMENT.read_text(), re.MULTILINE
    )
}


def is_read(name: str) -> bool:
    return name.startswith(PASSED) or any(fnmatchcase(name, known) for known in ENVIRONMENT)


def test_each_variable_of_the_original_is_there() -> None:
    assert sorted(ROWS) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_what_is_said_of_it_is_so(name: str) -> None:
    kind, text = ROWS[name]
    assert is_read(name) is (kind == "same")
    if kind == "other":
        named = re.findall(r"`([A-Z][A-Z_]+)", text)
        assert named and all(is_read(other) for other in named)
