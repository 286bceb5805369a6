"""Names to addresses: whose look-up it is, what is kept, what resolv.conf and the hosts file say."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.address import Address
from shared.errors import LimitError
from shared.net.names import resolver as module
from shared.net.names.dns_query import AGAIN_S, LOOK_UP_S, ResolveError
from shared.net.names.endpoint import OURS, Endpoint
from shared.net.names.resolver import (
    FAILED_S,
    LEAST_S,
    NEGATIVE_S,
    POSITIVE_S,
    Resolver,
    client_limits,
    in_turn,
)
from shared.tasks import spawn
from tests.support.name_server import Fault, NameServer, failing, late, name_server, never

SERVFAIL = 2

SEARCH = "search demo.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:{}\n"


class World:
    """A resolver with a name server, a resolv.conf and a hosts file of its own."""

    def __init__(self, folder: Path, server: NameServer) -> None:
        self.server = server
        self.resolv_conf = folder / "resolv.conf"
        self.hosts = folder / "hosts"
        self.resolv_conf.write_text("search .\n")
        self.hosts.write_text("")
        self.later_s = 0.0
        """By how much its clock is ahead."""
        self.resolver = Resolver(
            [f"127.0.0.1:{server.port}"],
            resolv_conf=self.resolv_conf,
            hosts=self.hosts,
            now=lambda: time.monotonic() + self.later_s,
        )

    async def addresses(self, host: str, party: str = OURS) -> list[str]:
        return [name[0] for _, name in await self.resolver.resolve(Address(host, 80), party)]

    def asks(self, host: str, party: str = OURS) -> asyncio.Task[list[str]]:
        return spawn(self.addresses(host, party), name=f"asks for {host}")

    async def fails(self, host: str) -> ResolveError:
        with pytest.raises(ResolveError) as caught:
            await self.addresses(host)
        return caught.value


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[World]:
    async with name_server() as server:
        yield World(tmp_path, server)


# Endpoints.


async def test_all_dials_of_a_loop_share_one() -> None:
    assert module.current() is module.current()


async def test_both_families_in_turn(it: World) -> None:
    it.server.names = {"x.test.": ("10.0.0.1", "10.0.0.2", "2001:db8::1")}
    assert await it.addresses("x.test.") == ["2001:db8::1", "10.0.0.1", "10.0.0.2"]


def test_families_take_turns() -> None:
    six: list[Endpoint] = [(socket.AF_INET6, (f"::{n}", 1, 0, 0)) for n in (1, 2, 3)]
    four: list[Endpoint] = [(socket.AF_INET, (f"127.0.0.{n}", 1)) for n in (1, 2)]
    turns = in_turn([*six, *four, four[0]])
    assert turns == [six[0], four[0], six[1], four[1], six[2]]


# The hosts file and the search list.


async def test_the_hosts_file_goes_first(it: World) -> None:
    it.server.names = {"*": ("10.0.0.1",)}
    it.hosts.write_text("10.9.9.9 db.example\n")
    assert await it.addresses("db.example") == ["10.9.9.9"]
    assert await it.addresses("db.example.") == ["10.9.9.9"]
    assert it.server.asked == []  # not even for AAAA
    it.hosts.write_text("")
    assert await it.addresses("db.example.") == ["10.0.0.1"]


async def test_an_absolute_name_is_asked_as_it_is(it: World) -> None:
    it.resolv_conf.write_text(SEARCH.format(5))
    it.server.names = {"db.prod.svc.cluster.local.": ("10.0.0.1",)}
    error = await it.fails("db.prod.")
    assert error.kind == "no_name"
    assert it.server.asked_names == ["db.prod."]


@pytest.mark.parametrize("ndots", [1, 5])
async def test_a_kubernetes_name_is_found_with_the_search_list(it: World, ndots: int) -> None:
    it.resolv_conf.write_text(SEARCH.format(ndots))
    it.server.names = {"istiod.istio-system.svc.cluster.local.": ("10.0.0.1",)}
    assert await it.addresses("istiod.istio-system.svc") == ["10.0.0.1"]
    assert it.server.asked_names[-1] == "istiod.istio-system.svc.cluster.local."


@pytest.mark.parametrize(("fault", "most_s"), [(failing(SERVFAIL), 2.0), (never, LOOK_UP_S + 2)])
async def test_a_cluster_without_the_world_still_finds_its_own_names(
    it: World, fault: Fault, most_s: float
) -> None:
    """With ndots 1 the name goes to the servers outside of the cluster first, which may be away."""
    it.resolv_conf.write_text(SEARCH.format(1))
    it.server.names = {"istiod.istio-system.svc.cluster.local.": ("10.0.0.1",)}
    it.server.faults = {"istiod.istio-system.svc.": fault}
    async with asyncio.timeout(most_s):
        assert await it.addresses("istiod.istio-system.svc") == ["10.0.0.1"]


async def test_a_silent_name_server_is_not_asked_for_all_candidates(it: World) -> None:
    it.server.faults = {"*": never}
    it.resolv_conf.write_text(SEARCH.format(5))
    error = await it.fails("db.prod")
    assert error.kind == "timeout"
    assert it.server.asked_names == ["db.prod.demo.svc.cluster.local."]


async def test_of_several_failures_the_one_that_says_most_is_told(it: World) -> None:
    it.resolv_conf.write_text(SEARCH.format(5))
    assert (await it.fails("a.b")).kind == "no_name"
    it.server.names = {"b.c.svc.cluster.local.": ()}
    assert (await it.fails("b.c")).kind == "no_address"
    it.server.faults = {"c.d.svc.cluster.local.": failing(SERVFAIL)}
    error = await it.fails("c.d")
    assert error.kind == "failed"
    assert error.text.endswith("(SERVFAIL); asked as it is, and with resolv.conf's search list")


async def test_names_that_are_never_there(it: World) -> None:
    it.server.names = {"*": ("10.0.0.1",)}
    for name in ("nowhere.invalid", "nowhere.invalid.", "invalid"):
        assert (await it.fails(name)).kind == "no_name"
    assert it.server.asked == []


# What is shared and kept.


async def test_who_asks_for_the_same_name_waits_for_the_same_answer(it: World) -> None:
    it.server.names = {"x.test.": ("10.0.0.1",)}
    it.server.faults = {"*": late(0.1)}
    asked = [it.asks("x.test.", party) for party in ("", "a", "b", "a")]
    assert await asyncio.gather(*asked) == [["10.0.0.1"]] * 4
    assert sorted(it.server.questions("x.test.")) == ["A", "AAAA"]
    assert (it.resolver.counts.found, it.resolver.counts.reused) == (1, 3)


async def test_the_end_of_one_who_waits_is_nobody_else_s(it: World) -> None:
    it.server.names = {"x.test.": ("10.0.0.1",)}
    it.server.faults = {"*": late(0.3)}
    first, second = it.asks("x.test.", "a"), it.asks("x.test.", "b")
    await it.server.until(lambda: len(it.server.asked) == 2)
    first.cancel()
    assert await second == ["10.0.0.1"]
    assert it.resolver.clients.taken == 0


async def test_a_look_up_that_nobody_waits_for_is_given_up(it: World) -> None:
    it.server.faults = {"*": never}
    asked = [it.asks("x.test.", "a"), it.asks("x.test.", "b")]
    await it.server.until(lambda: len(it.server.asked) == 2)
    assert it.resolver.clients.taken == 1
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(0)
    assert (it.resolver.clients.taken, it.resolver.counts.abandoned) == (0, 1)
    # Who comes then has one of its own.
    it.server.faults = {}
    it.server.names = {"x.test.": ("10.0.0.1",)}
    assert await it.addresses("x.test.", "a") == ["10.0.0.1"]


async def test_one_that_is_given_up_before_it_began_leaves_nothing(it: World) -> None:
    task = it.asks("x.test.", "a")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert (it.resolver.clients.taken, it.resolver._running) == (0, {})


async def test_answers_are_kept_for_their_time(it: World) -> None:
    it.server.names = {"*": ("10.0.0.1",)}

    async def asked() -> list[int]:
        for name, ttl_s in lives.items():
            it.server.ttl_s = ttl_s
            await it.addresses(name)
        return [len(it.server.questions(name)) // 2 for name in lives]

    lives = {"none.test.": 0, "short.test.": 3, "long.test.": 3600}
    assert await asked() == [1, 1, 1]
    assert await asked() == [1, 1, 1]
    it.later_s += LEAST_S
    assert await asked() == [2, 1, 1]
    it.later_s += 3 - LEAST_S
    assert await asked() == [3, 2, 1]
    it.later_s += POSITIVE_S - 3
    assert (await asked())[-1] == 2


async def test_failures_are_kept_for_a_moment(it: World) -> None:
    it.server.faults = {"broken.test.": failing(SERVFAIL)}

    async def asked() -> list[int]:
        assert (await it.fails("none.test.")).kind == "no_name"
        assert (await it.fails("broken.test.")).kind == "failed"
        return [len(it.server.questions(name)) for name in ("none.test.", "broken.test.")]

    first = await asked()
    assert await asked() == first
    it.later_s += FAILED_S
    assert await asked() == [first[0], 2 * first[1]]
    it.later_s += NEGATIVE_S
    assert await asked() == [2 * first[0], 3 * first[1]]


async def test_what_is_kept_has_a_bound(it: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 10)
    await asyncio.gather(*(it.fails(f"{number}.test.") for number in range(30)))
    assert len(it.resolver._kept) == 10


async def test_the_name_server_that_answers_is_asked_first() -> None:
    async with name_server() as silent, name_server() as other:
        silent.faults = {"*": never}
        other.names = {"*": ("10.0.0.1",)}
        resolver = Resolver([f"127.0.0.1:{silent.port}", f"127.0.0.1:{other.port}"])
        loop = asyncio.get_running_loop()
        for number in range(3):
            started = loop.time()
            await resolver.resolve(Address(f"{number}.test.", 80))
            assert (loop.time() - started > AGAIN_S[0] * 0.9) == (number == 0)
        assert silent.asked_names == ["0.test."]


# Fair shares.


@asynccontextmanager
async def many_dead(it: World, count: int, party: str) -> AsyncIterator[None]:
    """`count` look-ups of names that nobody answers, by `party`, with a number of its own for a `{}`."""
    it.server.names = {"*.good.test.": ("10.0.0.1",)}
    it.server.faults = {"*.dead.test.": never}
    dead = [it.asks(f"{number}.dead.test.", party.format(number)) for number in range(count)]
    yield
    for task in dead:
        task.cancel()
    await asyncio.gather(*dead, return_exceptions=True)


async def test_names_that_nobody_answers_cost_only_the_one_who_asks_for_them(it: World) -> None:
    it.resolver.clients.limits = client_limits(8, 4)
    async with many_dead(it, 20, "attacker"):
        await it.server.until(lambda: len(it.server.asked) == 8)
        async with asyncio.timeout(LOOK_UP_S / 2):
            assert await it.addresses("a.good.test.", "honest") == ["10.0.0.1"]
            assert await it.addresses("b.good.test.") == ["10.0.0.1"]
        assert (it.resolver.clients.taken, it.resolver.clients.waiting) == (4, 16)


async def test_many_who_ask_for_dead_names_leave_ours_alone(it: World) -> None:
    it.resolver.clients.limits = client_limits(8, 4)
    async with many_dead(it, 20, "attacker {}"):
        await it.server.until(lambda: len(it.server.asked) == 16)
        async with asyncio.timeout(LOOK_UP_S / 2):
            assert await it.addresses("a.good.test.") == ["10.0.0.1"]


async def test_a_queue_s_end_is_told(it: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_PER_CLIENT", 2)
    it.resolver.clients.limits = client_limits(1, 1)
    async with many_dead(it, 3, "10.0.0.9"):
        await it.server.until(lambda: len(it.server.asked) == 2)
        with pytest.raises(LimitError) as caught:
            await it.addresses("more.test.", "10.0.0.9")
        assert (caught.value.limit, caught.value.flag) == ("max_lookups_per_client", "LIMIT")
        assert str(caught.value) == (
            "1 names are being looked up for 10.0.0.9, which is max_lookups_per_client; 2 more wait"
        )


async def test_who_waited_for_a_slot_takes_an_answer_that_came_meanwhile(it: World) -> None:
    it.resolver.clients.limits = client_limits(1, 1)
    it.server.names = {"*": ("10.0.0.1",)}
    it.server.faults = {"*": late(0.1)}
    first = it.asks("first.test.", "a")
    await it.server.until(lambda: len(it.server.asked) == 2)
    queued = it.asks("x.test.", "b")
    await asyncio.sleep(0)
    ours = it.asks("x.test.")
    assert await asyncio.gather(first, queued, ours) == [["10.0.0.1"]] * 3
    assert sorted(it.server.questions("x.test.")) == ["A", "AAAA"]
