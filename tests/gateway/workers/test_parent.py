"""`hgate --workers N`: the processes, how the load is shared, what a death costs, and how all of it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from shared import core_dumps
from shared.address import Address
from shared.errors import EXIT_CONFIG, EXIT_OK, EXIT_SIGTERM, EXIT_UNAVAILABLE, EXIT_USAGE
from shared.listen import bound_address, listen
from shared.net.listen_close import listening_on
from shared.tasks import spawn
from tests.support.gateway_load import HELLO, EchoService, flowing, say, staying
from tests.support.gateway_world import tunnel
from tests.support.hbone_port import GATEWAY, Mesh
from tests.support.hellos import UNRECOGNIZED_NAME
from tests.support.hgate_process import Hgate, hgate
from tests.support.process import started
from tests.support.running_gateway import change_config, write_config
from tests.support.tcp_peer import PATIENCE_S, TcpPeer
from tests.support.world import free_port


@pytest.fixture
async def service() -> AsyncIterator[EchoService]:
    async with EchoService.listening() as service:
        yield service


@pytest.fixture
def file(tmp_path: Path, service: EchoService) -> Path:
    """A gateway's file with a route to the service."""
    write_config(tmp_path / "hgate.yaml", [tunnel(service.port)], drain_delay=0)
    return tmp_path / "hgate.yaml"


def content_of(path: str) -> str:
    return Path(path).read_text()


def workers(file: Path, count: int) -> AbstractAsyncContextManager[Hgate]:
    return hgate(file, "--workers", str(count))


async def pid_of(running: Hgate, name: str) -> int:
    """The newest process of this name."""
    found = [re.search(rf"^{name} has pid (\d+)$", message) for message in running.process.messages]
    return int([match[1] for match in found if match][-1])


def tunnels_of(shown: list[dict[str, object]]) -> Counter[object]:
    """How many tunnels each worker has."""
    return Counter(row["worker"] for row in shown)


# Start.


async def test_all_share_the_load(file: Path) -> None:
    async with workers(file, 3) as running, staying(running.port, 60) as tunnels:
        assert listening_on(Address("127.0.0.1", running.port)) == 3
        shares = tunnels_of(await running.dump("/tunnels"))
        assert set(shares) == {1, 2, 3}
        assert sum(shares.values()) == 60
        assert max(shares.values()) < 50, "the kernel deals them out"
        connections = await running.dump("/connections")
        assert sum(connection["streams"] for connection in connections) == 60
        assert {connection["worker"] for connection in connections} == {1, 2, 3}
        await tunnels.talk()


async def test_numbers_are_those_of_all(file: Path) -> None:
    async with workers(file, 2) as running, staying(running.port, 20) as tunnels:
        async with TcpPeer.connected(running.port) as client:
            await client.send(b"no TLS")
            await client.rest()
        assert await running.metric("hbone_connections_open") == 20
        assert await running.metric("hbone_connections_limit") == 10_000
        assert sum((await running.samples("hbone_tunnels_opened_total")).values()) == 20
        assert await running.metric("hbone_tunnel_setup_seconds_count") == 20
        assert await running.metric("hbone_tunnel_setup_seconds_bucket", "+Inf") == 20
        assert await running.metric("hbone_connections_refused_total", "NOT_TLS") == 1
        assert sum((await running.samples("hbone_sent_bytes_total")).values()) == 20 * len(HELLO)
        assert await running.metric("hbone_workers") == 2
        assert (await running.get("health", "/healthz/live")).body == b"alive\n"
        assert (await running.dump("/config"))["listen"] == ["127.0.0.1:0"]
        await tunnels.end()


async def test_the_page_is_that_of_all(file: Path) -> None:
    async with workers(file, 2) as running, staying(running.port, 20):
        async with TcpPeer.connected(running.port) as client:
            await client.send(b"no TLS")
            await client.rest()
        page = await running.dump("/overview")
        assert (page["workers"], page["silent"], page["totals"]["tunnels"]) == (2, [], 20)
        assert {row["worker"] for row in page["tunnels"]["rows"]} == {1, 2}
        assert page["routes"]["rows"][0]["connections"] == 20
        assert sum(row["streams"] for row in page["origins"]["rows"]) == 20
        assert [(one["flag"], one["count"]) for one in page["refusals"]] == [("NOT_TLS", 1)]
        told = await running.dump("/config_dump")
        assert told["config"]["routes"][0]["source"] == f"{file}:9"
        assert (await running.get("admin", "/page.js")).status == 200
        assert (await running.get("admin", "/logging")).body == b"info\n"


