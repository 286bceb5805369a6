"""Where the tokens come from that prove this process to the far side: a file, the metadata server, nowhere.

Owns reading, caching and renewing of bearer tokens, and what may be told about one in a log. Does not check
signatures (`jwt_check` does, in the stand-in for Cloud Run) and sends nothing to the far side. A token itself
goes into no error text, log line or repr here: whatever tells about one uses `describe`.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import re
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from shared.errors import DialError, TokenError, UpstreamError
from shared.tasks import spawn

if TYPE_CHECKING:
    from shared.net.http1_client import Response

MAX_TOKEN_BYTES = 16 * 1024
"""An ID token is about 1 KiB; more than 16 KiB would not fit into anybody's header list (FACTS section 1)."""

DEFAULT_METADATA_HOST = "metadata.google.internal"

METADATA_TIMEOUT_S = 3.0
"""GCE_METADATA_TIMEOUT's default in Google's own libraries."""

REFRESH_AHEAD_S = 300
"""From here on a new token is fetched in the background, while the old one still serves."""

UNUSABLE_AHEAD_S = 60
"""A token this close to its end is not sent any more: clocks differ, and a request takes its time."""

REFRESH_PACE_S = 10
"""Least time between two fetches in the background: the metadata server has a cache of its own and may well
answer with the token that we hold already, and one that fails is not helped by a request per tunnel."""

FAILURE_MEMORY_S = 1.0
"""How long a failure answers for a new attempt, so that a thousand waiting tunnels do not become a thousand
requests in a row."""

LOOK_AGAIN_S = 1.0
"""How long a look at a token's file counts: it costs 3.5 µs, and one that is replaced before its time is up
is good for longer than that. A token that is refused is looked for anew at once."""

SHOWN_CHARS = 200
"""How much of one claim is shown."""

_HEADER_SAFE = re.compile(r"[\x21-\x7e]+")
_JWT = re.compile(r"[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")


class TokenSource(Protocol):
    """What the gateway asks before it opens a tunnel."""

    async def token(self) -> str | None:
        """A token that can be sent now, None when this source is there to send none. Raises TokenError when
        there should be one and is not."""
        ...

    def at_hand(self) -> str | None:
        """What `token` would say, if it is known without waiting, empty for none; None: ask `token`."""
        ...

    def invalidate(self, rejected: str | None = None) -> None:
        """Says that the far side rejected a token, so the next `token` has to be a new one. With `rejected`
        only that token is dropped: of a hundred tunnels that are refused together, the first makes room for
        a new token, and the others leave it alone."""
        ...


class NoToken:
    """For routes that need none."""

    async def token(self) -> None:
        return None

    def at_hand(self) -> str:
        return ""

    def invalidate(self, rejected: str | None = None) -> None:
        return None


class FileToken:
    """The token in a file that somebody else keeps current, such as a projected service account token.

    A look at the file's metadata per call tells whether it has to be read again; `at_hand`, which is asked
    for each tunnel, looks every `LOOK_AGAIN_S`. What is in it may be any text that fits into a header;
    whether it is valid the far side knows.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`monotonic` is a clock in seconds."""
        self._path = os.fspath(path)
        self._token = ""
        self._version: tuple[int, int, int] | None = None
        self._monotonic = monotonic
        self._look_at = 0.0

    async def token(self) -> str:
        """The file's present content, blanks around it removed; TokenError when it cannot be used."""
        try:
            # In place: both are local, and the kubelet's volume is memory.
            if self._version is None or _version(os.stat(self._path)) != self._version:
                self._read()
        except OSError as error:
            raise TokenError(
                f"cannot read token file {self._path}: {error.strerror}; check the path and its permissions"
            ) from error
        return self._token

    def at_hand(self) -> str | None:
        if self._version is None:
            return None
        now = self._monotonic()
        if now < self._look_at:
            return self._token
        try:
            if _version(os.stat(self._path)) != self._version:
                return None
        except OSError:
            return None
        self._look_at = now + LOOK_AGAIN_S
        return self._token

    def invalidate(self, rejected: str | None = None) -> None:
        if rejected is None or rejected == self._token:
            self._version = None

    def _read(self) -> None:
        with open(self._path, "rb", opener=_open_without_waiting) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise TokenError(f"cannot use token file {self._path}: it is not a regular file")
            content = file.read(MAX_TOKEN_BYTES + 1)
        if len(content) > MAX_TOKEN_BYTES:
            raise TokenError(
                f"cannot use token file {self._path}: it is longer than {MAX_TOKEN_BYTES} bytes; "
                "it has to hold one token and nothing else"
            )
        text = content.strip().decode("latin-1")
        if not text:
            raise TokenError(f"cannot use token file {self._path}: it is empty")
        if _HEADER_SAFE.fullmatch(text) is None:
            raise TokenError(
                f"cannot use token file {self._path}: it has characters that no header can carry; "
                "it has to hold one token and nothing else"
            )
        self._token = text
        self._version = _version(about)


