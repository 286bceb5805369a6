"""Tokens in files, what makes one unfit to be sent, and nothing told about them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.tokens import LOOK_AGAIN_S, FileToken, NoToken, TokenSource, demand_fit
from shared.errors import TokenError
from shared.ops.token_counts import TokenCounts, TokenStatus
from shared.trust.token_claims import at_utc, claims_of, describe
from tests.support.error_texts import all_texts
from tests.support.metadata_server import unsigned_token
from tests.support.wall_clock import START, Clock

AUDIENCE = "https://hello.a.run.app"

# No token.


async def test_routes_without_a_token() -> None:
    nothing: TokenSource = NoToken()
    nothing.invalidate()
    assert await nothing.token() is None
    assert nothing.token_now() == ""


# Files.


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" first \n")
    tokens: TokenSource = FileToken(file)
    assert await tokens.token() == "first"
    file.write_text("the second, longer".replace(" ", "-"))
    assert await tokens.token() == "the-second,-longer"
    # As the kubelet and `Authority.write` do: another file takes the name; size and time may be the same.
    about = file.stat()
    fresh = tmp_path / "fresh"
    fresh.write_text("THE-SECOND,-LONGER")
    os.utime(fresh, ns=(about.st_atime_ns, about.st_mtime_ns))
    fresh.rename(file)
    assert await tokens.token() == "THE-SECOND,-LONGER"


async def test_a_file_is_at_hand_while_it_is_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    now = 1000.0
    tokens: TokenSource = FileToken(file, monotonic=lambda: now)
    assert tokens.token_now() is None
    await tokens.token()
    assert tokens.token_now() == "first"
    file.write_text("another")
    assert tokens.token_now() == "first", "which has just been looked at"
    now += LOOK_AGAIN_S
    assert tokens.token_now() is None
    assert await tokens.token() == tokens.token_now() == "another"
    file.unlink()
    now += LOOK_AGAIN_S
    assert tokens.token_now() is None


async def test_a_file_is_looked_at_again_once_its_token_was_rejected(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    tokens: TokenSource = FileToken(file, monotonic=lambda: 1000.0)
    await tokens.token()
    assert tokens.token_now() == "first"
    file.write_text("another")
    tokens.invalidate("first")
    assert tokens.token_now() is None
    assert await tokens.token() == tokens.token_now() == "another"


async def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    counts = TokenCounts()
    tokens = FileToken(file, counts=counts)
    assert await tokens.token() == await tokens.token() == "one"
    tokens.invalidate("some other token")
    await tokens.token()
    assert counts.refreshes_total == 1
    tokens.invalidate("one")
    await tokens.token()
    assert counts.refreshes_total == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"two words", "characters that no header can carry"),
        (b"one\r\nx-injected: 1", "characters that no header can carry"),
        (b"caf\xc3\xa9", "characters that no header can carry"),
        (b"nul\x00", "characters that no header can carry"),
        (b"a" * (16 * 1024 + 1), "longer than 16384 bytes"),
    ],
)
async def test_files_that_hold_no_token(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(TokenError) as caught:
        await FileToken(file).token()
    assert str(caught.value).startswith(f"cannot use token file {file}: ")
    assert reason in str(caught.value)
    assert (content.decode("latin-1").strip() or "\n") not in str(caught.value)


async def test_the_longest_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"a" * 16 * 1024)
    assert len(await FileToken(file).token()) == 16 * 1024


async def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(
        TokenError, match=f"cannot read token file {missing}: No such file or directory; check"
    ):
        await FileToken(missing).token()
    with pytest.raises(TokenError, match="it is a directory"):
        await FileToken(tmp_path).token()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TokenError, match="not a regular file"):
        await FileToken(pipe).token()


# What is known of a JWT in a file.


def jwt_file(folder: Path, **claims: object) -> Path:
    file = folder / "token"
    file.write_text(unsigned_token(**claims))
    return file


async def test_a_file_whose_token_expires_is_not_sent_any_more(tmp_path: Path, clock: Clock) -> None:
    counts = TokenCounts()
    file = jwt_file(tmp_path, aud=AUDIENCE, exp=START + 600)
    tokens = FileToken(file, counts=counts, now=clock)
    token = await tokens.token()
    clock.turn(599)
    assert await tokens.token() == tokens.token_now() == token
    clock.turn(8)
    assert tokens.token_now() is None
    error = await _error(tokens)
    expired = "its token expired 7 s ago, at 2026-09-21T14:23:20Z; does anybody renew it?"
    assert str(error) == f"cannot use token file {file}: {expired}"
    assert error.reason == "expired"
    assert tokens.status().failure == str(error)
    jwt_file(tmp_path, aud=AUDIENCE, exp=START + 1200, jti="renewed")
    assert await tokens.token() == tokens.token_now() != token
    assert (counts.refreshes_total, counts.failures_by_reason) == (2, {"expired": 1})


async def test_a_clock_that_is_set_back_makes_it_good_again(tmp_path: Path, clock: Clock) -> None:
    tokens = FileToken(jwt_file(tmp_path, exp=START - 1), now=clock)
    await _error(tokens)
    clock.turn(-60)
    assert await tokens.token() == tokens.token_now()


@pytest.mark.parametrize("named", [AUDIENCE, [AUDIENCE], ["https://other.example", AUDIENCE]])
async def test_a_file_whose_token_is_for_the_audience(tmp_path: Path, named: object) -> None:
    tokens = FileToken(jwt_file(tmp_path, aud=named, exp=START + 60), AUDIENCE, now=Clock())
    assert await tokens.token() == tokens.token_now()


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        (
            {"aud": "https://other.example"},
            "it is for https://other.example, not for https://hello.a.run.app",
        ),
        ({"aud": ["a", "b"]}, "it is for a b, not for https://hello.a.run.app"),
        ({"aud": 5}, "it is for 5, not for"),
        ({}, "it is for nobody, not for"),
    ],
)
async def test_a_file_whose_token_is_for_others(
    tmp_path: Path, claims: dict[str, object], reason: str
) -> None:
    file = jwt_file(tmp_path, exp=START + 60, **claims)
    assert await FileToken(file, now=Clock()).token(), "nobody has said whom it should be for"
    error = await _error(FileToken(file, AUDIENCE, now=Clock()))
    assert str(error).startswith(f"cannot use token file {file}: its token cannot be sent: {reason}")
    assert error.reason == "audience"


async def test_an_opaque_token_has_no_audience_to_look_at(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("opaque")
    error = await _error(FileToken(file, AUDIENCE))
    assert "it is no JWT: it is not three base64url parts joined by dots, so nobody knows" in str(error)
    assert "opaque" not in str(error).replace(str(file), "")


async def test_what_may_be_told_of_a_file(tmp_path: Path, clock: Clock) -> None:
    file = jwt_file(tmp_path, aud=AUDIENCE, exp=START + 60)
    os.utime(file, (START - 5, START - 5))
    tokens = FileToken(file, AUDIENCE, now=clock)
    assert tokens.status() == TokenStatus(f"file {file}", AUDIENCE, None, None, "", None)
    await tokens.token()
    assert tokens.status() == TokenStatus(f"file {file}", AUDIENCE, START - 5, START + 60, "", None)
    file.write_text("opaque token")
    error = await _error(tokens)
    told = tokens.status()
    assert (told.failure, told.failed_at_s) == (str(error), START)


async def test_a_file_that_is_renewed_while_nobody_asks(tmp_path: Path, clock: Clock) -> None:
    file = jwt_file(tmp_path, aud=AUDIENCE, exp=START + 60)
    tokens = FileToken(file, AUDIENCE, now=clock)
    await tokens.token()
    jwt_file(tmp_path, aud=AUDIENCE, exp=START + 3600)
    assert tokens.status().expires_at_s == START + 3600
    file.write_text("garbage, for another audience")
    assert tokens.status().expires_at_s == START + 3600, "whoever asks for it is told"
    assert tokens.status().failure == ""


async def _error(tokens: TokenSource) -> TokenError:
    with pytest.raises(TokenError) as caught:
        await tokens.token()
    return caught.value


# Secrets.


async def test_a_file_that_was_away_for_a_moment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("opaque")
    tokens = FileToken(file, monotonic=lambda: 0.0)
    await tokens.token()
    file.rename(tmp_path / "away")
    await _error(tokens)
    assert "No such file" in tokens.status().failure
    (tmp_path / "away").rename(file)
    assert await tokens.token() == "opaque"
    assert tokens.status().failure == ""


@pytest.mark.parametrize("audience", ["", "https://other.example"])
async def test_no_error_text_holds_the_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, audience: str
) -> None:
    token = unsigned_token(aud=AUDIENCE, exp=START - 1)
    file = tmp_path / "token"
    with caplog.at_level(logging.DEBUG):
        for content in (token, f"{token} {token}", token * 200, f"{token}\x7f"):
            file.write_text(content)
            source = FileToken(file, audience, now=Clock())
            assert token not in all_texts(await _error(source))
            assert token not in f"{source!r} {source.status()!r}"
    assert token not in caplog.text


# What is fit to be sent.


@pytest.mark.parametrize(
    ("token", "reason", "text"),
    [
        (unsigned_token(aud="https://other.example"), "audience", "it is for https://other.example, not for"),
        ("", "garbled", "it is empty, or has characters that no header can carry"),
        ("two words", "garbled", "characters that no header can carry"),
        ("x" * 16385, "garbled", "it is longer than 16384 bytes"),
    ],
)
def test_what_is_not_fit(token: str, reason: str, text: str) -> None:
    with pytest.raises(TokenError, match=r"^cannot use the token from somewhere: ") as caught:
        demand_fit(Minted(token, START + 60), AUDIENCE, "somewhere", START)
    assert text in str(caught.value)
    assert caught.value.reason == reason


def test_an_end_that_is_over() -> None:
    with pytest.raises(TokenError, match="it expired 0 s ago; is the clock right") as caught:
        demand_fit(Minted("opaque", START), AUDIENCE, "somewhere", START)
    assert caught.value.reason == "expired"


@pytest.mark.parametrize("token", ["opaque", unsigned_token(), unsigned_token(aud=[AUDIENCE])])
def test_what_is_fit(token: str) -> None:
    demand_fit(Minted(token, START + 0.1), AUDIENCE, "somewhere", START)


# What may be told.


@pytest.mark.parametrize("seconds", [1e15, 1e300, -1e300])
def test_times_that_no_calendar_has(seconds: float) -> None:
    assert at_utc(seconds) == "a time that no calendar has"


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (unsigned_token(aud="a", exp=START), "audience a, expires 2026-09-21T14:13:20Z"),
        (
            unsigned_token(aud=["a", "b"], sub=5, exp=1.5),
            "audience a b, subject 5, expires 1970-01-01T00:00:01Z",
        ),
        (unsigned_token(email="a@b"), "email a@b, without a readable expiry"),
        (unsigned_token(exp=1e300), "expires a time that no calendar has"),
        (unsigned_token(aud={"a": 1}, exp="x"), "audience of type dict, without a readable expiry"),
        (
            unsigned_token(sub="a\nb\x1b[31mä", exp=0),
            r"subject a\nb\x1b[31m\xe4, expires 1970-01-01T00:00:00Z",
        ),
        ("opaque", "opaque token of 6 characters"),
    ],
)
def test_describing_a_token(token: str, told: str) -> None:
    assert describe(token) == told


def test_descriptions_have_a_bound() -> None:
    assert len(describe(unsigned_token(aud="a" * 5000, sub="b" * 5000))) < 500


@pytest.mark.parametrize(
    "token", ["", "a.b", "a.b.c.d", "..", "a.b.c", "a.W10.c", "a.e30=.c", "a." + "W" * 17000 + ".c"]
)
def test_what_is_no_jwt(token: str) -> None:
    with pytest.raises(ValueError, match=r"^no JWT: "):
        claims_of(token)
