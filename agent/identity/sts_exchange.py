"""krun's token exchange with Google: STS, and for ID tokens IAM, with the caller's own token.

Nothing is kept, so no caller gets a token that was made from somebody else's.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

from shared.credentials.token_sources.gke_exchange import FederatedToken, GkeExchange, SubjectToken
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.credentials.tokens.minting import Minted
from shared.errors import SubjectRefusedError, TargetRefusedError, TokenError, TokenRefusedError, UsageError
from shared.trust.token_claims import claims_of, expiry_of

REFUSED = range(400, 500)
TRANSIENT = (408, 429)
"""Refusals that say nothing of the request."""


class GkeSts:
    """Exchanges Kubernetes tokens as `settings` say."""

    def __init__(
        self,
        settings: TokenSettings,
        *,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`tls` is for https, None: the system's trust; `now` gives seconds since 1970."""
        self._settings = settings
        self._tls = tls
        self._now = now

    async def access_token(self, subject: str) -> Minted:
        """As `sts_server.Exchange` has it."""
        federated = FederatedToken(self._settings, _given(subject), tls=self._tls, now=self._now)
        try:
            return await federated.access_token()
        except TokenError as error:
            raise _judged(error) from error

    async def id_token(self, subject: str, audience: str) -> Minted:
        """As `sts_server.Exchange` has it."""
        try:
            exchange = GkeExchange(self._settings, _given(subject), tls=self._tls, now=self._now)
            return await exchange.mint(audience)
        except UsageError as error:
            raise TargetRefusedError(str(error)) from error
        except TokenError as error:
            raise _judged(error) from error


def _given(subject: str) -> SubjectToken:
    """Whatever audience it is for: Google's STS knows which ones it accepts."""

    async def mint(audience: str) -> Minted:
        try:
            return Minted(subject, expiry_of(claims_of(subject)))
        except ValueError:  # only where Google's answer has no end of its own is this one asked for
            return Minted(subject, 0.0)

    return mint


def _judged(error: TokenError) -> TokenError:
    """The same error as the class that tells whose fault it is."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, TokenRefusedError):
        seen = seen.__cause__
    if isinstance(seen, TokenRefusedError) and seen.status in REFUSED and seen.status not in TRANSIENT:
        return SubjectRefusedError(str(error))
    return error
