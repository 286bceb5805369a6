"""A name is looked up again and again, at its times, whatever becomes of the look-ups."""

from __future__ import annotations

import asyncio
import socket

from shared.address import Address
from shared.net.names.endpoint import Endpoint
from shared.net.pool.name_watch import JITTER, NameWatch
from tests.shared.net.hasty_loop import hasty

NAME = Address("service.example", 443)


class Resolver:
    """Answers as it is told, and notes when it was asked."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.error: OSError | None = None
        self.hangs = False

    async def resolve(self, address: Address) -> list[Endpoint]:
        self.asked.append(round(asyncio.get_running_loop().time() - self.started, 1))
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return [
            (socket.AF_INET, ("10.0.0.1", address.port)),
            (socket.AF_INET6, ("2001:db8::1", address.port, 0, 0)),
        ]

    def watch(self, address: Address = NAME, chance: float = 0.0) -> NameWatch:
        self.started = asyncio.get_running_loop().time()
        self.found: list[set[str]] = []
        return NameWatch(address, self.resolve, chance=lambda: chance, found=self.found.append)


@hasty
async def test_at_its_times() -> None:
    resolver = Resolver()
    watch = resolver.watch()
    watch.start(30.0, 10.0)
    watch.start(30.0, 10.0)
    await asyncio.sleep(100)
    assert [round(at / 30) for at in resolver.asked] == [1, 2, 3]
    assert resolver.found == [{"10.0.0.1:443", "[2001:db8::1]:443"}] * 3
    watch.stop()
    await asyncio.sleep(100)
    assert len(resolver.asked) == 3


@hasty
async def test_earlier_by_chance() -> None:
    resolver = Resolver()
    watch = resolver.watch(chance=1.0)
    watch.start(30.0, 10.0)
    await asyncio.sleep(30 * (1 - JITTER) + 0.5)
    assert len(resolver.asked) == 1
    watch.stop()


@hasty
async def test_failures_and_silence_say_nothing() -> None:
    resolver = Resolver()
    watch = resolver.watch()
    resolver.error = socket.gaierror(-2, "Name or service not known")
    watch.start(30.0, 10.0)
    await asyncio.sleep(31)
    resolver.hangs = True
    await asyncio.sleep(30)
    assert (len(resolver.asked), resolver.found) == (2, [])
    resolver.hangs, resolver.error = False, None
    await asyncio.sleep(45)
    assert len(resolver.found) == 1
    watch.stop()


@hasty
async def test_an_answer_after_the_end_is_dropped() -> None:
    resolver = Resolver()
    watch = resolver.watch()
    resolver.hangs = True
    watch.start(30.0, 10.0)
    await asyncio.sleep(31)
    watch.stop()
    await asyncio.sleep(60)
    assert (len(resolver.asked), resolver.found) == (1, [])


@hasty
async def test_addresses_and_an_interval_of_zero_need_no_look() -> None:
    resolver = Resolver()
    for watch in (resolver.watch(Address("10.0.0.1", 443)), resolver.watch(Address("::1", 443))):
        watch.start(30.0, 10.0)
    resolver.watch().start(0.0, 10.0)
    await asyncio.sleep(100)
    assert resolver.asked == []
