"""Tokens from files and from a metadata server: caching, renewal, failure, and nothing told about them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared import tasks
from shared.errors import HboneError, TokenError
from shared.identity.tokens import (
    LOOK_AGAIN_S,
    FileToken,
    MetadataToken,
    NoToken,
    TokenSource,
    claims_of,
    describe,
)
from tests.support.metadata_server import (
    PATIENCE_S,
    Answer,
    MetadataServer,
    Request,
    closed_port,
    unsigned_token,
)

AUDIENCE = "https://hello.a.run.app"
START = 1_790_000_000.0


class Clock:
    """Stands still until turned."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


class Mint:
    """Answers each request with a new token of `lifetime_s`, numbered in its claims."""

    def __init__(self, clock: Clock, lifetime_s: float = 3600) -> None:
        self.clock, self.lifetime_s = clock, lifetime_s
        self.minted: list[str] = []

    def __call__(self, request: Request) -> Answer:
        serial = len(self.minted)
        self.minted.append(
            unsigned_token(aud=request.audience, exp=self.clock() + self.lifetime_s, serial=serial)
        )
        return Answer(self.minted[-1].encode() + b"\n")


def always(answer: Answer) -> Callable[[Request], Answer]:
    return lambda _: answer


def failing() -> Callable[[Request], Answer]:
    return always(Answer(status=500))


def source(
    server: MetadataServer, clock: Callable[[], float], timeout_s: float = PATIENCE_S
) -> MetadataToken:
    return MetadataToken(AUDIENCE, server.host, timeout_s=timeout_s, now=clock)


async def landed() -> None:
    """Waits for the requests in the background."""
    async with asyncio.timeout(PATIENCE_S):
        for task in asyncio.all_tasks():
            if task.get_name().startswith("token for "):
                await asyncio.wait([task])


# No token.


async def test_routes_without_a_token() -> None:
    nothing: TokenSource = NoToken()
    nothing.invalidate()
    assert await nothing.token() is None
    assert nothing.at_hand() == ""


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
    assert tokens.at_hand() is None
    await tokens.token()
    assert tokens.at_hand() == "first"
    file.write_text("another")
    assert tokens.at_hand() == "first", "which has just been looked at"
    now += LOOK_AGAIN_S
    assert tokens.at_hand() is None
    assert await tokens.token() == tokens.at_hand() == "another"
    file.unlink()
    now += LOOK_AGAIN_S
    assert tokens.at_hand() is None


async def test_a_file_is_looked_at_again_once_its_token_was_rejected(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    tokens: TokenSource = FileToken(file, monotonic=lambda: 1000.0)
    await tokens.token()
    assert tokens.at_hand() == "first"
    file.write_text("another")
    tokens.invalidate("first")
    assert tokens.at_hand() is None
    assert await tokens.token() == tokens.at_hand() == "another"


async def test_a_minted_token_is_at_hand_until_it_is_renewed() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        tokens = source(server, clock)
        assert tokens.at_hand() is None
        token = await tokens.token()
        assert tokens.at_hand() == token
        tokens.invalidate(token)
        assert tokens.at_hand() is None
        token = await tokens.token()
        clock.turn(3600 - 299)
        assert tokens.at_hand() is None, "so that somebody asks, and a new one is fetched ahead"
        assert await tokens.token() == token
        await landed()


async def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    about = file.stat()
    tokens = FileToken(file)
    assert await tokens.token() == "one"
    file.write_text("two")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert await tokens.token() == "one"
    tokens.invalidate("some other token")
    assert await tokens.token() == "one"
    tokens.invalidate("one")
    assert await tokens.token() == "two"


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
    with pytest.raises(TokenError, match="Is a directory"):
        await FileToken(tmp_path).token()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TokenError, match="not a regular file"):
        await FileToken(pipe).token()


async def test_a_file_that_goes_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    tokens = FileToken(file)
    assert await tokens.token() == "one"
    file.unlink()
    with pytest.raises(TokenError):
        await tokens.token()
    file.write_text("three")
    assert await tokens.token() == "three"


# The metadata server, and the life of a token.


async def test_the_request_and_a_cached_answer() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        tokens = MetadataToken("https://hello.a.run.app/?a=b&c=d#e", server.host, now=clock)
        first = await tokens.token()
        clock.turn(3299)
        assert await tokens.token() == first
        assert claims_of(first)["aud"] == "https://hello.a.run.app/?a=b&c=d#e"
    (request,) = server.requests
    assert request.query["format"] == ["full"]
    assert request.headers["host"] == server.host


