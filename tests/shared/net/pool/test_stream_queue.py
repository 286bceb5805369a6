"""Who waits for a stream gets one answer, whatever comes in the same turn of the loop."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import DialError
from shared.http2.events import Headers
from shared.net.pool.stream_queue import WaitQueue
from shared.ops.pool_counts import OriginCounts
from shared.tasks import spawn
from tests.shared.http2.dialogue import POST
from tests.shared.net.loopback import turns

LONG_S = 3600.0


class Opened:
    """In a stream's place: all that the queue may do with one is to abort it."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def opened_queue(counts: OriginCounts) -> WaitQueue[tuple[Headers, bool], Opened]:
    return WaitQueue(counts, Opened.abort)


class Room:
    """Opens so many streams."""

    def __init__(self, count: int) -> None:
        self.opened: list[Opened] = []
        self._left = count

    def open_now(self, asked: tuple[Headers, bool]) -> Opened | None:
        if not self._left:
            return None
        self._left -= 1
        self.opened.append(Opened())
        return self.opened[-1]


def waiting(queue: WaitQueue[tuple[Headers, bool], Opened], count: int) -> list[asyncio.Task[Opened]]:
    return [spawn(queue.wait((POST, False), LONG_S), name=f"waits {number}") for number in range(count)]


async def test_in_order_as_long_as_there_is_room() -> None:
    counts = OriginCounts()
    queue = opened_queue(counts)
    tasks = waiting(queue, 5)
    await turns(3)
    assert (len(queue), counts.waiting) == (5, 5)
    room = Room(3)
    queue.serve(room.open_now)
    assert (len(queue), counts.waiting) == (2, 2)
    assert await asyncio.gather(*tasks[:3]) == room.opened
    queue.refuse(DialError("no more"))
    for task in tasks[3:]:
        with pytest.raises(DialError, match="no more"):
            await task
    assert (len(queue), counts.waiting) == (0, 0)


async def test_each_has_an_error_of_its_own() -> None:
    queue = opened_queue(OriginCounts())
    tasks = waiting(queue, 10)
    await turns(3)
    cause = OSError("cause")
    error = DialError("refused")
    error.__cause__ = cause
    queue.refuse(error)
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert {(str(one), type(one)) for one in errors} == {("refused", DialError)}
    assert len({id(one) for one in errors}) == 10
    assert all(isinstance(one, DialError) and one.__cause__ is cause for one in errors)


async def test_whoever_has_given_up_gets_nothing() -> None:
    queue = opened_queue(OriginCounts())
    tasks = waiting(queue, 2)
    await turns(3)
    tasks[0].cancel()
    room = Room(1)
    queue.serve(room.open_now)
    assert await tasks[1] is room.opened[0]
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert len(queue) == 0


async def test_whoever_gives_up_in_the_very_turn_leaves_no_stream_behind() -> None:
    queue = opened_queue(OriginCounts())
    (task,) = waiting(queue, 1)
    await turns(3)
    room = Room(1)
    queue.serve(room.open_now)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.opened[0].aborted


async def test_an_answer_in_the_last_turn_counts() -> None:
    queue = opened_queue(OriginCounts())
    loop = asyncio.get_running_loop()
    task = spawn(queue.wait((POST, False), 0.01), name="waits")
    await turns(3)
    room = Room(1)
    due = loop.time() + 0.05
    while loop.time() < due:
        pass  # so that the deadline is over when the answer comes
    queue.serve(room.open_now)
    assert await task is room.opened[0]
    assert not room.opened[0].aborted


async def test_the_deadline() -> None:
    counts = OriginCounts()
    queue = opened_queue(counts)
    with pytest.raises(TimeoutError):
        await queue.wait((POST, False), 0.001)
    assert (len(queue), counts.waiting) == (0, 0)
