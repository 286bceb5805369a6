"""One cluster, user or context of a kubeconfig file, read field by field."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.credentials.kubernetes.kubernetes_access import Pem
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """One cluster, user or context, and the file that it comes from."""

    file: Path
    field: str
    values: Mapping[str, Any]

    def wrong(self, key: str, reason: str) -> ConfigError:
        """An error about the field `key`, empty for the entry as a whole."""
        return ConfigError(str(self.file), None, f"{self.field}.{key}" if key else self.field, reason)

    def text(self, key: str) -> str:
        """A text, empty if it is not set."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "has to be a text")
        return value or ""

    def need(self, key: str) -> str:
        if not (text := self.text(key)):
            raise self.wrong(key, "not set")
        return text

    def path(self, key: str) -> Path | None:
        return self.file.parent / text if (text := self.text(key)) else None

    def pem(self, key: str) -> Pem | None:
        """What `KEY-data` holds in base64, else the file that `KEY` names."""
        data = self.text(f"{key}-data")
        if data:
            try:
                return Pem(
                    f"{self.file}: {self.field}.{key}-data", given=base64.b64decode(data, validate=True)
                )
            except binascii.Error:
                raise self.wrong(f"{key}-data", "no base64") from None
        path = self.path(key)
        return None if path is None else Pem(str(path), file=path)
