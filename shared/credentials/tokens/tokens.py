"""The tokens that prove this process to the far side: the contract `TokenSource`, tokens in a file, no
token at all, and what makes a token unfit to be sent.

Signatures are not checked. A token goes into no error text, log line or repr: use `describe`.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from shared.errors import TokenError
from shared.trust.token_claims import MAX_TOKEN_BYTES, at_utc, claims_of, expiry_of, shown_claim
from shared.watched_file import Stamp, stamp_of

if TYPE_CHECKING:  # ssh users wait for what is imported
    from shared.credentials.tokens.minting import Minted
    from shared.ops.token_counts import TokenCounts, TokenStatus

LOOK_AGAIN_S = 1.0
"""How long a look at a token's file counts: it costs 3.5 µs, and one that is replaced before its time is up
is good for longer than that. A token that is refused is looked for anew at once."""

_HEADER_SAFE = re.compile(r"[\x21-\x7e]+")


class TokenSource(Protocol):
    """What the gateway asks before it opens a tunnel."""

    async def token(self, admit: Callable[[], None] | None = None) -> str | None:
        """A token that can be sent now, None when this source is there to send none. Raises TokenError when
        there should be one and is not.

        `admit` is called before a token is asked of anybody as long as `is_new`, and may raise instead."""
        ...

    @property
    def is_new(self) -> bool:
        """Whether a token has to be asked of somebody, and nobody has accepted one of this source yet."""
        ...

    def accepted(self) -> None:
        """Says that the far side has taken a token of this source."""
        ...

    def token_now(self) -> str | None:
        """What `token` would say, if it is known without waiting, empty for none; None: ask `token`."""
        ...

    def invalidate(self, rejected: str | None = None) -> None:
        """Says that the far side rejected a token, so the next `token` has to be a new one. With `rejected`
        only that token is dropped: of a hundred tunnels that are refused together, the first makes room for
        a new token, and the others leave it alone."""
        ...


class NoToken:
    """Where none is needed."""

    is_new = False

    async def token(self, admit: Callable[[], None] | None = None) -> None:
        return None

    def token_now(self) -> str:
        return ""

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        return None


class FileToken:
    """The token in a file that somebody else keeps current, such as a projected service account token.

    A look at the file's metadata per call tells whether it has to be read again; `token_now`, which is asked
    for each tunnel, looks every `LOOK_AGAIN_S`. What is in it may be any text that fits into a header. Of a
    JWT it is known when it ends, and whom it is for: it is not sent after its `exp`, nor to another audience
    than `audience`, if there is one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        audience: str = "",
        *,
        counts: TokenCounts | None = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is the wall clock in seconds since 1970, as `exp` is, `monotonic` one that is never set."""
        self._path = os.fspath(path)
        self._audience = audience
        self._counts = counts
        self._now = now
        self._token = ""
        self._expires_at_s = math.inf
        self._version: Stamp | None = None
        self._failure = ""
        self._failed_at_s = 0.0
        self._monotonic = monotonic
        self._look_at = 0.0

    is_new = False

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        """The file's present content, blanks around it removed; TokenError when it cannot be used."""
        try:
            # In place: both are local, and the kubelet's volume is memory.
            if self._version is None or stamp_of(os.stat(self._path)) != self._version:
                self._read()
            self._demand_unexpired()
        except OSError as error:
            text = (
                f"cannot read token file {self._path}: {error.strerror}; check the path and its permissions"
            )
            raise self._failed(TokenError(text, "file")) from error
        except TokenError as error:
            text = f"cannot use token file {self._path}: {error}"
            raise self._failed(TokenError(text, error.reason)) from error
        self._failure = ""
        return self._token

    def token_now(self) -> str | None:
        if self._version is None or self._now() >= self._expires_at_s:
            return None
        now = self._monotonic()
        if now < self._look_at:
            return self._token
        try:
            if stamp_of(os.stat(self._path)) != self._version:
                return None
        except OSError:
            return None
        self._failure = ""
        self._look_at = now + LOOK_AGAIN_S
        return self._token

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        if rejected is None or rejected == self._token:
            if self._version is not None and self._counts is not None:
                self._counts.failed("rejected")
            self._version = None

    def status(self) -> TokenStatus:
        """What may be told of it. It is as old as the file."""
        from shared.ops.token_counts import TokenStatus

        self._follow()
        return TokenStatus(
            identity=f"file {self._path}",
            audience=self._audience,
            minted_at_s=self._version.mtime_ns / 1e9 if self._version else None,
            expires_at_s=self._expires_at_s if self._version and math.isfinite(self._expires_at_s) else None,
            failure=self._failure,
            failed_at_s=self._failed_at_s if self._failure else None,
        )

    def _follow(self) -> None:
        """Reads a file that has been replaced since: a token that nobody asked for meanwhile looks as if it
        were not renewed. Whatever is wrong with it, whoever asks for it is told."""
        with suppress(OSError, TokenError):
            if self._version is not None and stamp_of(os.stat(self._path)) != self._version:
                self._read()

    def _failed(self, error: TokenError) -> TokenError:
        if self._counts is not None:
            self._counts.failed(error.reason)
        self._failure, self._failed_at_s = str(error), self._now()
        return error

    def _read(self) -> None:
        from shared import regular_files  # most tokens are in no file

        content, about = regular_files.read_with_status(self._path, MAX_TOKEN_BYTES + 1)
        text = content.strip().decode("latin-1")
        if not text:
            raise TokenError("it is empty", "file")
        try:
            demand_sendable(text)
        except TokenError as error:
            raise TokenError(f"{error}; it has to hold one token and nothing else", "file") from error
        if self._audience:
            try:
                demand_audience(text, self._audience, opaque_ok=False)
            except TokenError as error:
                raise TokenError(f"its token cannot be sent: {error}", error.reason) from error
        self._token = text
        self._expires_at_s = _expiry_if_told(text)
        self._version = stamp_of(about)
        if self._counts is not None:
            self._counts.refreshed()

    def _demand_unexpired(self) -> None:
        late_s = self._now() - self._expires_at_s
        if late_s >= 0:
            ago = f"{late_s:.0f} s ago, at {at_utc(self._expires_at_s)}"
            raise TokenError(f"its token expired {ago}; does anybody renew it?", "expired")


