"""An ID token that is kept between two runs of `hbone`: gcloud takes a second for one, and a shell is to be
there at once. HBONE_CACHE switches it off.

gcloud keeps logins and tokens in its own folder in the same way. The file is the user's alone; what is in it
is good for an hour at most, for one host, while a login that is stolen is good until it is revoked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hbone import lookup_settings
from hbone.kept import Kept, cache_folder, state_of
from shared.credentials.token_sources import token_settings
from shared.credentials.token_sources.token_settings import DEFAULT_METADATA_HOST
from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.tokens import fits_header

LAST_S = 300.0
"""A token this close to its end is not used any more: the tunnel's request has to come before it."""

SLOW = ("auto", "google", "gcloud")
"""Sources whose tokens are kept. The metadata server and a Kubernetes token are as near as a file."""


class KeptToken:
    """The token for one audience and host."""

    def __init__(self, kept: Kept, question: object, now: Callable[[], float] = time.time) -> None:
        """`now` gives seconds since 1970."""
        self._kept = kept
        self._question = question
        self._now = now
        self.identity = ""
        """Whose it is, once `token` has found one."""
        self.made_at_s = 0.0
        """When it came, in seconds since 1970."""

    def token(self) -> str:
        """It, empty if there is none."""
        found = self._kept.get(self._question)
        if not isinstance(found, dict):
            return ""
        token, identity, made_at_s = found.get("token"), found.get("identity"), found.get("made")
        if not (isinstance(token, str) and isinstance(identity, str) and isinstance(made_at_s, float)):
            return ""
        self.identity, self.made_at_s = identity, made_at_s
        return token if fits_header(token) else ""

    @property
    def trouble(self) -> str:
        """Why the last token could not be kept; empty: it is."""
        return self._kept.trouble

    def keep(self, minted: Minted, identity: str) -> None:
        """Keeps a new one, until LAST_S before its end."""
        answer = {"token": minted.token, "identity": identity, "made": self._now()}
        self._kept.put(self._question, answer, minted.expires_at_s - LAST_S)

    def drop(self) -> None:
        """Keeps it no more: somebody has refused it."""
        self._kept.drop(self._question)


def of_environment(environ: Mapping[str, str], audience: str, host: str) -> KeptToken | None:
    """The kept token of the source that `environ` means; None if tokens are not kept. Raises UsageError if a
    variable is wrong."""
    settings = token_settings.from_env(environ)
    near = settings.source not in SLOW or settings.metadata_host != DEFAULT_METADATA_HOST
    if near or lookup_settings.from_env(environ).kept != "all":
        return None
    folder = cache_folder(environ)
    if folder is None:
        return None
    from shared.credentials.token_sources import gcloud

    config = gcloud.GcloudConfig(environ, settings)
    told = [[environ.get(name, "") for name in token_settings.ENVIRONMENT], gcloud.told(environ)]
    files: list[Path] = [*filter(None, (settings.credentials, settings.gcloud)), *config.files()]
    return KeptToken(Kept(folder), ["token", audience, host, told, state_of(files)])
