"""Which source of tokens the settings mean, and what `auto` means on this machine. A source that is not
chosen is not imported.

`auto` is the first of these that is there:

1. the credentials in the file that GOOGLE_APPLICATION_CREDENTIALS names;
2. the exchange on GKE, when its settings are complete and there is a Kubernetes token;
3. the metadata server, if it answers: it is asked once, for a second at most, but not at all when
   GCE_METADATA_HOST names one. That it did not answer counts for PROBE_AGAIN_S, for on GKE it comes up later
   than the pod;
4. the credentials in gcloud's file;
5. the gcloud command's login, where the caller says so: for people. It goes before 4 if the file there is a
   person's login, too, for what that gives is accepted by nobody.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shared.credentials.token_sources.token_settings import (
    DEFAULT_METADATA_HOST,
    TokenSettings,
    from_env,
    is_there,
)
from shared.credentials.tokens.minting import Minted, Minter
from shared.errors import HboneError, TokenError, UsageError

if TYPE_CHECKING:
    from shared.credentials.token_sources.gke_exchange import SubjectToken

PROBE_TIMEOUT_S = 1.0
"""For the metadata server to show that it is there; it is on this machine or the one below."""

PROBE_AGAIN_S = 10.0
"""How long it counts as absent."""

MAX_PROBE_BYTES = 64 * 1024
"""Its first page is a line."""


def minter_from_env(
    environ: Mapping[str, str],
    file: TokenSettings | None = None,
    account: str = "",
    *,
    for_people: bool = False,
) -> Minter:
    """The minter that `environ` means, and where it says nothing `file`; its tokens are `account`'s, if one
    is named. For `gke` without a projected token a pod asks for one itself. `for_people` makes the gcloud
    command a source of `auto`.

    Raises:
        UsageError: a variable is wrong, or something that the set source needs is not set.
        UnavailableError: the address of the pod's API server is malformed.
    """
    settings = from_env(environ, file)
    if account:
        settings = replace(settings, service_account=account)
    if settings.source == "auto" and for_people and settings.credentials is None:
        return AutomaticMinter(settings, gcloud=_gcloud(settings, environ))
    if settings.source != "gke" or settings.subject_token is not None:
        return make_minter(settings, environ=environ)
    from shared.credentials.token_sources.pod_tokens import pod_tokens

    pod = pod_tokens(environ, settings.step_timeout_s)
    return make_minter(settings, subject_token=pod.mint if pod is not None else None)


def make_minter(
    settings: TokenSettings,
    *,
    subject_token: SubjectToken | None = None,
    tls: ssl.SSLContext | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Minter:
    """The minter that `settings` mean; it opens nothing yet. On the event loop's thread or before it.

    `subject_token` is for `gke`, None: the file of the settings; `tls` for https, None: the system's trust;
    `environ` has the PATH and the configuration of the gcloud command.
    Raises UsageError when something that the set source needs is not set.
    """
    if settings.source == "metadata":
        return _metadata(settings, tls)
    if settings.source == "gcloud":
        minter = _gcloud(settings, environ)
        if minter is None:
            raise UsageError("HBONE_TOKENS=gcloud: there is no gcloud in PATH")
        return minter
    if settings.source == "google":
        return _google(settings, tls)
    if settings.source == "gke":
        missing = missing_for_gke(settings, subject_token)
        if missing:
            names = ", ".join(missing)
            raise UsageError(f"no token exchange on GKE without {names}, or the like in hgate's file")
        return _gke(settings, subject_token, tls)
    return AutomaticMinter(settings, subject_token=subject_token, tls=tls)


def missing_for_gke(settings: TokenSettings, subject_token: SubjectToken | None) -> list[str]:
    """The names of what the exchange on GKE needs and has not."""
    missing = []
    if not settings.exchange_audience:
        names = {
            "PROJECT_ID": settings.project_id,
            "CLUSTER_NAME": settings.cluster_name,
            "CLUSTER_LOCATION": settings.cluster_location,
        }
        missing += [name for name, value in names.items() if not value]
    if not settings.exchange_account:
        missing.append("PROJECT_NUMBER")
    if subject_token is None and settings.subject_token is None:
        missing.append("HBONE_SUBJECT_TOKEN")
    return missing


class AutomaticMinter:
    """Mints by the first source that is there."""

    def __init__(
        self,
        settings: TokenSettings,
        *,
        subject_token: SubjectToken | None = None,
        gcloud: Minter | None = None,
        tls: ssl.SSLContext | None = None,
        usual_host: str = DEFAULT_METADATA_HOST,
        probe_again_s: float = PROBE_AGAIN_S,
    ) -> None:
        """`gcloud` is the command's login, None: it is no source. A metadata server with another name than
        `usual_host` is one that somebody has named."""
        self._command = gcloud
        self._usual_host = usual_host
        self._probe_again_s = probe_again_s
        self._settings = settings
        self._subject_token = subject_token
        self._tls = tls
        self._chosen: Minter | None = None
        if settings.credentials is not None:
            # Here and now: google-auth takes 40 ms to import, which no tunnel should wait for.
            self._chosen = _google(settings, tls)
        self._gcloud: Minter | None = None
        self._likeliest: Minter | None = None
        """Whose identity is told as long as nothing is chosen for good."""
        self._choosing = asyncio.Lock()
        self._absent_until = float("-inf")
        self._absence = ""

    @property
    def identity(self) -> str:
        """The chosen source's; before the choice that of the likeliest."""
        if self._chosen is None:
            self._chosen = self._is_there()
        if self._chosen is not None:
            return self._chosen.identity
        if self._likeliest is None:
            self._likeliest = _metadata(self._settings, self._tls)
        return self._likeliest.identity

    async def mint(self, audience: str) -> Minted:
        """A new ID token. Raises TokenError, which says what was looked for if there is no source at all."""
        minter = self._chosen
        if minter is None:
            async with self._choosing:
                minter = await self._choice()
        return await minter.mint(audience)

    async def _choice(self) -> Minter:
        """What is to be asked; only what will stay there is remembered."""
        if self._chosen is None:
            self._chosen = self._is_there()
        if self._chosen is None and await self._metadata_answers():
            self._chosen = _metadata(self._settings, self._tls)
        if self._chosen is not None:
            return self._chosen
        settings = self._settings
        if self._command is not None and not self._file_gives_tokens():
            self._likeliest = self._command
            return self._command
        if is_there(settings.gcloud):
            if self._gcloud is None:
                self._gcloud = self._likeliest = _google(settings, self._tls)
            return self._gcloud
        absent = ["GOOGLE_APPLICATION_CREDENTIALS is not set"]
        if settings.project_id or settings.cluster_name or settings.subject_token is not None:
            # Who has set nothing of it does not want it.
            missing = missing_for_gke(settings, self._subject_token)
            gke = f"{', '.join(missing)} not set" if missing else f"no file {settings.subject_token}"
            absent.append(f"no exchange on GKE: {gke}")
        absent.append(self._absence)
        absent.append(f"no login of gcloud's: no {settings.gcloud or 'home folder'}")
        raise TokenError(f"no source of ID tokens: {'; '.join(absent)}", "unreachable")

    def _is_there(self) -> Minter | None:
        """The source that needs no asking, if there is one."""
        settings = self._settings
        if not missing_for_gke(settings, self._subject_token) and (
            self._subject_token is not None or is_there(settings.subject_token)
        ):
            return _gke(settings, self._subject_token, self._tls)
        if settings.metadata_host != self._usual_host:
            return _metadata(settings, self._tls)
        return None

    def _file_gives_tokens(self) -> bool:
        """Whether gcloud's file is there, and is more than a person's login."""
        if not is_there(self._settings.gcloud):
            return False
        from shared.credentials.token_sources import google_file

        assert self._settings.gcloud is not None
        try:
            kind = google_file.read(self._settings.gcloud).kind
        except TokenError:
            return True  # whoever uses it says what is wrong with it
        return kind != "authorized_user" or bool(self._settings.service_account)

    async def _metadata_answers(self) -> bool:
        loop = asyncio.get_running_loop()
        if loop.time() < self._absent_until:
            return False
        self._absence = await absence_of_metadata(self._settings.metadata_host)
        if self._absence:
            self._absent_until = loop.time() + self._probe_again_s
        return not self._absence


