"""Those who wait at one origin, for a stream or for a connection, in the order in which they came. Each gets
one answer: what it waits for, or an error of its own."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Generic, TypeVar

from shared.http2.events import Headers
from shared.net.legs.stream import Stream
from shared.ops.pool_counts import OriginCounts

Asked = TypeVar("Asked")
Given = TypeVar("Given")


class _Waiter(Generic[Asked, Given]):
    __slots__ = ("answer", "asked")

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.answer: asyncio.Future[Given] = asyncio.get_running_loop().create_future()


class WaitQueue(Generic[Asked, Given]):
    """Those who have asked for something and wait for what is given; `len` is how many."""

    def __init__(self, counts: OriginCounts, drop: Callable[[Given], None] = lambda given: None) -> None:
        """`drop` takes back what was given to a caller that was cancelled in the same turn of the loop."""
        self._counts = counts
        self._drop = drop
        self._waiting: dict[_Waiter[Asked, Given], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, asked: Asked, timeout_s: float) -> Given:
        """Returns what `serve` gives for `asked`.

        Raises:
            TimeoutError: nothing within `timeout_s` seconds.
            HboneError: what `refuse` was called with.
        """
        waiter: _Waiter[Asked, Given] = _Waiter(asked)
        self._waiting[waiter] = None
        self._counts.waiting += 1
        answer = waiter.answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            if answer.done() and not answer.cancelled():
                return answer.result()  # both in the same turn
            raise
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and not answer.exception():
                self._drop(answer.result())
            raise
        finally:
            self._answered(waiter)

    def serve(self, give: Callable[[Asked], Given | None]) -> None:
        """Gives out what `give` has, until it has nothing (None)."""
        while self._waiting:
            waiter = next(iter(self._waiting))
            if not waiter.answer.done():
                given = give(waiter.asked)
                if given is None:
                    return
                waiter.answer.set_result(given)
            self._answered(waiter)

    def refuse(self, error: Exception) -> None:
        """Tells all who wait."""
        for waiter in list(self._waiting):
            if not waiter.answer.done():
                own = copy.copy(error)  # a shared one would collect the tracebacks of all
                own.__cause__ = error.__cause__
                waiter.answer.set_exception(own)
            self._answered(waiter)

    def _answered(self, waiter: _Waiter[Asked, Given]) -> None:
        if waiter in self._waiting:
            del self._waiting[waiter]
            self._counts.waiting -= 1


def stream_queue(counts: OriginCounts) -> WaitQueue[tuple[Headers, bool], Stream]:
    """For callers that wait for a stream: their request headers, and whether these end the request."""
    return WaitQueue(counts, lambda stream: stream.abort())
