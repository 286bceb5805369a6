"""Secrets and ConfigMaps as the API server has them (Kubernetes API, core v1), read one by one with the verb
`get`: who may list or watch could read all others of the namespace."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.config.mount_settings import ObjectName
from shared.credentials.kubernetes.kubernetes_access import Access
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_names import check_key, check_namespace
from shared.errors import ConfigError, StatusError, UnavailableError

MAX_BYTES = 8 << 20
"""Of an answer. An object holds 1 MiB; base64 makes 1.4 of it, JSON's escapes up to 6."""


@dataclass(frozen=True, slots=True)
class Values:
    """Of one object; kept out of `repr`."""

    texts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """By key; what variables are made of."""

    binaries: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """A ConfigMap's binaryData, which is for files only."""

    @property
    def all(self) -> dict[str, bytes]:
        """Both, by key."""
        return {**self.texts, **self.binaries}

    @property
    def digest(self) -> bytes:
        """Another one after each change of a value."""
        return hashlib.sha256(repr(sorted(self.all.items())).encode()).digest()


class ClusterObjects:
    """Those of one namespace."""

    def __init__(self, access: Access, namespace: str = "") -> None:
        """An empty `namespace` is that of `access`. Raises UnavailableError if that can be none."""
        try:
            self._namespace = check_namespace(namespace or access.namespace)
        except ValueError as error:
            raise UnavailableError(f"namespace of {access.server}: {error}") from error
        self._api = KubernetesApi(access, max_bytes=MAX_BYTES)

    def place(self, name: ObjectName) -> str:
        """Of the object `name`, for people."""
        return f"{name} of namespace {self._namespace}"

    async def read(self, name: ObjectName) -> Values | None:
        """Its values; None: there is no such object.

        Raises:
            StatusError: the server says no.
            ConfigError: a value or a key is malformed.
            DialError, UpstreamError, TokenError, UnavailableError: it cannot be asked.
        """
        path = f"/api/v1/namespaces/{self._namespace}/{name.resource}/{name.name}"
        try:
            answer = await self._api.ask("GET", path)
        except StatusError as error:
            if error.status == 404:
                return None
            raise
        data, binary = self._mapping(name, answer, "data"), self._mapping(name, answer, "binaryData")
        encoded = name.kind == "secret"
        return Values(
            {key: self._decoded(name, key, text, encoded=encoded) for key, text in data.items()},
            {key: self._decoded(name, key, text, encoded=True) for key, text in binary.items()},
        )

    async def need(self, name: ObjectName) -> Values:
        """As `read`, but one that is missing is an UnavailableError."""
        found = await self.read(name)
        if found is None:
            raise self.missing(name)
        return found

    def missing(self, name: ObjectName) -> UnavailableError:
        """The error that there is no such object."""
        return UnavailableError(f"there is no {self.place(name)} on {self._api.server}: create it")

    def _mapping(self, name: ObjectName, answer: Mapping[str, Any], field: str) -> dict[str, Any]:
        found = answer.get(field) or {}
        if not isinstance(found, dict):
            raise ConfigError(self.place(name), None, field, "is no mapping")
        return found

    def _decoded(self, name: ObjectName, key: str, text: object, *, encoded: bool) -> bytes:
        place = self.place(name), None, ascii(key[:60])
        try:
            check_key(key)
        except ValueError as error:
            raise ConfigError(*place, str(error)) from error
        if not isinstance(text, str):
            raise ConfigError(*place, "is no text")
        try:
            return base64.b64decode(text, validate=True) if encoded else text.encode()
        except ValueError:
            # Without the original: its traceback may have the value.
            raise ConfigError(*place, "is no base64" if encoded else "is no Unicode") from None
