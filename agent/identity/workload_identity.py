"""What the workload proves itself with, where nobody mounts it: tokens and a certificate that krun keeps.

The parts start in the order in which they need each other: tokens in files first, for Istio's CA may ask for
one of them; then the token exchange; last the certificate, which Envoy needs at its start.

All of it goes on until the app and Envoy have ended: they may need a new token in their last seconds, too.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from agent.config.settings import Settings
from shared.trust.spiffe import SpiffeId

if TYPE_CHECKING:
    from agent.config.certificate_settings import CertificateSettings
    from agent.identity.sts_server import StsServer
    from agent.identity.token_files import TokenFiles
    from shared.credentials.certificates.certificate_keeper import CertificateKeeper
    from shared.credentials.kubernetes.kubernetes_access import Access

log = logging.getLogger("hbone.agent")

STS_STOP_S = 0.5
"""For token exchanges that are under way when the app and Envoy have ended: nobody is there to take them."""


class WorkloadIdentity:
    """What `settings` ask for, which by default is nothing."""

    def __init__(self, settings: Settings, access: Access | None = None) -> None:
        """`access` leads to the cluster that MESH names; None: it names none."""
        self._settings = settings
        self._access = access
        self._token_files: TokenFiles | None = None
        self._sts: StsServer | None = None
        self._keeper: CertificateKeeper | None = None

    async def start(self) -> None:
        """Returns when all is there. May be cancelled; `close` then ends what has started.

        Raises:
            UnavailableError: a file, a port or the way to an API server cannot be had.
            TokenError, SigningError: there was no token, or no certificate, in time.
            ConfigError: the kubeconfig or the roots are wrong.
        """
        await self._start_token_files()
        await self._start_exchange()
        await self._start_keeper()

    async def close(self) -> None:
        """Ends it; files stay as they are."""
        if self._keeper is not None:
            await self._keeper.close()
        if self._sts is not None:
            await self._sts.close(STS_STOP_S)
        if self._token_files is not None:
            self._token_files.close()

    async def _start_token_files(self) -> None:
        settings = self._settings.kubernetes
        if settings is None:
            return
        from agent.identity.token_files import make_token_files

        self._token_files = make_token_files(settings, self._access)
        await self._token_files.start(settings.start_timeout_s)

    async def _start_exchange(self) -> None:
        settings = self._settings.sts
        if settings is None:
            return
        from agent.identity.sts_exchange import GkeSts
        from agent.identity.sts_server import StsServer

        self._sts = StsServer(GkeSts(settings.google))
        log.info("token exchange on %s", await self._sts.start(settings.listen))

    async def _start_keeper(self) -> None:
        settings = self._settings.authority
        if settings is None:
            return
        from agent.identity.certificates import make_keeper

        settings = dataclasses.replace(settings, identity=self._identity(settings))
        if settings.ca == "istio" and settings.token_file is not None and not settings.token_file.exists():
            log.warning(
                "no token for Istio's CA in %s yet; HBONE_K8S_TOKENS=istio-ca: krun asks the cluster for one",
                settings.token_file,
            )
        self._keeper = make_keeper(settings, self._settings.certificates)
        await self._keeper.start()

    def _identity(self, settings: CertificateSettings) -> SpiffeId:
        """Whose certificate is asked for: if krun knows the namespace from its access to the cluster only,
        that is the one in its tokens, too, and Istio's CA signs for no other."""
        kubernetes = self._settings.kubernetes
        if kubernetes is None or kubernetes.namespace or self._token_files is None:
            return settings.identity
        return SpiffeId.of_workload(
            settings.identity.trust_domain, self._token_files.namespace, kubernetes.service_account
        )
