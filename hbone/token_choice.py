"""Which token `hbone` sends, by the flags and the environment.

A token is sent only over https, or to this machine, so that others cannot read it. A JWT in a file must have
the URL's host as its audience, or the one that --audience names, so that others cannot use it; what has no
audience is sent only to a host that the user has written. A person's token by gcloud is for gcloud, and good
at every service of Cloud Run that the person may call: it is sent to Cloud Run's own host names only. The
code that gets new tokens is imported when it is needed, because ssh users wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hbone.target import TunnelTarget
from shared.address import Address, is_own_machine
from shared.credentials.tokens.tokens import FileToken, NoToken, TokenSource, demand_fit
from shared.errors import OwnClientError, TokenError, UsageError
from shared.trust.token_claims import claims_of, shown_claim

if TYPE_CHECKING:
    from hbone.kept_token import KeptToken
    from shared.credentials.tokens.minting import Minted, Minter

GCLOUD_AUDIENCE = "32555940559.apps.googleusercontent.com"
"""gcloud's OAuth client, the audience of the tokens that it has for a person's own account. It cannot be
chosen there. Cloud Run accepts it for every service that the person may call."""

CLOUD_RUN = ".run.app"
"""The end of the names of Cloud Run's services."""

_HINT = "on your own machine, gcloud auth login, or --token-file FILE"


class MintedToken:
    """A `TokenSource` that gets a new token each time, unless one is kept from before."""

    def __init__(
        self,
        make: Callable[[], Minter],
        audience: str,
        host: str,
        hint: str = _HINT,
        *,
        kept: KeptToken | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`make` makes the minter when it is needed. The token is sent to `host`, `hint` is added to errors,
        `now` is the wall clock in seconds since 1970."""
        self._make = make
        self._minter: Minter | None = None
        self._audience = audience
        self._host = host
        self._hint = hint
        self._kept = kept
        self._now = now
        self.was_kept = False
        """Whether the last token came from the file of an earlier run."""

    @property
    def identity(self) -> str:
        """Whose tokens they are, or the source that decides it; known for certain after the first token."""
        if self._minter is None and self._kept is not None and self._kept.identity:
            age_s = max(0, int(self._now() - self._kept.made_at_s))
            kept = f"{age_s // 60} min" if age_s >= 60 else f"{age_s} s"
            return f"{self._kept.identity}, kept for {kept}"
        return self._source().identity

    @property
    def not_kept(self) -> str:
        """Why the last token could not be kept for the next run; empty if it is, or is not to be."""
        return self._kept.trouble if self._kept is not None else ""

    is_new = False

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        kept = self._kept.token() if self._kept is not None else ""
        self.was_kept = bool(kept)
        if kept:
            return kept
        try:
            minted, audience = await self._minted()
            demand_fit(minted, audience, self._source().identity, self._now())
        except TokenError as error:
            raise TokenError(f"{error}; {self._hint}", error.reason) from error
        if self._kept is not None:
            self._kept.keep(minted, self._source().identity)
        return minted.token

    async def _minted(self) -> tuple[Minted, str]:
        """A new token, and the audience that it has to have."""
        try:
            return await self._source().mint(self._audience), self._audience
        except OwnClientError as error:
            if error.client != GCLOUD_AUDIENCE or not self._host.endswith(CLOUD_RUN):
                raise
            return await self._source().mint(error.client), error.client

    def _source(self) -> Minter:
        if self._minter is None:
            self._minter = self._make()
        return self._minter

    def token_now(self) -> None:
        return None

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        if self._kept is not None:
            self._kept.drop()


class TunnelFileToken(FileToken):
    """The token in a file, for a tunnel's target. A JWT with another audience is not sent; nor is one without
    where others have chosen the host."""

    def __init__(self, path: Path, target: TunnelTarget, chosen_by: str = "") -> None:
        """`chosen_by` has said which host it is, empty: the user."""
        super().__init__(path)
        self._target = target
        self._chosen_by = chosen_by

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        token = await super().token(admit)
        try:
            named = claims_of(token).get("aud")
        except ValueError:
            named = None  # it has no audience that we can read
        if named is None and self._chosen_by:
            text = (
                f"cannot use token file {self._path}: it names no audience, and {self._target.host} "
                f"is the choice of {self._chosen_by}; if that is right, write {self._target.audience}"
            )
            raise TokenError(text, "audience")
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


def demand_own(audience: str, target: TunnelTarget, place: str) -> None:
    """Raises UsageError unless a token for `audience`, which `place` asks for, is good only at the host of
    `target`."""
    if audience == GCLOUD_AUDIENCE or not _is_for(audience, target):
        raise UsageError(
            f"{place} asks for a token for {shown_claim(audience)}, which is not its host {target.host}: if "
            f"that is right, say --audience {shown_claim(audience)}"
        )


def for_tunnel(
    target: TunnelTarget,
    environ: Mapping[str, str],
    *,
    connect: Address | None = None,
    token_file: Path | None = None,
    audience: str | None = None,
    none: bool = False,
    chosen_by: str = "",
) -> TokenSource:
    """The token source for the flags. By default it is a new token for the URL's host, from the source that
    the environment names, and no token without TLS, which is for this machine only. `connect` is the address
    that is dialled instead of the URL's host. `chosen_by` has said which host it is, empty: the user.

    Raises:
        UsageError: a flag, or a variable of `environ`, is wrong.
    """
    if none:
        return NoToken()
    _check_secrecy(target, connect or target.address)
    if target.scheme == "http" and token_file is None and audience is None:
        return NoToken()
    if audience is not None:
        check_audience(audience)
    if token_file is not None:
        if audience is None:
            return TunnelFileToken(checked_file(token_file), target, chosen_by)
        return file_token(token_file, audience)
    wanted = audience or target.audience
    return minted_token(environ, wanted, target.host, f"{_HINT}, or --no-token")


def minted_token(environ: Mapping[str, str], audience: str, host: str, hint: str = _HINT) -> MintedToken:
    """New tokens for `audience`, sent to `host`, from the source that the environment names; `hint` is added
    to errors. Raises UsageError if a variable is wrong."""
    from hbone import kept_token

    kept = kept_token.of_environment(environ, audience, host)
    source = MintedToken(lambda: minter(environ), audience, host, hint, kept=kept)
    if kept is None or not kept.token():
        source.identity  # noqa: B018  # a wrong variable is said now
    return source


def _check_secrecy(target: TunnelTarget, dialled: Address) -> None:
    """Raises UsageError if others could read a token, and all else, on its way."""
    if target.scheme == "https" or is_own_machine(dialled.host):
        return
    where = f"{target} leads" if dialled == target.address else f"{target} by way of {dialled} leads"
    raise UsageError(
        f"{where} to another machine without TLS, where others can read everything; use https, or "
        "--no-token if that is meant"
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

    return minter_from_env(environ, for_people=True)
