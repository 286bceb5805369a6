"""Cloud Run's Admin API, as far as hbone asks it: one service of a region (v2), all of a project (v1)."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any, Self

from tests.support.http1_server import NotingServer, received

TOKEN = "Access-of-me"

_ONE = re.compile(r"/v2/projects/proj/locations/([^/]+)/services/([^/?]+)")
_ALL = re.compile(r"/apis/serving\.knative\.dev/v1/namespaces/proj/services\?limit=\d+(?:&continue=(\d+))?")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that came in."""

    path: str
    headers: dict[str, str]


@dataclass(slots=True)
class RunApi(NotingServer[Asked]):
    """`async with RunApi() as api:` listens on `api.url` until the block ends."""

    services: list[dict[str, str]] = field(default_factory=list)
    """Name, region, url, and namespace if its krun has one."""

    tokens: set[str] = field(default_factory=lambda: {TOKEN})
    page: int = 1
    """Services in one answer of a list."""

    answer: tuple[int, bytes] | None = None
    """What it answers instead."""

    url: str = ""

    async def __aenter__(self) -> Self:
        self.url = f"http://127.0.0.1:{await self._listen(self._serve)}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await received(reader)
        asked = Asked(request.target, request.headers)
        await self._note(asked)
        await self.gate.wait()
        status, body = self.answer or self._answer(asked)
        writer.write(request.answer(status, body, ("content-type", "application/json")))
        await writer.drain()

    def _answer(self, asked: Asked) -> tuple[int, bytes]:
        scheme, _, token = asked.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.tokens:
            return _failed(401, "UNAUTHENTICATED")
        if found := _ONE.fullmatch(asked.path):
            for one in self.services:
                if (one["region"], one["name"]) == found.groups():
                    return 200, json.dumps(_v2(one)).encode()
            return _failed(404, "NOT_FOUND")
        if found := _ALL.fullmatch(asked.path):
            first = int(found[1] or 0)
            after = first + self.page
            page: dict[str, Any] = {"items": [_v1(one) for one in self.services[first:after]]}
            page["metadata"] = {"continue": str(after)} if after < len(self.services) else {}
            return 200, json.dumps(page).encode()
        return _failed(404, "NOT_FOUND")


def _failed(status: int, code: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": {"code": status, "status": code, "message": "no"}}).encode()


def _env(one: dict[str, str]) -> list[dict[str, str]]:
    named = [{"name": "WORKLOAD_NAMESPACE", "value": one["namespace"]}] if "namespace" in one else []
    return [{"name": "OTHER", "value": "x"}, *named]


def _v2(one: dict[str, str]) -> dict[str, Any]:
    name = f"projects/proj/locations/{one['region']}/services/{one['name']}"
    return {"name": name, "uri": one["url"], "template": {"containers": [{"env": _env(one)}]}}


def _v1(one: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": one["name"], "labels": {"cloud.googleapis.com/location": one["region"]}},
        "spec": {"template": {"spec": {"containers": [{"env": _env(one)}]}}},
        "status": {"url": one["url"]},
    }
