"""Which token `hbone` sends, where it comes from, and where it may go.

Owned here: what flags and environment mean, and that no token goes to where it could be read or used by
somebody else. A token goes only over https, or to this machine. A JWT in a file has to be for the URL's host,
unless --audience says whom else it may be for. A command needs its token once, so none is kept: the gateway's
cache (`shared/credentials/tokens/token_cache.py`) is not even imported. What mints is imported when a token
is to be minted, for ssh users wait.
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
"""In what `gcloud auth print-identity-token` gives for a person's own account, whose audience cannot be
chosen: gcloud's OAuth client. Cloud Run takes it for every service that the person may call."""

CLOUD_RUN = ".run.app"
"""How the names of Cloud Run's services end."""

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


class TunnelFileToken(FileToken):
    """The token in a file for a tunnel's target: a JWT that is for somebody else is not sent."""

    def __init__(self, path: Path, target: TunnelTarget) -> None:
        super().__init__(path)
        self._target = target

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        token = await super().token(admit)
        try:
            named = claims_of(token).get("aud")
        except ValueError:
            return token  # it does not say whom it is for
        audiences = named if isinstance(named, list) else [named]
        if named is not None and not any(_is_for(audience, self._target) for audience in audiences):
            text = (
                f"cannot use token file {self._path}: its token is for {shown_claim(named)}, not for "
                f"{self._target.audience}; where the service takes that one, name it with --audience"
            )
            raise TokenError(text, "audience")
        return token


def _is_for(audience: object, target: TunnelTarget) -> bool:
    """Whether a token for `audience` is meant for the host of `target` (RFC 7519 section 4.1.3)."""
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
    # The URL of a traffic tag, whose tokens are for the service ("Authenticating service-to-service").
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
    """The token source that the flags say; by default a token for the URL's host, minted as the environment
    says, and none where there is no TLS to keep it secret. `connect` is where is dialled instead of the
    URL's host.

    Raises:
        UsageError: a flag, or a variable of `environ`, is wrong.
    """
    if none or (target.scheme == "http" and token_file is None and audience is None):
        return NoToken()
    _demand_secrecy(target, connect or target.address, "--audience" if token_file is None else "--token-file")
    if audience is not None:
        checked_audience(audience)
    if token_file is not None:
        path = checked_file(token_file)
        return TunnelFileToken(path, target) if audience is None else FileToken(path, audience)
    return MintedToken(minter(environ), audience or target.audience, f"{_HINT}, or --no-token")


def _demand_secrecy(target: TunnelTarget, dialled: Address, flag: str) -> None:
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


def of_file(path: Path, audience: str = "") -> FileToken:
    """The token in a file, which has to be for `audience`, if there is one. Raises as `checked_file`."""
    return FileToken(checked_file(path), audience)


def checked_file(path: Path) -> Path:
    """`path`, if it may be one. Raises UsageError, which does not repeat it, for what must be the token
    itself."""
    from shared.config.kinds import file_path

    try:
        return file_path(str(path))
    except ValueError as error:
        raise UsageError(f"--token-file {error}") from None


def checked_audience(audience: str) -> str:
    """`audience`, if a token can be asked for it. Raises UsageError."""
    if not audience or not audience.isprintable():
        raise UsageError("--audience is empty, or has characters that cannot be printed")
    return audience


def minter(environ: Mapping[str, str]) -> Minter:
    """Who mints tokens, as the environment has it. Raises UsageError if a variable is wrong."""
    from shared.credentials.token_sources.minters import minter_from_env

    return minter_from_env(environ)
