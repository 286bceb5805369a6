"""One exchange with one of Google's token services: its answer is read without trust.

What may be told of a failure is the place, the status and the service's error code; never the body, which may
repeat what was sent.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping
from typing import Any

from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.tokens import demand_fit, demand_sendable
from shared.errors import DialError, TokenError, TokenRefusedError, UpstreamError
from shared.net.http1 import Response, Target, request
from shared.trust.token_claims import claims_of, expiry_of

MAX_ANSWER_BYTES = 64 * 1024
"""A token is 1 to 4 KiB, and an error of Google's with all its details hardly more."""

MAX_ACCESS_TOKEN_S = 12 * 3600.0
"""The longest life that Google gives an access token (IAM's bound); what claims more is not believed."""

# RFC 6749 section 5.2 and google.rpc.Code spell theirs so. Of other shapes nothing is repeated.
_ERROR_CODE = re.compile(r"(?=.{2,40}\Z)(?:[a-z]+(?:_[a-z]+)*|[A-Z]+(?:_[A-Z]+)*)")


async def ask(
    place: str,
    url: str,
    body: Mapping[str, object],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    tls: ssl.SSLContext | None,
    hints: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Posts `body` as JSON to the service that `place` names for error texts, and returns its JSON object.

    `timeout_s` bounds the exchange in seconds; `hints` says what a status may mean.

    Raises:
        TokenRefusedError: the status is another than 200.
        TokenError: anything else went wrong.
    """
    try:
        response = await request(
            "POST",
            url,
            headers={"content-type": "application/json", "accept": "application/json", **(headers or {})},
            body=json.dumps(body).encode(),
            timeout_s=timeout_s,
            max_bytes=MAX_ANSWER_BYTES,
            tls=tls,
        )
    except (DialError, UpstreamError) as error:
        raise TokenError(f"no token from {place}: {error}", "unreachable") from error
    except ValueError as error:
        raise TokenError(f"no token from {place}: {error}") from error
    if response.status != 200:
        hint = (hints or {}).get(response.status)
        raise TokenRefusedError(
            f"no token from {place} at {Target.parse(url)}: it answered "
            f"{said(response)}{f'; {hint}' if hint else ''}",
            response.status,
        )
    answer = response.json_object()
    if answer is None:
        raise TokenError(
            f"no token from {place} at {Target.parse(url)}: its answer is no JSON object", "garbled"
        )
    return answer


def said(response: Response) -> str:
    """Its status, with the error code of the body if it has one: OAuth's `{"error": "invalid_grant"}`, or the
    `{"error": {"status": "PERMISSION_DENIED"}}` of Google's other services."""
    error = (response.json_object() or {}).get("error")
    code = error.get("status") if isinstance(error, dict) else error
    known = isinstance(code, str) and _ERROR_CODE.fullmatch(code)
    return f"{response.status} ({code})" if known else str(response.status)


def access_token(answer: Mapping[str, Any], place: str, now_s: float, otherwise_s: float) -> Minted:
    """The access token of an OAuth or STS answer (RFC 6749 section 5.1); without `expires_in` it ends at
    `otherwise_s`, both in seconds since 1970. Raises TokenError."""
    token = answer.get("access_token")
    if not isinstance(token, str):
        raise TokenError(f"no token from {place}: its answer has no access_token", "garbled")
    try:
        demand_sendable(token)
    except TokenError as error:
        raise TokenError(f"cannot use the token from {place}: {error}", error.reason) from error
    expires_in = answer.get("expires_in")
    if expires_in is None:
        return Minted(token, otherwise_s)
    if isinstance(expires_in, bool) or not isinstance(expires_in, (int, float)):
        raise TokenError(f"no token from {place}: its expires_in is no number", "garbled")
    if not expires_in > 0:  # true for NaN, too
        raise TokenError(f"cannot use the token from {place}: it has expired already", "expired")
    return Minted(token, now_s + min(expires_in, MAX_ACCESS_TOKEN_S))


def jwt_for(token: object, audience: str, place: str, now_s: float) -> Minted:
    """`token` as it came from `place`, once it is seen to be a JWT for `audience` that has not expired at
    `now_s` (seconds since 1970). Its signature is for those to check who get it. Raises TokenError."""
    if not isinstance(token, str):
        raise TokenError(f"no token from {place}: its answer has none", "garbled")
    try:
        minted = Minted(token, expiry_of(claims_of(token)))
    except ValueError as error:
        raise TokenError(f"no token from {place}: what it gave is {error}", "garbled") from error
    demand_fit(minted, audience, place, now_s)
    return minted
