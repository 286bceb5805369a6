"""An issuer's keys: fetched when a token asks for them, kept, rotated, kept on while the issuer is away."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.certificates.authority import Authority
from shared.credentials.token_sources import jwks
from shared.credentials.token_sources.jwks import (
    KeySet,
    check_url,
    key_id_of,
    read_keys,
)
from shared.errors import TokenRejectedError, UnavailableError
from shared.tasks import spawn
from shared.trust.jwt_check import Issuer, TokenChecker
from tests.shared.net.loopback import until
from tests.support.key_server import KeyServer, served
from tests.support.metadata_server import closed_port, listening
from tests.support.wall_clock import Clock

AUDIENCE = "https://hello.a.run.app"


@pytest.fixture(scope="module")
def old() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def new() -> Issuer:
    return Issuer()


def key_set(server: KeyServer, now: Clock) -> KeySet:
    tls = server.tls
    return KeySet(server.url, tls=None if tls is None else lambda: tls, now=now)


class Verifier:
    """What those who check tokens do with the keys."""

    def __init__(self, keys: KeySet) -> None:
        self.keys = keys
        self._checker = TokenChecker(keys.keys, [AUDIENCE])

    def is_ready(self, authorization: str) -> bool:
        return self.keys.is_ready(key_id_of(authorization))

    def check_now(self, authorization: str) -> dict[str, Any]:
        return self._checker.check(authorization)

    async def check(self, authorization: str) -> dict[str, Any]:
        await self.keys.prepare(key_id_of(authorization))
        return self._checker.check(authorization)


def bearer(issuer: Issuer) -> str:
    return f"Bearer {issuer.mint(AUDIENCE)}"


# From a URL.


async def test_the_first_token_fetches_the_keys_and_the_next_ones_do_not(old: Issuer) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, Clock()))
        assert not verify.is_ready(bearer(old))
        assert (await verify.check(bearer(old)))["aud"] == AUDIENCE
        for _ in range(3):
            assert verify.is_ready(bearer(old))
            verify.check_now(bearer(old))
        assert server.asked == 1


async def test_a_hundred_tokens_at_once_are_one_request(old: Issuer) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, Clock()))
        checks = await asyncio.gather(*(verify.check(bearer(old)) for _ in range(100)))
        assert len(checks) == 100 and server.asked == 1


async def test_who_gives_up_takes_the_answer_from_nobody(old: Issuer) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, Clock()))
        server.gate.clear()
        impatient = spawn(verify.check(bearer(old)), name="impatient")
        patient = spawn(verify.check(bearer(old)), name="patient")
        await until(lambda: server.asked > 0)
        impatient.cancel()
        server.gate.set()
        assert (await patient)["aud"] == AUDIENCE and impatient.cancelled()


async def test_an_issuer_that_rotates_its_keys_is_followed(old: Issuer, new: Issuer, clock: Clock) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, clock))
        await verify.check(bearer(old))
        server.issuers = [new]
        clock.now += jwks.MIN_PACE_S
        assert not verify.is_ready(bearer(new))
        await verify.check(bearer(new))
        with pytest.raises(TokenRejectedError, match="not known here"):
            verify.check_now(bearer(old))


async def test_tokens_of_unknown_keys_cannot_make_us_ask_all_the_time(
    old: Issuer, new: Issuer, clock: Clock
) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, clock))
        await verify.check(bearer(old))
        for _ in range(50):
            with pytest.raises(TokenRejectedError, match="not known here"):
                await verify.check(bearer(new))
        assert server.asked == 1
        clock.now += jwks.MIN_PACE_S
        with pytest.raises(TokenRejectedError):
            await verify.check(bearer(new))
        assert server.asked == 2


@pytest.mark.parametrize(
    ("said", "age", "counts_s"),
    [
        ("public, max-age=600", "", 600),
        ("max-age=600", "100", 500),
        ("max-age=600", "garbage", 600),
        ("s-maxage=5", "", jwks.DEFAULT_AGE_S),
        ("", "", jwks.DEFAULT_AGE_S),
        ("max-age=0", "", jwks.MIN_AGE_S),
        ("max-age=70", "999", jwks.MIN_AGE_S),
        ("max-age=999999999", "", jwks.MAX_AGE_S),
    ],
)
async def test_old_keys_serve_while_newer_ones_are_fetched(
    old: Issuer, new: Issuer, said: str, age: str, counts_s: float, clock: Clock
) -> None:
    async with served(old) as server:
        server.cache_control, server.age = said, age
        verify = Verifier(key_set(server, clock))
        await verify.check(bearer(old))
        clock.now += jwks.AHEAD * counts_s - 1
        assert verify.is_ready(bearer(old)) and server.asked == 1
        server.issuers = [old, new]
        clock.now += 1
        assert verify.is_ready(bearer(old)), "nobody waits for the newer ones"
        await until(lambda: len(verify.keys.keys) == 2)
        assert server.asked == 2


async def test_a_key_that_was_withdrawn_while_nobody_came(old: Issuer, new: Issuer, clock: Clock) -> None:
    async with served(old) as server:
        server.cache_control = "max-age=600"
        verify = Verifier(key_set(server, clock))
        await verify.check(bearer(old))
        server.issuers = [new]
        clock.now += 600
        assert not verify.is_ready(bearer(old)), "they count no longer than the issuer said"
        with pytest.raises(TokenRejectedError, match="not known here"):
            await verify.check(bearer(old))


async def test_keys_count_on_while_the_issuer_is_away_but_not_for_ever(
    old: Issuer, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, clock))
        await verify.check(bearer(old))
        server.answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
        for asked in (2, 3, 4):
            clock.now += jwks.MAX_AGE_S
            assert not verify.is_ready(bearer(old)), "the issuer may be back"
            await verify.check(bearer(old))
            assert verify.is_ready(bearer(old)), "one has waited for all"
            assert server.asked == asked
        assert caplog.text.count("it answered 503; keeping those in use") == 1
        clock.now += jwks.STALE_S - 3 * jwks.MAX_AGE_S
        with pytest.raises(UnavailableError, match="it answered 503"):
            await verify.check(bearer(old))


async def test_a_new_key_while_the_issuer_is_away_is_not_called_a_bad_one(
    old: Issuer, new: Issuer, clock: Clock
) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, clock))
        await verify.check(bearer(old))
        server.answer = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
        clock.now += jwks.MIN_PACE_S
        for _ in range(3):
            with pytest.raises(UnavailableError, match="it answered 503"):
                await verify.check(bearer(new))
            await verify.check(bearer(old))
        assert server.asked == 2


async def test_the_end_while_keys_are_fetched(old: Issuer) -> None:
    async with served(old) as server:
        verify = Verifier(key_set(server, Clock()))
        server.gate.clear()
        waiting = spawn(verify.check(bearer(old)), name="waiting")
        await until(lambda: server.asked > 0)
        verify.keys.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        server.gate.set()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "it answered 404"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", "no JSON Web Key Set"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "broken answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n" + b" " * 999_999, "longer than"),
        (b"no HTTP at all\r\n\r\n", "broken answer"),
    ],
)
async def test_garbage_is_told_and_a_failure_is_remembered(
    old: Issuer, answer: bytes, says: str, clock: Clock
) -> None:
    async with served(old) as server:
        server.answer = answer
        verify = Verifier(key_set(server, clock))
        for _ in range(3):
            with pytest.raises(UnavailableError, match=f"no keys from {server.url}: .*{says}"):
                await verify.check(bearer(old))
        assert server.asked == 1
        server.answer = None
        clock.now += jwks.EMPTY_PACE_S
        await verify.check(bearer(old))


async def test_a_server_that_is_not_there_or_never_answers(old: Issuer) -> None:
    absent = Verifier(KeySet(f"http://127.0.0.1:{closed_port()}/certs"))
    with pytest.raises(UnavailableError, match="cannot connect"):
        await absent.check(bearer(old))
    async with served(old) as server:
        server.gate.clear()
        with pytest.raises(UnavailableError, match=r"no complete answer .* within 0\.05 s"):
            await Verifier(KeySet(server.url, timeout_s=0.05)).check(bearer(old))
        server.gate.set()


async def test_over_tls_with_a_trust_of_our_own(old: Issuer, tmp_path: Path) -> None:
    authority = Authority.create("issuer.local")
    authority.write(tmp_path, authority.issue(ip_addresses=["127.0.0.1"]))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certificates.pem", tmp_path / "private_key.pem")
    keys = KeyServer(old)
    async with listening(keys.serve, tls=context) as port:
        keys.url = f"https://127.0.0.1:{port}/certs"
        with pytest.raises(UnavailableError, match="certificate refused: "):
            await Verifier(key_set(keys, Clock())).check(bearer(old))
        keys.tls = ssl.create_default_context(cafile=str(tmp_path / "ca_certificates.pem"))
        await Verifier(key_set(keys, Clock())).check(bearer(old))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://issuer.example/certs", "https only"),
        ("ftp://issuer.example/certs", "scheme 'ftp'"),
        ("https://", "without a host"),
    ],
)
def test_a_url_that_cannot_be_used(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        KeySet(url)
    check_url("https://issuer.example/certs")


# From a file.


async def test_a_file_is_read_again_when_it_changes(
    old: Issuer, new: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, file = Clock(), tmp_path / "keys.json"
    file.write_text(json.dumps(old.jwks()))
    verify = Verifier(KeySet(str(file), now=clock))
    await verify.check(bearer(old))
    (tmp_path / "next").write_text(json.dumps(new.jwks()))
    os.replace(tmp_path / "next", file)
    assert verify.is_ready(bearer(old)) and old.kid in verify.keys.keys, "not looked at for each token"
    await verify.check(bearer(new))
    with pytest.raises(TokenRejectedError, match="not known here"):
        await verify.check(bearer(old))
    file.write_text("garbage")
    clock.now += jwks.LOOK_EVERY_S
    with caplog.at_level(logging.WARNING):
        await verify.check(bearer(new))
    assert f"no keys from {file}: no JSON Web Key Set; keeping those in use" in caplog.text
    with pytest.raises(UnavailableError, match="no JSON Web Key Set"):
        await verify.check(bearer(old))
    file.unlink()
    for _ in range(3):
        clock.now += jwks.LOOK_EVERY_S
        await verify.check(bearer(new))
    assert caplog.text.count("No such file") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "no JSON Web Key Set"), (b" " * (jwks.MAX_BYTES + 1), "longer than")],
)
async def test_a_file_that_was_never_good(
    old: Issuer, tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "keys.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UnavailableError, match=f"no keys from {file}: .*{says}"):
        await Verifier(KeySet(str(file), now=Clock())).check(bearer(old))


async def test_what_is_no_file_holds_nothing_up(old: Issuer, tmp_path: Path) -> None:
    pipe = tmp_path / "keys.json"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(UnavailableError, match="not a regular file"):
            await Verifier(KeySet(str(place), now=Clock())).check(bearer(old))


# What a key set may be.


def test_keys_that_cannot_be_used_are_left_out(old: Issuer) -> None:
    good = old.jwks()["keys"][0]
    others = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "symmetric"},
        {"kty": "oct", "kid": "symmetric, without a key"},
        good | {"kid": "for another algorithm", "alg": "RS512"},
        good | {"kid": "for signing", "key_ops": ["sign"]},
        good | {"kid": "for what", "key_ops": None},
        good | {"kid": "of what kind", "kty": ["RSA"]},
        good | {"kid": "for encryption", "use": "enc"},
        good | {"kid": None},
        good | {"kid": "not base64", "n": "!"},
        {"kty": "none of all", "kid": "x"},
        "no object",
        {"kty": "RSA", "n": "AQAB", "e": "AQAB", "kid": "weak"},
    ]
    assert list(read_keys(json.dumps({"keys": [*others, good]}).encode())) == [old.kid]


def test_too_many_keys(old: Issuer) -> None:
    keys = old.jwks()["keys"] * (jwks.MAX_KEYS + 1)
    with pytest.raises(ValueError, match="more than 64"):
        read_keys(json.dumps({"keys": keys}).encode())


_NAMES = ["keys", "kty", "n", "e", "x", "crv", "kid", "use", "alg", "k", "d", "oth", "key_ops"]


def test_a_key_that_says_all_about_itself(old: Issuer) -> None:
    full = old.jwks()["keys"][0] | {"alg": "RS256", "use": "sig", "key_ops": ["verify"]}
    assert list(read_keys(json.dumps({"keys": [full]}).encode())) == [old.kid]
    bare = {name: full[name] for name in ("kty", "kid", "n", "e")}
    assert list(read_keys(json.dumps({"keys": [bare]}).encode())) == [old.kid]


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_NAMES), inner),
        max_leaves=20,
    ).map(lambda document: json.dumps(document).encode())
)
def test_nothing_that_comes_raises_anything_else(document: bytes) -> None:
    try:
        assert read_keys(document)
    except ValueError as error:
        assert "JSON Web Key Set" in str(error)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer a.b.c", "Bearer  ", "Bearer e30.e30."])
def test_a_header_that_names_no_key(header: str | None) -> None:
    assert key_id_of(header) is None
