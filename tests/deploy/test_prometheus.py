"""A Prometheus that scrapes a running hgate: it loads the rules, and answers every query of the dashboard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from deploy.monitoring import write_monitoring
from shared.errors import DialError, UpstreamError
from shared.net import http1
from tests.gateway.conftest import world  # noqa: F401  # a fixture
from tests.support.gateway_world import World
from tests.support.hellos import hello
from tests.support.network import free_port
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_program

RULES = Path(write_monitoring.__file__).parent / "alerts.yaml"

EMPTY_HERE = (
    "hbone_cluster",  # of another process
    "hbone_certificate",  # neither certificates nor revocation lists nor ports that want them
    "hbone_crl",
    "hbone_jwt",
    "hbone_listener",
    "hbone_reverse",
    "hbone_token",
    "hbone_worker",
    "hbone_upstream_retries_total",
)
"""Beginnings of metrics that a gateway has samples of only where its file says so, or once it has retried."""


class Prometheus:
    """Made by `prometheus`."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urlencode(query)}"
        response = await http1.get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=1 << 22)
        answer = json.loads(response.body)
        assert answer["status"] == "success", answer
        return answer["data"]

    async def samples(self, query: str) -> list[Any]:
        """What a query gives now."""
        data = await self.get("query", query=query)
        return data["result"] if data["resultType"] == "vector" else [data["result"]]

    async def until(self, query: str) -> list[Any]:
        """The same once it gives something."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if samples := await self.samples(query):
                        return samples
                except (DialError, UpstreamError, ValueError):  # it starts, and says so in plain text
                    continue


@asynccontextmanager
async def prometheus(folder: Path, target: int) -> AsyncIterator[Prometheus]:
    """It scrapes the metrics on a loopback port, four times a second."""
    program = find_program("prometheus")
    port = free_port()
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "hgate", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
async def scraped(world: World, tmp_path: Path) -> AsyncIterator[Prometheus]:  # noqa: F811
    """A gateway that has carried a tunnel and refused another, as Prometheus has seen it twice."""
    gateway = await world.start()
    client, stream = await world.open()
    refused = await world.client(hello("nowhere.example"))
    await refused.rest()
    async with prometheus(tmp_path, gateway._ports["metrics"]) as running:
        await running.until("hbone_tunnels_open == 1 and count_over_time(hbone_tunnels_open[1m]) > 3")
        await world.echoes(client, stream)
        client.end()
        stream.end()
        await running.until("increase(hbone_tunnels_closed_total[1m]) > 0")
        yield running


async def evaluated(scraped: Prometheus) -> list[Any]:
    """The rules, once each has been evaluated."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (group,) = (await scraped.get("rules"))["groups"]
            if all(rule["health"] != "unknown" for rule in group["rules"]):
                return list(group["rules"])


async def test_it_evaluates_every_rule_and_answers_every_query(scraped: Prometheus) -> None:
    """One test, for Prometheus takes six seconds to have seen enough."""
    (sample,) = await scraped.samples("hbone_ready")
    assert (sample["metric"]["job"], sample["value"][1]) == ("hgate", "1")

    found = await evaluated(scraped)
    names = [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
    assert [rule["name"] for rule in found] == names
    assert [rule["lastError"] for rule in found if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in found if rule["state"] == "firing"] == []

    empty = []
    for query in write_monitoring.expressions():
        if query.startswith("label_values("):
            continue
        query = query.replace("$__rate_interval", "1m").replace("$job", "hgate").replace("$instance", ".*")
        if not await scraped.samples(query) and not any(name in query for name in EMPTY_HERE):
            empty.append(query)
    assert [query for query in empty if "> 0" not in query] == [], "others show only what is not 0"
