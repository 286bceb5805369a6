"""Tokens as Cloud Run judges them: which pass, which get 401, which 403, and what the refusal says."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Collection
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from shared.errors import EXIT_DENIED, RefusedError, TokenRejectedError
from shared.trust.jwt_check import (
    GOOGLE_ISSUER,
    KINDS,
    MALFORMED,
    UNKNOWN_KEY,
    Issuer,
    PublicKey,
    TokenChecker,
)
from shared.trust.token_claims import at_utc, claims_of, describe

AUDIENCE = "https://hello.a.run.app"
NOW = int(time.time())
"""When the tests are collected."""


def now() -> float:
    return NOW


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer(now=now)


@pytest.fixture(scope="module")
def other() -> Issuer:
    return Issuer(now=now)


@pytest.fixture(scope="module")
def curve_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def checker(issuer: Issuer, **keys: PublicKey) -> TokenChecker:
    return TokenChecker(issuer.public_keys | keys, [AUDIENCE, "custom"], GOOGLE_ISSUER)


def rejected(checker: TokenChecker, authorization: str | None) -> TokenRejectedError:
    with pytest.raises(TokenRejectedError) as caught:
        checker.check(authorization)
    assert caught.value.kind in KINDS
    return caught.value


def part(content: object) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def signed(issuer: Issuer, claims: dict[str, Any]) -> str:
    return jwt.encode(claims, issuer._key, algorithm="RS256", headers={"kid": issuer.kid})


# Accepted.


def test_a_minted_token_opens_the_service(issuer: Issuer) -> None:
    token = issuer.mint(AUDIENCE, subject="42", email="me@project.iam.gserviceaccount.com")
    for authorization in (f"Bearer {token}", f"bearer {token}", f" Bearer   {token} "):
        claims = checker(issuer).check(authorization)
        assert claims == claims_of(token)
    assert claims == {
        "iss": "https://accounts.google.com",
        "aud": AUDIENCE,
        "azp": "42",
        "sub": "42",
        "email": "me@project.iam.gserviceaccount.com",
        "email_verified": True,
        "iat": NOW,
        "exp": NOW + 3600,
    }
    assert describe(token) == (
        f"audience {AUDIENCE}, subject 42, email me@project.iam.gserviceaccount.com, "
        f"expires {at_utc(NOW + 3600)}"
    )


def test_any_audience_of_several_will_do(issuer: Issuer) -> None:
    checker(issuer).check(f"Bearer {issuer.mint('custom')}")
    token = signed(issuer, {"iss": GOOGLE_ISSUER, "aud": ["x", AUDIENCE], "exp": NOW + 3600})
    checker(issuer).check(f"Bearer {token}")


def test_clocks_may_differ_by_ten_seconds(issuer: Issuer) -> None:
    at_s = time.time()
    for times in ({"exp": at_s - 5}, {"iat": at_s + 9, "exp": at_s + 60}):
        claims = {"iss": GOOGLE_ISSUER, "aud": AUDIENCE, **times}
        checker(issuer).check(f"Bearer {signed(issuer, claims)}")


def test_elliptic_curve_keys(issuer: Issuer, curve_key: ec.EllipticCurvePrivateKey) -> None:
    claims = {"iss": GOOGLE_ISSUER, "aud": AUDIENCE, "exp": NOW + 3600}
    token = jwt.encode(claims, curve_key, algorithm="ES256", headers={"kid": "curve"})
    checker(issuer, curve=curve_key.public_key()).check(f"Bearer {token}")


def test_any_issuer_when_none_is_asked_for(issuer: Issuer) -> None:
    token = signed(issuer, {"iss": "https://elsewhere", "aud": AUDIENCE, "exp": NOW + 3600})
    TokenChecker(issuer.public_keys, [AUDIENCE]).check(f"Bearer {token}")


def test_the_key_set_is_one_that_others_can_read(issuer: Issuer) -> None:
    keys = jwt.PyJWKSet.from_dict(issuer.jwks())
    claims = jwt.decode(
        issuer.mint(AUDIENCE),
        keys[issuer.kid],
        audience=AUDIENCE,
        options={"verify_exp": False, "verify_iat": False},
    )
    assert claims["aud"] == AUDIENCE


# Refused.


@pytest.mark.parametrize("authorization", [None, "", "  "])
def test_no_token_is_403(issuer: Issuer, authorization: str | None) -> None:
    refusal = rejected(checker(issuer), authorization)
    assert refusal.status == 403
    assert str(refusal) == "token rejected: the request carries no token"
    assert isinstance(refusal, RefusedError)
    assert refusal.exit_code == EXIT_DENIED


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": "https://other"}, f"its audience is https://other, expected custom, {AUDIENCE}"),
        ({"aud": AUDIENCE + "/"}, f"its audience is {AUDIENCE}/, expected"),
        ({"aud": ["a", "b"]}, "its audience is a b, expected"),
        ({"aud": {"a": 1}}, "its audience is of type dict, expected"),
        ({"aud": [[AUDIENCE]]}, "its audience is , expected"),
        ({"aud": None}, "its audience is None, expected"),
        ({"aud": "x\ny" * 500}, r"its audience is x\\nyx\\ny"),
        ({"exp": NOW - 100}, r"it expired \d+ s ago"),
        ({"exp": None}, "it has no expiry"),
        ({"exp": "tomorrow"}, "its times or its signature cannot be read"),
        ({"exp": float("inf")}, "its times or its signature cannot be read"),
        ({"exp": float("nan")}, "its times or its signature cannot be read"),
        ({"exp": -1}, r"it expired \d+ s ago"),
        ({"exp": -(10**400)}, "it expired very many s ago"),
        ({"iat": 10**400, "nbf": "x"}, r"it is valid only in very many s \(iat\)"),
        ({"iat": NOW + 9000}, r"it is valid only in \d+ s \(iat\)"),
        ({"iat": NOW, "nbf": NOW + 9000}, r"it is valid only in \d+ s \(nbf\)"),
        ({"nbf": "x"}, "its times or its signature cannot be read"),
        (
            {"iss": "https://elsewhere"},
            "its issuer is https://elsewhere, expected https://accounts.google.com",
        ),
        ({"iss": None}, "its issuer is None, expected"),
    ],
)
def test_well_signed_claims_that_do_not_hold_are_401(
    issuer: Issuer, claims: dict[str, Any], reason: str
) -> None:
    whole = {"iss": GOOGLE_ISSUER, "aud": AUDIENCE, "exp": NOW + 3600} | claims
    header = part({"alg": "RS256", "kid": issuer.kid})
    signing_input = f"{header}.{part(whole)}"
    # Signed by hand: PyJWT does not mint nonsense.
    signature = jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256).sign(
        signing_input.encode(), issuer._key
    )
    token = f"{signing_input}.{part(signature)}"
    refusal = rejected(checker(issuer), f"Bearer {token}")
    assert refusal.status == 401
    assert re.match(f"token rejected: {reason}", str(refusal))
    assert len(str(refusal)) < 400
    assert token not in str(refusal)


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        ("Basic dXNlcjpwYXNz", "not of the form `Bearer TOKEN`"),
        ("Bearer", "no JWT"),
        ("Bearer abc", "no JWT"),
        ("Bearer a.b", "no JWT"),
        ("Bearer a.b.c.d", "no JWT"),
        ("Bearer a.b.c d", "no JWT"),
        (f"Bearer x.{part([1])}.eQ", "no JWT"),
        ("Bearer " + "a" * 20_000, "longer than 16384 bytes"),
        (f"Bearer x.{part({})}.eQ", "its header cannot be read"),
        (f"Bearer {part(b'[' * 8000)}.{part({})}.eQ", "its header cannot be read"),
        (f"Bearer {part([1])}.{part({})}.eQ", "its header cannot be read"),
        (f"Bearer {part({'alg': 'RS256', 'kid': 5})}.{part({})}.eQ", "its header cannot be read"),
        (
            f"Bearer {part({'alg': 'RS256', 'crit': ['b64'], 'b64': True})}.{part({})}.eQ",
            "demands extensions",
        ),
        (f"Bearer {part({'alg': 'RS256'})}.{part({})}.eQ", "key that is not known here"),
        (f"Bearer {part({'alg': 'RS256', 'kid': 'nobody'})}.{part({})}.eQ", "key that is not known here"),
    ],
)
def test_what_is_no_token_is_401(issuer: Issuer, authorization: str, reason: str) -> None:
    refusal = rejected(checker(issuer), authorization)
    assert refusal.status == 401
    assert reason in refusal.reason
    assert refusal.kind == (UNKNOWN_KEY if "not known here" in reason else MALFORMED)


def test_signatures_that_do_not_hold(
    issuer: Issuer, other: Issuer, curve_key: ec.EllipticCurvePrivateKey
) -> None:
    token = issuer.mint(AUDIENCE)
    header, payload, signature = token.split(".")
    claims = claims_of(token)
    public_pem = issuer.public_keys[issuer.kid].public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    kid = {"kid": issuer.kid}
    forged = [
        f"{header}.{part(claims | {'email': 'admin@example.com'})}.{signature}",
        f"{header}.{payload}.SIGNATURE_REMOVED_BY_GOOGLE",
        f"{part({'alg': 'none'} | kid)}.{payload}.eQ",
        f"{part({'alg': 'HS256'} | kid)}.{payload}.{part(_hmac(public_pem, payload))}",
        jwt.encode(claims, other._key, algorithm="RS256", headers=kid),
        jwt.encode(claims, issuer._key, algorithm="RS512", headers=kid),
        jwt.encode(claims, issuer._key, algorithm="PS256", headers=kid),
        jwt.encode(claims, curve_key, algorithm="ES256", headers=kid),
        jwt.encode(claims, issuer._key, algorithm="RS256", headers={"kid": "curve"}),
    ]
    keys = checker(issuer, curve=curve_key.public_key())
    for token in forged:
        refusal = rejected(keys, f"Bearer {token}")
        assert (refusal.status, refusal.reason) == (401, "its signature is not valid")


def _hmac(key: bytes, payload: str) -> bytes:
    return hmac.new(key, payload.encode(), hashlib.sha256).digest()


def test_weak_and_foreign_keys_are_not_used(issuer: Issuer) -> None:
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    large = ec.generate_private_key(ec.SECP384R1())
    keys = checker(issuer, weak=weak.public_key(), large=large.public_key())
    for kid in ("weak", "large"):
        token = f"{part({'alg': 'RS256', 'kid': kid})}.{part({})}.eQ"
        assert "too weak or of another kind" in rejected(keys, f"Bearer {token}").reason


def test_a_checker_needs_an_audience(issuer: Issuer) -> None:
    malformed: list[Collection[str]] = [[], AUDIENCE]
    for audiences in malformed:
        with pytest.raises(ValueError, match="non-empty collection"):
            TokenChecker(issuer.public_keys, audiences)