async def test_limits_hold_for_all_together(tmp_path: Path, service: EchoService) -> None:
    file = tmp_path / "hgate.yaml"
    write_config(file, [tunnel(service.port)], max_connections=4)
    async with workers(file, 2) as running, AsyncExitStack() as block:
        for _ in range(40):
            block.enter_context(socket.create_connection(("127.0.0.1", running.port)))
        async with asyncio.timeout(PATIENCE_S):
            while await running.metric("hbone_connections_refused_total", "LIMIT") < 36:
                pass
        assert await running.metric("hbone_connections_open") == 4
        assert await running.metric("hbone_connections_limit") == 4


async def test_look_ups_are_bounded_for_all_together(tmp_path: Path, service: EchoService) -> None:
    file = tmp_path / "hgate.yaml"
    write_config(file, [tunnel(service.port)], max_lookups=40)
    async with workers(file, 2) as running:
        assert await running.metric("hbone_dns_lookups_limit", "clients") == 40


@pytest.mark.parametrize("purpose", ["hbone", "reverse"])
async def test_they_share_a_free_port_for_members(file: Path, tmp_path: Path, purpose: str) -> None:
    own = Mesh(tmp_path).member(GATEWAY)
    change_config(file, **{purpose: {"certificates": str(own), "listen": ["127.0.0.1:0"], "rules": []}})
    async with workers(file, 2) as running:
        port = (await running.said(rf"^{purpose} on 127\.0\.0\.1:(\d+)$"))[1]
        assert listening_on(Address("127.0.0.1", int(port))) == 2
        if purpose == "hbone":
            assert await running.metric("hbone_listener_connections_limit") == 1000


@pytest.mark.parametrize("purpose", ["listen", "hbone", "reverse", "admin", "metrics", "health"])
async def test_a_port_in_use_is_told_in_one_line(file: Path, tmp_path: Path, purpose: str) -> None:
    async with await listen(Address("127.0.0.1", 0), asyncio.Protocol, purpose="test") as taken:
        address = str(bound_address(taken))
        if purpose in ("hbone", "reverse"):
            own = Mesh(tmp_path).member(GATEWAY)
            change_config(file, **{purpose: {"certificates": str(own), "listen": [address], "rules": []}})
        else:
            change_config(file, **{purpose: [address] if purpose == "listen" else address})
        async with started("gateway", "--config", str(file), "--workers", "3") as process:
            code, _, err = await process.ended()
    assert code == EXIT_UNAVAILABLE
    assert err.splitlines() == [f"hgate: {purpose}: cannot listen on {address}: the port is in use"]


async def test_what_all_workers_lack_is_told_once(file: Path, tmp_path: Path) -> None:
    """Only they find out, and none of them is there long enough to be ready."""
    missing = tmp_path / "nowhere"
    change_config(file, hbone={"certificates": str(missing), "listen": ["127.0.0.1:0"], "rules": []})
    async with started("gateway", "--config", str(file), "--workers", "3") as process:
        code, _, err = await process.ended()
    assert code == EXIT_UNAVAILABLE
    lines = err.splitlines()
    assert lines.count(f"hgate: {missing}/certificates.pem: No such file or directory") == 1, err
    assert len([line for line in lines if " ended with exit code " in line]) == 1, err


async def test_each_line_has_its_worker_s_number(file: Path) -> None:
    """In the access log, and in the log; those of the parent and of the ops process have none."""
    async with workers(file, 2) as running:
        async with staying(running.port, 20) as tunnels:
            await tunnels.end()
        running.process.send(signal.SIGTERM)
        await running.stop_reading()
        code, out, err = await running.process.ended()
    assert code == EXIT_OK
    lines = [*running.lines, *map(json.loads, out.splitlines())]
    assert (len(lines), {line["worker"] for line in lines}) == (20, {1, 2})
    told = [json.loads(line) for line in err.splitlines()]
    assert sorted(line["worker"] for line in told if "no longer listening" in line["message"]) == [1, 2]
    assert ["worker" in line for line in told if line["message"] == "draining 2 workers"] == [False]


