"""Which token `hbone` sends, by the flags and the environment.

A token is sent only over https, or to this machine, so that others cannot read it. A JWT in a file must have
the URL's host as its audience, or the one that --audience names, so that others cannot use it. A command
needs its token once, so there is no cache. The code that gets new tokens is imported when it is needed,
because ssh users wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hbone.target import TunnelTarget
from shared.credentials.tokens.tokens import FileToken, NoToken, TokenSource, demand_fit
from shared.errors import TokenError, UsageError
from shared.trust.token_claims import claims_of, shown_claim

if TYPE_CHECKING:
    from shared.address import Address
    from shared.credentials.tokens.minting import Minter

GCLOUD_AUDIENCE = "32555940559.apps.googleusercontent.com"
"""gcloud's OAuth client, the audience of the tokens that `gcloud auth print-identity-token` prints for a
person's own account. It cannot be chosen there. Cloud Run accepts it for every service that the person may
call."""

CLOUD_RUN = ".run.app"
"""The end of the names of Cloud Run's services."""

_HINT = "on your own machine, gcloud auth print-identity-token >FILE and --token-file FILE"


class MintedToken:
    """A `TokenSource` that gets a new token each time."""

    def __init__(
        self, minter: Minter, audience: str, hint: str = _HINT, *, now: Callable[[], float] = time.time
    ) -> None:
        """`hint` is added to errors; `now` is the wall clock in seconds since 1970."""
        self._minter = minter
        self._audience = audience
        self._hint = hint
        self._now = now

    @property
    def identity(self) -> str:
        """Whose tokens they are, or the source that decides it; known for certain after the first token."""
        return self._minter.identity

    is_new = False

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        try:
            minted = await self._minter.mint(self._audience)
            demand_fit(minted, self._audience, self.identity, self._now())
        except TokenError as error:
            raise TokenError(f"{error}; {self._hint}", error.reason) from error
        return minted.token

    def token_now(self) -> None:
        return None

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        return None


class TunnelFileToken(FileToken):
    """The token in a file, for a tunnel's target. A JWT with another audience is not sent."""

    def __init__(self, path: Path, target: TunnelTarget) -> None:
        super().__init__(path)
        self._target = target

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        token = await super().token(admit)
        try:
            named = claims_of(token).get("aud")
        except ValueError:
            return token  # it has no audience that we can read
        audiences = named if isinstance(named, list) else [named]
        if named is not None and not any(_is_for(audience, self._target) for audience in audiences):
            text = (
                f"cannot use token file {self._path}: its token is for {shown_claim(named)}, not for "
                f"{self._target.audience}; if the service accepts that audience, name it with --audience"
            )
            raise TokenError(text, "audience")
        return token


def _is_for(audience: object, target: TunnelTarget) -> bool:
    """Whether a token for `audience` may be sent to the host of `target` (RFC 7519 section 4.1.3)."""
    if not isinstance(audience, str):
        return False
    if audience == GCLOUD_AUDIENCE:
        return target.host.endswith(CLOUD_RUN)
    _, separator, rest = audience.lower().partition("://")
    host = rest.partition("/")[0]
    if not separator or not host:
        return False
    if ":" in host.rpartition("]")[2]:
        host = host.rpartition(":")[0]
    if host == target.host or host == f"[{target.host}]":
        return True
    # The URL of a traffic tag, whose tokens have the service as audience ("Authenticating
    # service-to-service").
    return target.host.endswith(CLOUD_RUN) and target.host.partition("---")[2] == host


def for_tunnel(
    target: TunnelTarget,
    environ: Mapping[str, str],
    *,
    connect: Address | None = None,
    token_file: Path | None = None,
    audience: str | None = None,
    none: bool = False,
) -> TokenSource:
    """The token source for the flags. By default it is a new token for the URL's host, from the source that
    the environment names, and no token without TLS. `connect` is the address that is dialled instead of the
    URL's host.

    Raises:
        UsageError: a flag, or a variable of `environ`, is wrong.
    """
    if none or (target.scheme == "http" and token_file is None and audience is None):
        return NoToken()
    _check_secrecy(target, connect or target.address, "--audience" if token_file is None else "--token-file")
    if audience is not None:
        check_audience(audience)
    if token_file is not None:
        if audience is None:
            return TunnelFileToken(checked_file(token_file), target)
        return file_token(token_file, audience)
    return MintedToken(minter(environ), audience or target.audience, f"{_HINT}, or --no-token")


def _check_secrecy(target: TunnelTarget, dialled: Address, flag: str) -> None:
    """Raises UsageError if others could read a token on its way."""
    if target.scheme == "https":
        return
    from shared.credentials.token_sources.token_settings import is_own_machine

    if not is_own_machine(dialled.host):
        where = f"{target} leads" if dialled == target.address else f"{target} by way of {dialled} leads"
        raise UsageError(
            f"{flag}: {where} to another machine without TLS, where others could read the token; "
            "use https, or --no-token"
        )


def file_token(path: Path, audience: str = "") -> FileToken:
    """The token in a file; `audience` is the audience that it must have, empty for any. Raises as
    `checked_file`."""
    return FileToken(checked_file(path), audience)


def checked_file(path: Path) -> Path:
    """Returns `path`. Raises UsageError if it looks like the token itself, which the error does not
    repeat."""
    from shared.config.kinds import file_path

    try:
        return file_path(str(path))
    except ValueError as error:
        raise UsageError(f"--token-file {error}") from None


def check_audience(audience: str) -> None:
    """Raises UsageError if no token can have `audience`."""
    if not audience or not audience.isprintable():
        raise UsageError("--audience must not be empty or have unprintable characters")


def minter(environ: Mapping[str, str]) -> Minter:
    """The source of new tokens that the environment names. Raises UsageError if a variable is wrong."""
    from shared.credentials.token_sources.minters import minter_from_env

    return minter_from_env(environ)