def _open_without_waiting(path: str, flags: int) -> int:
    """Opening a named pipe would otherwise wait for its writer, and the event loop with it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _version(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_mtime_ns, about.st_size, about.st_ino


class MetadataToken:
    """ID tokens for one audience from Google's metadata server, cached until shortly before they expire.

    The life of a cached token, by its `exp`:

    - until 300 s before: handed out at once;
    - until 60 s before: handed out at once, while one request in the background fetches the next;
    - after that: callers wait for one request that they share.

    A failure answers everybody for a second. `now` is the wall clock in seconds since 1970, as `exp` is.
    """

    def __init__(
        self,
        audience: str,
        host: str = DEFAULT_METADATA_HOST,
        *,
        timeout_s: float = METADATA_TIMEOUT_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`host` is a name or address with an optional port, as in GCE_METADATA_HOST; `timeout_s` bounds one
        request in seconds. Raises ValueError when `audience` is empty or `host` malformed."""
        from shared.net.http1_client import Target  # as with json, other sources start sooner without it

        if not audience:
            raise ValueError("empty audience")
        # https://cloud.google.com/compute/docs/instances/verifying-instance-identity
        self._url = (
            f"http://{host}/computeMetadata/v1/instance/service-accounts/default/identity"
            f"?audience={quote(audience, safe='')}&format=full"
        )
        target = Target.parse(self._url)
        if target.authority != host:
            raise ValueError(f"metadata host {host!r} is not HOST or HOST:PORT")
        self._host = str(target)
        self._audience = audience
        self._timeout_s = timeout_s
        self._now = now
        self._token = ""
        self._refresh_at = 0.0
        self._usable_until = 0.0
        self._failure: TokenError | None = None
        self._failed_at = 0.0
        self._flight: asyncio.Task[str | TokenError] | None = None

    async def token(self) -> str:
        """A token for the audience; TokenError when the metadata server has none for us."""
        if self._now() < self._refresh_at:
            return self._token
        return await self._renewed()

    def at_hand(self) -> str | None:
        return self._token if self._now() < self._refresh_at else None

    def invalidate(self, rejected: str | None = None) -> None:
        if rejected is None or rejected == self._token:
            self._token = ""
            self._refresh_at = self._usable_until = 0.0

    async def _renewed(self) -> str:
        now = self._now()
        if now < self._usable_until:
            self._fly()
            return self._token
        if self._failure is not None and 0 <= now - self._failed_at < FAILURE_MEMORY_S:
            raise TokenError(str(self._failure)) from self._failure
        # Shielded: a caller that gives up must not take the answer from the others.
        outcome = await asyncio.shield(self._fly())
        if isinstance(outcome, TokenError):
            raise TokenError(str(outcome)) from outcome
        return outcome

    def _fly(self) -> asyncio.Task[str | TokenError]:
        """The one request under way, started when there is none."""
        if self._flight is None or self._flight.done():
            self._flight = spawn(self._fetch(), name=f"token for {self._audience}")
        return self._flight

    async def _fetch(self) -> str | TokenError:
        """Fetches and stores a token. A failure is returned, not raised: several callers may be waiting for
        it, each in need of a traceback of its own, or nobody at all."""
        try:
            token, expires_at = await self._ask()
        except TokenError as error:
            now = self._now()
            self._failure, self._failed_at = error, now
            self._refresh_at = min(now + REFRESH_PACE_S, self._usable_until)
            return error
        now = self._now()
        self._failure = None
        self._token = token
        self._usable_until = expires_at - UNUSABLE_AHEAD_S
        self._refresh_at = min(max(expires_at - REFRESH_AHEAD_S, now + REFRESH_PACE_S), self._usable_until)
        return token

    async def _ask(self) -> tuple[str, float]:
        from shared.net.http1_client import get

        try:
            response = await get(
                self._url,
                headers={"metadata-flavor": "Google"},
                timeout_s=self._timeout_s,
                max_bytes=MAX_TOKEN_BYTES,
            )
        except DialError as error:
            raise TokenError(
                f"no metadata server: {error}; set GCE_METADATA_HOST or use a token file"
            ) from error
        except UpstreamError as error:
            raise TokenError(f"no token from the metadata server: {error}") from error
        return self._judge(response)

    def _judge(self, response: Response) -> tuple[str, float]:
        """Takes the token and its expiry out of an answer; the answer's body stays out of all error texts."""
        server = f"metadata server at {self._host}"
        if response.status != 200:
            hint = "; has this machine or pod a service account?" if response.status in (403, 404) else ""
            raise TokenError(f"no token from the {server}: it answered {response.status}{hint}")
        token = response.body.strip().decode("latin-1")
        try:
            expires_at = _expiry(claims_of(token))
        except ValueError as error:
            raise TokenError(f"no token from the {server}: its answer is {error}") from error
        late_s = self._now() - expires_at
        if late_s >= 0:
            raise TokenError(
                f"no token from the {server}: the one it gave expired {late_s:.0f} s ago; is the clock right?"
            )
        return token, expires_at


