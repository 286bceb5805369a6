"""Routes that are warm before their first client: a connection with TLS and SETTINGS behind it, and a token.

The pool keeps the connections. A task for each origin waits for the first one, gets the token, and asks for
it again from time to time, so that it is replaced before it ends whether or not somebody comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from gateway.rules.routes import Target
from gateway.sni.upstream import TargetRequest, Upstreams
from shared.errors import HboneError
from shared.net.dial import Origin
from shared.ops.readiness import Readiness, Task
from shared.tasks import spawn

log = logging.getLogger("hbone.warm")

CHECK_S = 30.0
"""How often a warm route's connection and token are checked: tokens are replaced minutes before they end."""

READY_S = 10.0
"""How long readiness waits for warm routes: a service that is down must not keep the gateway from serving."""


class WarmRoutes:
    """The routes that are to be warm."""

    def __init__(self, upstreams: Upstreams, readiness: Readiness) -> None:
        self._upstreams = upstreams
        self._readiness = readiness
        self._tasks: dict[tuple[Origin, str], asyncio.Task[None]] = {}

    def use(self, targets: Iterable[Target], *, at_start: bool = False) -> None:
        """From now on these are warm, and no others. With `at_start` readiness waits for them, `READY_S`
        seconds at most."""
        wanted: dict[tuple[Origin, str], TargetRequest] = {}
        for target in targets:
            try:
                request = self._upstreams.request_of(target)
            except HboneError as error:
                log.warning("%s is not warm: %s", target.url, error)
                continue
            wanted[request.origin, target.token.value] = request
        for key in [key for key in self._tasks if key not in wanted]:
            self._tasks.pop(key).cancel()
        self._upstreams.pool.keep_warm({origin for origin, _ in wanted})
        for key, request in wanted.items():
            if key not in self._tasks:
                waiting = self._readiness.task(f"warm {request.origin}") if at_start else None
                self._tasks[key] = spawn(self._keep(request, waiting), name=f"warm {request.origin}")

    def close(self) -> None:
        """Warms no more."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _keep(self, request: TargetRequest, waiting: Task | None) -> None:
        """`waiting` is done once it is warm, or after `READY_S`."""
        loop = asyncio.get_running_loop()
        overdue = loop.call_later(READY_S, waiting.done) if waiting is not None else None
        is_warm: bool | None = None  # as the log has it
        try:
            while True:
                why = await self._warm(request)
                if (not why) is not is_warm:
                    is_warm = not why
                    if is_warm:
                        log.info("%s is warm", request.origin)
                    else:
                        log.warning("%s is not warm: %s", request.origin, why)
                if is_warm and waiting is not None:
                    waiting.done()
                await asyncio.sleep(CHECK_S)
        finally:
            if overdue is not None:
                overdue.cancel()
            if waiting is not None:
                waiting.done()

    async def _warm(self, request: TargetRequest) -> str:
        """Why it is not warm; empty if it is."""
        upstreams = self._upstreams
        try:
            await upstreams.pool.of(request.origin).connected(upstreams.response_timeout_s)
            async with asyncio.timeout(upstreams.response_timeout_s):
                await request.source.token()
        except TimeoutError:
            return f"no token within {upstreams.response_timeout_s:g} s"
        except HboneError as error:
            return str(error)
        return ""
