"""What becomes of a look-up with a name server that is right, late, silent or wrong."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.net.names import dns_query
from shared.net.names.dns_query import (
    AGAIN_S,
    LOOK_UP_S,
    MAX_ADDRESSES,
    Answer,
    ResolveError,
    look_up,
)
from shared.tasks import spawn
from tests.support.name_server import (
    REFUSED,
    SERVFAIL,
    Fault,
    NameServer,
    Query,
    empty,
    failing,
    garbage,
    late,
    name_server,
    never,
    only,
    truncated,
    wrong_id,
)
from tests.support.name_server import (
    Answer as Said,
)

NAME = "service.test."
SOON_S = LOOK_UP_S / 2
"""Without waiting for anybody who does not answer."""

SIX, FOUR = "2001:db8::1", "10.0.0.1"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[NameServer]:
    async with name_server() as made:
        made.names = {NAME: (FOUR, SIX)}
        yield made


async def asked(server: NameServer, name: str = NAME) -> tuple[Answer | ResolveError, float]:
    """What a look-up comes to, and how long it takes."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        outcome: Answer | ResolveError = await look_up(name, [f"127.0.0.1:{server.port}"])
    except ResolveError as error:
        outcome = error
    return outcome, loop.time() - started


async def test_both_families(server: NameServer) -> None:
    server.ttl_s = 17
    assert await asked(server) == (Answer((SIX, FOUR), 17), pytest.approx(0, abs=LOOK_UP_S / 2))
    assert sorted(server.questions(NAME)) == ["A", "AAAA"]


async def test_each_question_has_a_port_of_its_own(server: NameServer) -> None:
    for _ in range(4):
        await asked(server)
    assert len({query.peer for query in server.asked}) == 8


@pytest.mark.parametrize("lost", ["A", "AAAA"])
@pytest.mark.parametrize(
    "fault",
    [never, failing(SERVFAIL), failing(REFUSED), failing(3), garbage, empty, late(3)],
    ids=["never", "SERVFAIL", "REFUSED", "NXDOMAIN", "garbage", "empty", "late"],
)
async def test_one_family_fails(server: NameServer, lost: str, fault: Fault) -> None:
    server.faults = {NAME: only(lost, fault)}
    outcome, took_s = await asked(server)
    assert outcome == Answer((FOUR if lost == "AAAA" else SIX,), 30)
    assert took_s < SOON_S  # "none" is waited for, and comes


async def test_the_second_family_may_be_a_little_late(
    server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_query, "OTHER_FAMILY_S", LOOK_UP_S)
    server.faults = {NAME: only("A", late(0.3))}
    outcome, _ = await asked(server)
    assert outcome == Answer((SIX, FOUR), 30)


async def test_an_answer_too_long_for_udp_comes_over_tcp(server: NameServer) -> None:
    server.faults = {NAME: truncated}
    outcome, _ = await asked(server)
    assert outcome == Answer((SIX, FOUR), 30)
    assert sorted(query.transport for query in server.asked) == ["tcp", "tcp", "udp", "udp"]


async def test_of_very_many_addresses_some_are_kept(server: NameServer) -> None:
    server.names = {NAME: tuple(f"10.0.{number // 256}.{number % 256}" for number in range(1000))}
    server.faults = {NAME: truncated}
    outcome, _ = await asked(server)
    assert isinstance(outcome, Answer)
    assert len(outcome.addresses) == MAX_ADDRESSES


async def test_an_answer_that_comes_late(server: NameServer) -> None:
    """Even after the question was asked again."""
    server.faults = {NAME: late(AGAIN_S[0] + 0.4)}
    outcome, took_s = await asked(server)
    assert outcome == Answer((SIX, FOUR), 30)
    assert took_s < LOOK_UP_S - 0.5  # c-ares' own repetitions would only hear the answer to the last one


async def test_a_question_that_is_lost_is_repeated(server: NameServer) -> None:
    seen: set[str] = set()

    def first_lost(query: Query, answer: Said) -> Said:
        if query.type in seen:
            return answer
        seen.add(query.type)
        return never(query, answer)

    server.faults = {NAME: first_lost}
    outcome, took_s = await asked(server)
    assert outcome == Answer((SIX, FOUR), 30)
    assert 0.9 * AGAIN_S[0] < took_s < LOOK_UP_S


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (failing(3), "no_name", "no such name, says the name server {} (NXDOMAIN)"),
        (empty, "no_address", "the name has no address, says the name server {}"),
        (failing(SERVFAIL), "failed", "the name server {} failed to look it up (SERVFAIL)"),
        (failing(REFUSED), "refused", "the name server {} refuses to look it up (REFUSED)"),
        (failing(4), "failed", "the name server {} cannot look it up (NOTIMP)"),
        (garbage, "malformed", "the name server {} gives answers that are no DNS"),
    ],
    ids=["NXDOMAIN", "no address", "SERVFAIL", "REFUSED", "NOTIMP", "garbage"],
)
async def test_each_failure_has_its_words(server: NameServer, fault: Fault, kind: str, text: str) -> None:
    server.faults = {NAME: fault}
    outcome, took_s = await asked(server)
    assert isinstance(outcome, ResolveError)
    assert (outcome.kind, outcome.text) == (kind, text.format(f"127.0.0.1:{server.port}"))
    assert took_s < SOON_S


@pytest.mark.parametrize("fault", [never, wrong_id], ids=["silence", "answers to other questions"])
async def test_a_name_server_that_does_not_answer(server: NameServer, fault: Fault) -> None:
    server.faults = {NAME: fault}
    outcome, took_s = await asked(server)
    assert isinstance(outcome, ResolveError)
    assert outcome.kind == "timeout"
    where = f"127.0.0.1:{server.port}"
    assert outcome.text == f"no answer from the name server {where} within {LOOK_UP_S:g} s"
    assert LOOK_UP_S * 0.9 < took_s < LOOK_UP_S + 1


async def test_a_name_that_one_family_knows_nothing_of(server: NameServer) -> None:
    """Broken servers say NXDOMAIN to AAAA of names that have no address of that kind."""
    server.names = {NAME: ()}
    server.faults = {NAME: only("AAAA", failing(3))}
    outcome, _ = await asked(server)
    assert isinstance(outcome, ResolveError)
    assert outcome.kind == "no_address"


async def test_nobody_at_the_name_server_s_port(server: NameServer) -> None:
    with pytest.raises(ResolveError) as caught:
        await look_up(NAME, ["127.0.0.1:1"])
    assert caught.value.kind == "unreachable"
    assert caught.value.text == "the name server 127.0.0.1:1 cannot be reached"


@pytest.mark.parametrize("name", ["a..b.", "x" * 64 + ".test.", "." + "x.", "x." * 130])
async def test_a_name_that_cannot_be(server: NameServer, name: str) -> None:
    outcome, _ = await asked(server, name)
    assert isinstance(outcome, ResolveError)
    assert server.asked == []


async def test_a_look_up_that_is_given_up_leaves_no_socket(server: NameServer) -> None:
    server.faults = {"*": never}
    before = set(os.listdir("/proc/self/fd"))
    tasks = [spawn(asked(server, f"{number}.test."), name="asks") for number in range(20)]
    await server.until(lambda: len(server.asked) == 40)
    assert len(set(os.listdir("/proc/self/fd")) - before) >= 40
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_many_look_ups_leave_nothing(server: NameServer) -> None:
    import pycares

    server.names = {"*": (FOUR,)}
    for number in range(200):
        await asked(server, f"{number}.test.")
    assert not pycares._handle_to_channel
