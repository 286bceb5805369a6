"""Whose tokens count on the HBONE port: each request's is checked when the first rule asks for it.

No error or log line has a token in it.

1. The token is the Bearer of `proxy-authorization`, which is meant for us (RFC 9110 section 11.7.2), else
   that of `authorization`, which our own routes send. Both end here: a tunnel carries no headers on.
2. A request waits for keys only if its rules ask for a token, and it shows one that could be good.
3. If the keys cannot be fetched, a token cannot be checked, and the request is refused: 503.
4. A reload keeps the keys of an unchanged source.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.config.jwt_settings import JwtSettings
from gateway.rules.claims import NO_TOKEN, Token
from shared.errors import KeysError, TokenRejectedError, UnavailableError
from shared.http2.events import Headers
from shared.net.legs.stream import header_value
from shared.net.tls.contexts import ALPN_HTTP1, client_context
from shared.ops import families

if TYPE_CHECKING:
    from prometheus_client import Metric

    from shared.credentials.token_sources.jwks import KeySet
    from shared.trust.jwt_check import TokenChecker

GOOD, NO_KEYS = "good", "no_keys"
"""Results of a check, beside the kinds of faults that `jwt_check` knows."""

_SCHEME = b"bearer "


class KeysAwaitedError(Exception):
    """The issuer's keys have to be waited for: not an error but an answer, which no user meets."""


class HboneTokens:
    """The settings as they are now, with the issuer's keys; `use` changes them."""

    def __init__(self, settings: JwtSettings | None) -> None:
        self.results: dict[str, int] = {}
        """How many tokens were checked, by result."""
        self.keys: KeySet | None = None
        self._checker: TokenChecker | None = None
        self._settings: JwtSettings | None = None
        self._fetched_before = 0  # by key sets that are no longer in use
        self._failed_before = 0
        self.use(settings)

    def use(self, settings: JwtSettings | None) -> None:
        """From now on goes by `settings`; None: nobody's tokens count. `start` follows."""
        before, self._settings = self._settings, settings
        if settings is None:
            self._checker = None
            self._drop_keys()
            return
        from shared.credentials.token_sources.jwks import KeySet
        from shared.trust.jwt_check import TokenChecker

        if before is None or (before.keys, before.ca) != (settings.keys, settings.ca):
            self._drop_keys()
        if self.keys is None:
            ca = settings.ca
            self.keys = KeySet(settings.keys, tls=None if ca is None else lambda: _trusting(ca))
        self._checker = TokenChecker(self.keys.keys, settings.audiences, settings.issuer)

    def start(self) -> None:
        """Looks at a file of keys, so that the log has at once what is wrong with it."""
        if self._settings is not None and self.keys is not None and "://" not in self._settings.keys:
            self.keys.is_ready(None)

    def shown(self, headers: Headers) -> Token:
        """The token of a request with these headers."""
        if self.keys is None or self._checker is None:
            return NO_TOKEN
        return ShownToken(bearer(headers), self.keys, self._checker, self.results)

    def close(self) -> None:
        """Fetches no more keys."""
        if self.keys is not None:
            self.keys.close()

    def families(self) -> Iterator[Metric]:
        """The metrics about it."""
        keys = self.keys
        fetched = self._fetched_before + (keys.fetched_total if keys else 0)
        failed = self._failed_before + (keys.failed_total if keys else 0)
        yield families.JWT_CHECKS.metric(self.results.items())
        yield families.JWT_KEY_FETCHES.metric([("success", fetched), ("failure", failed)])

    def _drop_keys(self) -> None:
        # A request of theirs that is under way has a deadline, and tunnels that wait for it.
        if self.keys is not None:
            self._fetched_before += self.keys.fetched_total
            self._failed_before += self.keys.failed_total
        self.keys = None


class ShownToken:
    """What one request shows (`claims.Token`)."""

    __slots__ = (
        "_authorization",
        "_checker",
        "_claims",
        "_is_settled",
        "_keys",
        "_results",
        "challenge",
        "fault",
        "is_awaited",
    )

    def __init__(
        self, authorization: str | None, keys: KeySet, checker: TokenChecker, results: dict[str, int]
    ) -> None:
        self.is_awaited = False
        self.fault = ""
        self.challenge = b""
        self._authorization = authorization
        self._keys = keys
        self._checker = checker
        self._results = results
        self._claims: Mapping[str, Any] | None = None
        self._is_settled = False

    def claims(self) -> Mapping[str, Any] | None:
        if not self._is_settled:
            key_id = self._key_id()
            if key_id is not None and not self._keys.is_ready(key_id):
                self.is_awaited = True
                raise KeysAwaitedError
            self._settle()
        return self._claims

    async def prepare(self) -> None:
        try:
            await self._keys.prepare(self._key_id())
        except UnavailableError as error:
            self._count(NO_KEYS)
            raise KeysError(f"the token cannot be checked: {error}") from error
        self._settle()

    def _key_id(self) -> str | None:
        from shared.credentials.token_sources.jwks import key_id_of

        return key_id_of(self._authorization) if self._authorization is not None else None

    def _settle(self) -> None:
        from shared.trust.jwt_check import MISSING

        self._is_settled, self.is_awaited = True, False
        try:
            self._claims = self._checker.check(self._authorization)
        except TokenRejectedError as error:
            self.fault = error.reason
            self.challenge = b"Bearer" if error.kind == MISSING else b'Bearer error="invalid_token"'
            self._count(error.kind)
        else:
            self.challenge = b'Bearer error="insufficient_scope"'
            self._count(GOOD)

    def _count(self, result: str) -> None:
        self._results[result] = self._results.get(result, 0) + 1


def bearer(headers: Headers) -> str | None:
    """The field value, scheme included, that has the token (rule 1); None: there is none."""
    for name in (b"proxy-authorization", b"authorization"):
        value = header_value(headers, name).strip()
        if value[: len(_SCHEME)].lower() == _SCHEME:
            return value.decode("latin-1")
    return None


def _trusting(ca: Path) -> ssl.SSLContext:
    return client_context(ca, asyncio.get_running_loop().time(), ALPN_HTTP1)
