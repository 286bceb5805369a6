"""One kind, followed: what is known stays and becomes current again, whatever the API server does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from gateway.cluster import api_server, object_watch
from gateway.cluster.api_server import ApiServer
from gateway.cluster.object_watch import Key, Kind, ObjectWatch
from shared.tasks import spawn
from tests.support.scripted_api import TOKEN, ScriptedApi, access_to, scripted_api, status
from tests.support.tcp_peer import PATIENCE_S

THINGS = Kind("Thing", "things.example/v1", "things", is_optional=True)


class Follower:
    """A watch, and what it told."""

    def __init__(self, api: ApiServer) -> None:
        self.changes: list[Key] = []
        self.listed = 0
        self._told = asyncio.Event()
        self.watch: ObjectWatch[Any] = ObjectWatch(api, THINGS, self._keep, self._changed, self._listed)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: kept for (_, name), kept in self.watch.objects.items()}

    async def until(self, **sizes: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.sizes != sizes:
                self._told.clear()
                await self._told.wait()

    def _keep(self, found: Mapping[str, Any]) -> int | None:
        size: int = found["size"]
        return size if size else None

    def _changed(self, key: Key) -> None:
        self.changes.append(key)
        self._told.set()

    def _listed(self) -> None:
        self.listed += 1
        self._told.set()


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedApi]:
    monkeypatch.setattr(object_watch, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(object_watch, "ABSENT_PAUSE_S", 0.05)
    async with scripted_api() as api:
        yield api


@pytest_asyncio.fixture
async def follower(server: ScriptedApi, tmp_path: Path) -> AsyncIterator[Follower]:
    api = await ApiServer.connected(access_to(server, tmp_path))
    follower = Follower(api)
    task = spawn(follower.watch.run(), name="follow things")
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.wait({task})
        await api.close()


async def test_a_list_and_what_changes_after_it(server: ScriptedApi, follower: Follower) -> None:
    await server.watched()
    assert follower.watch.is_complete
    await server.put("a", size=1)
    await follower.until(a=1)
    await server.put("a", size=2)
    await server.put("ignored", size=0)
    await server.put("b", size=1)
    await follower.until(a=2, b=1)
    await server.delete("a")
    await follower.until(b=1)
    assert follower.changes == [("demo", name) for name in ("a", "a", "b", "a")], "and nothing of the ignored"
    assert server.authorizations == {f"Bearer {TOKEN}"}, "with each request"
    assert follower.listed == 1


async def test_a_list_in_pages(server: ScriptedApi, follower: Follower) -> None:
    server.page = 2
    for number in range(5):
        server.items[f"n{number}"] = {
            "metadata": {"name": f"n{number}", "namespace": "demo", "resourceVersion": "1"},
            "size": 1,
        }
    server.answers.append(status(503, "Starting"))
    await follower.until(**{f"n{number}": 1 for number in range(5)})
    assert follower.listed == 1, "once, when it was whole"


async def test_a_watch_goes_on_from_where_it_was(server: ScriptedApi, follower: Follower) -> None:
    await server.watched()
    await server.put("a", size=1)
    await follower.until(a=1)
    await server.tell({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "90"}}})
    await server.end_watches()
    await server.watched(2)
    assert server.asked[-1][2]["resourceVersion"] == "90"
    assert follower.listed == 1


async def test_after_410_the_list_is_read_anew(
    server: ScriptedApi, follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hbone.cluster")
    await server.watched()
    await server.put("a", size=1)
    await server.put("b", size=1)
    await follower.until(a=1, b=1)
    del server.items["a"]  # while nobody watches
    await server.tell({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
    await follower.until(b=1)
    assert follower.listed == 2
    assert follower.watch.failures == {"410": 1}
    assert caplog.messages == [], "it is customary"


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_what_is_known_stays_while_the_server_refuses(
    server: ScriptedApi, follower: Follower, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level(logging.INFO, "hbone.cluster")
    await server.watched()
    await server.put("a", size=1)
    await follower.until(a=1)
    server.answers.extend(status(code, "Busy", Retry_After="0") for _ in range(3))
    await server.end_watches()
    await server.watched(2)
    await server.put("a", size=2)
    await follower.until(a=2)
    first, second = caplog.messages
    assert first.startswith("things: ") and first.endswith("; what is known stays until it works again")
    assert second == "things: followed again, 1 objects"
    assert follower.watch.failures[str(code)] == 3
    assert follower.listed == 1, "the watch went on"


async def test_a_server_that_is_asked_less_when_it_says_so(
    server: ScriptedApi, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    server.answers.append(status(429, "TooManyRequests", Retry_After="7"))
    await server.watched()
    assert slept == [7.0]


async def test_a_watch_that_tells_nothing_any_more_is_given_up(
    server: ScriptedApi, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.watched()
    monkeypatch.setattr(object_watch, "WATCH_S", 0.0)
    monkeypatch.setattr(object_watch, "LATE_S", 0.2)
    await server.end_watches()
    server.is_silent = True
    await server.watched(2)
    await server.put("a", size=1)
    await server.watched(3)
    server.is_silent = False
    await server.put("a", size=2)
    await follower.until(a=2)


@pytest.mark.parametrize(
    "event",
    [
        b"no JSON\n",
        b"[]\n",
        b'{"type": "MODIFIED"}\n',
        b'{"type": "MODIFIED", "object": {}}\n',
        b'{"type": "MODIFIED", "object": {"metadata": {"name": "a"}}}\n',
        b'{"type": "ERROR", "object": {}}\n',
        b"x" * (8 << 20) + b"\n",
    ],
)
async def test_broken_events_break_nothing(server: ScriptedApi, follower: Follower, event: bytes) -> None:
    await server.watched()
    await server.put("a", size=1)
    await follower.until(a=1)
    server.answers.append(web.Response(body=event))
    await server.end_watches()
    await server.watched(2)
    await server.put("b", size=1)
    await follower.until(a=1, b=1)


@pytest.mark.parametrize(
    "event",
    [
        b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}\n',
        b'{"type": "MODIFIED", "object": {}}\n',
        b"",
    ],
)
async def test_a_watch_that_begins_and_fails_every_time_is_no_busy_loop(
    server: ScriptedApi, follower: Follower, monkeypatch: pytest.MonkeyPatch, event: bytes
) -> None:
    await server.watched()
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    one_list = {"metadata": {"resourceVersion": "1"}, "items": []}
    for _ in range(4):
        server.answers.append(web.Response(body=event))
        if b"410" in event:
            server.answers.append(web.json_response(one_list))
    await server.end_watches()
    await server.watched(2)
    assert slept[0] == 0.0, "once it is customary"
    assert all(later > 0.0 for later in slept[1:]) and len(slept) >= 4


async def test_one_broken_object_keeps_no_other_from_being_followed(
    server: ScriptedApi, follower: Follower
) -> None:
    server.items["broken"] = {"metadata": {"name": "broken", "namespace": "demo"}}  # it has no size
    server.items["a"] = {"metadata": {"name": "a", "namespace": "demo", "resourceVersion": "1"}, "size": 1}
    await follower.until(a=1)
    await server.watched()
    await server.put("broken")
    await server.put("b", size=1)
    await follower.until(a=1, b=1)
    assert follower.watch.failures["broken"] == 2
    assert follower.watch.is_followed


async def test_an_answer_that_never_ends_is_not_kept(
    server: ScriptedApi, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "MAX_ANSWER_BYTES", 1000)
    server.answers.append(web.Response(body=b"[" * 100_000))
    await server.watched()
    assert follower.watch.failures["connection"] == 1
    assert follower.watch.is_complete, "the next one was short"


async def test_a_kind_that_the_cluster_does_not_have_yet(server: ScriptedApi, follower: Follower) -> None:
    server.answers.extend([status(404, "NotFound"), status(404, "NotFound")])
    server.items["a"] = {"metadata": {"name": "a", "namespace": "demo", "resourceVersion": "1"}, "size": 1}
    await follower.until(a=1)
    assert follower.listed >= 2, "complete without it, and with it"
    assert not follower.watch.failures


async def test_a_list_is_read_anew_from_time_to_time(
    server: ScriptedApi, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.watched()
    monkeypatch.setattr(object_watch, "RESYNC_S", -1.0)  # it is always time
    server.items["a"] = {"metadata": {"name": "a", "namespace": "demo", "resourceVersion": "1"}, "size": 1}
    await server.end_watches()  # nobody was told of a
    await follower.until(a=1)
