"""Spawned tasks: held until they end, and what they raise is reported under their name."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from shared import tasks
from shared.errors import DialError
from shared.tasks import report, spawn


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger=tasks.log.name)
    return caplog


async def ended(task: asyncio.Task[None]) -> None:
    """Returns when the task has ended and was looked at, without taking what it raised."""
    await asyncio.wait([task])
    await asyncio.sleep(0)


async def test_a_task_has_a_name_and_a_result() -> None:
    async def answer() -> int:
        return 42

    before = tasks.running()
    task = spawn(answer(), name="the answer")
    assert task.get_name() == "the answer"
    assert tasks.running() == before + 1
    assert await task == 42
    await asyncio.sleep(0)
    assert tasks.running() == before


async def test_nobody_has_to_hold_a_task() -> None:
    done = asyncio.Event()
    wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await wake
        done.set()

    spawn(wait(), name="held by nobody")
    await asyncio.sleep(0)
    gc.collect()
    wake.set_result(None)
    await done.wait()


async def test_a_failure_is_logged_with_its_traceback(reports: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("out of range")

    await ended(spawn(fail(), name="tunnel 10.1.2.3:4431"))
    (report,) = reports.records
    assert report.levelno == logging.ERROR
    assert report.getMessage() == "task tunnel 10.1.2.3:4431 failed: ValueError: out of range"
    assert report.exc_info is not None


async def test_a_foreseeable_failure_is_its_owners_to_report(reports: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise DialError("connect to 127.0.0.1:1: connection refused")

    await ended(spawn(fail(), name="dial"))
    (report,) = reports.records
    assert report.levelno == logging.DEBUG
    assert report.getMessage() == "task dial ended: connect to 127.0.0.1:1: connection refused"
    assert not report.exc_info


async def test_a_failure_that_somebody_awaits_is_raised_there() -> None:
    async def fail() -> None:
        raise DialError("no")

    with pytest.raises(DialError):
        await spawn(fail(), name="awaited")


async def test_a_cancelled_task_is_no_failure(reports: pytest.LogCaptureFixture) -> None:
    task = spawn(asyncio.Event().wait(), name="for ever")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert reports.records == []


async def test_a_task_needs_a_loop() -> None:
    async def nothing() -> None: ...

    def elsewhere() -> None:
        coro = nothing()
        with pytest.raises(RuntimeError, match="no running event loop"):
            spawn(coro, name="lost")
        coro.close()

    await asyncio.to_thread(elsewhere)


def test_a_fault_in_the_place_of_a_task_is_reported_like_one(reports: pytest.LogCaptureFixture) -> None:
    report("tunnel 10.1.2.3:4431", ValueError("oops"))
    assert [(record.levelname, record.getMessage()) for record in reports.records] == [
        ("ERROR", "task tunnel 10.1.2.3:4431 failed: ValueError: oops")
    ]
    assert reports.records[0].exc_info
