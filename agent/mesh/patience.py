"""Asks again while a server is away, until a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.backoff import doubled_s
from shared.errors import StatusError, UpstreamError

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
"""Between attempts while a server is away."""


async def patiently(
    attempt: Callable[[], Awaitable[T]], what: str, log: logging.Logger, timeout_s: float
) -> T:
    """What `attempt` gives. For `timeout_s` seconds it is made again, after pauses that double, while its
    UpstreamError may pass by itself; the log says `what` that was about. Raises what `attempt` raises."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    failures = 0
    while True:
        try:
            return await attempt()
        except UpstreamError as error:
            pause_s = doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures)
            if not _may_pass(error) or loop.time() + pause_s >= deadline:
                raise
            log.warning("%s: %s; again in %g s", what, error, pause_s)
            await asyncio.sleep(pause_s)
            failures += 1


def _may_pass(error: UpstreamError) -> bool:
    return not isinstance(error, StatusError) or error.status >= 500 or error.status == 429
