"""The URL of a service, by its name: what is kept, the cluster, Cloud Run's API, in this order.

Which credentials go where: those of the kubeconfig to its API server, an access token of Google's to Cloud
Run's API. Neither goes to the service, and the service's ID token goes to neither.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hbone import lookup_settings, proxy_choice
from hbone.kept import Kept, cache_folder, state_of
from hbone.services.found_service import FoundService
from hbone.services.named_service import ServiceName
from shared.credentials.token_sources import gcloud, token_settings
from shared.credentials.token_sources.token_settings import DEFAULT_METADATA_HOST, TokenSettings, is_there
from shared.errors import HboneError, UnavailableError, UsageError

if TYPE_CHECKING:
    from hbone.services.cluster_services import ClusterServices
    from hbone.services.run_services import RunServices
    from shared.credentials.token_sources.access_tokens import AccessTokens

KEPT_S = 600.0
"""How long an answer is used: URLs of services seldom change, and a second one within minutes is usual."""

NAMES_NEW_S = 60.0
"""How long names for completions count as new."""

NAMES_KEPT_S = 86_400.0
"""How long they are good for want of newer ones: a name that is gone does no harm there."""

# What decides whom is asked, besides the files that are looked at.
_VARIABLES = (
    "KUBECONFIG",
    "KUBERNETES_SERVICE_HOST",
    "KUBERNETES_SERVICE_PORT",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GCE_METADATA_HOST",
    "HBONE_RUN_URL",
    "HBONE_TOKENS",
)


class Lookup:
    """Looks services up, as the flags and variables of one command line say."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        project: str = "",
        region: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        """With a `project` or `region` only Cloud Run is asked. Raises UsageError if a variable is wrong."""
        self._environ = environ
        self._project = project
        self._region = region
        self._now = now
        self._settings = lookup_settings.from_env(environ)
        self._tokens = token_settings.from_env(environ)
        self._gcloud = gcloud.GcloudConfig(environ, self._tokens)
        self._kept = Kept(None if self._settings.kept == "none" else cache_folder(environ), now)

    async def find(self, wanted: ServiceName) -> FoundService:
        """Where the service is.

        A cluster that is there and cannot be asked ends the search for a name without a namespace: another
        service of Google's project may have the same one.

        Raises:
            UnavailableError: nobody knows it, or there is nobody to ask; says who was asked.
            UsageError: a variable is wrong.
        """
        question = self._question("service", wanted.name, wanted.namespace)
        kept = FoundService.of_kept(self._kept.get(question))
        if kept is not None:
            return kept
        refused = []
        for who in (self._in_cluster, self._in_run):
            try:
                found = await who(wanted)
            except UnavailableError as error:
                refused.append(str(error))
                continue
            except UsageError:
                raise
            except HboneError as error:
                refused.append(str(error))
                if wanted.namespace:
                    continue
                raise UnavailableError(
                    f"no service {wanted}: {error}; --project PROJECT asks Cloud Run only"
                ) from error
            self._kept.put(question, found.kept(), self._now() + KEPT_S)
            return found
        raise UnavailableError(
            f"no service {wanted}: {'; '.join(filter(None, refused))}; a host of this name is written as "
            f"https://{wanted}"
        )

    async def names(self) -> list[str]:
        """All services that somebody knows, for completions. If nobody can be asked: those of before."""
        kept = self._kept.get(self._question("names", "new"))
        if isinstance(kept, list):
            return _texts(kept)
        for who in (self._of_cluster, self._of_run):
            try:
                found = await who()
            except HboneError:
                continue
            self._kept.put(self._question("names", "new"), found, self._now() + NAMES_NEW_S)
            self._kept.put(self._question("names"), found, self._now() + NAMES_KEPT_S)
            return found
        return self.names_of_before()

    def names_of_before(self) -> list[str]:
        """What `names` has found in the last NAMES_KEPT_S; empty if that was nothing."""
        return _texts(self._kept.get(self._question("names")))

    def _question(self, *what: str) -> list[object]:
        """`what` is asked, and all that the answer depends on. A file that has changed, such as a kubeconfig
        in which another context is the current one, makes it another question."""
        told = [[self._environ.get(name, "") for name in _VARIABLES], gcloud.told(self._environ)]
        files = [*_kubeconfigs(self._environ), *self._gcloud.files()]
        return [*what, self._project, self._region, told, state_of(files)]

    async def _in_cluster(self, wanted: ServiceName) -> FoundService:
        return await self._cluster().find(wanted)

    async def _of_cluster(self) -> list[str]:
        return await self._cluster().names()

    async def _in_run(self, wanted: ServiceName) -> FoundService:
        return await self._run().find(wanted)

    async def _of_run(self) -> list[str]:
        return await self._run().names()

    def _cluster(self) -> ClusterServices:
        """Raises HboneError if there is no access to a cluster, or it is not to be asked."""
        if self._project or self._region:
            raise UnavailableError("")
        from hbone.services.cluster_services import MAX_ANSWER_BYTES, TIMEOUT_S, ClusterServices
        from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
        from shared.credentials.kubernetes.kubernetes_discovery import find_access

        access = find_access(self._environ)
        proxy = proxy_choice.for_url(access.server, self._environ)
        api = KubernetesApi(access, timeout_s=TIMEOUT_S, max_bytes=MAX_ANSWER_BYTES, proxy=proxy)
        return ClusterServices(api)

    def _run(self) -> RunServices:
        """Raises HboneError if there is no project, or no login."""
        project = self._project or self._gcloud.project
        if not project:
            raise UnavailableError(
                "no Google project to look in: --project, or gcloud config set project PROJECT"
            )
        from hbone.services.run_services import RunServices

        url, region = self._settings.run_url, self._region or self._gcloud.region
        proxy = proxy_choice.for_url(url, self._environ)
        return RunServices(url, project, region, self._access_tokens(), proxy)

    def _access_tokens(self) -> AccessTokens:
        """Who we are for Cloud Run's API. Raises UnavailableError if there is no login."""
        told, source = self._tokens, self._tokens.source
        if source in ("auto", "google") and told.credentials is not None:
            return _of_file(told)
        if source == "metadata" or (source == "auto" and told.metadata_host != DEFAULT_METADATA_HOST):
            from shared.credentials.token_sources.metadata_access import MetadataAccess

            return MetadataAccess(told.metadata_host, timeout_s=told.metadata_timeout_s)
        if source != "google" and (program := gcloud.find(self._environ)):
            return gcloud.GcloudAccess(program, self._gcloud)
        if is_there(told.gcloud):
            return _of_file(told)
        raise UnavailableError(
            "no login for Cloud Run's API: there is no gcloud in PATH, and GOOGLE_APPLICATION_CREDENTIALS is "
            "not set"
        )


def _texts(kept: object) -> list[str]:
    return [name for name in kept if isinstance(name, str)] if isinstance(kept, list) else []


def _of_file(settings: TokenSettings) -> AccessTokens:
    from shared.credentials.token_sources.google_credentials import GoogleAccess

    return GoogleAccess(settings)


def _kubeconfigs(environ: Mapping[str, str]) -> list[Path]:
    if named := environ.get("KUBECONFIG", "").strip():
        return [Path(name) for name in named.split(os.pathsep) if name]
    return [Path("~/.kube/config").expanduser()]
