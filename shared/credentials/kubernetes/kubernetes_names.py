"""Names and numbers that Kubernetes fixes: a pod's folder, what may be a name, how long tokens last.

Constants and checks only, for settings are read at every start, and most starts need no more than this.
"""

from __future__ import annotations

import re
from pathlib import Path

SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What the kubelet mounts into each container (Kubernetes, "Accessing the Kubernetes API from a Pod")."""

# The names in that folder.
TOKEN_FILE = "token"
AUTHORITY_FILE = "ca.crt"
NAMESPACE_FILE = "namespace"

DEFAULT_NAMESPACE = "default"
DEFAULT_SERVICE_ACCOUNT = "default"

LIFETIME_S = 3600
"""What the kubelet asks for unless a pod says otherwise."""

MIN_LIFETIME_S = 600
"""The API server refuses less (Kubernetes API, TokenRequestSpec)."""

MAX_LIFETIME_S = 2**32
"""The API server refuses more; many clusters give a day at most, whatever is asked for."""

MAX_NAME_CHARS = 253

# RFC 1123, as the API server checks names: a label for a namespace, labels joined by dots for an account.
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL)
_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")


def is_label(name: str) -> bool:
    """Whether `name` is a label of RFC 1123, as names of namespaces and Services are."""
    return _NAMESPACE.fullmatch(name) is not None


def check_namespace(name: str) -> str:
    """The name of a namespace. Raises ValueError if it can be none."""
    if not _NAMESPACE.fullmatch(name):
        raise ValueError("no name of a namespace: lower-case letters, digits and inner hyphens, 63 at most")
    return name


def check_service_account(name: str) -> str:
    """The name of a service account. Raises ValueError if it can be none."""
    if not _SUBDOMAIN.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise ValueError("no name of a service account: lower-case letters, digits, inner hyphens and dots")
    return name


def check_object_name(name: str) -> str:
    """The name of a Secret or a ConfigMap. Raises ValueError if it can be none."""
    if not _SUBDOMAIN.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise ValueError("a Secret's or ConfigMap's name has lower-case letters, digits, inner - and dots")
    return name


def check_key(key: str) -> str:
    """A key in a Secret or a ConfigMap, which is a file's name where one is mounted (Kubernetes,
    IsConfigMapKey). Raises ValueError if it can be none."""
    if not _KEY.fullmatch(key) or len(key) > MAX_NAME_CHARS or key == "." or key.startswith(".."):
        raise ValueError("a key has letters, digits, -, _ and dots, and no two dots at its start")
    return key