async def absence_of_metadata(host: str, timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """Why there is no metadata server at `host`, empty if there is one. Google's answers each request with
    its own header; something else on that address, such as a captive portal, does not."""
    from shared.net.http1 import get

    try:
        response = await get(
            f"http://{host}/",
            headers={"metadata-flavor": "Google"},
            timeout_s=timeout_s,
            max_bytes=MAX_PROBE_BYTES,
        )
    except HboneError as error:
        return f"no metadata server: {error}"
    if response.headers.get("metadata-flavor") != "Google":
        return f"no metadata server: what answers at {host} is another"
    return ""


def _metadata(settings: TokenSettings, tls: ssl.SSLContext | None) -> Minter:
    from shared.credentials.token_sources.metadata import MetadataMinter

    host, timeout_s = settings.metadata_host, settings.metadata_timeout_s
    if not settings.service_account:
        return MetadataMinter(host, timeout_s=timeout_s)
    from shared.credentials.token_sources.impersonation import Impersonated, id_token_url
    from shared.credentials.token_sources.metadata_access import MetadataAccess

    return Impersonated(
        MetadataAccess(host, timeout_s=timeout_s),
        settings.service_account,
        id_token_url(settings.iam_url, settings.service_account),
        timeout_s=settings.step_timeout_s,
        tls=tls,
    )


def _google(settings: TokenSettings, tls: ssl.SSLContext | None) -> Minter:
    from shared.credentials.token_sources.google_credentials import GoogleCredentials

    return GoogleCredentials(settings, tls=tls)


def _gcloud(settings: TokenSettings, environ: Mapping[str, str]) -> Minter | None:
    from shared.credentials.token_sources import gcloud

    program = gcloud.find(environ)
    return gcloud.GcloudMinter(program, settings, gcloud.GcloudConfig(environ, settings)) if program else None


def _gke(settings: TokenSettings, subject_token: SubjectToken | None, tls: ssl.SSLContext | None) -> Minter:
    from shared.credentials.token_sources.gke_exchange import GkeExchange, ProjectedToken

    if subject_token is None:
        if settings.subject_token is None:
            raise UsageError("no token exchange on GKE without HBONE_SUBJECT_TOKEN")
        subject_token = ProjectedToken(settings.subject_token).mint
    return GkeExchange(settings, subject_token, tls=tls)