async def test_refreshed_ahead_while_the_old_one_serves() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        tokens = source(server, clock)
        old = await tokens.token()
        clock.turn(3300)
        server.gate.clear()
        # However many ask, one request goes out and nobody waits for it.
        assert [await tokens.token() for _ in range(5)] == [old] * 5
        await server.seen(2)
        assert await tokens.token() == old
        server.gate.set()
        await landed()
        assert claims_of(await tokens.token())["serial"] == 1
        assert len(server.requests) == 2


async def test_sixty_seconds_before_its_end_a_token_is_not_used_any_more() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        tokens = source(server, clock)
        await tokens.token()
        clock.turn(3540)
        assert claims_of(await tokens.token())["serial"] == 1


async def test_callers_share_one_request() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        tokens = source(server, clock)
        server.gate.clear()
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(tokens.token()) for _ in range(50)]
            await server.seen(1)
            server.gate.set()
        assert len({task.result() for task in waiting}) == 1
        assert len(server.requests) == 1


async def test_a_caller_that_gives_up_leaves_the_request_to_the_others() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        tokens = source(server, clock)
        server.gate.clear()
        async with asyncio.TaskGroup() as group:
            impatient = group.create_task(tokens.token())
            patient = group.create_task(tokens.token())
            await server.seen(1)
            impatient.cancel()
            await asyncio.wait([impatient])
            server.gate.set()
        assert impatient.cancelled()
        assert claims_of(patient.result())["serial"] == 0
        assert len(server.requests) == 1


async def test_stale_while_the_server_fails() -> None:
    clock = Clock()
    mint = Mint(clock)
    async with MetadataServer(mint) as server:
        tokens = source(server, clock)
        old = await tokens.token()
        server.answer = failing()
        clock.turn(3300)
        for _ in range(20):
            # The failures in the background reach no caller, and there is one attempt in ten seconds.
            assert await tokens.token() == old
            await landed()
            clock.turn(1)
        assert len(server.requests) == 3
        clock.turn(220)
        with pytest.raises(TokenError, match="it answered 500"):
            await tokens.token()
        server.answer = mint
        clock.turn(1)
        assert claims_of(await tokens.token())["serial"] == 1


async def test_a_failure_answers_for_one_second() -> None:
    clock = Clock()
    async with MetadataServer(failing()) as server:
        tokens = source(server, clock)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(_error(tokens)) for _ in range(10)]
        assert len({id(task.result()) for task in waiting}) == 10
        clock.turn(0.99)
        await _error(tokens)
        assert len(server.requests) == 1
        clock.turn(0.01)
        await _error(tokens)
        assert len(server.requests) == 2
        # A wall clock can be set back: the memory must not last until it is there again.
        clock.turn(-3600)
        server.answer = Mint(clock)
        await tokens.token()


async def _error(tokens: TokenSource) -> TokenError:
    with pytest.raises(TokenError) as caught:
        await tokens.token()
    return caught.value


async def test_a_server_with_a_cache_of_its_own_is_not_asked_all_the_time() -> None:
    clock = Clock()
    nearly_over = unsigned_token(aud=AUDIENCE, exp=START + 200)
    async with MetadataServer(always(Answer(nearly_over.encode()))) as server:
        tokens = source(server, clock)
        for _ in range(30):
            assert await tokens.token() == nearly_over
            await landed()
            clock.turn(1)
        assert len(server.requests) == 3


async def test_a_token_about_to_end_is_used_once_and_not_kept() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock, lifetime_s=30)) as server:
        tokens = source(server, clock)
        assert [claims_of(await tokens.token())["serial"] for _ in range(3)] == [0, 1, 2]


async def test_a_rejected_token_is_replaced() -> None:
    clock = Clock()
    async with MetadataServer(Mint(clock)) as server:
        tokens = source(server, clock)
        first = await tokens.token()
        tokens.invalidate()
        second = await tokens.token()
        assert second != first
        # A hundred tunnels were refused with the first one: the second stays.
        for _ in range(100):
            tokens.invalidate(first)
        assert await tokens.token() == second
        tokens.invalidate(second)
        assert await tokens.token() != second
        assert len(server.requests) == 3


