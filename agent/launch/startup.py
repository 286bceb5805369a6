"""Waiting for the app to be ready, whoever has started it."""

from __future__ import annotations

import asyncio
from typing import Any

from agent.config.probe import Probe
from shared.address import Address
from shared.errors import DialError, HboneError, UnavailableError
from shared.net.dial import dial_socket

POLL_S = 0.02
"""Seconds between two checks of a port: there is no event for an opened port, and a refused connection costs
0.1 ms."""

HTTP_POLL_S = 0.1
"""The same of a URL, which an app may find dearer."""

PROBE_TIMEOUT_S = 1.0
"""Seconds for one check."""

MAX_ANSWER_BYTES = 1 << 20


async def ready(probe: Probe, timeout_s: float, ended: asyncio.Future[Any]) -> bool:
    """Waits until `probe` is answered: True; False when `ended` is done before.

    Raises UnavailableError when neither has happened after `timeout_s` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not ended.done():
        if await answers(probe):
            return True
        if loop.time() >= deadline:
            raise _silent(probe, timeout_s)
        await asyncio.wait({ended}, timeout=HTTP_POLL_S if probe.url else POLL_S)
    return False


def _silent(probe: Probe, timeout_s: float) -> UnavailableError:
    if probe.url:
        return UnavailableError(f"app does not answer {probe} after {timeout_s:g} s: see HBONE_STARTUP_PROBE")
    return UnavailableError(
        f"app does not listen on {probe} after {timeout_s:g} s: it must listen on the port in its variable "
        "PORT, or HBONE_APP must name its address; HBONE_STARTUP_PROBE=- waits for nothing"
    )


async def answers(probe: Probe) -> bool:
    """Whether it is answered now."""
    if probe.url:
        from shared.net.http1 import get

        try:
            answer = await get(probe.url, headers={}, timeout_s=PROBE_TIMEOUT_S, max_bytes=MAX_ANSWER_BYTES)
        except HboneError:
            return False
        return 200 <= answer.status < 400
    return probe.address is None or await accepts(probe.address)


async def accepts(address: Address) -> bool:
    """Whether `address` accepts connections."""
    try:
        sock = await dial_socket(address, PROBE_TIMEOUT_S)
    except DialError:  # refused, unreachable, no such name yet, or timed out
        return False
    with sock:
        # Without a listener, a connection to a port of the ephemeral range can by chance connect to itself.
        return bool(sock.getsockname() != sock.getpeername())
