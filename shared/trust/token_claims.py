"""What a JWT says about itself, unverified: for showing, and for planning a renewal.

A token goes into no error text, log line or repr: use `describe`. Imported at each start that sends a token,
so nothing heavy is imported here.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any

MAX_TOKEN_BYTES = 16 * 1024
"""An ID token is about 1 KiB; more than 16 KiB would not fit into anybody's header list."""

SHOWN_CHARS = 200
"""How much of one claim is shown."""

_JWT = re.compile(r"[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")


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
    told = [
        f"{name} {shown_claim(claims[claim])}"
        for claim, name in (("aud", "audience"), ("sub", "subject"), ("email", "email"))
        if claim in claims
    ]
    try:
        told.append(f"expires {at_utc(expiry_of(claims))}")
    except ValueError:
        told.append("without a readable expiry")
    return ", ".join(told)


def at_utc(seconds: float) -> str:
    """A time in seconds since 1970 as RFC 3339 has it, and in words if no calendar has it."""
    from datetime import UTC, datetime

    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return "a time that no calendar has"


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


def expiry_of(claims: dict[str, Any]) -> float:
    """`exp` in seconds since 1970 (RFC 7519 section 4.1.4); ValueError when there is none."""
    expires_at = claims.get("exp")
    if isinstance(expires_at, bool) or not isinstance(expires_at, (int, float)):
        raise ValueError("a JWT without an expiry")
    # Compared, not asked with isfinite alone: an integer may be too large for a float.
    if not (math.isfinite(expires_at) if isinstance(expires_at, float) else abs(expires_at) < 2**53):
        raise ValueError("a JWT with an impossible expiry")
    return float(expires_at)
