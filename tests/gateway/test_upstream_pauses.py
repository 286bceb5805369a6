"""Tunnel requests sent once more after a pause: the deadline, the budget, and who goes away meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from shared.tunnel.retry import MIN_BUDGET
from tests.support.clocks import ROUNDING_S
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import INTERNAL_ERROR, hello
from tests.support.http2_peer import Service
from tests.support.retried_tunnels import SAID, end, opens, retried, retries, wait

CANCEL = 8
REFUSED_STREAM = 7
BIG = bytes(range(256)) * 4096
"""1 MiB: a stream's whole window."""

PAGE = b"<html><title>Error</title>The service you requested is not available yet.</html>" * 20


# Statuses that pass.


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_a_status_that_passes(world: World, status: int) -> None:
    gateway = await world.start()
    client = await world.client(SAID)
    (await world.service.request()).respond(status, end=True)
    stream = await opens(world, client)
    await end(client, stream)
    line = await gateway.line()
    assert (line["flags"], line["status"], line["attempts"]) == ("-", 200, 2)
    assert await retries(world, str(status)) == 1
    await world.nothing_is_left()


@pytest.mark.parametrize("status", [400, 403, 404, 500, 504])
async def test_a_status_that_does_not(world: World, status: int) -> None:
    gateway = await world.start()
    client = await world.client(SAID)
    (await world.service.request()).respond(status, [wait("0")], end=True)
    await client.rest()
    line = await gateway.line()
    assert line["status"] == status
    assert "attempts" not in line
    assert not world.service.asked


async def test_one_after_the_other(world: World) -> None:
    """Everything that can be mended, in one tunnel."""
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}))
    client = await world.client(SAID)
    (await world.service.request()).respond(401, end=True)
    (await world.service.request()).reset(REFUSED_STREAM)
    (await world.service.request()).respond(503, end=True)
    (await world.service.request()).peer.drop()
    (await world.service.request()).respond(429, end=True)
    await end(client, await opens(world, client))
    line = await gateway.line()
    assert (line["flags"], line["status"], line["attempts"]) == ("-", 200, 6)


async def test_everything_that_came_meanwhile_is_delivered_in_order_and_once(world: World) -> None:
    """Its end, too: a client may say all that it has to say, send FIN and wait for the answer."""
    await world.start()
    said = SAID + BIG
    client = await world.client(said[:1000])
    first = await world.service.request()
    client.send_soon(said[1000:])
    client.end()
    first.respond(503, end=True)
    second = await world.service.request()
    second.reset(REFUSED_STREAM)
    stream = await world.service.request()
    stream.respond(200)
    assert await stream.rest() == said
    await stream.send(b"bye")
    stream.end()
    assert await client.rest() == b"bye"
    assert first.data == second.data == said[: len(first.data)], "the first flight went with each request"
    assert len(first.data) >= len(SAID)
    assert (await world.gateway.line())["flags"] == "-"


async def test_an_attempt_is_let_go_of_before_the_next(world: World) -> None:
    """And its page is not read to the end."""
    await world.start()
    client = await world.client(SAID)
    first = await world.service.request()
    first.respond(503, [(b"content-type", b"text/html")])
    await first.send(PAGE)
    assert await first.broken() == CANCEL
    await opens(world, client)


async def test_retry_after_is_kept_to(world: World) -> None:
    await world.start()
    client = await world.client(SAID)
    stream = await world.service.request()
    began = asyncio.get_running_loop().time()
    stream.respond(429, [wait("1")], end=True)
    await opens(world, client)
    assert asyncio.get_running_loop().time() - began >= 1.0 - ROUNDING_S


@pytest.mark.parametrize("value", ["60", "3600", "Fri, 31 Dec 9999 23:59:59 GMT"])
async def test_retry_after_the_deadline_is_a_refusal_at_once(world: World, value: str) -> None:
    gateway = await world.start(response_timeout="60s")
    client = await world.client(SAID)
    stream = await world.service.request()
    stream.respond(503, [wait(value)], end=True)
    assert await client.rest() == INTERNAL_ERROR, "and that within the client's patience"
    line = await gateway.line()
    assert (line["flags"], line["status"]) == ("STATUS", 503)
    assert "; not asked again: no time for a pause of " in line["error"]
    assert not world.service.asked


async def test_the_deadline_is_for_all_attempts_together(world: World) -> None:
    gateway = await world.start(response_timeout="3s")
    client = await world.client(SAID)
    began = asyncio.get_running_loop().time()
    (await world.service.request()).respond(503, [wait("2")], end=True)
    silent = await world.service.request()
    assert await client.rest() == INTERNAL_ERROR
    took_s = asyncio.get_running_loop().time() - began
    assert 2.9 < took_s < 5.0, "the second would have until then"
    assert await silent.broken() == CANCEL
    line = await gateway.line()
    assert (line["flags"], line["error"], line["attempts"]) == (
        "UPSTREAM",
        "no response headers within 3 s",
        2,
    )
    assert "status" not in line, "the last attempt had none"


