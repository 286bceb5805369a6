from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.net.relay.edge_poll import ENDS, EdgePoll
from tests.shared.net.loopback import turns, until
from tests.shared.net.relay.test_splice import connected_pair
from tests.support.few_files import most_open_files


class Owner:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.turns = 0

    def ready(self, fd: int, events: int) -> None:
        self.told.append((fd, events))

    def next_turn(self) -> None:
        self.turns += 1


@pytest.fixture
async def edges() -> AsyncIterator[EdgePoll]:
    await asyncio.sleep(0.01)  # the event loop's own descriptors come with its first turns
    before = len(os.listdir("/proc/self/fd"))
    edges = EdgePoll()
    yield edges
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = connected_pair()
    with near, far:
        yield near, far


async def test_how_it_is_now_is_told_once(edges: EdgePoll, pair: tuple[socket.socket, socket.socket]) -> None:
    owner, (near, far) = Owner(), pair
    far.send(b"x")
    edges.watch(near.fileno(), owner)
    await until(lambda: bool(owner.told))
    await turns(10)
    assert owner.told == [(near.fileno(), select.EPOLLIN | select.EPOLLOUT)]
    far.send(b"y")
    await until(lambda: len(owner.told) == 2)
    edges.close()


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_ends_are_told(edges: EdgePoll, pair: tuple[socket.socket, socket.socket], how: str) -> None:
    owner, (near, far) = Owner(), pair
    edges.watch(near.fileno(), owner)
    await until(lambda: bool(owner.told))
    if how == "fin":
        far.shutdown(socket.SHUT_WR)
    else:
        near.send(b"unread")
        far.close()
    await until(lambda: bool(owner.told[-1][1] & ENDS))
    assert bool(owner.told[-1][1] & select.EPOLLERR) == (how == "rst")
    edges.close()


async def test_a_forgotten_socket_is_not_told_of_though_its_connection_lives_on(
    edges: EdgePoll, pair: tuple[socket.socket, socket.socket]
) -> None:
    """As a transport's does, from which it was taken: epoll knows connections, not descriptors."""
    owner, (near, far) = Owner(), pair
    again = near.dup()
    edges.watch(again.fileno(), owner)
    await until(lambda: bool(owner.told))
    owner.told.clear()
    edges.forget(again.fileno())
    again.close()
    edges.forget(-1)
    far.send(b"x")
    await turns(10)
    assert (owner.told, len(edges)) == ([], 0)
    edges.close()


async def test_two_of_one_turn_of_which_the_first_ends_the_second(edges: EdgePoll) -> None:
    class Ends(Owner):
        def ready(self, fd: int, events: int) -> None:
            super().ready(fd, events)
            for sock in socks:
                edges.forget(sock.fileno())

    owner = Ends()
    socks = [*connected_pair(), *connected_pair()]
    for sock in socks:
        edges.watch(sock.fileno(), owner)
    await until(lambda: bool(owner.told))
    await turns(10)
    assert len(owner.told) == 1
    for sock in socks:
        sock.close()
    edges.close()


async def test_another_turn(edges: EdgePoll, pair: tuple[socket.socket, socket.socket]) -> None:
    owner, (near, _) = Owner(), pair
    edges.watch(near.fileno(), owner)
    edges.again(owner)
    assert owner.turns == 0
    await turns(10)
    assert owner.turns == 1
    edges.close()


async def test_closed_by_who_is_told(edges: EdgePoll, pair: tuple[socket.socket, socket.socket]) -> None:
    class Closes(Owner):
        def ready(self, fd: int, events: int) -> None:
            super().ready(fd, events)
            edges.close()

    owner, (near, far) = Closes(), pair
    edges.watch(near.fileno(), owner)
    edges.watch(far.fileno(), owner)
    await until(lambda: bool(owner.told))
    await turns(10)
    assert len(owner.told) == 1


async def test_no_descriptor_left(edges: EdgePoll, pair: tuple[socket.socket, socket.socket]) -> None:
    owner, (near, _) = Owner(), pair
    with most_open_files(0), pytest.raises(OSError, match="Too many open files"):
        edges.watch(near.fileno(), owner)
    edges.watch(near.fileno(), owner)
    await until(lambda: bool(owner.told))
    edges.close()
