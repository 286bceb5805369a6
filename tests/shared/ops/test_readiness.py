from __future__ import annotations

import pytest

from shared.ops.http_server import Request
from shared.ops.readiness import Readiness

PROBE = Request("GET", "/healthz/ready")


def answer(readiness: Readiness) -> tuple[int, bytes]:
    response = readiness.healthz(PROBE)
    return response.status, response.body


def test_ready_when_nothing_is_pending() -> None:
    readiness = Readiness()
    assert readiness.ready
    assert answer(readiness) == (200, b"ready\n")


def test_names_what_is_pending_in_order() -> None:
    readiness = Readiness()
    listener, routes, second = (readiness.task(name) for name in ("listener", "routes", "listener"))
    assert answer(readiness) == (503, b"not ready, pending: listener, routes\n")
    listener.done()
    listener.done()
    assert readiness.pending == ("routes", "listener")
    second.done()
    assert not readiness.ready
    routes.done()
    assert readiness.ready
    assert answer(readiness) == (200, b"ready\n")


def test_draining_and_back() -> None:
    readiness = Readiness()
    readiness.draining = True
    assert not readiness.ready
    assert answer(readiness) == (503, b"draining\n")
    readiness.draining = False
    assert readiness.ready


def test_a_task_that_fails_stays_pending() -> None:
    readiness = Readiness()
    with readiness.task("routes"):
        pass
    with pytest.raises(OSError), readiness.task("listener"):
        raise OSError("no such address")
    assert readiness.pending == ("listener",)
