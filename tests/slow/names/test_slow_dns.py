"""hgate as a process, in a network whose name server is slow, dead or wrong: who asks for names that nobody
answers delays nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.net.names.resolver import MAX_LOOKUPS_PER_CLIENT, MAX_WAITING_PER_CLIENT
from shared.tasks import spawn
from tests.support.dns_world import (
    ATTACKER,
    LATENCY_S,
    OTHER,
    POD_RESOLV_CONF,
    RESOLVER,
    Crowd,
    names,
    sni,
    world,
)
from tests.support.hbone_port import CALLER
from tests.support.hellos import hello
from tests.support.name_server import (
    NXDOMAIN,
    REFUSED,
    SERVFAIL,
    Fault,
    NameServer,
    both,
    empty,
    failing,
    garbage,
    late,
    never,
    only,
    truncated,
    wrong_id,
)
from tests.support.network_namespace import POD, Network
from tests.support.tcp_peer import TcpPeer

SOON_S = 3.0
"""A dial takes LATENCY_S and some milliseconds; in the attacks below it took 7 s and more before."""


@pytest.fixture
def net(network: Network) -> Iterator[Network]:
    network.resolv_conf.write_text(POD_RESOLV_CONF)
    yield network


# Slow.


async def test_connects_to_names_that_nobody_answers_delay_nobody(net: Network, tmp_path: Path) -> None:
    async with names() as server, world(tmp_path) as it:
        status, text, _ = await it.connect("first.good.test")
        assert status == 200, text
        for round_ in ("a", "b"):
            async with it.member() as attacker:
                for number in range(8):
                    attacker.request(b"CONNECT", b"", authority=f"{number}.{round_}.dead.test:80".encode())
                await server.until(lambda end=f".{round_}.dead.test.": any_of(server, end))  # type: ignore[misc]
            # It has left, and now others have names looked up.
            times = [await it.connect(f"{number}.{round_}.good.test") for number in range(3)]
            assert [status for status, *_ in times] == [200] * 3
            assert max(took for *_, took in times) < SOON_S
            assert await it.hello(f"honest-{round_}") < SOON_S
        assert await it.gateway.metric("hbone_dns_lookups_total", "abandoned") == 16


async def test_connects_that_stay_delay_nobody_either(net: Network, tmp_path: Path) -> None:
    async with names() as server, world(tmp_path) as it, it.member() as attacker:
        for number in range(100):
            attacker.request(b"CONNECT", b"", authority=f"{number}.dead.test:80".encode())
        await server.until(lambda: len(server.asked_names) >= MAX_LOOKUPS_PER_CLIENT)
        status, text, took_s = await it.connect("other.good.test", OTHER)
        assert (status, text) == (200, "")
        assert took_s < SOON_S
        assert await it.hello("honest") < SOON_S
        assert len(server.asked_names) <= MAX_LOOKUPS_PER_CLIENT + 2


async def test_an_identity_with_too_many_look_ups_is_told(net: Network, tmp_path: Path) -> None:
    room = MAX_LOOKUPS_PER_CLIENT + MAX_WAITING_PER_CLIENT
    async with names() as server, world(tmp_path) as it, it.member() as one, it.member() as other:
        for number in range(room):
            peer = one if number % 2 else other
            peer.request(b"CONNECT", b"", authority=f"{number}.dead.test:80".encode())
        await server.until(lambda: len(server.asked_names) >= MAX_LOOKUPS_PER_CLIENT)
        await one.answered()
        await other.answered()
        status, text, _ = await it.connect("more.dead.test")
        assert (status, text) == (
            503,
            f"{MAX_LOOKUPS_PER_CLIENT} names are being looked up for {CALLER}, which is "
            f"max_lookups_per_client; {MAX_WAITING_PER_CLIENT} more wait\n",
        )
        await it.until_lines(1)
        assert it.gateway.lines[0]["flags"] == "LIMIT"
        assert await it.gateway.metric("hbone_limit_refusals_total", "max_lookups_per_client") == 1
        assert (await it.connect("other.good.test", OTHER))[0] == 200


async def test_a_connect_that_waits_for_others_to_end_is_told(net: Network, tmp_path: Path) -> None:
    async with names() as server, world(tmp_path, connect_timeout="1s") as it, it.member() as peer:
        for number in range(MAX_LOOKUPS_PER_CLIENT):
            peer.request(b"CONNECT", b"", authority=f"{number}.dead.test:80".encode())
        await server.until(lambda: len(server.asked_names) >= MAX_LOOKUPS_PER_CLIENT)
        status, text, _ = await it.connect("waits.dead.test")
        assert (status, text.partition(": ")[2]) == (503, "its name was not looked up within 1 s\n")


async def test_random_server_names_delay_nobody(net: Network, tmp_path: Path) -> None:
    async with names() as server, world(tmp_path) as it, Crowd() as crowd:
        server.names = {"honest*.good.test.": (POD,)}  # any other is not there, which takes as long
        stop = asyncio.Event()

        async def attack() -> int:
            for number in range(1000):
                if stop.is_set():
                    return number
                await crowd.say(it.gateway.port, ATTACKER, sni(f"random{number}"))
                await asyncio.sleep(0.005)
            return 1000

        attacker = spawn(attack(), name="attacker")
        await server.until(lambda: len(server.asked_names) >= 50)
        took = [await it.hello(f"honest{number}") for number in range(10)]
        assert not attacker.done()
        stop.set()
        assert await attacker > 50
        assert max(took) < SOON_S
        # Each name was asked for as it is, although the search list has ndots 5.
        assert all(name.endswith(".good.test.") for name in server.asked_names)


async def test_random_server_names_that_nobody_answers_delay_nobody(net: Network, tmp_path: Path) -> None:
    async with names() as server, world(tmp_path) as it, Crowd() as crowd:
        server.faults = {"random*": never, "*": late(LATENCY_S)}
        for number in range(MAX_LOOKUPS_PER_CLIENT + MAX_WAITING_PER_CLIENT + 20):
            await crowd.say(it.gateway.port, ATTACKER, sni(f"random{number}"))
        await server.until(lambda: len(server.asked_names) >= MAX_LOOKUPS_PER_CLIENT)
        assert max([await it.hello(f"honest{number}") for number in range(5)]) < SOON_S
        await it.until_metric("hbone_limit_refusals_total", 20, "max_lookups_per_client")
        line = next(line for line in it.gateway.lines if line["flags"] == "LIMIT")
        assert line["error"] == (
            f"{MAX_LOOKUPS_PER_CLIENT} names are being looked up for {ATTACKER}, which is "
            f"max_lookups_per_client; {MAX_WAITING_PER_CLIENT} more wait"
        )
        assert await it.gateway.metric("hbone_dns_lookups_running", "clients") == MAX_LOOKUPS_PER_CLIENT


# Wrong.


WRONG: dict[str, tuple[Fault, int, str]] = {
    "late": (late(1.5), 200, ""),
    "very late": (late(3), 200, ""),
    "never": (never, 503, f"no answer from the name server {RESOLVER} within 4 s"),
    "never AAAA": (only("AAAA", never), 200, ""),
    "lying about AAAA": (only("AAAA", failing(NXDOMAIN)), 200, ""),
    "SERVFAIL for AAAA": (only("AAAA", failing(SERVFAIL)), 200, ""),
    "SERVFAIL": (failing(SERVFAIL), 503, f"the name server {RESOLVER} failed to look it up (SERVFAIL)"),
    "REFUSED": (failing(REFUSED), 503, f"the name server {RESOLVER} refuses to look it up (REFUSED)"),
    "NXDOMAIN": (
        failing(NXDOMAIN),
        503,
        f"no such name, says the name server {RESOLVER} (NXDOMAIN); asked without resolv.conf's search list",
    ),
    "no address": (empty, 503, f"the name has no address, says the name server {RESOLVER}"),
    "wrong id": (wrong_id, 503, f"no answer from the name server {RESOLVER} within 4 s"),
    "garbage": (garbage, 503, f"the name server {RESOLVER} gives answers that are no DNS"),
    "truncated": (truncated, 200, ""),
    "truncated and late": (both(truncated, late(0.5)), 200, ""),
}


@pytest.mark.parametrize(("fault", "status", "text"), WRONG.values(), ids=WRONG)
async def test_a_name_server_that_is_wrong(
    net: Network, tmp_path: Path, fault: Fault, status: int, text: str
) -> None:
    async with names() as server, world(tmp_path) as it:
        server.faults = {"one.good.test.": fault}
        told = text and f"connect to one.good.test:{it.app_port}: {text}\n"
        assert (await it.connect("one.good.test"))[:2] == (status, told)


async def test_no_name_server(net: Network, tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        status, text, took_s = await it.connect("one.good.test")
        assert (status, text.partition(": ")[2]) == (503, f"the name server {RESOLVER} cannot be reached\n")
        assert took_s < SOON_S


async def test_only_ipv6(net: Network, tmp_path: Path) -> None:
    async with names() as server, world(tmp_path, host="::1") as it:
        server.names = {"six.good.test.": ("::1",)}
        assert (await it.connect("six.good.test"))[0] == 200


# resolv.conf.


async def test_a_changed_resolv_conf_counts_at_once(net: Network, tmp_path: Path) -> None:
    async with names(), world(tmp_path) as it:
        net.resolv_conf.write_text("nameserver 127.0.0.54\n")
        assert (await it.connect("a.good.test"))[0] == 503
        net.resolv_conf.write_text(POD_RESOLV_CONF)
        assert (await it.connect("b.good.test"))[0] == 200


@pytest.mark.parametrize("ndots", [1, 5])
async def test_forward_follows_the_search_list(net: Network, tmp_path: Path, ndots: int) -> None:
    net.resolv_conf.write_text(POD_RESOLV_CONF.replace("ndots:5", f"ndots:{ndots}"))
    async with names() as server, world(tmp_path, forward="istiod.istio-system.svc") as it:
        server.names = {"istiod.istio-system.svc.cluster.local.": (POD,)}
        async with TcpPeer.connected(it.gateway.port) as client:
            client.send_soon(hello("istiod.istio-system.svc"))
            assert await client.rest() == b""  # the app's end
        await it.until_lines(1)
        assert it.gateway.lines[-1]["flags"] == "-"
        assert server.asked_names[-1] == "istiod.istio-system.svc.cluster.local."
        assert len(server.asked_names) == {1: 4, 5: 3}[ndots]


# Rules about names.


@pytest.mark.parametrize("name", ["db.prod.svc", "db.prod", "DB.Prod.", "db.prod.svc.cluster.local"])
async def test_no_spelling_leads_past_a_rule_about_a_name(net: Network, tmp_path: Path, name: str) -> None:
    deny = {"from": [str(CALLER)], "to": ["db.prod.svc.cluster.local:*"], "deny": True}
    async with names() as server, world(tmp_path, deny) as it:
        server.names = {"db.prod.svc.cluster.local.": (POD,)}
        status, text, _ = await it.connect(name)
        if name == "db.prod.svc.cluster.local":
            assert (status, server.asked) == (401, [])
        else:
            assert status == 503
            assert "NXDOMAIN" in text
            assert server.asked_names == [f"{name.lower().removesuffix('.')}."]


@pytest.mark.parametrize("name", ["db.prod.svc.cluster.local.", "DB.prod.svc.Cluster.local."])
async def test_a_dot_at_the_end_changes_nothing(net: Network, tmp_path: Path, name: str) -> None:
    deny = {"from": [str(CALLER)], "to": ["db.prod.svc.cluster.local:*"], "deny": True}
    async with names() as server, world(tmp_path, deny) as it:
        server.names = {"*.prod.svc.cluster.local.": (POD,)}
        assert (await it.connect(name))[0] == 401
        assert server.asked == []
        assert (await it.connect("web.prod.svc.cluster.local."))[0] == 200


def any_of(server: NameServer, end: str) -> bool:
    return any(name.endswith(end) for name in server.asked_names)
