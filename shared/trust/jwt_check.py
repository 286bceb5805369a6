"""Checks and mints ID tokens the way Google's front end and token service do.

Import it only where tokens are checked: it brings in PyJWT and cryptography.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.types import Options

from shared.errors import TokenRejectedError
from shared.trust.token_claims import MAX_TOKEN_BYTES, claims_of, shown_claim

LEEWAY_S = 10
"""By how much two clocks may differ."""

TOKEN_LIFETIME_S = 3600
"""What the ID tokens of Google's metadata server have."""

RSA_BITS = 2048
"""The size of Google's own signing keys, and the least that is accepted here."""

GOOGLE_ISSUER = "https://accounts.google.com"


PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey


MISSING, MALFORMED, UNKNOWN_KEY, SIGNATURE = "missing", "malformed", "unknown_key", "signature"
TIME, AUDIENCE, ISSUER = "time", "audience", "issuer"

KINDS = (MISSING, MALFORMED, UNKNOWN_KEY, SIGNATURE, TIME, AUDIENCE, ISSUER)
"""Every kind of fault that a TokenRejectedError can have: the values of a metric's label."""


_OPTIONS: Options = {"require": ["exp"], "verify_sub": False, "verify_jti": False}
"""Rules look at the subject, and nobody at the token's id."""


class TokenChecker:
    """Checks `authorization` headers against keys, audiences and an issuer."""

    def __init__(
        self,
        keys: Mapping[str, PublicKey],
        audiences: Collection[str],
        issuer: str | None = None,
    ) -> None:
        """`keys` maps key ids to public keys (RSA for RS256, P-256 for ES256) and is read at each check, so
        it may change. `issuer` None accepts any that the keys vouch for.
        Raises ValueError when there is no audience or a bare string in place of several.
        """
        if isinstance(audiences, str) or not audiences:
            raise ValueError("audiences have to be a non-empty collection of strings")
        self._keys = keys
        self._audiences = frozenset(audiences)
        self._issuer = issuer

    def check(self, authorization: str | None) -> dict[str, Any]:
        """Returns the claims of the token in an `authorization` header value.

        Raises TokenRejectedError, with status 403 when there is no header and 401 for everything else, as
        Cloud Run answers.
        """
        if authorization is None or not authorization.strip():
            raise TokenRejectedError(HTTPStatus.FORBIDDEN, "the request carries no token", MISSING)
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
        key, own_algorithm = self._key(token)
        try:
            return jwt.decode(
                token,
                key,
                [own_algorithm],
                options=_OPTIONS,
                audience=self._audiences,
                issuer=self._issuer,
                leeway=LEEWAY_S,
            )
        except (jwt.PyJWTError, ArithmeticError) as error:
            # Without the original: some of PyJWT's texts quote what the token holds.
            raise self._rejection(error, claims) from None

    def _key(self, token: str) -> tuple[PublicKey, str]:
        """The key with which it says to be signed, and the key's own algorithm: the token must not choose how
        it is checked (RFC 8725 section 3.1)."""
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, RecursionError):
            raise _unauthorized("its header cannot be read", MALFORMED) from None
        # PyJWT knows one extension, which no JWT may use (RFC 7797 section 7).
        if "crit" in header:
            raise _unauthorized("it demands extensions that are not known here", MALFORMED)
        key_id = header.get("kid")
        key = self._keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise _unauthorized("it is signed with a key that is not known here", UNKNOWN_KEY)
        own = algorithm(key)
        if own is None:
            raise _unauthorized("it is signed with a key that is too weak or of another kind", UNKNOWN_KEY)
        return key, own

    def _rejection(self, error: Exception, claims: dict[str, Any]) -> TokenRejectedError:
        """What PyJWT found, in words for the caller."""
        match error:
            case jwt.InvalidSignatureError() | jwt.InvalidAlgorithmError() | jwt.InvalidKeyError():
                return _unauthorized("its signature is not valid", SIGNATURE)
            case jwt.ExpiredSignatureError():
                return _unauthorized(f"it expired {_seconds_to(claims['exp'])} s ago", TIME)
            case jwt.ImmatureSignatureError():
                claim = "nbf" if "nbf" in str(error) else "iat"
                return _unauthorized(f"it is valid only in {_seconds_to(claims[claim])} s ({claim})", TIME)
            case jwt.MissingRequiredClaimError(claim="exp"):
                return _unauthorized("it has no expiry", TIME)
            case jwt.InvalidAudienceError() | jwt.MissingRequiredClaimError(claim="aud"):
                expected = ", ".join(sorted(self._audiences))
                shown = shown_claim(claims.get("aud"))
                return _unauthorized(f"its audience is {shown}, expected {expected}", AUDIENCE)
            case jwt.InvalidIssuerError() | jwt.MissingRequiredClaimError(claim="iss"):
                shown = shown_claim(claims.get("iss"))
                return _unauthorized(f"its issuer is {shown}, expected {self._issuer}", ISSUER)
        return _unauthorized("its times or its signature cannot be read", MALFORMED)


def _unauthorized(reason: str, kind: str) -> TokenRejectedError:
    return TokenRejectedError(HTTPStatus.UNAUTHORIZED, reason, kind)


def _seconds_to(date: str | float) -> str:
    """How far away a NumericDate (RFC 7519 section 2) is that PyJWT could read."""
    try:
        return f"{abs(int(date) - time.time()):.0f}"
    except OverflowError:
        return "very many"


def algorithm(key: object) -> str | None:
    """The one algorithm (RFC 7518 section 3.1) that a key is used with; None: it is none, or too weak."""
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= RSA_BITS:
        return "RS256"
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return "ES256"
    return None


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
        """Key id to key, as `TokenChecker` expects it."""
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
