"""Tokens of requests to the HBONE port: where they stand, when the issuer's keys are fetched, what counts."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config.jwt_settings import JwtSettings
from gateway.hbone.hbone_tokens import HboneTokens, KeysAwaitedError, bearer
from gateway.rules.claims import NO_TOKEN
from shared.credentials.certificates.authority import Authority
from shared.errors import KeysError
from shared.http2.events import Headers
from shared.trust.jwt_check import GOOGLE_ISSUER, KINDS, Issuer
from tests.support.key_server import KeyServer, served
from tests.support.metadata_server import listening

AUDIENCE = "https://hgate.example"


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def other() -> Issuer:
    return Issuer("https://other.example")


@pytest.fixture
def key_file(tmp_path: Path, issuer: Issuer) -> Path:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(issuer.jwks()))
    return file


@pytest.fixture
def tokens(key_file: Path) -> Iterator[HboneTokens]:
    tokens = HboneTokens(settings(str(key_file)))
    tokens.start()
    yield tokens
    tokens.close()


def settings(keys: str) -> JwtSettings:
    return JwtSettings(GOOGLE_ISSUER, (AUDIENCE,), keys)


def with_token(token: str, name: bytes = b"authorization") -> Headers:
    return [(b":method", b"CONNECT"), (name, f"Bearer {token}".encode())]


def counted(tokens: HboneTokens) -> dict[str, float]:
    """All metrics, by result."""
    return {
        sample.labels["result"]: sample.value for family in tokens.families() for sample in family.samples
    }


# Where the token is.


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], None),
        ([(b"authorization", b"Bearer a")], "Bearer a"),
        ([(b"authorization", b" bEARER  a ")], "bEARER  a"),
        ([(b"authorization", b"Bearer a"), (b"proxy-authorization", b"Bearer p")], "Bearer p"),
        ([(b"proxy-authorization", b"Basic p"), (b"authorization", b"Bearer a")], "Bearer a"),
        ([(b"proxy-authorization", b"Basic p"), (b"authorization", b"Digest a")], None),
        ([(b"authorization", b"Bearer")], None),
        ([(b"authorization", b"Bearer \xff")], "Bearer \xff"),
    ],
)
def test_where_the_token_is(headers: Headers, found: str | None) -> None:
    assert bearer(headers) == found


# What is said of it.


def test_a_good_one(tokens: HboneTokens, issuer: Issuer) -> None:
    shown = tokens.shown(with_token(issuer.mint(AUDIENCE, email="me@example.com")))
    for _ in range(2):
        claims = shown.claims()
        assert claims is not None and claims["email"] == "me@example.com"
    assert shown.challenge == b'Bearer error="insufficient_scope"', "were it for other claims"
    assert not shown.fault
    assert tokens.results == {"good": 1}, "once checked, it is known"


def test_bad_ones(tokens: HboneTokens, issuer: Issuer, other: Issuer) -> None:
    token = issuer.mint(AUDIENCE)
    for wrong, kind in (
        (issuer.mint("https://else.example"), "audience"),
        (issuer.mint(AUDIENCE, lifetime_s=-100), "time"),
        (other.mint(AUDIENCE), "unknown_key"),
        (token[:-4] + "AAAA", "signature"),
        ("garbage", "malformed"),
        ("x" * 20_000, "malformed"),
    ):
        tokens.results.clear()
        shown = tokens.shown(with_token(wrong))
        assert shown.claims() is None
        assert shown.challenge == b'Bearer error="invalid_token"'
        assert shown.fault and wrong not in shown.fault
        assert tokens.results == {kind: 1} and kind in KINDS
    tokens.results.clear()
    shown = tokens.shown([])
    assert shown.claims() is None
    assert (shown.fault, shown.challenge) == ("the request carries no token", b"Bearer")
    assert tokens.results == {"missing": 1}


def test_nobody_s_tokens_count() -> None:
    tokens = HboneTokens(None)
    tokens.start()
    assert tokens.shown(with_token("a")) is NO_TOKEN
    assert counted(tokens) == {"success": 0, "failure": 0}
    tokens.close()


# The issuer's keys.


async def test_keys_are_waited_for_only_where_they_could_help(issuer: Issuer) -> None:
    async with served(issuer) as server:
        tokens = HboneTokens(settings(server.url))
        tokens.start()
        for headers in ([], with_token("garbage"), with_token("a.b.c")):
            shown = tokens.shown(headers)
            assert shown.claims() is None and not shown.is_awaited
        tokens.shown(with_token(issuer.mint(AUDIENCE)))
        assert server.asked == 0, "nobody has asked for what it says"
        shown = tokens.shown(with_token(issuer.mint(AUDIENCE)))
        with pytest.raises(KeysAwaitedError):
            shown.claims()
        assert shown.is_awaited
        await shown.prepare()
        assert not shown.is_awaited and shown.claims() is not None
        assert tokens.shown(with_token(issuer.mint(AUDIENCE))).claims() is not None
        assert server.asked == 1
        assert counted(tokens) == {
            "missing": 1,
            "malformed": 2,
            "good": 2,
            "success": 1,
            "failure": 0,
        }


async def test_keys_with_a_trust_of_their_own(issuer: Issuer, tmp_path: Path) -> None:
    authority = Authority.create("issuer.local")
    authority.write(tmp_path, authority.issue(ip_addresses=["127.0.0.1"]))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certificates.pem", tmp_path / "private_key.pem")
    server, ca = KeyServer(issuer), tmp_path / "ca.pem"
    async with listening(server.serve, tls=context) as port:
        tokens = HboneTokens(replace(settings(f"https://127.0.0.1:{port}/certs"), ca=ca))
        shown = tokens.shown(with_token(issuer.mint(AUDIENCE)))
        with pytest.raises(KeysError, match=r"trusted certificates: .*ca\.pem: No such file"):
            await shown.prepare()
        ca.write_bytes(authority.root_pem)
        again = HboneTokens(replace(settings(f"https://127.0.0.1:{port}/certs"), ca=ca))
        shown = again.shown(with_token(issuer.mint(AUDIENCE)))
        await shown.prepare()
        assert shown.claims() is not None


# A reload.


async def test_a_reload_keeps_the_keys_of_an_unchanged_source(issuer: Issuer) -> None:
    async with served(issuer) as server:
        tokens = HboneTokens(settings(server.url))
        early = tokens.shown(with_token(issuer.mint("https://new.example")))
        await early.prepare()
        tokens.use(replace(settings(server.url), audiences=("https://new.example",)))
        assert tokens.shown(with_token(issuer.mint("https://new.example"))).claims() is not None
        assert tokens.shown(with_token(issuer.mint(AUDIENCE))).claims() is None
        assert early.claims() is None, "it was asked under the old settings"
        assert server.asked == 1
        tokens.use(settings(f"{server.url}/2"))
        with pytest.raises(KeysAwaitedError):
            tokens.shown(with_token(issuer.mint(AUDIENCE))).claims()
        assert counted(tokens)["success"] == 1, "counters do not go back"
        tokens.use(None)
        assert tokens.shown(with_token(issuer.mint(AUDIENCE))) is NO_TOKEN
        assert counted(tokens)["success"] == 1