# What a token says about itself.


def claims_of(token: str) -> dict[str, Any]:
    """The claims in a JWT (RFC 7519), not verified at all: good for showing and for planning a refresh.

    Raises ValueError, whose text begins with `no JWT` and has nothing of the token in it.
    """
    match = _JWT.fullmatch(token) if len(token) <= MAX_TOKEN_BYTES else None
    if match is None:
        raise ValueError("no JWT: it is not three base64url parts joined by dots")
    import json

    payload = match[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, RecursionError):
        # Without the original: it holds the text that could not be read.
        raise ValueError("no JWT: its second part is not JSON in base64url") from None
    if not isinstance(claims, dict):
        raise ValueError("no JWT: its claims are not an object")
    return claims


def describe(token: str) -> str:
    """What may be shown of a token: audience, subject, e-mail and expiry as far as it has them."""
    try:
        claims = claims_of(token)
    except ValueError:
        return f"opaque token of {len(token)} characters"
    from datetime import UTC, datetime

    told = [
        f"{name} {shown_claim(claims[claim])}"
        for claim, name in (("aud", "audience"), ("sub", "subject"), ("email", "email"))
        if claim in claims
    ]
    try:
        told.append(f"expires {datetime.fromtimestamp(_expiry(claims), UTC):%Y-%m-%dT%H:%M:%SZ}")
    except (ValueError, OverflowError, OSError):
        told.append("without a readable expiry")
    return ", ".join(told)


def shown_claim(claim: object) -> str:
    """A claim as one printable line of bounded length: whoever made the token chose what is in it."""
    if isinstance(claim, list):
        text = " ".join(name for name in claim if isinstance(name, str))
    elif isinstance(claim, (str, int, float, type(None))):
        text = str(claim)
    else:
        text = f"of type {type(claim).__name__}"
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _expiry(claims: dict[str, Any]) -> float:
    """`exp` in seconds since 1970 (RFC 7519 section 4.1.4); ValueError when there is none."""
    expires_at = claims.get("exp")
    if isinstance(expires_at, bool) or not isinstance(expires_at, (int, float)):
        raise ValueError("a JWT without an expiry")
    # Compared, not asked with isfinite alone: an integer may be too large for a float.
    if not (math.isfinite(expires_at) if isinstance(expires_at, float) else abs(expires_at) < 2**53):
        raise ValueError("a JWT with an impossible expiry")
    return float(expires_at)