# What makes a token unfit to be sent.


def demand_fit(minted: Minted, audience: str, place: str, now: float) -> None:
    """Raises TokenError unless a new token that `place` gave can be sent to `audience` for some time from
    `now` on, in seconds since 1970. What is no JWT says nothing of its audience and is taken as it is."""
    try:
        demand_sendable(minted.token)
        demand_audience(minted.token, audience, opaque_ok=True)
        late_s = now - minted.expires_at_s
        if late_s >= 0:
            raise TokenError(f"it expired {late_s:.0f} s ago; is the clock right?", "expired")
    except TokenError as error:
        raise TokenError(f"cannot use the token from {place}: {error}", error.reason) from error


def demand_sendable(token: str) -> None:
    """Raises TokenError if no header can carry `token`, or if it is too long for one."""
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenError(f"it is longer than {MAX_TOKEN_BYTES} bytes", "garbled")
    if not fits_header(token):
        raise TokenError("it is empty, or has characters that no header can carry", "garbled")


def fits_header(token: str) -> bool:
    """Whether a header can carry `token`; none can carry nothing."""
    return _HEADER_SAFE.fullmatch(token) is not None


def demand_audience(token: str, audience: str, *, opaque_ok: bool) -> None:
    """Raises TokenError if `token` is a JWT for others than `audience` (RFC 7519 section 4.1.3: a string or a
    list of them). A token that does not say whom it is for is good only if `opaque_ok`."""
    try:
        named = claims_of(token).get("aud")
    except ValueError as error:
        if opaque_ok:
            return
        raise TokenError(f"it is {error}, so nobody knows whether it is for {audience}", "garbled") from error
    if named is None and opaque_ok:
        return
    if named != audience and not (isinstance(named, list) and audience in named):
        told = "nobody" if named is None else shown_claim(named)
        raise TokenError(f"it is for {told}, not for {audience}", "audience")


def _expiry_if_told(token: str) -> float:
    """`exp`, or infinity where there is none that can be read."""
    try:
        return expiry_of(claims_of(token))
    except ValueError:
        return math.inf
