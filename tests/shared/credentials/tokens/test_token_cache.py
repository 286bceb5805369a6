"""The cache of minted tokens: a clock that is turned, a metadata server, minters that wait for the test."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from shared import tasks
from shared.credentials.token_sources.metadata import MetadataMinter
from shared.credentials.tokens import token_cache
from shared.credentials.tokens.token_cache import CachedToken, TokenCache
from shared.credentials.tokens.tokens import TokenSource
from shared.errors import TokenError
from shared.ops.token_counts import TokenCounts
from shared.trust.token_claims import claims_of
from tests.support.metadata_server import PATIENCE_S, Answer, MetadataServer, Request
from tests.support.wall_clock import START, Clock, HandMinter, Mint

AUDIENCE = "https://hello.a.run.app"


def failing(_: Request) -> Answer:
    return Answer(status=500)


@asynccontextmanager
async def metadata(
    answer: Callable[[Request], Answer], clock: Callable[[], float]
) -> AsyncIterator[tuple[MetadataServer, TokenCache, CachedToken]]:
    """A metadata server, a cache whose chance is 0, and a source of tokens one of which was accepted."""
    async with MetadataServer(answer) as server:
        cache = TokenCache(now=clock, chance=lambda: 0.0)
        tokens = cache.source(MetadataMinter(server.host, timeout_s=PATIENCE_S), AUDIENCE)
        tokens.accepted()
        yield server, cache, tokens
        cache.close()


@pytest.fixture
async def cache(clock: Clock) -> AsyncIterator[TokenCache]:
    cache = TokenCache(now=clock)
    yield cache
    cache.close()


@pytest.fixture
def minter(clock: Clock) -> HandMinter:
    return HandMinter(clock)


async def landed() -> None:
    """Waits for the requests in the background."""
    async with asyncio.timeout(PATIENCE_S):
        for task in asyncio.all_tasks():
            if task.get_name().startswith("token for "):
                await asyncio.wait([task])
    await asyncio.sleep(0)


async def error_of(tokens: TokenSource) -> TokenError:
    with pytest.raises(TokenError) as caught:
        await tokens.token()
    return caught.value


# A token's life.


async def test_at_hand_while_it_is_kept(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, _, tokens):
        assert tokens.token_now() is None
        token = await tokens.token()
        assert tokens.token_now() == token
        clock.turn(3299)
        assert tokens.token_now() == await tokens.token() == token
        assert len(server.requests) == 1


async def test_nothing_that_is_kept_shows_the_token(clock: Clock) -> None:
    """Tasks show what they came to, in the debug mode of asyncio for one."""
    seen: list[str] = []
    async with metadata(Mint(clock), clock) as (_, cache, tokens):
        asking = asyncio.ensure_future(tokens.token())  # noqa: TID251 - to be looked at while it runs
        await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_name().startswith("token for "):
                task.add_done_callback(lambda task: seen.append(repr(task)))
        token = await asking
        await asyncio.sleep(0)
        seen += [repr(tokens), repr(cache), repr(list(cache.statuses()))]
    assert "Minted(" in seen[0]
    assert not any(part in text for text in seen for part in (token[:12], token[-12:]))


async def test_refreshed_ahead_while_the_old_one_serves(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, _, tokens):
        old = await tokens.token()
        clock.turn(3300)
        server.gate.clear()
        # However many ask, one request goes out and nobody waits for it.
        assert [tokens.token_now() for _ in range(5)] == [old] * 5
        assert [await tokens.token() for _ in range(5)] == [old] * 5
        await server.seen(2)
        assert tokens.token_now() == old
        server.gate.set()
        await landed()
        assert claims_of(tokens.token_now() or "")["serial"] == 1
        assert len(server.requests) == 2


async def test_refreshed_by_the_timer_though_nobody_asks(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, cache, tokens):
        await tokens.token()
        clock.turn(3299)
        cache.look()
        assert len(server.requests) == 1
        clock.turn(1)
        cache.look()
        await landed()
        assert len(server.requests) == 2
        assert claims_of(tokens.token_now() or "")["serial"] == 1


async def test_the_timer_itself() -> None:
    """With the real clock, and tokens that live two seconds: the next is there before anybody asks for it."""
    async with metadata(Mint(time.time, lifetime_s=2), time.time) as (server, _, tokens):
        await tokens.token()
        await server.seen(3)
        await landed()
        assert claims_of(tokens.token_now() or "")["serial"] >= 2


async def test_what_nobody_asks_for_is_let_go(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, cache, tokens):
        await tokens.token()
        clock.turn(3300)
        cache.look()
        await landed()
        assert len(server.requests) == 2, "asked for within its lifetime"
        clock.turn(301)
        cache.look()
        assert (cache.size, len(server.requests)) == (0, 2)
        await tokens.token()
        assert (cache.size, len(server.requests)) == (1, 3), "whoever holds its source can go on"


async def test_a_clock_that_was_set_back_keeps_nothing_longer(clock: Clock) -> None:
    clock.turn(1e6)
    async with metadata(Mint(clock), clock) as (_, cache, tokens):
        await tokens.token()
        clock.turn(-1e6)
        cache.look()
        assert cache.size == 1
        clock.turn(3601)
        cache.look()
        assert cache.size == 0


async def test_short_lives_are_kept_for_a_minute(clock: Clock) -> None:
    async with metadata(Mint(clock, lifetime_s=10), clock) as (server, cache, tokens):
        await tokens.token()
        for _ in range(7):
            clock.turn(8)
            cache.look()
            await landed()
        assert len(server.requests) == 8
        clock.turn(8)
        cache.look()
        assert cache.size == 0


async def test_a_machine_that_slept(clock: Clock) -> None:
    """No timer has run for hours, and the first that comes finds out by itself."""
    async with metadata(Mint(clock), clock) as (server, _, tokens):
        old = await tokens.token()
        clock.turn(8 * 3600)
        assert tokens.token_now() is None
        assert await tokens.token() != old
        assert len(server.requests) == 2


async def test_a_kept_token_costs_no_task(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (_, _, tokens):
        token = await tokens.token()
        await landed()
        before = tasks.running()
        call = tokens.token()
        with pytest.raises(StopIteration) as ended:
            call.send(None)
        assert ended.value.value == token
        assert tasks.running() == before


# One request at a time.


async def test_callers_share_one_request(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, cache, tokens):
        server.gate.clear()
        others = cache.source(MetadataMinter(server.host), AUDIENCE)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task((tokens, others)[i % 2].token()) for i in range(50)]
            await server.seen(1)
            server.gate.set()
        assert len({task.result() for task in waiting}) == 1
        assert len(server.requests) == 1


async def test_a_caller_that_gives_up_leaves_the_request_to_the_others(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, _, tokens):
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


async def test_identities_and_audiences_are_kept_apart(clock: Clock, cache: TokenCache) -> None:
    one, other = HandMinter(clock, "one"), HandMinter(clock, "other")
    async with asyncio.TaskGroup() as group:
        waiting = [
            group.create_task(cache.source(minter, audience).token())
            for minter in (one, other)
            for audience in ("a", "b")
        ]
        for minter, audience in product((one, other), ("a", "b")):
            await minter.is_asked_for(audience)
        given = [minter.give(audience) for minter in (one, other) for audience in ("a", "b")]
    assert [task.result() for task in waiting] == given
    assert (cache.size, cache.new_size) == (0, 4)
    cache.source(one, "a").accepted()
    assert (cache.size, cache.new_size) == (1, 3)


async def test_not_all_keys_ask_at_once(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, minter: HandMinter
) -> None:
    monkeypatch.setattr(token_cache, "MAX_FLIGHTS", 2)
    cache = TokenCache(now=clock)
    names = [f"a{number}" for number in range(5)]
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(cache.source(minter, name).token())
        for name in names:
            await minter.is_asked_for(name)
            assert len(minter.waiting) <= 2
            minter.give(name)
    assert minter.asked == names
    cache.close()


async def test_the_slowest_minter(monkeypatch: pytest.MonkeyPatch, clock: Clock, cache: TokenCache) -> None:
    monkeypatch.setattr(token_cache, "MINT_TIMEOUT_S", 0.05)
    error = await error_of(cache.source(HandMinter(clock), AUDIENCE))
    assert str(error) == f"no token from somebody: none within 0.05 s (asked for {AUDIENCE})"
    assert error.reason == "unreachable"


# Failures.


async def test_stale_while_the_server_fails_then_recovery(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    mint = Mint(clock)
    async with metadata(mint, clock) as (server, cache, tokens):
        old = await tokens.token()
        server.answer = failing
        clock.turn(3300)
        with caplog.at_level(logging.INFO):
            for _ in range(239):
                # The failures in the background reach no caller.
                assert tokens.token_now() == await tokens.token() == old
                await landed()
                clock.turn(1)
            assert 8 <= len(server.requests) <= 14, "ever more rarely"
            (record,) = caplog.records
            assert record.levelname == "WARNING"
            assert "it answered 500" in record.message
            assert record.message.endswith("; the old one serves until 2026-09-21T15:12:20Z")
            clock.turn(2)
            error = await error_of(tokens)
            assert str(error).endswith(f"it answered 500 (asked for {AUDIENCE})")
            server.answer = mint
            clock.turn(60)
            cache.look()
            await landed()
            assert claims_of(tokens.token_now() or "")["serial"] == 1, "without anybody's asking"
            assert "there is a new token" in caplog.records[-1].message


async def test_a_failure_answers_for_a_short_while(clock: Clock) -> None:
    async with metadata(failing, clock) as (server, _, tokens):
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(error_of(tokens)) for _ in range(10)]
        assert len({id(task.result()) for task in waiting}) == 10
        clock.turn(0.49)
        assert (await error_of(tokens)).reason == "refused"
        assert len(server.requests) == 1
        clock.turn(0.01)
        await error_of(tokens)
        assert len(server.requests) == 2
        # A wall clock can be set back: the memory must not last until it is there again.
        clock.turn(-3600)
        server.answer = Mint(clock)
        await tokens.token()


async def test_tokens_that_are_not_fit(clock: Clock, minter: HandMinter) -> None:
    counts = TokenCounts()
    cache = TokenCache(lambda *_: counts, now=clock)
    async with MetadataServer(Mint(clock, lifetime_s=-7)) as server:
        error = await error_of(cache.source(MetadataMinter(server.host), AUDIENCE))
    place = f"cannot use the token from metadata server at {server.host}: "
    assert str(error) == f"{place}it expired 7 s ago; is the clock right? (asked for {AUDIENCE})"
    waiting = tasks.spawn(cache.source(minter, "b").token(), name="wait")
    await minter.is_asked_for("b")
    minter.waiting["c"] = minter.waiting["b"]
    minter.give("c")
    with pytest.raises(TokenError, match=r"from somebody: it is for c, not for b \(asked for b\)$"):
        await waiting
    assert counts.failures_by_reason == {"expired": 1, "audience": 1}
    cache.close()


async def test_who_was_asked_is_said(clock: Clock, cache: TokenCache) -> None:
    minter = HandMinter(clock, "account a@b")
    waiting = tasks.spawn(cache.source(minter, "b").token(), name="wait")
    await minter.is_asked_for("b")
    minter.fail("b", "no token from there: no")
    with pytest.raises(TokenError, match=r"^no token from there: no \(account a@b was asked for b\)$"):
        await waiting


async def test_failures_in_the_background_are_no_task_failures(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    async with metadata(Mint(clock), clock) as (server, _, tokens):
        await tokens.token()
        server.answer = failing
        clock.turn(3400)
        await tokens.token()
        await landed()
    gc.collect()
    assert [record.name for record in caplog.records] == ["hbone.tokens"]


# Rejected tokens.


async def test_a_rejected_token_is_replaced_once(clock: Clock) -> None:
    counts = TokenCounts()
    async with MetadataServer(Mint(clock)) as server:
        cache = TokenCache(lambda *_: counts, now=clock)
        tokens = cache.source(MetadataMinter(server.host), AUDIENCE)
        first = await tokens.token()
        tokens.invalidate(first)
        assert tokens.token_now() is None
        second = await tokens.token()
        assert second != first
        # A hundred tunnels were refused with the first one, and with the second, too.
        for _ in range(100):
            tokens.invalidate(first)
            tokens.invalidate(second)
        assert await tokens.token() == second
        clock.turn(10)
        tokens.invalidate(second)
        assert await tokens.token() not in (first, second)
        assert len(server.requests) == 3
        assert counts.failures_by_reason == {"rejected": 2}
        cache.close()


async def test_a_rejected_token_is_replaced_though_nobody_asks(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, _, tokens):
        tokens.invalidate(await tokens.token())
        await server.seen(2)


async def test_nothing_is_known_of_a_token_that_is_not_kept() -> None:
    tokens = TokenCache().source(HandMinter(time.time), AUDIENCE)
    tokens.invalidate()
    tokens.invalidate("one")
    assert tokens.token_now() is None


def test_an_audience_is_needed() -> None:
    with pytest.raises(ValueError, match="empty audience"):
        TokenCache().source(HandMinter(time.time), "")


# The bounds, and the end.


@pytest.mark.parametrize("accepted", [False, True])
async def test_the_oldest_makes_room(accepted: bool, clock: Clock) -> None:
    async with MetadataServer(Mint(clock)) as server:
        minter = MetadataMinter(server.host)
        cache = TokenCache(most=2, most_new=2, now=clock)
        for name in ("a", "b", "a", "c"):
            clock.turn(1)
            tokens = cache.source(minter, name)
            await tokens.token()
            if accepted:
                tokens.accepted()
        assert [status.audience for status in cache.statuses()] == ["a", "c"]
        assert {status.accepted for status in cache.statuses()} == {accepted}
        assert (cache.size, cache.new_size) == ((2, 0) if accepted else (0, 2))
        cache.close()
        assert (cache.size, cache.new_size) == (0, 0)


@pytest.mark.parametrize("accepted", [False, True])
async def test_no_room_while_all_are_being_asked_for(
    accepted: bool, clock: Clock, minter: HandMinter
) -> None:
    counts: dict[tuple[str, str], TokenCounts] = {}
    cache = TokenCache(lambda *key: counts.setdefault(key[:2], TokenCounts()), most=1, most_new=1, now=clock)
    sources = [cache.source(minter, name) for name in ("a", "b")]
    if accepted:
        for source in sources:
            source.accepted()
    first = tasks.spawn(sources[0].token(), name="wait")
    await minter.is_asked_for("a")
    error = await error_of(sources[1])
    assert (str(error), error.reason) == ("no token for b: 1 others are being asked for", "limit")
    assert counts["somebody", "b"].failures_by_reason == {"limit": 1}
    given = minter.give("a")
    assert await first == given
    cache.close()


async def test_new_keys_push_out_none_that_was_accepted(clock: Clock) -> None:
    async with MetadataServer(Mint(clock)) as server:
        minter = MetadataMinter(server.host)
        cache = TokenCache(most=2, most_new=3, now=clock)
        good = [cache.source(minter, name) for name in ("a", "b")]
        kept = []
        for tokens in good:
            kept.append(await tokens.token())
            tokens.accepted()
        for number in range(100):
            clock.turn(1)
            await cache.source(minter, f"random-{number}").token()
        assert (cache.size, cache.new_size) == (2, 3)
        assert [tokens.token_now() for tokens in good] == kept
        assert len(server.requests) == 102
        cache.close()


async def test_one_more_accepted_key_makes_the_oldest_of_them_go(clock: Clock) -> None:
    """And its token is asked for again as one that is known."""
    async with MetadataServer(Mint(clock)) as server:
        minter = MetadataMinter(server.host)
        cache = TokenCache(most=2, now=clock)
        sources = [cache.source(minter, name) for name in ("a", "b", "c")]
        for tokens in sources:
            clock.turn(1)
            assert tokens.is_new
            await tokens.token()
            tokens.accepted()
            assert not tokens.is_new
        assert [tokens.token_now() is None for tokens in sources] == [True, False, False]
        assert not sources[0].is_new
        await sources[0].token(refuse)
        assert (cache.size, cache.new_size, len(server.requests)) == (2, 0, 4)
        cache.close()


async def test_no_room_for_one_more_accepted_key_while_all_are_being_asked_for(
    clock: Clock, minter: HandMinter
) -> None:
    cache = TokenCache(most=1, now=clock)
    busy, other = cache.source(minter, "a"), cache.source(minter, "b")
    busy.accepted()
    first = tasks.spawn(busy.token(), name="wait")
    second = tasks.spawn(other.token(), name="wait")
    await minter.is_asked_for("b")
    minter.give("b")
    await second
    other.accepted()
    assert (cache.size, cache.new_size, other.is_new) == (1, 1, True)
    minter.give("a")
    await first
    other.accepted()
    assert (cache.size, cache.new_size, other.is_new) == (1, 0, False)
    cache.close()


async def test_a_fixed_audience_is_not_new(clock: Clock) -> None:
    """It is the file's, not a client's: no admission, and no place among those that clients have made up."""
    async with MetadataServer(Mint(clock)) as server:
        minter = MetadataMinter(server.host)
        cache = TokenCache(most=2, most_new=1, now=clock)
        fixed = [cache.source(minter, name, is_fixed=True) for name in ("a", "b", "c")]
        assert not fixed[0].is_new
        for tokens in fixed[:2]:
            await tokens.token(refuse)
        assert (cache.size, cache.new_size) == (2, 0)
        assert {status.accepted for status in cache.statuses()} == {False}
        fixed[0].accepted()
        assert {status.audience: status.accepted for status in cache.statuses()} == {"a": True, "b": False}
        await fixed[2].token(refuse)
        assert (cache.size, cache.new_size) == (2, 1), (
            "with no room beside the others it is among the new ones"
        )
        other = cache.source(minter, "d")
        await other.token()
        clock.turn(1)
        other.accepted()
        assert [status.audience for status in cache.statuses()] == ["a", "d"], "those that were accepted stay"
        cache.close()


async def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MAX_ACCEPTED", 2)
    cache = TokenCache()
    sources = [cache.source(HandMinter(time.time), name) for name in ("a", "b", "c")]
    for tokens in sources:
        tokens.accepted()
    assert [tokens.is_new for tokens in sources] == [True, False, False]


# Who may have a token asked for.


class NotAdmitted(Exception):
    pass


def refuse() -> None:
    raise NotAdmitted


async def test_a_new_key_needs_admission(clock: Clock, cache: TokenCache) -> None:
    async with MetadataServer(Mint(clock)) as server:
        tokens = cache.source(MetadataMinter(server.host), AUDIENCE)
        with pytest.raises(NotAdmitted):
            await tokens.token(refuse)
        assert (server.requests, cache.new_size) == ([], 0)
        admitted: list[None] = []
        token = await tokens.token(lambda: admitted.append(None))
        assert len(admitted) == 1
        assert await tokens.token(refuse) == token, "it is there"
        clock.turn(3600)
        with pytest.raises(NotAdmitted):
            await tokens.token(refuse)
        tokens.accepted()
        assert await tokens.token(refuse) != token


async def test_whoever_joins_a_request_needs_none(cache: TokenCache, minter: HandMinter) -> None:
    first = tasks.spawn(cache.source(minter, "a").token(), name="wait")
    await minter.is_asked_for("a")
    second = tasks.spawn(cache.source(minter, "a").token(refuse), name="wait")
    await asyncio.sleep(0)
    given = minter.give("a")
    assert await first == await second == given


async def test_nothing_is_asked_ahead_for_a_new_key(clock: Clock) -> None:
    async with MetadataServer(Mint(clock)) as server:
        cache = TokenCache(now=clock, chance=lambda: 0.0)
        tokens = cache.source(MetadataMinter(server.host), AUDIENCE)
        token = await tokens.token()
        clock.turn(3400)
        assert tokens.token_now() == token
        cache.look()
        await landed()
        assert len(server.requests) == 1
        tokens.accepted()
        assert tokens.token_now() == token
        await landed()
        assert len(server.requests) == 2
        cache.close()


async def test_new_keys_leave_requests_to_the_others(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, minter: HandMinter
) -> None:
    monkeypatch.setattr(token_cache, "MAX_NEW_FLIGHTS", 2)
    cache = TokenCache(now=clock)
    names = [f"new-{number}" for number in range(5)]
    waiting = [tasks.spawn(cache.source(minter, name).token(), name="wait") for name in names]
    await minter.is_asked_for("new-1")
    known = cache.source(minter, "known")
    known.accepted()
    first = tasks.spawn(known.token(), name="wait")
    await minter.is_asked_for("known")
    assert minter.asked == ["new-0", "new-1", "known"]
    given = minter.give("known")
    assert await first == given
    for name in names:
        await minter.is_asked_for(name)
        minter.give(name)
    await asyncio.gather(*waiting)
    cache.close()


async def test_who_waits_at_the_end_is_told(cache: TokenCache, minter: HandMinter) -> None:
    waiting = tasks.spawn(cache.source(minter, "a").token(), name="wait")
    await minter.is_asked_for("a")
    cache.close()
    with pytest.raises(TokenError, match="no token for a: we stop"):
        await waiting


async def test_what_may_be_told(clock: Clock) -> None:
    async with metadata(Mint(clock), clock) as (server, cache, tokens):
        token = await tokens.token()
        (told,) = cache.statuses()
        assert (told.audience, told.minted_at_s, told.expires_at_s) == (AUDIENCE, START, START + 3600)
        assert (told.failure, told.failed_at_s) == ("", None)
        server.answer = failing
        clock.turn(3300)
        await tokens.token()
        await landed()
        (told,) = cache.statuses()
        assert "it answered 500" in told.failure
        assert told.failed_at_s == START + 3300
        assert token not in repr((told, cache, tokens))


# Whatever happens.

AUDIENCES = ("a", "b", "c", "d")


class AnyLife(RuleBasedStateMachine):
    """Callers, answers, failures, rejections and a clock, in any order, in a cache with room for two keys of
    each class."""

    answered = Bundle("answered")

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.minter = HandMinter(self.clock)
        self.ends: dict[str, float] = {}
        self.cache = self.runner.run(self._made())
        self.sources = {
            name: self.cache.source(self.minter, name, is_fixed=name == "d") for name in AUDIENCES
        }
        self.callers: list[asyncio.Task[Any]] = []

    async def _made(self) -> TokenCache:
        return TokenCache(most=2, most_new=2, now=self.clock, chance=lambda: 0.5)

    def _do(self, step: Callable[[], object]) -> None:
        async def run() -> None:
            step()
            for _ in range(10):
                await asyncio.sleep(0)

        self.runner.run(run())

    @rule(name=st.sampled_from(AUDIENCES))
    def ask(self, name: str) -> None:
        """A caller, who may get its answer at once or later."""
        self._do(lambda: self.callers.append(tasks.spawn(self._call(name), name="caller")))

    async def _call(self, name: str) -> None:
        try:
            token = await self.sources[name].token()
        except TokenError as error:
            assert name in str(error)
        else:
            assert claims_of(token)["aud"] == name
            assert self.clock() < self.ends[token]

    @rule(name=st.sampled_from(AUDIENCES))
    def glance(self, name: str) -> None:
        def look() -> None:
            token = self.sources[name].token_now()
            assert token is None or self.clock() < self.ends[token]

        self._do(look)

    @rule(
        target=answered,
        name=st.sampled_from(AUDIENCES),
        lifetime_s=st.sampled_from([0.5, 5.0, 600.0, 3600.0]),
    )
    def mint(self, name: str, lifetime_s: float) -> tuple[str, str]:
        token = ""

        def give() -> None:
            nonlocal token
            if name in self.minter.waiting:
                token = self.minter.give(name, lifetime_s)
                self.ends[token] = self.clock() + lifetime_s

        self._do(give)
        return name, token

    @rule(name=st.sampled_from(AUDIENCES))
    def fail(self, name: str) -> None:
        self._do(lambda: self.minter.fail(name) if name in self.minter.waiting else None)

    @rule(what=answered)
    def reject(self, what: tuple[str, str]) -> None:
        name, token = what
        self._do(lambda: self.sources[name].invalidate(token))

    @rule(name=st.sampled_from(AUDIENCES))
    def accept(self, name: str) -> None:
        self._do(lambda: self.sources[name].accepted())

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 60.0, 300.0, 3000.0, 40_000.0, -5.0]))
    def turn(self, seconds: float) -> None:
        self.clock.turn(seconds)

    @rule()
    def look(self) -> None:
        self._do(self.cache.look)

    @rule()
    def give_up(self) -> None:
        self._do(lambda: self.callers[0].cancel() if self.callers else None)

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "cache"):
            assert 0 <= self.cache.size <= 2 and 0 <= self.cache.new_size <= 2
            assert len(self.minter.waiting) <= self.cache.size + self.cache.new_size
            told = [status.accepted for status in self.cache.statuses()]
            assert told.count(True) <= self.cache.size
            assert len(told) == self.cache.size + self.cache.new_size
            for caller in [caller for caller in self.callers if caller.done()]:
                self.callers.remove(caller)
                if not caller.cancelled():
                    caller.result()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self._do(self.cache.close)
            self._do(lambda: None)
            assert all(caller.done() for caller in self.callers), "nobody is left waiting"
            self.runner.close()


AnyLife.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyLife = AnyLife.TestCase
