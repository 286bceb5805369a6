"""Keys of Secrets and ConfigMaps as variables, by kubelet's rules (`envFrom`).

A later object goes over an earlier one. Each key can be a variable's name, also one with a hyphen or a dot. A
ConfigMap's binaryData are for files only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from agent.config.mount_settings import EnvFrom
from agent.mounts.cluster_objects import ClusterObjects, Values
from shared.errors import ConfigError

log = logging.getLogger("hbone.mounts")

MAX_VARIABLE_BYTES = 128 * 1024
"""Of a name, =, a value and a NUL: Linux' MAX_ARG_STRLEN (execve(2))."""


async def variables(sources: Sequence[EnvFrom], objects: ClusterObjects) -> dict[str, str]:
    """The variables of all `sources`. Raises what `ClusterObjects.need` raises, and ConfigError for a value
    that can be no variable's."""
    found: dict[str, str] = {}
    for source in sources:
        if source.optional:
            values = await objects.read(source.object) or Values()
        else:
            values = await objects.need(source.object)
        for key, value in values.texts.items():
            if b"\0" in value:
                reason = "has a NUL byte, which no variable can have: mount it as a file"
                raise ConfigError(objects.place(source.object), None, ascii(key), reason)
            name = f"{source.prefix}{key}"
            if len(os.fsencode(name)) + len(value) + 2 > MAX_VARIABLE_BYTES:
                reason = "is too long for a variable: mount it as a file"
                raise ConfigError(objects.place(source.object), None, ascii(key), reason)
            found[name] = os.fsdecode(value)
        log.info("%s: as variables, keys: %d", source.object, len(values.texts))
    return found
