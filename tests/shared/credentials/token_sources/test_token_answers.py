"""What may be told of a service's answer, and which tokens in one are taken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.token_sources.token_answers import (
    MAX_ACCESS_TOKEN_S,
    access_token,
    jwt_for,
    said,
)
from shared.errors import TokenError
from shared.net.http1 import Response
from tests.support.metadata_server import unsigned_token

NOW_S = 1_000_000.0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"error": "invalid_grant", "error_description": "eyJ.a.b"}, "400 (invalid_grant)"),
        (
            {"error": {"code": 403, "status": "PERMISSION_DENIED", "message": "eyJ"}},
            "400 (PERMISSION_DENIED)",
        ),
        ({"error": {"code": 403}}, "400"),
        ({"error": "eyJhbGciOiJub25lIn0"}, "400"),
        ({"error": "Bearer_eyJ"}, "400"),
        ({"error": "a b"}, "400"),
        ({"error": "invalid_grant\n"}, "400"),
        ({"error": "x" * 41}, "400"),
        ({"error": ["invalid_grant"]}, "400"),
        ([], "400"),
    ],
)
def test_what_is_told_of_an_error(body: object, told: str) -> None:
    assert said(Response(400, {}, json.dumps(body).encode())) == told


@given(st.text())
def test_nothing_but_codes_is_told(text: str) -> None:
    told = said(Response(400, {}, json.dumps({"error": text}).encode()))
    assert told == "400" or (len(told) <= 46 and told.isascii() and told.isprintable())


@given(st.binary())
def test_any_body_can_be_read(body: bytes) -> None:
    assert said(Response(500, {}, body)).startswith("500")


def test_how_long_an_access_token_lives() -> None:
    def end(expires_in: object) -> float:
        return access_token({"access_token": "a", "expires_in": expires_in}, "it", NOW_S, 7.0).expires_at_s

    assert end(10) == NOW_S + 10
    assert end(2.5) == NOW_S + 2.5
    assert end(1e300) == NOW_S + MAX_ACCESS_TOKEN_S
    assert end(None) == 7.0


@pytest.mark.parametrize("expires_in", [0, -1, float("nan"), "60", True, [60]])
def test_an_access_token_without_a_life(expires_in: object) -> None:
    with pytest.raises(TokenError):
        access_token({"access_token": "a", "expires_in": expires_in}, "it", NOW_S, 7.0)


def test_a_jwt_that_is_fit() -> None:
    token = unsigned_token(aud=["x", "me"], exp=NOW_S + 60)
    assert jwt_for(token, "me", "it", NOW_S).expires_at_s == NOW_S + 60


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (None, "garbled"),
        ("opaque", "garbled"),
        (unsigned_token(aud="me"), "garbled"),
        (unsigned_token(aud="me", exp="soon"), "garbled"),
        (unsigned_token(aud="you", exp=NOW_S + 60), "audience"),
        (unsigned_token(aud="me", exp=NOW_S), "expired"),
    ],
)
def test_a_jwt_that_is_not(token: object, reason: str) -> None:
    with pytest.raises(TokenError) as caught:
        jwt_for(token, "me", "it", NOW_S)
    assert caught.value.reason == reason
    assert "eyJ" not in str(caught.value)
