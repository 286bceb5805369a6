"""hgate cluster at scale, against a real API server: `make scale`, or `python -m tests.kube.scale`.

1,000 annotated Services, 1,000 more with 10 endpoints each, three replicas, 50 changes a second, one replica
killed. Prints a table like `make stress`: what was demanded, what was measured, also what it cost the API
server; the exit code is 1 if anything failed, 69 if there is no API server to be had.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shared import loop
from shared.cluster.service_annotations import STATUS
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.tasks import spawn
from tests.kube import build, run
from tests.kube.build import unavailable
from tests.kube.run import ADMIN
from tests.stress.figures import look, percentile, settled
from tests.stress.programs import Program
from tests.stress.table import Row, render
from tests.support.api_server import RealApiServer, access, kubeconfig

ROUTED, REACHED, EACH = 1000, 1000, 10
"""Services with a route, Services with endpoints, endpoints of each."""

REPLICAS = 3
CHANGES_PER_S = 50
CHANGING_S = 20.0
IDLE_S = 20.0
ALONE_S = 10.0
AT_ONCE = 16
"""Requests of ours to the API server."""

NAMESPACE = "scale"
WRITES = "we write from now on"
NAME = "echo.outside.example"
"""Of the route by which tunnels are measured; it is in the file."""

FILE = """\
listen: ["127.0.0.1:0"]
admin: off
metrics: off
health: 127.0.0.1:0
routes:
  - {{host: {name}, forward: "127.0.0.1:{echo}"}}
cluster:
  folder: {folder}
  ops: 127.0.0.1:0
  mesh_env: false
  register: false
  allow:
    - namespace: {namespace}
      hosts: ["**.run.app"]
      services: ["reached-*"]
      audiences: ["https://changed-*"]