async def test_a_wrong_file_or_variable_is_told_once(file: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("routes: 5\n")
    for path, environ, code in (
        (tmp_path / "wrong.yaml", {}, EXIT_CONFIG),
        (file, {"GCE_METADATA_HOST": "http://metadata"}, EXIT_USAGE),
    ):
        async with started("gateway", "--config", str(path), "--workers", "3", environ=environ) as process:
            ended, _, err = await process.ended()
        assert ended == code
        assert len(err.splitlines()) == 1, err


async def test_one_worker_has_no_parent(file: Path) -> None:
    async with one_worker(file) as running:
        assert content_of(f"/proc/{running.pid}/task/{running.pid}/children") == ""
        assert not any("process" in message for message in running.process.messages)


@asynccontextmanager
async def one_worker(file: Path) -> AsyncIterator[Hgate]:
    async with started("gateway", "--config", str(file), "--workers", "1", "--log-format", "json") as process:
        running = Hgate(process)
        await running.said("^ready$")
        yield running
        await running.stop_reading()


# Deaths.


async def test_a_killed_worker_takes_its_own_tunnels_only_and_comes_back(file: Path) -> None:
    async with workers(file, 3) as running, staying(running.port, 60) as tunnels:
        by_worker = tunnels_of(await running.dump("/tunnels"))
        before = await running.samples("hbone_tunnels_opened_total")
        lost = {row["src.addr"] for row in await running.dump("/tunnels") if row["worker"] == 2}
        os.kill(await pid_of(running, "worker 2"), signal.SIGKILL)
        await running.said(r"^worker 2 was killed by signal 9; a new one starts in 0\.1 s$")
        async with flowing(running.port) as load:
            for client in [client for client in tunnels.clients if client.address in lost]:
                tunnels.clients.remove(client)
                with suppress(ConnectionResetError):  # or FIN, as the kernel sees fit
                    assert await client.rest() == b""
                await client.close()
            await tunnels.talk()
            await running.said(r"^worker 2 has pid \d+$")
            await running.until_ready()
            await load.more(30)
        assert not load.failed, "the others take who comes meanwhile"
        assert len(lost) == by_worker[2]
        async with staying(running.port, 30):
            assert set(tunnels_of(await running.dump("/tunnels"))) == {1, 2, 3}
            assert await running.metric("hbone_connections_open") == 60 - len(lost) + 30
        after = await running.samples("hbone_tunnels_opened_total")
        assert sum(after.values()) >= sum(before.values()) + 30, "what it had counted still counts"
        assert await running.metric("hbone_worker_restarts_total") == 1
        await tunnels.end()
        running.process.send(signal.SIGTERM)
        assert await running.ended() == EXIT_OK


async def test_a_killed_ops_process_comes_back_and_knows_the_file(file: Path) -> None:
    async with workers(file, 2) as running, staying(running.port, 5) as tunnels:
        ops_process = await pid_of(running, "ops process")
        os.kill(ops_process, signal.SIGSTOP)  # so that it does not see the change
        write_config(file, [])
        os.kill(ops_process, signal.SIGKILL)
        await running.said("^ops process was killed by signal 9; a new one starts in ")
        await running.said("^reload: 0 routes from ")
        async with TcpPeer.connected(running.port) as client:
            await client.send(HELLO)
            assert await client.rest() == UNRECOGNIZED_NAME
        await tunnels.talk()
        told = [message for message in running.process.messages if message.startswith("metrics on ")]
        assert len(told) == 2


async def test_a_worker_that_is_told_to_end_is_replaced(file: Path) -> None:
    """One at a time they can be renewed."""
    async with workers(file, 2) as running, staying(running.port, 20) as tunnels:
        old = await pid_of(running, "worker 1")
        os.kill(old, signal.SIGTERM)
        await running.said("^draining: ")
        await tunnels.talk()
        await tunnels.end()
        await running.said("^worker 1 ended with exit code 0; a new one starts in ")
        await running.until_ready()


async def test_without_their_parent_they_drain(file: Path) -> None:
    async with workers(file, 2) as running, staying(running.port, 10) as tunnels:
        running.process.send(signal.SIGKILL)
        await running.said("^draining: ")
        await tunnels.talk()
        await tunnels.end()
        await running.ended()  # nobody holds its standard output any more
        assert [line["flags"] for line in running.lines] == ["-"] * 10


# Reload.


async def test_sighup_reaches_all(file: Path, service: EchoService) -> None:
    async with workers(file, 3) as running, staying(running.port, 30) as tunnels:
        write_config(file, [])
        running.process.send(signal.SIGHUP)
        await running.said("^reload: 0 routes from ")
        for _ in range(30):
            async with TcpPeer.connected(running.port) as client:
                await client.send(HELLO)
                assert await client.rest() == UNRECOGNIZED_NAME
        change_config(file, routes=5)
        running.process.send(signal.SIGHUP)
        await running.said(r"^reload: .*hgate\.yaml:1: routes: .*; the running configuration stays$")
        write_config(file, [tunnel(service.port)], max_connections=999)
        running.process.send(signal.SIGHUP)
        await running.said("^reload: 1 routes from ")
        for _ in range(30):
            async with TcpPeer.connected(running.port) as client:
                await say(client, HELLO)
        await tunnels.talk()
        assert await running.metric("hbone_connections_limit") == 999
        assert await running.metric("hbone_config_reloads_total", "success") == 2
        assert await running.metric("hbone_config_reloads_total", "failure") == 1
        told = [message for message in running.process.messages if message.startswith("reload: ")]
        assert len(told) == 3, "told once each, not by every worker"


async def test_a_reload_moves_all_of_them(file: Path) -> None:
    async with workers(file, 2) as running, staying(running.port, 10) as tunnels:
        new = Address("127.0.0.1", free_port())
        change_config(file, listen=[str(new)])
        running.process.send(signal.SIGHUP)
        await running.said("^reload: 1 routes from ")
        assert listening_on(new) == 2
        assert listening_on(Address("127.0.0.1", running.port)) == 0
        async with staying(new.port, 10) as more:
            await more.talk()
            await tunnels.talk()


# End.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_all_drain(file: Path, number: int) -> None:
    async with workers(file, 2) as running, staying(running.port, 20) as tunnels:
        assert await running.is_ready()
        running.process.send(number)
        await running.said("^draining 2 workers$")
        async with asyncio.timeout(PATIENCE_S):
            while await running.is_ready():
                pass  # the parent logs before it signals
            while listening_on(Address("127.0.0.1", running.port)):
                # The ops process says it for all, or for the first worker if that got the signal before it.
                assert (await running.get("health", "/healthz/ready")).body.endswith(b"draining\n")
        await tunnels.talk()
        assert await running.metric("hbone_connections_open") == 20, "it is served to the end"
        await tunnels.end()
        assert await running.ended() == EXIT_OK
        assert [line["flags"] for line in running.lines] == ["-"] * 20


async def test_a_second_signal_forces_the_end(tmp_path: Path, service: EchoService) -> None:
    file = tmp_path / "hgate.yaml"
    write_config(file, [tunnel(service.port)], drain_timeout="1h")
    async with workers(file, 2) as running, staying(running.port, 10) as tunnels:
        running.process.send(signal.SIGTERM)
        await running.said("^draining: ")
        told = spawn(running.said("^second signal: the workers end at once$"), name="wait for it")
        while not told.done():
            running.process.send(signal.SIGTERM)
            await asyncio.wait({told}, timeout=0.05)
        await told
        assert await running.ended() == EXIT_SIGTERM
        assert all([await client.was_reset() for client in tunnels.clients])
        assert [line["flags"] for line in running.lines] == ["STOPPED"] * 10


async def test_a_signal_to_the_whole_group_is_one(file: Path) -> None:
    """As systemd sends it: the parent passes on what the workers have got already."""
    async with workers(file, 2) as running, staying(running.port, 10) as tunnels:
        pids = [await pid_of(running, f"worker {number}") for number in (1, 2)]
        for pid in (running.pid, *pids):
            os.kill(pid, signal.SIGTERM)
        await running.said("^draining 2 workers$")
        await running.said("^draining: ")
        await tunnels.talk()
        await tunnels.end()
        assert await running.ended() == EXIT_OK
        assert [line["flags"] for line in running.lines] == ["-"] * 10


async def test_successors_take_over_under_load(file: Path) -> None:
    """New workers after old ones: no connection fails, no tunnel breaks."""
    change_config(file, listen=[f"127.0.0.1:{free_port()}"])
    async with AsyncExitStack() as block:
        old = await block.enter_async_context(workers(file, 2))
        load = await block.enter_async_context(flowing(old.port))
        tunnels = await block.enter_async_context(staying(old.port, 20))
        new = await block.enter_async_context(workers(file, 2))
        old.process.send(signal.SIGTERM)
        await old.said("^draining: ")
        await load.more(50)
        await tunnels.talk()
        await tunnels.end()
        assert await old.ended() == EXIT_OK
        await load.more(50)
        await load.stop()
        assert not load.failed
        assert {line["flags"] for line in old.lines} == {"-"}
        new.process.send(signal.SIGTERM)
        assert await new.ended() == EXIT_OK


# What it costs.


async def test_workers_share_what_they_have_in_common(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked after the imports, each has a third of its memory for itself."""
    monkeypatch.setenv(core_dumps.VARIABLE, "1")  # else only root may look
    async with workers(file, 2) as running:
        for number in (1, 2):
            pid = await pid_of(running, f"worker {number}")
            found = re.findall(r"^(\w+): +(\d+) kB$", content_of(f"/proc/{pid}/smaps_rollup"), re.MULTILINE)
            sizes = {name: int(size) for name, size in found}
            assert sizes["Private_Dirty"] < sizes["Rss"] / 2
