"""What kubelet would give a pod's container: Secrets and ConfigMaps in files and variables, and the values
that the app's variables refer to. All of it is there before anything else starts: the mTLS end may need a
file of it, too.

The values of variables are handed to the app only; krun's environment, which Envoy and pilot-agent are given,
stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from agent.config.mount_settings import MountSettings
from agent.mounts.value_files import ValueFiles
from shared.blame import about
from shared.errors import HboneError, UnavailableError
from shared.patience import patiently
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

    from agent.mounts.cluster_objects import ClusterObjects
    from agent.mounts.mounted_folders import MountedFolders
    from shared.credentials.kubernetes.kubernetes_access import Access

T = TypeVar("T")

log = logging.getLogger("hbone.mounts")


class Mounts:
    """What `settings` and references ask for."""

    def __init__(
        self, settings: MountSettings, environ: Mapping[str, str] | None, access: Access | None
    ) -> None:
        """`environ` is what the app gets of krun's environment; None: krun starts no app. `access` leads to
        the cluster that MESH names; None: it names none."""
        self._settings = settings
        self._environ = environ
        self._access = access
        self._files = ValueFiles(settings.owner)
        self._folders: MountedFolders | None = None
        self._variables: dict[str, str] = {}

    async def start(self) -> None:
        """Returns when all is there. May be cancelled; `close` then ends what has started.

        Raises:
            UnavailableError: an object or a value cannot be had; the exit code is that of the reason.
            ConfigError: a reference is malformed, or the kubeconfig.
        """
        objects = self._objects() if self._settings.asks_cluster else None
        deadline = asyncio.get_running_loop().time() + self._settings.start_timeout_s
        works = [
            spawn(self._start_folders(objects, deadline), name="first files"),
            spawn(self._fill_environment(objects, deadline), name="the app's variables"),
        ]
        try:
            await asyncio.gather(*works)
        finally:
            for work in works:
                work.cancel()

    def environment(self) -> dict[str, str]:
        """The app's, once; afterwards krun knows no value any more."""
        variables, self._variables = self._variables, {}
        return variables

    def families(self) -> Iterator[Metric]:
        """Metrics."""
        if self._folders is not None:
            yield from self._folders.families()

    def close(self) -> None:
        """Mounted files stay as they are, temporary ones are removed."""
        if self._folders is not None:
            self._folders.close()
        self._files.close()

    def _objects(self) -> ClusterObjects:
        from agent.mounts.cluster_objects import ClusterObjects
        from shared.credentials.kubernetes.kubernetes_discovery import find_access

        access = self._access or find_access(self._settings.access)
        return ClusterObjects(access, self._settings.namespace)

    async def _start_folders(self, objects: ClusterObjects | None, deadline: float) -> None:
        settings = self._settings
        if objects is None or not settings.mounts:
            return
        from agent.mounts.mounted_folders import MountedFolders

        self._folders = MountedFolders(
            settings.mounts, objects, refresh_s=settings.refresh_s, owner=settings.owner
        )
        await self._in_time("HBONE_MOUNTS", self._folders.start, deadline)

    async def _fill_environment(self, objects: ClusterObjects | None, deadline: float) -> None:
        settings = self._settings
        if self._environ is None:
            if settings.env_from:
                log.warning("HBONE_ENV_FROM is not used: krun starts no app")
            return
        variables = dict(self._environ)
        if objects is not None and settings.env_from:
            from agent.mounts import env_from

            found = await self._in_time(
                "HBONE_ENV_FROM", lambda: env_from.variables(settings.env_from, objects), deadline
            )
            variables = {**found, **variables}
        if settings.has_references(variables):
            from agent.mesh.platform import Platform
            from agent.mounts.resolving import Resolver

            resolver = Resolver(settings, Platform(settings.metadata_host).bearer, self._files)
            left_s = max(deadline - asyncio.get_running_loop().time(), 0.0)
            variables.update(await resolver.resolve(variables, left_s, own=self._environ))
        self._variables = variables

    async def _in_time(self, variable: str, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """What `work` for the setting `variable` gives. Raises what it raises, as UnavailableError, and that
        when the deadline is over."""
        timeout_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                return await patiently(work, variable, log, timeout_s)
        except TimeoutError as error:
            raise UnavailableError(f"{variable}: no answer within {timeout_s:g} s") from error
        except HboneError as error:
            raise about(variable, error) from error
