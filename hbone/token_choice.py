"""Which token `hbone` sends, and where it comes from.

Owned here: what flags and environment mean. A command needs its token once, so none is kept: the gateway's
cache (`shared/identity/token_cache.py`) is not even imported. What mints is imported when a token is to be
minted, for ssh users wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hbone.target import TunnelTarget
from shared.errors import TokenError, UsageError
from shared.identity.tokens import FileToken, NoToken, TokenSource, demand_fit

if TYPE_CHECKING:
    from shared.identity.minting import Minter

_HINT = "on your own machine, gcloud auth print-identity-token >FILE and --token-file FILE"


class MintedToken:
    """A `TokenSource` that has a new token minted each time it is asked."""

    def __init__(
        self, minter: Minter, audience: str, hint: str = _HINT, *, now: Callable[[], float] = time.time
    ) -> None:
        """`hint` says what else can be done; `now` is the wall clock in seconds since 1970."""
        self._minter = minter
        self._audience = audience
        self._hint = hint
        self._now = now

    @property
    def identity(self) -> str:
        """Whose tokens they are, or the place that decides about it; for certain once there was one."""
        return self._minter.identity

    is_new = False

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        try:
            minted = await self._minter.mint(self._audience)
            demand_fit(minted, self._audience, self.identity, self._now())
        except TokenError as error:
            raise TokenError(f"{error}; {self._hint}", error.reason) from error
        return minted.token

    def at_hand(self) -> None:
        return None

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        return None


def for_tunnel(
    target: TunnelTarget,
    environ: Mapping[str, str],
    *,
    token_file: Path | None = None,
    audience: str | None = None,
    none: bool = False,
) -> TokenSource:
    """The token source that the flags say; by default a token for the URL's host, minted as the environment
    says, and none where there is no TLS to keep it secret.

    Raises:
        UsageError: a flag, or a variable of `environ`, is wrong.
    """
    if none or (target.scheme == "http" and token_file is None and audience is None):
        return NoToken()
    if token_file is not None:
        return of_file(token_file)
    audience = target.audience if audience is None else checked_audience(audience)
    return MintedToken(minter(environ), audience, f"{_HINT}, or --no-token")


def of_file(path: Path, audience: str = "") -> FileToken:
    """The token in a file, which has to be for `audience`, if there is one. Raises UsageError, which does not
    repeat it, for what must be the token itself."""
    from shared.identity.token_sources.token_settings import file_path

    try:
        return FileToken(file_path(str(path)), audience)
    except ValueError as error:
        raise UsageError(f"--token-file {error}") from None


def checked_audience(audience: str) -> str:
    """`audience`, if a token can be asked for it. Raises UsageError."""
    if not audience or not audience.isprintable():
        raise UsageError("--audience is empty, or has characters that cannot be printed")
    return audience


def minter(environ: Mapping[str, str]) -> Minter:
    """Who mints tokens, as the environment has it. Raises UsageError if a variable is wrong."""
    from shared.identity.token_sources.minters import minter_from_env

    return minter_from_env(environ)