"""


@dataclass
class Replica:
    """One pod: both processes, and the folder that they share."""

    folder: Path
    gateway: Program
    cluster: Program
    port: int = 0

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.gateway.send(number)
        self.cluster.send(number)


class Scale:
    """What is measured, row by row."""

    def __init__(self, server: RealApiServer, folder: Path, api_pid: int, echo: int) -> None:
        self.rows: list[Row] = []
        self._api = KubernetesApi(access(server, ADMIN), max_bytes=64 << 20)
        self._server = server
        self._folder = folder
        self._api_pid = api_pid
        self._echo = echo
        self._version = itertools.count()

    def row(self, what: str, demanded: str, measured: str, *, passed: bool) -> None:
        self.rows.append(Row(what, demanded, measured, passed))
        print(f"{what}: {measured}", flush=True)

    # Objects.

    async def _each(self, requests: Iterable[Callable[[], Awaitable[object]]]) -> None:
        left = iter(requests)

        async def some() -> None:
            for request in left:
                await request()

        await asyncio.gather(*(spawn(some(), name="ask") for _ in range(AT_ONCE)))

    async def _put(self, path: str, name: str, body: dict[str, Any], *, new: bool = False) -> None:
        if new:
            await self._api.ask("POST", path, body)
        else:
            await self._api.ask("PUT", f"{path}/{name}", body)

    async def furnish(self) -> None:
        core = "/api/v1/namespaces"
        await self._api.ask("POST", core, {"metadata": {"name": NAMESPACE}})
        services, slices = f"{core}/{NAMESPACE}/services", _slices()
        asked: list[Callable[[], Awaitable[object]]] = []
        for number in range(ROUTED):
            body = _service(f"routed-{number}", {"hbone.dev/cloudrun-url": _url(number)})
            asked.append(partial(self._put, services, "", body, new=True))
        for number in range(REACHED):
            body = _service(f"reached-{number}", {})
            asked.append(partial(self._put, services, "", body, new=True))
            asked.append(partial(self._put, slices, "", _slice(number, 0), new=True))
        await self._each(asked)

    async def change(self, for_s: float) -> int:
        """Changes objects at the rate that is demanded: nine endpoints, then a route. Returns how many."""
        clock = asyncio.get_running_loop().time
        began, done = clock(), 0
        while clock() - began < for_s:
            number, version = done % REACHED, next(self._version) + 1
            if done % 10:
                await self._put(_slices(), f"reached-{number}", _slice(number, version))
            else:
                path = f"/api/v1/namespaces/{NAMESPACE}/services/routed-{number}"
                found = await self._api.ask("GET", path)
                found["metadata"]["annotations"]["hbone.dev/audience"] = f"https://changed-{version}"
                await self._api.ask("PUT", path, found)
            done += 1
            await asyncio.sleep(max(0.0, began + done / CHANGES_PER_S - clock()))
        return done

    # Replicas.

    def start(self, name: str) -> Replica:
        folder = self._folder / name
        folder.mkdir()
        file = folder / "hgate.yaml"
        file.write_text(FILE.format(name=NAME, echo=self._echo, folder=folder, namespace=NAMESPACE))
        known = folder / "kubeconfig"
        known.write_text(kubeconfig(self._server, ADMIN))
        environ = {"KUBECONFIG": str(known), "POD_NAME": name, "POD_NAMESPACE": "default"}
        common = ("--config", str(file), "--log-format", "json")
        gateway = Program(f"{name}-hgate", ["gateway", *common], folder)
        cluster = Program(f"{name}-cluster", ["gateway", "cluster", *common], folder, environ)
        return Replica(folder, gateway, cluster)

    async def ready(self, replica: Replica) -> None:
        found = await replica.gateway.said(r"listening on 127\.0\.0\.1:(\d+)")
        replica.port = int(found[1])
        await replica.gateway.said('"ready"')

    async def begin(self) -> list[Replica]:
        began = time.monotonic()
        first = self.start("a")
        await self.ready(first)
        took_s = time.monotonic() - began
        routes = len(json.loads((first.folder / "routes.json").read_bytes())["routes"])
        self.row(
            "start",
            f"{ROUTED} routes within 10 s, both processes started at once",
            f"{routes} routes, ready after {took_s:.1f} s",
            passed=routes == ROUTED and took_s < 10,
        )
        complete = await settled(lambda: _endpoints(first) == REACHED * EACH, 10)
        self.row("endpoints", f"{REACHED * EACH}", f"{_endpoints(first)}", passed=complete)
        return [first]

    async def told(self, replica: Replica) -> None:
        """Until every object has been told what became of it."""
        began = time.monotonic()
        path = f"/api/v1/namespaces/{NAMESPACE}/services"
        left = ROUTED
        while left and time.monotonic() - began < 300:
            await asyncio.sleep(2.0)
            found = await self._api.ask("GET", path)
            told = (each["metadata"].get("annotations") or {} for each in found["items"])
            left = ROUTED - sum(STATUS in annotations for annotations in told)
        took_s = time.monotonic() - began
        self.row(
            "status", "every object is told within 5 min", f"{took_s:.0f} s, {left} left", passed=not left
        )

    async def alone(self) -> None:
        """What the API server takes without a replica, quiet and with the changes."""
        shares = []
        for during, for_s in ((asyncio.sleep(ALONE_S), ALONE_S), (self.change(ALONE_S), ALONE_S)):
            before = look(self._api_pid).cpu_s
            await during
            shares.append((look(self._api_pid).cpu_s - before) / for_s * 100)
        told = f"{shares[0]:.1f} % quiet, {shares[1]:.1f} % with {CHANGES_PER_S} changes a second"
        self.row("the API server alone", "for comparison", told, passed=True)

    async def idle(self, replicas: Sequence[Replica], what: str, most: float) -> None:
        pids = {
            "hgate": replicas[0].gateway.pid,
            "cluster": replicas[0].cluster.pid,
            "API server": self._api_pid,
        }
        before = {name: look(pid).cpu_s for name, pid in pids.items()}
        await asyncio.sleep(IDLE_S)
        used = {name: (look(pid).cpu_s - before[name]) / IDLE_S * 100 for name, pid in pids.items()}
        memory = {name: look(pid).pss_kib >> 10 for name, pid in pids.items()}
        told = ", ".join(f"{name} {used[name]:.2f} % {memory[name]} MiB" for name in pids)
        ours = max(used["hgate"], used["cluster"])
        self.row(what, f"each of ours below {most:g} % of a core", told, passed=ours < most)

    async def changes(self, replicas: Sequence[Replica]) -> None:
        quiet = await self._round_trips(replicas[0].port, asyncio.sleep(CHANGING_S))
        pids = {
            "hgate": replicas[0].gateway.pid,
            "cluster": replicas[0].cluster.pid,
            "API server": self._api_pid,
        }
        before = {name: look(pid).cpu_s for name, pid in pids.items()}
        done: list[int] = []

        async def change() -> None:
            done.append(await self.change(CHANGING_S))

        busy = await self._round_trips(replicas[0].port, change())
        used = {name: (look(pid).cpu_s - before[name]) / CHANGING_S * 100 for name, pid in pids.items()}
        rate = done[0] / CHANGING_S
        self.row(
            "changes",
            f"{CHANGES_PER_S} a second, a tenth of them of routes",
            f"{rate:.0f} a second: " + ", ".join(f"{name} {share:.1f} %" for name, share in used.items()),
            passed=rate > 0.8 * CHANGES_PER_S,
        )
        medians = [percentile(trips, 0.5) * 1e3 for trips in (quiet, busy)]
        tails = [percentile(trips, 0.99) * 1e3 for trips in (quiet, busy)]
        self.row(
            "tunnels meanwhile",
            "round trips: p99 within 20 ms, or twice the quiet one; none broken",
            f"p50 {medians[0]:.2f} ms quiet, {medians[1]:.2f} changing; p99 {tails[0]:.1f}, {tails[1]:.1f}",
            passed=tails[1] < max(20, 2 * tails[0]),
        )
        current = await settled(lambda: _alike(replicas), 10)
        self.row("after them", "every replica has the same lists", f"{current}", passed=current)

    async def loss(self, replicas: list[Replica]) -> None:
        """A node's loss: the leader's pod is gone without a word."""
        leader = next(each for each in replicas if each.cluster.count(WRITES))
        others = [each for each in replicas if each is not leader]
        survivor = others[0]

        async def lose() -> None:
            leader.stop(signal.SIGKILL)
            await settled(lambda: any(each.cluster.count(WRITES) for each in others), 30)

        began = time.monotonic()
        trips = await self._round_trips(survivor.port, lose())
        took_s = time.monotonic() - began
        replicas.remove(leader)
        self.row(
            "a node's loss",
            "another replica writes within 17 s, tunnels of the others go on",
            f"{took_s:.1f} s, p99 {percentile(trips, 0.99) * 1e3:.1f} ms",
            passed=took_s < 17.5,
        )

    async def _round_trips(self, port: int, during: Awaitable[None]) -> list[float]:
        """Seconds of each round trip in tunnels that were opened before, by a process of its own. Raises
        AssertionError if one breaks."""
        command = [sys.executable, "-m", "tests.kube.round_trips", str(port), NAME]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdin is not None and process.stdout is not None
        await process.stdout.readline()  # all are open
        await during
        process.stdin.close()
        said = await process.stdout.read()
        assert await process.wait() == 0, "a tunnel broke"
        trips: list[float] = json.loads(said)
        return trips


def _slices() -> str:
    return f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def _service(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"ports": [{"name": "http", "port": 80}], "clusterIP": "None"},
    }


def _url(number: int) -> str:
    return f"https://routed-{number}-abcdefghij-uc.a.run.app"


def _slice(number: int, version: int) -> dict[str, Any]:
    addresses = [f"10.{version % 250}.{number % 250}.{each + 1}" for each in range(EACH)]
    return {
        "metadata": {
            "name": f"reached-{number}",
            "labels": {"kubernetes.io/service-name": f"reached-{number}"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080}],
        "endpoints": [{"addresses": [address]} for address in addresses],
    }


def _endpoints(replica: Replica) -> int:
    try:
        found = json.loads((replica.folder / "endpoints.json").read_bytes())["services"]
    except FileNotFoundError:
        return 0
    return sum(len(ends) for ports in found.values() for ends in ports.values())


def _alike(replicas: Sequence[Replica]) -> bool:
    lists = [
        tuple((each.folder / name).read_bytes() for name in ("routes.json", "endpoints.json"))
        for each in replicas
    ]
    return all(each == lists[0] for each in lists)


async def _measured(server: RealApiServer, folder: Path, api_pid: int) -> list[Row]:
    echo = Program("echo", ["tests.stress.echo"], folder)
    scale = Scale(server, folder, api_pid, int((await echo.said(r":(\d+)"))[1]))
    await scale.furnish()
    await scale.alone()
    replicas = await scale.begin()
    try:
        await scale.told(replicas[0])
        await scale.idle(replicas, "idle, one replica", 1.0)
        replicas += [scale.start(name) for name in ("b", "c")]
        for each in replicas[1:]:
            await scale.ready(each)
        await scale.idle(replicas, f"idle, {REPLICAS} replicas", 1.0)
        await scale.changes(replicas)
        await scale.loss(replicas)
    finally:
        for each in replicas:
            each.stop(signal.SIGKILL)
    return scale.rows


def main() -> int:
    if shutil.which("etcd") is None:
        unavailable("no etcd on PATH (Debian: etcd-server)")
    program = build.built(build.folder())
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        server = stack.enter_context(run.running(program, Path(name)))
        api_pid = _pid_of(program)
        rows = loop.run(_measured(server, Path(name), api_pid))
    print(render(rows))
    return 0 if all(row.passed for row in rows) else 1


def _pid_of(program: Path) -> int:
    """The process that runs it, a child of ours."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if Path(f"/proc/{pid}/exe").resolve() == program.resolve():
                return int(pid)
    raise AssertionError(f"{program} does not run")


if __name__ == "__main__":
    sys.exit(main())
