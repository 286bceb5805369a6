"""Those who wait for a stream at one origin, in the order in which they came.

Owned here: the order, and that each gets one answer, a stream or an error of its own. Where streams come
from, and how many may wait, is `origin_pool.py`'s.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

from shared.net.pool_counts import OriginCounts
from shared.net.stream import Stream
from shared.wire.events import Headers


class _Waiter:
    __slots__ = ("headers", "stream")

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.stream: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()


class StreamQueue:
    """Openers without a stream; `len` is how many."""

    def __init__(self, counts: OriginCounts) -> None:
        self._counts = counts
        self._waiting: dict[_Waiter, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, headers: Headers, timeout_s: float) -> Stream:
        """Returns what `serve` has for these request headers.

        Raises:
            TimeoutError: nothing within `timeout_s` seconds.
            HboneError: what `refuse` was called with.
        """
        waiter = _Waiter(headers)
        self._waiting[waiter] = None
        self._counts.waiting += 1
        answer = waiter.stream
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            if answer.done() and not answer.cancelled():
                return answer.result()  # both in the same turn
            raise
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and not answer.exception():
                answer.result().abort()  # nobody will
            raise
        finally:
            self._answered(waiter)

    def serve(self, open_now: Callable[[Headers], Stream | None]) -> None:
        """Gives out what `open_now` opens, until it opens nothing."""
        while self._waiting:
            waiter = next(iter(self._waiting))
            if not waiter.stream.done():
                stream = open_now(waiter.headers)
                if stream is None:
                    return
                waiter.stream.set_result(stream)
            self._answered(waiter)

    def refuse(self, error: Exception) -> None:
        """Tells all who wait."""
        for waiter in list(self._waiting):
            if not waiter.stream.done():
                own = copy.copy(error)  # a shared one would collect the tracebacks of all
                own.__cause__ = error.__cause__
                waiter.stream.set_exception(own)
            self._answered(waiter)

    def _answered(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            del self._waiting[waiter]
            self._counts.waiting -= 1
