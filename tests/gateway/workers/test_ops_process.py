"""The ops process beside several workers, which are played here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gateway.config import reload
from gateway.ops import overview
from gateway.ops.ops_ports import OpsPorts
from gateway.workers import metric_sums, ops_process
from gateway.workers.ops_process import OpsProcess
from gateway.workers.worker_link import LinkClient, LinkServer, socket_pair
from shared.errors import EXIT_OK, Flag, HboneError
from shared.net import http1
from shared.ops.http_server import Handler, Request, Response
from shared.ops.metrics import TunnelMetrics
from shared.tasks import spawn
from tests.shared.net.loopback import until
from tests.support import overview_parts
from tests.support.overview_parts import tunnel
from tests.support.running_gateway import Records, write_config
from tests.support.tcp_peer import PATIENCE_S


def part(number: int) -> dict[str, Any]:
    """What a worker knows, which has one tunnel."""
    return overview_parts.part(total=1, tunnels=[tunnel("ab"[number - 1], number)])


def worker(number: int, client: str) -> dict[str, Any]:
    """What the ops process adds to a tunnel's row."""
    return {"worker": number, "id": f"{number} {client}"}


class Worker:
    """A worker with the responses that a test gives it."""

    def __init__(self, number: int) -> None:
        self._ours, self._theirs = socket_pair()
        self.client = LinkClient(number, self._ours)
        self.ready = Response.text(200, "ready")
        self.pid = 100 + number
        self.metrics = TunnelMetrics()
        self.mistake: str | None = None
        self.reloads = 0
        self.handlers: dict[str, Handler] = {
            "/started": lambda _: self.ready,
            "/ready": lambda _: self.ready,
            "/live": lambda _: Response.text(200, "alive"),
            "/metrics": lambda _: Response(200, str(self.pid), metric_sums.encode(self.metrics.collect())),
            "/reload": self._reload,
            "/tunnels": lambda _: Response(200, "application/json", json.dumps([{"sni": number}]).encode()),
            "/connections": lambda _: Response(200, "application/json", b"[]"),
            "/tokens": lambda _: Response(200, "application/json", b'[{"audience": "a"}]'),
            "/config_dump": lambda _: Response(200, "application/json", b'{"of": %d}' % number),
            "/overview": lambda _: Response.json(part(number)),
            "/logging": lambda _: Response.text(200, self.level),
            **{f"/logging/{level}": partial(self._use_level, level) for level in ("debug", "info", "error")},
        }
        self.level = "info"
        self.server = LinkServer(self._theirs, self.handlers)
        self.server.start()

    def close(self) -> None:
        self.server.close()
        self._ours.close()
        self._theirs.close()

    def _use_level(self, level: str, _: Request) -> Response:
        self.level = level
        return Response.text(200, level)

    def _reload(self, _: Request) -> Response:
        self.reloads += 1
        if self.mistake:
            raise HboneError(self.mistake)
        return Response.text(200, "reloaded")


class Running:
    def __init__(self, records: Records, workers: list[Worker], file: Path) -> None:
        self.records = records
        self.workers = workers
        self.file = file
        self.task: asyncio.Task[int]
        self.ports: OpsPorts

    @property
    def open_connections(self) -> dict[str, float]:
        """By port."""
        family = next(one for one in self.ports.families() if one.name == "hbone_ops_connections_open")
        return {sample.labels["port"]: sample.value for sample in family.samples}

    async def get(self, server: str, path: str) -> tuple[int, str]:
        port = (await self.records.match(rf"^{server} on 127\.0\.0\.1:(\d+)$"))[1]
        answer = await http1.get(
            f"http://127.0.0.1:{port}{path}", headers={}, timeout_s=PATIENCE_S, max_bytes=1 << 20
        )
        return answer.status, answer.body.decode()

    async def post(self, path: str) -> tuple[int, str]:
        port = (await self.records.match(r"^admin on 127\.0\.0\.1:(\d+)$"))[1]
        url = f"http://127.0.0.1:{port}{path}"
        answer = await http1.request("POST", url, headers={}, timeout_s=PATIENCE_S, max_bytes=1 << 20)
        return answer.status, answer.body.decode()

    async def rows(self, path: str) -> Any:
        return json.loads((await self.get("admin", path))[1])

    async def metric(self, name: str) -> float:
        found = re.search(
            rf"^{re.escape(name)} (\S+)$", (await self.get("metrics", "/metrics"))[1], re.MULTILINE
        )
        assert found is not None, name
        return float(found[1])


@asynccontextmanager
async def running(file: Path, *, is_replacement: bool = False) -> AsyncIterator[Running]:
    """An ops process with two workers, until the block ends or it has ended itself."""
    write_config(file, [])
    workers = [Worker(1), Worker(2)]
    ours, theirs = os.pipe()
    with Records() as records:
        running = Running(records, workers, file)
        made = OpsProcess(file, [worker.client for worker in workers], ours, is_replacement=is_replacement)
        running.ports = made._ports
        running.task = spawn(made.run(), name="ops process")
        yield running
        os.close(theirs)
        async with asyncio.timeout(PATIENCE_S):
            assert await running.task == EXIT_OK, "its parent is gone"
        os.close(ours)
        for worker in workers:
            worker.close()


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hgate.yaml") as started:
        await started.records.match("^all 2 workers are ready$")
        yield started


