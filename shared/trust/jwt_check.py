"""Checks and mints ID tokens the way Google's front end and token service do.

Owns signatures, audiences and the statuses that tell a caller what is wrong with its token. Does not fetch
keys (`jwks` does), and knows no IAM roles. Imported only where tokens are checked: it brings in PyJWT and
cryptography. Counterpart: `tokens`, which obtains and sends what is checked here.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from shared.errors import TokenRejectedError
from shared.trust.token_claims import MAX_TOKEN_BYTES, claims_of, shown_claim

LEEWAY_S = 10
"""By how much two clocks may differ."""

TOKEN_LIFETIME_S = 3600
"""What the ID tokens of Google's metadata server have."""

RSA_BITS = 2048
"""The size of Google's own signing keys, and the least that is accepted here."""

GOOGLE_ISSUER = "https://accounts.google.com"

STATUS_UNAUTHORIZED = 401
"""The token is malformed, expired, badly signed or meant for somebody else (FACTS section 1)."""

STATUS_FORBIDDEN = 403
"""There is no token, and the service is not open to everybody (FACTS section 1)."""

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey


MISSING, MALFORMED, UNKNOWN_KEY, SIGNATURE = "missing", "malformed", "unknown_key", "signature"
TIME, AUDIENCE, ISSUER = "time", "audience", "issuer"

KINDS = (MISSING, MALFORMED, UNKNOWN_KEY, SIGNATURE, TIME, AUDIENCE, ISSUER)
"""Every kind of fault that a TokenRejectedError can have: the values of a metric's label."""


