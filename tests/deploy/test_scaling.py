"""The example that scales a service by its tunnels: its metrics are ours, and Prometheus answers it."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from shared.config.kinds import Duration
from shared.ops import families
from tests.deploy.test_prometheus import prometheus
from tests.gateway.conftest import world  # noqa: F401  # a fixture
from tests.support.gateway_world import World, tunnel
from tests.support.hellos import hello
from tests.support.retried_tunnels import wait
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "k8s" / "service-scaling"
ROUTE = "hello.demo.svc.cluster.local"


def manifest(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def trigger() -> dict[str, str]:
    (found,) = manifest("scaledobject.yaml")["spec"]["triggers"]
    metadata: dict[str, str] = found["metadata"]
    return metadata


def adapter_rule() -> dict[str, Any]:
    """As docs/scale.md has it."""
    (block,) = re.findall(
        r"^```text\n(externalRules:.*?)^```$", (ROOT / "docs/scale.md").read_text(), re.M | re.S
    )
    (rule,) = yaml.safe_load(block)["externalRules"]
    found: dict[str, Any] = rule
    return found


def test_queries_name_metrics_that_have_a_route() -> None:
    known = {family.shown_name: family for family in families.FAMILIES}
    for text in (trigger()["query"], adapter_rule()["seriesQuery"], adapter_rule()["metricsQuery"]):
        names = re.findall(r"hbone_\w+", text)
        assert names == ["hbone_tunnels_open", "hbone_tunnels_opening"]
        assert all("route" in known[name].labels for name in names)


def test_both_scale_the_same_by_the_same() -> None:
    scaled, hpa = manifest("scaledobject.yaml")["spec"], manifest("hpa.yaml")["spec"]
    assert scaled["scaleTargetRef"]["name"] == hpa["scaleTargetRef"]["name"]
    assert scaled["maxReplicaCount"] == hpa["maxReplicas"]
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    (metric,) = hpa["metrics"]
    assert metric["external"]["metric"]["name"] == adapter_rule()["name"]["as"]
    assert metric["external"]["metric"]["selector"]["matchLabels"] == {"route": ROUTE}
    assert metric["external"]["target"]["averageValue"] == trigger()["threshold"]


def test_a_client_is_served_before_its_patience_ends() -> None:
    """By the figures of docs/scale.md: the scrape's interval, KEDA's, and a start."""
    text = (ROOT / "docs/scale.md").read_text()
    (patience,) = re.findall(r"that is `cold_start: (\w+)`", text)
    scrape, polled, start = re.findall(r"With (\d+) s, (\d+) s and (\d+) s", text)[0]
    assert manifest("scaledobject.yaml")["spec"]["pollingInterval"] == int(polled)
    assert int(scrape) + int(polled) + int(start) < Duration().parse(patience)


def test_kustomize_renders_it() -> None:
    done = subprocess.run(
        [find_program("kubectl"), "kustomize", str(FOLDER)],
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    (rendered,) = yaml.safe_load_all(done.stdout)
    assert (rendered["kind"], rendered["metadata"]["namespace"]) == ("ScaledObject", "demo")


async def test_prometheus_counts_who_waits_and_who_is_there(world: World, tmp_path: Path) -> None:  # noqa: F811
    """What an autoscaler is told: nobody, one that waits for a service that starts, one that is open."""
    gateway = await world.start(tunnel(world.service.port, host=ROUTE, cold_start="60s"))
    async with prometheus(tmp_path, gateway._ports["metrics"]) as running:

        async def told(count: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while (await running.until(trigger()["query"]))[0]["value"][1] != str(count):
                    pass

        await told(0)
        said = hello()
        client = await world.client(said)
        (await world.service.request()).respond(503, [wait("1")], end=True)
        await told(1)
        stream = await world.service.request()
        stream.respond(200)
        assert await stream.read(len(said)) == said
        await world.echoes(client, stream)
        (opened,) = await running.until(f'hbone_tunnels_open{{route="{ROUTE}"}} == 1')
        assert opened["metric"]["route"] == ROUTE
        await told(1)
        client.end()
        stream.end()
        await client.rest()
        await told(0)
