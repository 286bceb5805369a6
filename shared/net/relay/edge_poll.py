"""Readiness of bare sockets, edge-triggered, beside the event loop and turned by it.

Why not the loop's add_reader and add_writer: under back pressure they are set and unset at every stall, each
time with a new handle and two or three epoll_ctl(2); after EPOLLERR uvloop calls once and then never again;
and an edge has to be armed once only. So there is one epoll descriptor of our own, which the loop watches.

The rules:

1. `ready(fd, events)` tells that something has changed since the last call. It is a hint: what is tried then
   may still say EAGAIN. What is not used up by then is not told again: see `again`.
2. A socket is to be forgotten before it is closed: where its connection has another descriptor still, as the
   event loop's transports do for a turn, closing would leave it in epoll's set (epoll(7), Q6).
"""

from __future__ import annotations

import asyncio
import select
from typing import Protocol

EVENTS_PER_TURN = 256
"""Sockets told of in one go; for more there is the next turn of the loop, after others had theirs."""

_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET

ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
"""FIN or RST has come: behind the bytes that are there now is the end of them."""


class Ready(Protocol):
    """Who has bare sockets."""

    def ready(self, fd: int, events: int) -> None:
        """Something has changed for the descriptor `fd`: bits of epoll(7)."""

    def next_turn(self) -> None:
        """Its next turn has come, for which it asked with `again`."""


class EdgePoll:
    """Watches sockets of the running event loop, from `open` or the first one on until `close`."""

    __slots__ = ("_epoll", "_loop", "_owners")

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._loop: asyncio.AbstractEventLoop
        self._owners: dict[int, Ready] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def open(self) -> None:
        """Takes its descriptor, if it has none yet. Raises OSError if there is none left."""
        if self._epoll is None:
            self._loop = asyncio.get_running_loop()
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._turn)

    def watch(self, fd: int, owner: Ready) -> None:
        """From now on, and for how it is now, `owner` is told of `fd`.

        Raises OSError if there is no descriptor, or no memory for one more watch.
        """
        self.open()
        assert self._epoll is not None
        self._epoll.register(fd, _EVENTS)
        self._owners[fd] = owner

    def forget(self, fd: int) -> None:
        """Tells no more of `fd`; to be called before it is closed (rule 2)."""
        if self._owners.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)

    def again(self, owner: Ready) -> None:
        """Calls `owner.next_turn()` when others had their turn."""
        self._loop.call_soon(owner.next_turn)

    def close(self) -> None:
        """Forgets everything."""
        self._owners.clear()
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _turn(self) -> None:
        if self._epoll is None:
            return
        owners = self._owners
        for fd, events in self._epoll.poll(0, EVENTS_PER_TURN):
            owner = owners.get(fd)  # None: forgotten by one before it in this very turn
            if owner is not None:
                owner.ready(fd, events)