class TokenChecker:
    """Holds `authorization` headers against keys, audiences and an issuer."""

    def __init__(
        self,
        keys: Mapping[str, PublicKey],
        audiences: Collection[str],
        issuer: str | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`keys` maps key ids to public keys (RSA for RS256, P-256 for ES256) and is looked at on each check,
        so it may change. `issuer` None accepts any that the keys vouch for; `now` gives seconds since 1970.
        Raises ValueError when there is no audience or a bare string in place of several.
        """
        if isinstance(audiences, str) or not audiences:
            raise ValueError("audiences have to be a non-empty collection of strings")
        self._keys = keys
        self._audiences = frozenset(audiences)
        self._issuer = issuer
        self._now = now
        self._signatures = jwt.PyJWS(algorithms=["RS256", "ES256"])

    def check(self, authorization: str | None) -> dict[str, Any]:
        """Returns the claims of the token in an `authorization` header value.

        Raises TokenRejectedError, with status 403 when there is no header and 401 for everything else, as
        Cloud Run answers.
        """
        if authorization is None or not authorization.strip():
            raise TokenRejectedError(STATUS_FORBIDDEN, "the request carries no token", MISSING)
        scheme, _, token = authorization.strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer":
            raise _unauthorized("the authorization header is not of the form `Bearer TOKEN`", MALFORMED)
        if len(token) > MAX_TOKEN_BYTES:
            raise _unauthorized(f"it is longer than {MAX_TOKEN_BYTES} bytes", MALFORMED)
        try:
            claims = claims_of(token)
        except ValueError as error:
            raise _unauthorized(str(error), MALFORMED) from error
        self._check_signature(token)
        self._check_times(claims)
        self._check_names(claims)
        return claims

    def _check_signature(self, token: str) -> None:
        # PyJWT's own texts stay out of ours: some of them quote what the token holds.
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, RecursionError):
            raise _unauthorized("its header cannot be read", MALFORMED) from None
        # Here, for not every PyJWT that we run with knows it (RFC 7515 section 4.1.11).
        if "crit" in header:
            raise _unauthorized("it demands extensions that are not known here", MALFORMED)
        key_id = header.get("kid")
        key = self._keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise _unauthorized("it is signed with a key that is not known here", UNKNOWN_KEY)
        # Only the key's own algorithm: the token must not choose how it is checked (RFC 8725, 3.1).
        own = algorithm(key)
        if own is None:
            raise _unauthorized("it is signed with a key that is too weak or of another kind", UNKNOWN_KEY)
        try:
            self._signatures.decode_complete(token, key, algorithms=[own])
        except jwt.PyJWTError:
            raise _unauthorized("its signature is not valid", SIGNATURE) from None

    def _check_times(self, claims: dict[str, Any]) -> None:
        now = self._now()
        expires_at = _time(claims, "exp")
        if expires_at is None:
            raise _unauthorized("it has no expiry", TIME)
        if now >= expires_at + LEEWAY_S:
            raise _unauthorized(f"it expired {now - expires_at:.0f} s ago", TIME)
        for claim in ("iat", "nbf"):
            valid_from = _time(claims, claim)
            if valid_from is not None and now < valid_from - LEEWAY_S:
                raise _unauthorized(f"it is valid only in {valid_from - now:.0f} s ({claim})", TIME)

    def _check_names(self, claims: dict[str, Any]) -> None:
        audience = claims.get("aud")
        named = audience if isinstance(audience, list) else [audience]
        if not any(isinstance(name, str) and name in self._audiences for name in named):
            expected = ", ".join(sorted(self._audiences))
            raise _unauthorized(f"its audience is {shown_claim(audience)}, expected {expected}", AUDIENCE)
        issuer = claims.get("iss")
        if self._issuer is not None and issuer != self._issuer:
            raise _unauthorized(f"its issuer is {shown_claim(issuer)}, expected {self._issuer}", ISSUER)


def _unauthorized(reason: str, kind: str) -> TokenRejectedError:
    return TokenRejectedError(STATUS_UNAUTHORIZED, reason, kind)


def algorithm(key: object) -> str | None:
    """The one algorithm (RFC 7518 section 3.1) that a key is used with; None: it is none, or too weak."""
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= RSA_BITS:
        return "RS256"
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return "ES256"
    return None


def _time(claims: dict[str, Any], name: str) -> float | None:
    """A NumericDate (RFC 7519 section 2) in seconds, None when the claim is missing."""
    value = claims.get(name)
    if value is None:
        return None
    # The range keeps infinities, NaN and integers without end out of the arithmetic.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        raise _unauthorized(f"its {name} is not a time", TIME)
    return float(value)


class Issuer:
    """A token service of one's own, with a fresh RSA key: what Google's is to Cloud Run."""

    def __init__(self, name: str = GOOGLE_ISSUER, *, now: Callable[[], float] = time.time) -> None:
        """`name` becomes the `iss` claim; `now` gives seconds since 1970. Making the key takes 0.1 s."""
        self.name = name
        self._now = now
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)
        der = self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.kid = hashlib.sha256(der).hexdigest()[:40]

    @property
    def public_keys(self) -> dict[str, PublicKey]:
        """Key id to key, as `TokenChecker` takes it."""
        return {self.kid: self._key.public_key()}

    def jwks(self) -> dict[str, Any]:
        """The public key as a JSON Web Key Set (RFC 7517)."""
        numbers = self._key.public_key().public_numbers()
        return {
            "keys": [
                {
                    "kty": "RSA",
                    "use": "sig",
                    "alg": "RS256",
                    "kid": self.kid,
                    "n": _base64url_uint(numbers.n),
                    "e": _base64url_uint(numbers.e),
                }
            ]
        }

    def mint(
        self,
        audience: str,
        *,
        subject: str = "100000000000000000000",
        email: str | None = None,
        lifetime_s: float = TOKEN_LIFETIME_S,
    ) -> str:
        """Signs an ID token with the claims that Google's have, valid for `lifetime_s` seconds from now;
        a negative lifetime gives one that has expired."""
        now = int(self._now())
        claims: dict[str, Any] = {
            "iss": self.name,
            "aud": audience,
            "azp": subject,
            "sub": subject,
            "iat": now + min(0, int(lifetime_s)),
            "exp": now + int(lifetime_s),
        }
        if email is not None:
            claims |= {"email": email, "email_verified": True}
        return jwt.encode(claims, self._key, algorithm="RS256", headers={"kid": self.kid})


def _base64url_uint(number: int) -> str:
    """RFC 7518 section 2: big-endian, no leading zero bytes, no padding."""
    raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")
