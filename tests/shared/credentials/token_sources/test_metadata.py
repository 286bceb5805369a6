"""Tokens from a metadata server: what is asked, what an answer may be, and nothing of it in any text."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from shared.credentials.token_sources.metadata import MetadataMinter
from shared.credentials.tokens.minting import Minter
from shared.errors import TokenError
from shared.trust.token_claims import claims_of
from tests.support.error_texts import all_texts
from tests.support.metadata_server import (
    PATIENCE_S,
    Answer,
    MetadataServer,
    Request,
    closed_port,
    unsigned_token,
)
from tests.support.wall_clock import START, Clock, Mint

AUDIENCE = "https://hello.a.run.app"


def always(answer: Answer) -> Callable[[Request], Answer]:
    return lambda _: answer


async def error_of(minter: Minter, audience: str = AUDIENCE) -> TokenError:
    with pytest.raises(TokenError) as caught:
        await minter.mint(audience)
    return caught.value


async def test_the_request_and_the_answer() -> None:
    audience = "https://hello.a.run.app/?a=b&c=d#e"
    async with MetadataServer(Mint(Clock())) as server:
        minter: Minter = MetadataMinter(server.host)
        minted = await minter.mint(audience)
        assert minter.identity == f"metadata server at {server.host}"
    assert claims_of(minted.token)["aud"] == audience
    assert minted.expires_at_s == START + 3600
    (request,) = server.requests
    assert request.query["format"] == ["full"]
    assert request.headers["host"] == server.host


async def test_no_server_there() -> None:
    host = f"127.0.0.1:{closed_port()}"
    error = await error_of(MetadataMinter(host))
    assert str(error).startswith(f"no metadata server: cannot connect to {host}: ")
    assert str(error).endswith("; set GCE_METADATA_HOST or use a token file")
    assert error.reason == "unreachable"


async def test_a_server_that_does_not_answer() -> None:
    async with MetadataServer(always(Answer(status=500))) as server:
        server.gate.clear()
        error = await error_of(MetadataMinter(server.host, timeout_s=0.05))
    assert str(error).endswith(f"no complete answer from {server.host} within 0.05 s")
    assert error.reason == "unreachable"


@pytest.mark.parametrize(
    ("answer", "why", "text"),
    [
        (Answer(b"none", 404), "refused", "it answered 404; has this machine or pod a service account?"),
        (Answer(b"busy", 503), "refused", "it answered 503"),
        (Answer(b"", 301, (("location", "http://127.0.0.1:1/"),)), "refused", "it answered 301"),
        (Answer(b""), "garbled", "its answer is no JWT"),
        (Answer(b"<html>log in to this network</html>"), "garbled", "its answer is no JWT"),
        (Answer(b"a.b.c"), "garbled", "its answer is no JWT"),
        (Answer(b"a." + b"W1tb" * 3000 + b".c"), "garbled", "its answer is no JWT"),
        (Answer(b"x" * 20_000), "unreachable", "is longer than 16384 bytes"),
        (Answer(unsigned_token(aud="a").encode()), "garbled", "its answer is a JWT without an expiry"),
        (Answer(unsigned_token(exp="soon").encode()), "garbled", "its answer is a JWT without an expiry"),
        (Answer(unsigned_token(exp=float("inf")).encode()), "garbled", "a JWT with an impossible expiry"),
        (Answer(unsigned_token(exp=10**400).encode()), "garbled", "a JWT with an impossible expiry"),
        (Answer(raw=b"\x00\xffgarbage\r\n\r\n"), "unreachable", "broken answer from"),
        (Answer(raw=b""), "unreachable", "broken answer from"),
    ],
)
async def test_answers_without_a_token(answer: Answer, why: str, text: str) -> None:
    async with MetadataServer(always(answer)) as server:
        error = await error_of(MetadataMinter(server.host, timeout_s=PATIENCE_S))
    assert str(error).startswith(f"no token from the metadata server at {server.host}: ")
    assert text in str(error)
    assert error.reason == why


@pytest.mark.parametrize(
    "host", ["", "host/path", "host?x", "user@host", "host:99999", "host:x", "ho st", "http://x"]
)
def test_metadata_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ValueError):
        MetadataMinter(host)


async def test_no_error_text_holds_the_token(caplog: pytest.LogCaptureFixture) -> None:
    token = unsigned_token(aud=AUDIENCE, exp=START - 1)
    raw = token.encode()
    answers = [
        Answer(raw, 500),
        Answer(raw, 302, (("location", f"http://x/{token}"),)),
        Answer(raw + b" trailing"),
        Answer(raw * 100),
        Answer(raw=raw + b"\r\n\r\n"),
        Answer(raw=b"HTTP/1.1 200 OK\r\n" + raw + b"\r\n\r\n"),
        Answer(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + raw),
    ]
    with caplog.at_level(logging.DEBUG):
        for answer in answers:
            async with MetadataServer(always(answer)) as server:
                assert token not in all_texts(await error_of(MetadataMinter(server.host)))
        async with MetadataServer(always(Answer(raw))) as server:
            assert token not in repr(await MetadataMinter(server.host).mint(AUDIENCE))
    assert token not in caplog.text
