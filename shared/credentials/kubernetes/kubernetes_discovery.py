"""Finds the access to the Kubernetes API server: a pod's own folder, kept by the kubelet, or a kubeconfig."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shared import regular_files
from shared.address import Address
from shared.credentials.kubernetes.kubernetes_access import MAX_FILE_BYTES, Access, Pem
from shared.credentials.kubernetes.kubernetes_names import (
    AUTHORITY_FILE,
    DEFAULT_NAMESPACE,
    NAMESPACE_FILE,
    SERVICE_ACCOUNT_FOLDER,
    TOKEN_FILE,
)
from shared.credentials.tokens.tokens import FileToken
from shared.errors import UnavailableError

DEFAULT_PORT = 443


def find_access(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT_FOLDER) -> Access:
    """What there is, in this order: KUBECONFIG, the pod's own service account in `folder`, ~/.kube/config.

    Raises:
        UnavailableError: there is none of them, or a file cannot be read.
        ConfigError: the kubeconfig is wrong, or needs what we do not do.
    """
    # It imports YAML, 10 ms that a pod can spare.
    from shared.credentials.kubernetes.kubernetes_config import read_config

    named = environ.get("KUBECONFIG", "").strip()
    if named:
        return read_config([Path(name) for name in named.split(os.pathsep) if name])
    host = environ.get("KUBERNETES_SERVICE_HOST", "").strip()
    if host:
        return in_cluster(host, environ.get("KUBERNETES_SERVICE_PORT", "").strip(), folder)
    home = Path("~/.kube/config").expanduser()
    if home.is_file():
        return read_config([home])
    raise UnavailableError(
        "no Kubernetes API server: set KUBECONFIG (this is no pod, for KUBERNETES_SERVICE_HOST is not set, "
        f"and there is no {home})"
    )


def in_cluster(host: str, port: str = "", folder: Path = SERVICE_ACCOUNT_FOLDER) -> Access:
    """The access of a pod; its token is read again whenever the kubelet has renewed it.

    Raises UnavailableError when the address is malformed or there is no service account in `folder`.
    """
    try:
        address = Address.parse(
            f"[{host}]:{port or DEFAULT_PORT}" if ":" in host else f"{host}:{port or DEFAULT_PORT}"
        )
    except ValueError as error:
        raise UnavailableError(f"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT: {error}") from error
    token = folder / TOKEN_FILE
    if not token.is_file():
        raise UnavailableError(
            f"no service account token {token}: the pod has automountServiceAccountToken: false; "
            "leave that out, or set KUBECONFIG"
        )
    try:
        namespace = regular_files.read(folder / NAMESPACE_FILE, MAX_FILE_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        namespace = ""
    return Access(
        server=f"https://{address}",
        bearer=FileToken(token),
        namespace=namespace or DEFAULT_NAMESPACE,
        authority=Pem(str(folder / AUTHORITY_FILE), file=folder / AUTHORITY_FILE),
    )