async def test_a_cached_token_costs_no_task() -> None:
    async with MetadataServer(Mint(Clock())) as server:
        tokens = source(server, Clock())
        token = await tokens.token()
    before = tasks.running()
    call = tokens.token()
    with pytest.raises(StopIteration) as ended:
        call.send(None)
    assert ended.value.value == token
    assert tasks.running() == before


# Failures of the metadata server.


async def test_no_server_there() -> None:
    host = f"127.0.0.1:{closed_port()}"
    error = await _error(MetadataToken(AUDIENCE, host))
    assert str(error).startswith(f"no metadata server: cannot connect to {host}: ")
    assert str(error).endswith("; set GCE_METADATA_HOST or use a token file")


async def test_a_server_that_does_not_answer() -> None:
    async with MetadataServer(failing()) as server:
        server.gate.clear()
        error = await _error(source(server, Clock(), timeout_s=0.05))
    assert str(error).endswith(f"no complete answer from {server.host} within 0.05 s")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(b"no such account", 404), "it answered 404; has this machine or pod a service account?"),
        (Answer(b"busy", 503), "it answered 503"),
        (Answer(b"", 301, (("location", "http://127.0.0.1:1/"),)), "it answered 301"),
        (Answer(b""), "its answer is no JWT"),
        (Answer(b"<html>log in to this network</html>"), "its answer is no JWT"),
        (Answer(b"a.b.c"), "its answer is no JWT"),
        (Answer(b"a." + b"W1tb" * 3000 + b".c"), "its answer is no JWT"),
        (Answer(b"x" * 20_000), "is longer than 16384 bytes"),
        (Answer(unsigned_token(aud=AUDIENCE).encode()), "its answer is a JWT without an expiry"),
        (Answer(unsigned_token(exp="soon").encode()), "its answer is a JWT without an expiry"),
        (Answer(unsigned_token(exp=float("inf")).encode()), "its answer is a JWT with an impossible expiry"),
        (Answer(unsigned_token(exp=10**400).encode()), "its answer is a JWT with an impossible expiry"),
        (
            Answer(unsigned_token(exp=START - 7).encode()),
            "the one it gave expired 7 s ago; is the clock right?",
        ),
        (Answer(raw=b"\x00\xffgarbage\r\n\r\n"), "broken answer from"),
        (Answer(raw=b""), "broken answer from"),
    ],
)
async def test_answers_without_a_token(answer: Answer, reason: str) -> None:
    async with MetadataServer(always(answer)) as server:
        error = await _error(source(server, Clock()))
    assert reason in str(error)
    assert server.host in str(error)


@pytest.mark.parametrize(
    "host", ["", "host/path", "host?x", "user@host", "host:99999", "host:x", "ho st", "http://x"]
)
def test_metadata_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ValueError):
        MetadataToken(AUDIENCE, host)


def test_an_audience_is_needed() -> None:
    with pytest.raises(ValueError, match="empty audience"):
        MetadataToken("")


async def test_failures_in_the_background_are_no_task_failures(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.WARNING):
        async with MetadataServer(Mint(clock)) as server:
            tokens = source(server, clock)
            await tokens.token()
            server.answer = failing()
            clock.turn(3400)
            await tokens.token()
            await landed()
        gc.collect()
    assert caplog.records == []


# Secrets.


async def test_no_error_text_holds_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = unsigned_token(aud=AUDIENCE, exp=START - 1)
    raw = token.encode()
    file = tmp_path / "token"
    file.write_bytes(raw + b" " + raw)
    sources: list[TokenSource] = [FileToken(file)]
    answers = [
        Answer(raw),
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
                sources.append(source(server, Clock()))
                assert token not in _all_texts(await _error(sources[-1]))
        assert token not in _all_texts(await _error(sources[0]))
    assert token not in caplog.text
    assert not any(token in repr(each) for each in sources)


def _all_texts(error: BaseException | None) -> str:
    """The texts of an error and of everything it was raised from."""
    texts = []
    while error is not None:
        texts.append(f"{error!r} {error}")
        assert isinstance(error, HboneError | OSError | ValueError | TimeoutError)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


# What may be told.


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (unsigned_token(aud="a", exp=START), "audience a, expires 2026-09-21T14:13:20Z"),
        (
            unsigned_token(aud=["a", "b"], sub=5, exp=1.5),
            "audience a b, subject 5, expires 1970-01-01T00:00:01Z",
        ),
        (unsigned_token(email="a@b"), "email a@b, without a readable expiry"),
        (unsigned_token(exp=1e300), "without a readable expiry"),
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