async def test_ready_once_all_workers_are(started: Running) -> None:
    assert await started.get("health", "/healthz/ready") == (200, "ready\n")
    started.workers[1].ready = Response.text(503, "not ready, pending: listeners")
    assert await started.get("health", "/healthz/ready") == (503, "worker 2: not ready, pending: listeners\n")


async def test_the_metric_says_as_much_without_being_a_probe(started: Running) -> None:
    assert await started.metric("hbone_ready") == 1
    started.workers[1].ready = Response.text(503, "draining")
    assert await started.metric("hbone_ready") == 0
    assert not started.ports.readiness_is_asked_for


async def test_it_says_when_all_are_ready(tmp_path: Path) -> None:
    async with running(tmp_path / "hgate.yaml") as starting:
        starting.workers[0].ready = Response.text(503, "not yet")
        assert (await starting.get("health", "/healthz/ready"))[0] == 503
        assert not any("ready" in message for message in starting.records.messages)
        starting.workers[0].ready = Response.text(200, "ready")
        await starting.records.match("^all 2 workers are ready$")


async def test_a_silent_worker(started: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for worker in started.workers:
        worker.metrics.route("*.demo").opened()
    assert await started.metric('hbone_tunnels_open{route="*.demo"}') == 2
    started.workers[1].server.close()
    monkeypatch.setattr(OpsProcess._get_all, "__defaults__", (0.1,))
    silence = "worker 2 does not answer {}: no response within 0.1 s\n"
    assert await started.get("health", "/healthz/live") == (503, silence.format("/live"))
    assert await started.get("health", "/healthz/ready") == (503, silence.format("/ready"))
    assert await started.metric('hbone_tunnels_opened_total{route="*.demo"}') == 2, "it has counted it"
    assert await started.metric('hbone_tunnels_open{route="*.demo"}') == 1
    assert await started.rows("/tunnels") == [{"worker": 1, "sni": 1}]
    started.workers[1].server.start()
    assert (await started.get("health", "/healthz/live"))[0] == 200


async def test_lists_and_numbers_of_all(started: Running) -> None:
    assert await started.rows("/tunnels") == [{"worker": 1, "sni": 1}, {"worker": 2, "sni": 2}]
    assert await started.rows("/connections") == []
    assert [row["worker"] for row in await started.rows("/tokens")] == [1, 2]
    assert (await started.rows("/config"))["listen"] == ["127.0.0.1:0"]
    for worker in started.workers:
        worker.metrics.refused(Flag.NO_ROUTE)
    assert await started.metric('hbone_connections_refused_total{flags="NO_ROUTE"}') == 2
    assert await started.metric("hbone_workers") == 2
    assert await started.metric("hbone_worker_restarts_total") == 0
    started.workers[0].pid = 900
    assert await started.metric("hbone_worker_restarts_total") == 1


async def test_the_page_is_made_of_the_parts_of_all(
    started: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await started.get("admin", "/"))[1].startswith("<!doctype html>")
    page = await started.rows("/overview")
    assert (page["workers"], page["totals"]["tunnels"], page["silent"]) == (2, 2, [])
    assert page["tunnels"] == {
        "of": 2,
        "rows": [tunnel("b", 2) | worker(2, "b"), tunnel("a", 1) | worker(1, "a")],
    }
    started.workers[0].server.close()
    monkeypatch.setattr(OpsProcess._get_all, "__defaults__", (0.1,))
    page = await started.rows("/overview")
    assert page["silent"] == ["worker 1 does not answer /overview: no response within 0.1 s"]
    assert (page["totals"]["tunnels"], page["reload_is_good"]) == (1, True)
    started.workers[0].server.start()


@pytest.mark.parametrize("text", ["hello.demo", "a&b=c ?#/%", "\u00fc\n\x00", "\U0001f512" * 100])
async def test_what_is_looked_for_reaches_all(started: Running, text: str) -> None:
    asked: list[str] = []

    def looked_for(request: Request) -> Response:
        asked.append(request.query["find"])
        return Response.json(part(1))

    for one in started.workers:
        one.handlers["/overview"] = looked_for
    assert (await started.rows(f"/overview?find={quote(text)}"))["silent"] == []
    assert asked == [text[: overview.MAX_FIND_CHARS]] * 2


async def test_the_configuration_is_that_of_the_first_that_answers(
    started: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await started.rows("/config_dump") == {"of": 1}
    started.workers[0].server.close()
    monkeypatch.setattr(ops_process, "RESPONSE_S", 0.1)
    assert await started.rows("/config_dump") == {"of": 2}
    started.workers[1].server.close()
    silence = "worker 2 does not answer /config_dump: no response within 0.1 s\n"
    assert await started.get("admin", "/config_dump") == (500, silence)
    for one in started.workers:
        one.server.start()


async def test_a_log_level_reaches_all(started: Running) -> None:
    assert await started.get("admin", "/logging") == (200, "info\n")
    assert await started.post("/logging?level=debug") == (200, "debug\n")
    assert [one.level for one in started.workers] == ["debug", "debug"]
    started.workers[1].level = "info"
    assert await started.get("admin", "/logging") == (200, "worker 1: debug\nworker 2: info\n"), (
        "it began anew"
    )
    assert (await started.get("admin", "/logging?level=error"))[0] == 400
    assert (await started.post("/logging"))[0] == (await started.post("/logging?level=loud"))[0] == 400
    assert [one.level for one in started.workers] == ["debug", "info"]


async def test_a_log_level_that_one_does_not_hear_of(
    started: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.workers[1].server.close()
    monkeypatch.setattr(OpsProcess._get_all, "__defaults__", (0.1,))
    silence = "worker 2 does not answer /logging/error: no response within 0.1 s\n"
    assert await started.post("/logging?level=error") == (503, silence)
    assert await started.post("/logging?level=debug") == (503, silence.replace("error", "debug"))
    assert [one.level for one in started.workers] == ["debug", "info"]
    started.workers[1].server.start()


async def test_a_reload_reaches_all(started: Running) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    await started.records.match("^reload: 0 routes from ")
    assert [worker.reloads for worker in started.workers] == [1, 1]
    assert await started.metric('hbone_config_reloads_total{result="success"}') == 1
    started.file.write_text("routes: 5")
    os.kill(os.getpid(), signal.SIGHUP)
    await started.records.match(r"^reload: .*hgate\.yaml:1: routes: .*; the running configuration stays$")
    assert [worker.reloads for worker in started.workers] == [1, 1], "they are not bothered with it"
    assert await started.metric('hbone_config_reloads_total{result="failure"}') == 1


async def test_a_reload_that_one_refuses(started: Running) -> None:
    started.workers[1].mistake = "listen: cannot listen on 127.0.0.1:1"
    os.kill(os.getpid(), signal.SIGHUP)
    await started.records.match("^reload: worker 2: listen: cannot listen on 127.0.0.1:1; the running")
    assert await started.metric("hbone_config_last_reload_successful") == 0


async def test_a_change_reaches_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "WATCH_S", 0.01)
    async with running(tmp_path / "hgate.yaml") as started:
        await started.records.match("^all 2 workers are ready$")
        started.file.write_text(started.file.read_text() + "\n")
        await started.records.match("^reload: 0 routes from ")
        assert [worker.reloads for worker in started.workers] == [1, 1]


async def test_a_replacement_may_have_missed_a_change(tmp_path: Path) -> None:
    async with running(tmp_path / "hgate.yaml", is_replacement=True) as started:
        await started.records.match("^reload: 0 routes from ")
        assert [worker.reloads for worker in started.workers] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_drain_ends_readiness_at_once_and_nothing_else(started: Running, number: int) -> None:
    os.kill(os.getpid(), number)
    async with asyncio.timeout(PATIENCE_S):
        while (await started.get("health", "/healthz/ready"))[0] == 200:
            pass
    assert await started.get("health", "/healthz/ready") == (503, "draining\n")
    async with asyncio.timeout(PATIENCE_S):  # a worker of a busy machine may answer late
        while (await started.get("health", "/healthz/live"))[0] != 200:
            pass
    assert await started.metric("hbone_workers") == 2
    os.kill(os.getpid(), signal.SIGQUIT)
    async with asyncio.timeout(PATIENCE_S):
        assert await started.task == EXIT_OK


async def test_a_probe_is_answered_while_others_wait_for_a_worker(started: Running) -> None:
    """With more requests than a worker answers at once; requests for the same thing share one response."""
    held, asked = asyncio.Event(), Counter[str]()
    handlers = started.workers[0].handlers

    def held_up(path: str, handler: Handler) -> Handler:
        async def slow(request: Request) -> Response:
            asked[path] += 1
            await held.wait()
            answer = handler(request)
            assert isinstance(answer, Response)
            return answer

        return slow

    for path in ("/tunnels", "/connections", "/metrics"):
        handlers[path] = held_up(path, handlers[path])
    waiting = [spawn(started.rows("/tunnels"), name="ask") for _ in range(31)]
    waiting += [spawn(started.rows("/connections"), name="ask") for _ in range(31)]
    waiting += [spawn(started.get("metrics", "/metrics"), name="scrape") for _ in range(62)]
    await until(lambda: started.open_connections == {"health": 0, "metrics": 62, "admin": 62})
    for _ in range(10):
        assert await started.get("health", "/healthz/ready") == (200, "ready\n")
        assert await started.get("health", "/healthz/live") == (200, "alive\n")
    held.set()
    await asyncio.gather(*waiting)
    assert set(asked) == {"/tunnels", "/connections", "/metrics"}
    assert max(asked.values()) <= 2, "once for those that came first, and for those after it at most"