async def test_a_token_may_change_during_a_pause(world: World, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    await world.start(tunnel(world.service.port, token={"file": "token"}))
    client = await world.client(SAID)
    (await world.service.request()).respond(503, [wait("0")], end=True)
    (tmp_path / "token").write_text("new")
    assert (await opens(world, client))[b"authorization"] == b"Bearer new"


async def test_max_retries(world: World) -> None:
    gateway = await world.start(max_retries=2)
    client = await world.client(SAID)
    for _ in range(3):
        (await world.service.request()).respond(503, [wait("0")], end=True)
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["status"], line["attempts"]) == (503, 3)
    assert await retries(world, "503") == 2
    assert not world.service.asked


async def test_a_reload_changes_max_retries(world: World) -> None:
    gateway = await world.start()
    await gateway.reloaded(json.loads(gateway.file.read_text())["routes"], max_retries=0)
    client = await world.client(SAID)
    (await world.service.request()).respond(503, end=True)
    assert await client.rest() == INTERNAL_ERROR


# The budget.


async def test_retries_do_not_multiply_an_outage(world: World) -> None:
    gateway = await world.start(retry_budget_percent=20)
    clients = [await world.client(SAID) for _ in range(MIN_BUDGET + 4)]
    requests = [await world.service.request() for _ in clients]
    for request in requests:
        request.respond(503, [wait("1")], end=True)
    lines = [await gateway.line() for _ in range(4)]
    assert {(line["flags"], line["status"]) for line in lines} == {("STATUS", 503)}
    assert all(f"not asked again: {MIN_BUDGET} requests are retries" in line["error"] for line in lines)
    over = "hbone_upstream_retries_over_budget_total"
    assert await gateway.metric(over, route=GLOB) == 4
    assert await retries(world, "503") == MIN_BUDGET
    for _ in range(MIN_BUDGET):
        (await world.service.request()).respond(200)
    client = await world.client(SAID)
    (await world.service.request()).respond(503, end=True)
    await opens(world, client)
    assert await gateway.metric(over, route=GLOB) == 4, "who has an answer makes room"


async def test_each_origin_has_a_budget_of_its_own(world: World) -> None:
    async with Service.listening() as other:
        routes = [tunnel(other.port, host="other.demo.svc.cluster.local"), tunnel(world.service.port)]
        await world.start(*routes)
        stuck = [await world.client(hello("other.demo.svc.cluster.local")) for _ in range(MIN_BUDGET)]
        for _ in stuck:
            (await other.request()).respond(503, [wait("20")], end=True)
        await retried(world, "503", MIN_BUDGET, route="other.demo.svc.cluster.local")
        client = await world.client(SAID)
        (await world.service.request()).respond(503, end=True)
        await opens(world, client)


# Clients and gateways that go away.


async def test_a_client_that_goes_away_is_not_asked_for_again(world: World) -> None:
    gateway = await world.start()
    client = await world.client(SAID)
    (await world.service.request()).respond(503, [wait("20")], end=True)
    await retried(world, "503", 1)
    client.reset()
    line = await gateway.line()
    assert (line["severity"], line["flags"], line["status"]) == ("INFO", "DOWNSTREAM_RESET", 503)
    assert "attempts" not in line, "the second was never made"
    await world.nothing_is_left()
    await world.open()
    assert not world.service.asked


async def test_clients_that_go_away_leave_the_budget(world: World) -> None:
    gateway = await world.start()
    await world.client()  # somebody waits all the time
    await world.service.request()
    for number in range(MIN_BUDGET + 2):
        client = await world.client(SAID)
        (await world.service.request()).respond(503, [wait("20")], end=True)
        await retried(world, "503", number + 1)
        client.reset()
        assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"
    assert await gateway.metric("hbone_upstream_retries_over_budget_total", route=GLOB) == 0


async def test_a_gateway_that_stops_does_not_wait_for_pauses(world: World) -> None:
    gateway = await world.start(drain_timeout=0)
    client = await world.client(SAID)
    (await world.service.request()).respond(503, [wait("20")], end=True)
    await retried(world, "503", 1)
    gateway.interrupt()
    assert await client.rest() == INTERNAL_ERROR
    assert await gateway.exit_code() == 0
    assert [line["flags"] for line in await gateway.lines()] == ["STOPPED"]
