"""`hgate cluster` as a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shared.net import http1
from tests.support.api_server import RealApiServer, kubeconfig
from tests.support.gateway_output import answer_of
from tests.support.process import Process, started
from tests.support.tcp_peer import PATIENCE_S


class Cluster:
    """Made by `hgate_cluster`."""

    def __init__(self, process: Process, folder: Path, port: int) -> None:
        self.process = process
        self._folder = folder
        self._port = port

    def routes(self) -> dict[str, str]:
        """The URLs of the routes that are handed over now, by their names."""
        try:
            found = json.loads((self._folder / "routes.json").read_bytes())
        except FileNotFoundError:
            return {}
        return {route["host"]: route["url"] for route in found["routes"]}

    def endpoints(self) -> Any:
        """The endpoints that are handed over now."""
        return self._list("endpoints.json", "services")

    def addresses(self) -> Any:
        """The names of addresses that are handed over now."""
        return self._list("addresses.json", "addresses")

    def _list(self, name: str, key: str) -> Any:
        try:
            return json.loads((self._folder / name).read_bytes())[key]
        except FileNotFoundError:
            return {}

    async def get(self, path: str) -> http1.Response:
        """An answer of its port."""
        return await answer_of("cluster", self._port, path)

    async def metric(self, name: str, *labels: str) -> float:
        """The value of a metric by its labels' values; 0 if there is no such sample."""
        text = (await self.get("/metrics")).body.decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and tuple(sample.labels.values()) == labels:
                    return float(sample.value)
        return 0.0


@asynccontextmanager
async def hgate_cluster(
    server: RealApiServer,
    folder: Path,
    allow: str,
    *,
    token: str | None = None,
    name: str = "hgate-0",
    url: str = "",
    environ: Mapping[str, str] | None = None,
    **more: str,
) -> AsyncIterator[Cluster]:
    """The process for `server`, with our access or that of `token`, and a file in `folder` that allows what
    `allow` says, in YAML. It finds the server at `url`, if that is somewhere else; `more` are further fields
    of the section."""
    file, access = folder / f"{name}.yaml", folder / f"{name}.kubeconfig"
    file.write_text(gateway_file(folder, allow, **more))
    known = kubeconfig(server, server.admin if token is None else token)
    access.write_text(known.replace(server.url, url or server.url))
    environ = {
        "KUBECONFIG": str(access),
        "POD_NAME": name,
        "POD_NAMESPACE": "istio-system",
        **(environ or {}),
    }
    command = ("gateway", "cluster", "--config", str(file), "--log-format", "json")
    async with started(*command, environ=environ) as process:
        port = int((await process.said(r"^cluster on 127\.0\.0\.1:(\d+)$"))[1])
        yield Cluster(process, folder, port)


def gateway_file(folder: Path, allow: str, **more: str) -> str:
    """hgate's file, for hgate and for hgate cluster, on free ports, with `more` fields in `cluster`."""
    fields = {"mesh_env": "false", "register": "false", **more}
    written = "".join(f"  {name}: {value}\n" for name, value in fields.items())
    return f"""\
listen: ["127.0.0.1:0"]
admin: 127.0.0.1:0
metrics: 127.0.0.1:0
health: 127.0.0.1:0
routes: []
cluster:
  folder: {folder}
  ops: 127.0.0.1:0
  allow: {allow}
{written}"""


async def until(holds: Any, within_s: float = PATIENCE_S) -> None:
    """Returns as soon as `holds()` is true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  # files and lists, which tell nobody
            await asyncio.sleep(0.02)
