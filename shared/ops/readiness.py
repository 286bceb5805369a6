"""Whether this process is ready for traffic, and what it still waits for.

It speaks of this process alone: a service behind it that is down must not take it out of rotation.
"""

from __future__ import annotations

import logging
from types import TracebackType

from shared.ops.http_server import Request, Response

log = logging.getLogger("hbone.readiness")

READY = "ready"


class Task:
    """Something that has to be up first. As a context manager it is done unless an exception leaves."""

    def __init__(self, readiness: Readiness, name: str) -> None:
        self.name = name
        self._readiness = readiness

    def done(self) -> None:
        """It is up. Further calls do nothing."""
        self._readiness._done(self)

    def __enter__(self) -> Task:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.done()


class Readiness:
    """Ready once every task is done, until `draining` is set."""

    def __init__(self) -> None:
        self.draining = False
        """True: no new traffic, please; what is open goes on."""
        self._pending: dict[Task, None] = {}  # in order of registration

    def task(self, name: str) -> Task:
        """Something called `name` has to be up first; call `done` on what is returned."""
        task = Task(self, name)
        self._pending[task] = None
        return task

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the tasks that are not done, each once, in order of registration."""
        return tuple(dict.fromkeys(task.name for task in self._pending))

    @property
    def ready(self) -> bool:
        """Whether new traffic is welcome."""
        return not self._pending and not self.draining

    @property
    def text(self) -> str:
        """READY, or why it is not."""
        if self.draining:
            return "draining"
        return f"not ready, pending: {', '.join(self.pending)}" if self._pending else READY

    def healthz(self, _: Request) -> Response:
        """Answers a readiness probe: 200, or 503 with the reason."""
        return Response.text(200 if self.ready else 503, self.text)

    def _done(self, task: Task) -> None:
        if task not in self._pending:
            return
        del self._pending[task]
        if self._pending:
            log.debug("%s is up, pending: %s", task.name, ", ".join(self.pending))
        else:
            log.info("ready")
