"""Who gets the next tunnel, and who waits for somebody to give it to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from gateway.reverse.registry import Registration, Registry
from shared.errors import DialError, LimitError
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.support.tcp_peer import PATIENCE_S

NAME = "hello.svc"
IDENTITY = SpiffeId.of_workload("demo.local", "demo", "hello")


@dataclass
class Load:
    """As much of a connection as the registry looks at."""

    open_streams: int = 0
    room: int = 1


def registration(name: str = NAME, open_streams: int = 0, room: int = 1) -> Registration:
    return Registration(name, IDENTITY, Load(open_streams, room), "192.0.2.1:1", 0.0)


@pytest.fixture
def registry() -> Registry:
    return Registry(most_names=2, most_per_name=3)


def test_whoever_has_fewest_streams_and_room(registry: Registry) -> None:
    full, busy, idle = registration(room=0), registration(open_streams=2), registration(open_streams=1)
    for it in (full, busy, idle):
        registry.add(it)
    assert registry.best(NAME) is idle
    registry.discard(idle)
    assert registry.best(NAME) is busy
    registry.discard(busy)
    assert registry.best(NAME) is None


def test_equals_take_turns(registry: Registry) -> None:
    one, two, three = (registration() for _ in range(3))
    for it in (one, two, three):
        registry.add(it)
    assert [registry.best(NAME) for _ in range(4)] == [one, two, three, one]


def test_the_bounds(registry: Registry) -> None:
    for _ in range(3):
        registry.add(registration())
    with pytest.raises(LimitError, match="3 connections have this name"):
        registry.add(registration())
    registry.add(registration("other.svc"))
    with pytest.raises(LimitError, match="2 names are registered"):
        registry.add(registration("third.svc"))
    assert (len(registry), len(registry.names)) == (4, 2)


def test_a_name_without_workloads_is_none(registry: Registry) -> None:
    it = registration()
    registry.add(it)
    registry.discard(it)
    registry.discard(it)  # its connection may end in two ways at once
    assert registry.names == {}


async def wait(registry: Registry, timeout_s: float) -> None:
    await registry.wait(NAME, asyncio.get_running_loop().time() + timeout_s, timeout_s)


async def test_waiting_ends_when_somebody_comes(registry: Registry) -> None:
    waits = [spawn(wait(registry, PATIENCE_S), name="wait") for _ in range(2)]
    await asyncio.wait(waits, timeout=0)
    registry.add(registration("other.svc"))
    await asyncio.wait(waits, timeout=0)
    assert not any(task.done() for task in waits)
    registry.add(registration())
    await asyncio.gather(*waits)
    assert registry._waiters == {}


async def test_waiting_in_vain(registry: Registry) -> None:
    with pytest.raises(DialError, match=f"^reverse {NAME}: no workload has registered it$"):
        await wait(registry, 0.0)
    registry.add(registration(room=0))
    with pytest.raises(DialError, match=r"1 workloads have no free stream within 0.01 s$"):
        await wait(registry, 0.01)
    assert registry._waiters == {}
