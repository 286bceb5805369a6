"""An API server that fails as told: lists and watches of one kind, one answer after the other.

For what a real one does seldom: 410, 429, a list in pages that expires, a broken object, silence. What a real
one does always is tested with it (tests/kube).
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.tcp_peer import PATIENCE_S

TOKEN = "Pod-T0ken"


class ScriptedApi:
    """Made by `scripted_api`."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and query of each request."""
        self.authorizations: set[str] = set()
        self.items: dict[str, dict[str, Any]] = {}
        """What a list has now, by name."""
        self.version = 1
        self.page = 1000
        self.answers: deque[web.Response] = deque()
        """Given to the next requests, instead of what is so."""
        self._changed = asyncio.Condition()
        self._log: list[tuple[int, dict[str, Any]]] = []  # events by version
        self.is_silent = False
        """Watches tell nothing, and do not end."""
        self.objects: dict[str, dict[str, Any]] = {}
        """Single objects by their paths, which lists and watches do not have."""
        self.hangs = False
        """Requests get no answer."""
        self.watches = 0
        self._cut = asyncio.Event()

    async def put(self, name: str, kind: str = "MODIFIED", **fields: Any) -> None:
        """Makes or changes an object, and tells the watches."""
        self.version += 1
        about = {"name": name, "namespace": "demo", "uid": name, "resourceVersion": str(self.version)}
        self.items[name] = {"metadata": about, **fields}
        await self.tell({"type": kind, "object": self.items[name]})

    async def delete(self, name: str) -> None:
        """Removes it, and tells the watches."""
        self.version += 1
        found = self.items.pop(name)
        found["metadata"]["resourceVersion"] = str(self.version)
        await self.tell({"type": "DELETED", "object": found})

    async def tell(self, event: Mapping[str, Any]) -> None:
        """Tells the watches."""
        async with self._changed:
            self._log.append((self.version, dict(event)))
            self._changed.notify_all()

    async def end_watches(self) -> None:
        """Breaks all of them off."""
        self._cut.set()
        self._cut = asyncio.Event()
        async with self._changed:
            self._changed.notify_all()

    async def watched(self, count: int = 1) -> None:
        """Returns when so many watches have begun."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.watches >= count)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path, dict(request.query)))
        self.authorizations.add(request.headers.get("authorization", ""))
        if self.hangs:
            await asyncio.Event().wait()
        if self.answers:
            return self.answers.popleft()
        if "/namespaces/" in request.path:
            return await self._one(request)
        if "watch" in request.query:
            return await self._watch(request, int(request.query["resourceVersion"]))
        start = int(request.query.get("continue") or 0)
        names = sorted(self.items)[start : start + self.page]
        more = str(start + self.page) if start + self.page < len(self.items) else ""
        about = {"resourceVersion": str(self.version), "continue": more}
        return web.json_response({"metadata": about, "items": [self.items[name] for name in names]})

    async def _one(self, request: web.Request) -> web.Response:
        """Reads an object, applies it, or makes one of a kind whose name the server chooses."""
        if request.method == "POST":
            return web.json_response(await request.json())
        if request.method == "PATCH":
            self.objects[request.path] = await request.json()
        found = self.objects.get(request.path)
        return web.json_response(found) if found is not None else status(404, "NotFound")

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        cut = self._cut
        async with self._changed:
            self.watches += 1
            self._changed.notify_all()
        told = next((place for place, (at, _) in enumerate(self._log) if at > version), len(self._log))
        while not cut.is_set():
            async with self._changed:
                while not cut.is_set() and len(self._log) == told:
                    await self._changed.wait()
            for _, event in [] if self.is_silent else self._log[told:]:
                await response.write(json.dumps(event).encode() + b"\n")
            told = len(self._log)
        if request.transport is not None:
            request.transport.abort()
        return response


def status(code: int, reason: str, **headers: str) -> web.Response:
    """An answer that refuses."""
    body = {"kind": "Status", "code": code, "reason": reason, "message": f"{reason} it is"}
    return web.json_response(
        body, status=code, headers={key.replace("_", "-"): v for key, v in headers.items()}
    )


def access_to(server: ScriptedApi, folder: Path) -> dict[str, str]:
    """Variables by which the official client finds the server."""
    file = folder / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
            }
        )
    )
    return {"KUBECONFIG": str(file)}


@asynccontextmanager
async def scripted_api() -> AsyncIterator[ScriptedApi]:
    """The server, on a free loopback port."""
    api = ScriptedApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api._answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    api.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield api
    finally:
        await api.end_watches()
        await runner.cleanup()
