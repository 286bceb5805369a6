"""Where the sshd's keys are from: SSH_AUTH, a folder, the Secret `sshdebug` of the workload's namespace."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from agent.config.ssh_settings import SECRET, SshSettings
from agent.ssh import key_material
from agent.ssh.key_material import KeyMaterial
from agent.ssh.login import login
from shared.errors import HboneError, StatusError, UnavailableError

if TYPE_CHECKING:
    from agent.mounts.cluster_objects import ClusterObjects
    from shared.credentials.kubernetes.kubernetes_access import Access

log = logging.getLogger("hbone.ssh")

NOT_ENABLED = f"krun starts an sshd if there are keys in SSH_AUTH, HBONE_SSH_FOLDER or the Secret {SECRET}"

TOLD_S = 10.0
"""For the API server, where a person waits."""


class KeySources:
    """Those that `settings` name. `access` leads to the cluster that MESH names; None: it names none."""

    def __init__(self, settings: SshSettings, access: Access | None) -> None:
        self._settings = settings
        self._access = access
        self._objects: ClusterObjects | None = None
        self._of_secret = KeyMaterial()
        self.why_none = NOT_ENABLED
        """Why there is no key, if there is none."""

    @property
    def asks_cluster(self) -> bool:
        """Whether the Secret is looked for."""
        return self._access is not None or self._settings.asks_cluster

    @property
    def are_named(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._settings.auth) or self._settings.folder is not None or self.asks_cluster

    async def read(self, timeout_s: float) -> KeyMaterial:
        """What they say now; the API server has `timeout_s` seconds. Raises UnavailableError if a file cannot
        be read."""
        material = key_material.of_variable(self._settings.auth)
        if (folder := self._settings.folder) is not None:
            material = material.beside(await asyncio.to_thread(key_material.of_folder, folder))
        if self.asks_cluster:
            material = material.beside(await self._secret(timeout_s))
        return material

    async def _secret(self, timeout_s: float) -> KeyMaterial:
        """Without a Secret, or if we may not read it, there is no key: so it is off. While the server is away
        it is as it was."""
        from agent.config.mount_settings import ObjectName
        from agent.mounts.cluster_objects import ClusterObjects
        from shared.credentials.kubernetes.kubernetes_discovery import find_access

        name = ObjectName("secret", SECRET)
        try:
            if self._objects is None:
                access = self._access or find_access(self._settings.access)
                self._objects = ClusterObjects(access, self._settings.namespace)
            async with asyncio.timeout(timeout_s):
                found = await self._objects.read(name)
        except (HboneError, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            log.debug("Secret %s cannot be read: %s", SECRET, reason)
            self.why_none = f"{NOT_ENABLED}, and that cannot be read: {reason}"
            if isinstance(error, StatusError) and error.status in (401, 403):
                self._of_secret = KeyMaterial()
            return self._of_secret
        self.why_none = NOT_ENABLED
        if found is None:
            self._of_secret = KeyMaterial()
        else:
            place = self._objects.place(name).removeprefix("secret/")
            self._of_secret = key_material.of_files(found.all, f"Secret {place}")
        return self._of_secret


async def told(settings: SshSettings, access: Access | None) -> str:
    """Whether krun would start an sshd, and by what, for a person."""
    if settings.server == "none":
        return "none is started: HBONE_SSH=none"
    if settings.other is not None:
        return f"none is started: HBONE_SSHD={settings.other}"
    sources = KeySources(settings, access)
    try:
        material = await sources.read(TOLD_S)
    except HboneError as error:
        return f"none can be started: {error}"
    if not material.enables:
        return f"not enabled: {sources.why_none}"
    by = " and ".join(material.origins)
    try:
        login(settings.user)
    except UnavailableError as error:
        return f"enabled by {by}, but none can be started: {error}"
    keys = ", ".join(f"{key.fingerprint} {key.comment}".strip() for key in material.keys)
    return f"enabled by {by}, for {keys or 'whom its sshd_config says'}"
