"""A TCP connection to a name: all its addresses are tried, the next before the last has given up (RFC 8305).

The event loop's own `create_connection` tries one address after the other, each up to the kernel's two
minutes, so one dead address of a service would use up a tunnel's whole deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Sequence

from shared.address import Address
from shared.net.names import names
from shared.net.names.endpoint import Endpoint, Resolve
from shared.tasks import spawn

HEAD_START_S = 0.25
"""How long an address has before the next is tried as well (RFC 8305 section 5)."""

MAX_ADDRESSES = 8
"""Addresses tried of one name: a longer list is for balancing, and each costs a socket."""


async def dial(address: Address, resolve: Resolve = names.resolve) -> socket.socket:
    """A connection to `address` over whichever of its endpoints answers first: a non-blocking socket, the
    caller's to close. Has no deadline of its own. Raises OSError, or LimitError as `names.resolve` does.
    """
    return await connect(await resolve(address))


async def connect(endpoints: Sequence[Endpoint]) -> socket.socket:
    """The first connection that one of `endpoints` accepts: a non-blocking socket, the caller's to close. Of
    more than MAX_ADDRESSES the first are tried.

    Has no deadline of its own: the caller's cancellation ends all attempts. Raises the OSError of the last
    attempt that failed when all have.
    """
    if len(endpoints) == 1:
        return await _attempt(endpoints[0])
    waiting = list(endpoints[:MAX_ADDRESSES])
    running: set[asyncio.Task[socket.socket]] = set()
    failure: OSError = OSError("no address to connect to")
    try:
        while waiting or running:
            if waiting:
                endpoint = waiting.pop(0)
                running.add(spawn(_attempt(endpoint), name=f"connect to {endpoint[1][0]}"))
            done, running = await asyncio.wait(
                running, timeout=HEAD_START_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    return _keep_one(done, task)
                if not isinstance(error, OSError):
                    raise error
                failure = error
        raise failure
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_late)  # it may have connected in this very moment


def _keep_one(
    done: Iterable[asyncio.Task[socket.socket]], kept: asyncio.Task[socket.socket]
) -> socket.socket:
    """The socket of `kept`; those of others that came in the same moment are closed."""
    for task in done:
        if task is not kept and task.exception() is None:
            task.result().close()
    return kept.result()


def _close_late(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _attempt(endpoint: Endpoint) -> socket.socket:
    family, name = endpoint
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _connected(sock, name)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    return sock


async def _connected(sock: socket.socket, name: tuple[str, int] | tuple[str, int, int, int]) -> None:
    """As the loop's sock_connect, which would have a thread look up what is an address already (65 µs)."""
    failure = sock.connect_ex(name)
    if failure == errno.EINPROGRESS:
        loop = asyncio.get_running_loop()
        writable: asyncio.Future[None] = loop.create_future()
        loop.add_writer(sock, _set, writable)
        try:
            await writable
        finally:
            loop.remove_writer(sock)
        failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failure:
        raise OSError(failure, os.strerror(failure))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # it may be told twice
        future.set_result(None)
