"""The gateway's file while the gateway runs: which changes are seen, and what a new one leads to."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gateway.config import cluster_files, config, reload
from gateway.config.config import GatewayConfig
from gateway.config.limit_settings import Limits
from gateway.config.reload import ConfigFile, Reloads, keep_fixed
from gateway.config.reverse_settings import ReverseSettings
from gateway.config.route_settings import MAX_ROUTES
from gateway.rules.cluster_rules import ServiceRoute
from gateway.rules.reverse_rules import ReverseRule
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import EXIT_OK, ConfigError, UnavailableError
from shared.tasks import spawn
from tests.support.gateway_load import EchoService, flowing, staying
from tests.support.gateway_world import tunnel
from tests.support.hgate_process import hgate
from tests.support.running_gateway import write_config
from tests.support.tcp_peer import PATIENCE_S

ONE = 'routes: [{host: "one", forward: "127.0.0.1:1"}]\n'
TWO = 'routes: [{host: "one", forward: "127.0.0.1:1"}, {host: "two", forward: "127.0.0.1:2"}]\n'
BROKEN = 'routes:\n  - host: "one"\n    forwad: "127.0.0.1:1"\n'


def put(path: Path, content: str) -> None:
    path.write_text(content)


def content_of(path: Path) -> str:
    return path.read_text()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "WATCH_S", 0.01)
    monkeypatch.setattr(reload, "SETTLE_S", 0.001)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "hgate.yaml"
    path.write_text(ONE)
    return path


class Applied:
    """What was put into effect."""

    def __init__(self, path: Path) -> None:
        file = ConfigFile(path)
        file.read()
        self.error: Exception | None = None
        self.tries = 0
        self._configs: asyncio.Queue[GatewayConfig] = asyncio.Queue()
        self.reloads = Reloads(file, self._apply)

    async def hosts(self) -> list[str]:
        """Of the next file that is put into effect."""
        async with asyncio.timeout(PATIENCE_S):
            return [route.host for route in (await self._configs.get()).routes]

    async def until_failed(self, count: int) -> None:
        """Returns when so many files have been refused."""
        async with asyncio.timeout(PATIENCE_S):
            while self.reloads.failed < count:
                await asyncio.to_thread(self.reloads._file.check)

    async def _apply(self, config: GatewayConfig) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self._configs.put_nowait(config)


@asynccontextmanager
async def watching(path: Path, *, changes: bool = True) -> AsyncIterator[Applied]:
    applied = Applied(path)
    applied.reloads.watch(changes=changes)
    yield applied
    applied.reloads.close()


# What is seen.


async def test_a_change_is_seen(path: Path) -> None:
    async with watching(path) as applied:
        put(path, TWO)
        assert await applied.hosts() == ["one", "two"]
        put(path, ONE)
        assert await applied.hosts() == ["one"]


async def test_a_new_file_of_the_same_size_and_time_is_seen(path: Path, tmp_path: Path) -> None:
    async with watching(path) as applied:
        other = tmp_path / "new"
        other.write_text(ONE.replace("one", "two"))
        status = os.stat(path)
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.rename(path)
        assert await applied.hosts() == ["two"]


async def test_the_swap_of_a_config_map_is_seen(tmp_path: Path) -> None:
    """The kubelet's way: hgate.yaml → ..data/hgate.yaml, ..data → a folder with a time in its name."""
    for name, content in (("..1", ONE), ("..2", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hgate.yaml").write_text(content)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "hgate.yaml").symlink_to("..data/hgate.yaml")
    async with watching(tmp_path / "hgate.yaml") as applied:
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        assert await applied.hosts() == ["one", "two"]


async def test_a_renewed_ca_file_is_seen(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Authority.create("one.example").root_pem)
    path = tmp_path / "hgate.yaml"
    put(path, 'routes: [{host: "one", tunnel: "https://one.example/_hbone/1", ca: "ca.pem"}]')
    async with watching(path) as applied:
        ca.write_bytes(Authority.create("two.example").root_pem)
        assert await applied.hosts() == ["one"]
        put(path, ONE)
        assert await applied.hosts() == ["one"]
        assert set(applied.reloads._file.seen) == {path}, "a file that nobody names is not checked"


async def test_a_file_that_is_gone_comes_back(path: Path) -> None:
    async with watching(path) as applied:
        os.unlink(path)
        await applied.until_failed(1)
        put(path, TWO)
        assert await applied.hosts() == ["one", "two"]


async def test_a_file_is_not_read_while_it_is_being_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file can be a good one, with half of the routes."""
    checks: Iterator[int] = iter(range(6))
    check = ConfigFile.check

    def while_written(file: ConfigFile) -> reload.Stamps:
        if (number := next(checks, None)) is not None:
            put(path, TWO + "#" * number)
        return check(file)

    monkeypatch.setattr(ConfigFile, "check", while_written)
    async with watching(path) as applied:
        await applied.hosts()
        assert content_of(path) == TWO + "#" * 5
        assert applied.tries == 1


async def test_a_file_that_never_rests_is_read_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = ConfigFile.check

    def restless(file: ConfigFile) -> reload.Stamps:
        put(path, path.read_text() + "#")
        return check(file)

    monkeypatch.setattr(ConfigFile, "check", restless)
    async with watching(path) as applied:
        assert await applied.hosts() == ["one"]


async def test_a_request_needs_no_change(path: Path) -> None:
    async with watching(path) as applied:
        applied.reloads.request()
        assert await applied.hosts() == ["one"]


async def test_only_requests(path: Path) -> None:
    async with watching(path, changes=False) as applied:
        put(path, TWO)
        applied.reloads.request()
        assert await applied.hosts() == ["one", "two"]
        assert applied.tries == 1


# What it leads to.


async def test_a_broken_file_is_refused_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with watching(path) as applied:
        put(path, BROKEN)
        await applied.until_failed(1)
        put(path, TWO)
        assert await applied.hosts() == ["one", "two"]
        assert (applied.reloads.failed, applied.reloads.succeeded) == (1, 1)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith(f"reload: {path}:3: routes[0].forwad: unknown field")
    assert errors[0].endswith("; the running configuration stays")


async def test_all_mistakes_are_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with watching(path, changes=False) as applied:
        put(path, BROKEN + "admin: on\n")
        applied.reloads.request()
        await applied.until_failed(1)
        errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 2
        for line, text in zip((3, 4), errors, strict=True):
            assert text.startswith(f"reload: {path}:{line}: ")
            assert text.endswith("; the running configuration stays")


async def test_what_cannot_be_put_into_effect(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    applied = Applied(path)
    applied.error = UnavailableError("listen: cannot listen on 127.0.0.1:1")
    with pytest.raises(UnavailableError):
        await applied.reloads.now()
    assert (applied.reloads.failed, applied.reloads.last_succeeded) == (1, False)
    assert "reload: listen: cannot listen on 127.0.0.1:1; the running" in caplog.text
    applied.error = None
    await applied.reloads.now()
    assert (applied.reloads.succeeded, applied.reloads.last_succeeded) == (1, True)


CLUSTER = """\
cluster: {folder: ., allow: [{namespace: demo, hosts: ["**.run.app"]}]}
hbone: {certificates: c, rules: [{from: ["*"], to: ["*.svc.cluster.local:80"]}]}
routes: []
"""
HELLO = ServiceRoute(
    host="hello.demo.svc.cluster.local",
    url="https://hello.a.run.app/_hbone/15003",
    audience="https://hello.a.run.app",
    method="POST",
    service_account="",
    namespace="demo",
    source="Service demo/hello",
)


async def test_routes_of_the_cluster_are_read_without_the_file(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object that changes would else have the whole file read, and its warnings told."""
    loads: list[Path] = []

    def load(file: Path) -> GatewayConfig:
        loads.append(file)
        return config.load(file)

    monkeypatch.setattr(reload, "load", load)
    put(path, CLUSTER.replace("folder: .", f"folder: {path.parent}"))
    file, applied = ConfigFile(path), Applied(path)
    file.read()
    loads.clear()
    reloads = Reloads(file, applied._apply)
    for routes in ([HELLO], [], [HELLO]):
        cluster_files.write_routes(path.parent, routes)
        await reloads.now()
        assert [route.source for route in file.read().routes] == ["Service demo/hello"] * len(routes)
    told = [message for message in caplog.messages if "hbone.rules[0]" in message]
    assert (len(loads), told) == (3, []), "when nothing has changed, by request"
    put(path, "routes: [")
    with pytest.raises(ConfigError):
        await reloads.now()
    cluster_files.write_routes(path.parent, [])
    with pytest.raises(ConfigError):
        await reloads.now()


async def test_somebody_else_tells(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ConfigFile(path)
    reloads = Reloads(file, Applied(path)._apply, quiet=True)
    await reloads.now()
    put(path, BROKEN)
    with pytest.raises(ConfigError):
        await reloads.now()
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_reading_stops_nobody(path: Path) -> None:
    applied = Applied(path)
    read_by: list[int] = []
    read = applied.reloads._file.read

    def told() -> GatewayConfig:
        read_by.append(threading.get_ident())
        return read()

    applied.reloads._file.read = told  # type: ignore[method-assign]
    await applied.reloads.now()
    assert read_by != [threading.get_ident()]


async def test_the_numbers(path: Path) -> None:
    applied = Applied(path)

    def told() -> dict[str, float]:
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in applied.reloads.families()
            for sample in family.samples
        }

    start = told()["hbone_config_last_reload_success_timestamp_seconds"]
    assert told()["hbone_config_last_reload_successful"] == 1, "the start was one"
    put(path, BROKEN)
    with pytest.raises(ConfigError):
        await applied.reloads.now()
    numbers = told()
    assert numbers["hbone_config_reloads_totalfailure"] == 1
    assert numbers["hbone_config_reloads_totalsuccess"] == 0
    assert numbers["hbone_config_last_reload_successful"] == 0
    assert numbers["hbone_config_last_reload_success_timestamp_seconds"] == start
    put(path, ONE)
    await applied.reloads.now()
    assert told()["hbone_config_last_reload_successful"] == 1
    assert told()["hbone_config_last_reload_success_timestamp_seconds"] >= start


def test_what_cannot_change_while_we_run(caplog: pytest.LogCaptureFixture) -> None:
    running = GatewayConfig(routes=())
    limits = Limits(connect_timeout_s=1, max_connections=5)
    changed = dataclasses.replace(running, admin=None, health=None, limits=limits)
    kept = keep_fixed(running, changed)
    assert kept == dataclasses.replace(running, limits=limits)
    assert "reload: a change of admin, health takes effect at the next start" in caplog.text
    caplog.clear()
    tokens = dataclasses.replace(running, tokens=TokenSettings(source="google"))
    assert keep_fixed(running, tokens) == running
    assert "reload: a change of tokens takes effect at the next start" in caplog.text
    caplog.clear()
    assert keep_fixed(running, dataclasses.replace(running, listen=(Address("::", 1),))).listen[0].port == 1
    assert caplog.text == ""


def test_of_reverse_only_the_rules_change(caplog: pytest.LogCaptureFixture) -> None:
    rules = (ReverseRule(("*",), ("*.svc",)),)
    running = GatewayConfig(routes=(), reverse=ReverseSettings(Path("certs"), ()))
    wanted = dataclasses.replace(running, reverse=ReverseSettings(Path("certs"), rules))
    assert keep_fixed(running, wanted).reverse == wanted.reverse
    assert caplog.text == ""
    moved = dataclasses.replace(running, reverse=ReverseSettings(Path("moved"), rules, wait_s=1.0))
    assert keep_fixed(running, moved).reverse == wanted.reverse
    assert "a change of reverse.certificates, reverse.wait takes effect at the next start" in caplog.text
    assert keep_fixed(running, GatewayConfig(routes=())).reverse == running.reverse
    assert keep_fixed(GatewayConfig(routes=()), wanted).reverse is None


# As a process.


async def test_thirty_reloads_under_load(tmp_path: Path) -> None:
    """No new connection fails and no open one breaks, be the reload asked for or the change seen."""
    path = tmp_path / "hgate.yaml"
    async with AsyncExitStack() as block:
        service = await block.enter_async_context(EchoService.listening())
        routes = [tunnel(service.port), tunnel(1, host="*.other.svc.cluster.local")]
        write_config(path, routes)
        gateway = await block.enter_async_context(hgate(path))
        tunnels = await block.enter_async_context(staying(gateway.port, 20))
        load = await block.enter_async_context(flowing(gateway.port))
        for number in range(30):
            wanted = routes[: 1 + number % 2]
            write_config(path, wanted, max_connections=1000 + number)
            if number % 10:
                gateway.process.send(signal.SIGHUP)
            await gateway.process.said(f"^reload: {len(wanted)} routes from ")
            await load.more(5)
            await tunnels.talk()
        await load.stop()
        assert not load.failed
        assert await gateway.metric("hbone_connections_limit") == 1029
        assert await gateway.metric("hbone_config_reloads_total", "success") >= 30
        assert await gateway.metric("hbone_config_reloads_total", "failure") == 0
        await tunnels.end()
        gateway.process.send(signal.SIGTERM)
        assert await gateway.ended() == EXIT_OK
        assert {line["flags"] for line in gateway.lines} == {"-"}


async def test_a_long_file_stops_nobody(tmp_path: Path) -> None:
    """A thousand routes take a third of a second to read."""
    path = tmp_path / "hgate.yaml"
    async with AsyncExitStack() as block:
        service = await block.enter_async_context(EchoService.listening())
        others = [tunnel(1, host=f"*.n{number}.svc.cluster.local") for number in range(MAX_ROUTES - 1)]
        write_config(path, [tunnel(service.port)])
        gateway = await block.enter_async_context(hgate(path))
        tunnels = await block.enter_async_context(staying(gateway.port, 1))
        write_config(path, [tunnel(service.port), *others])
        gateway.process.send(signal.SIGHUP)
        reloaded = spawn(
            gateway.process.said(f"^reload: {MAX_ROUTES} routes from "), name="wait for the reload"
        )
        rounds = 0
        while not reloaded.done():
            await tunnels.talk()
            rounds += 1
        await reloaded
        assert rounds > 10, "else the loop stood still"
        await tunnels.end()
