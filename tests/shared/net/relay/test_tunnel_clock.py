"""Silence and age of tunnels, on a clock that jumps; what a relay makes of it has `test_relay.py`."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.errors import HboneError, IdleError, LifetimeError, LifetimeResetError
from shared.net.relay.tunnel_clock import (
    GRACE,
    JITTER,
    QUIET_S,
    TunnelClock,
)
from tests.shared.net.hasty_loop import hasty

HOUR_S = 3600.0
LIFETIME_S = 600.0


class Tunnel:
    """What the clock sees of a tunnel."""

    def __init__(self, *, at_rest: bool = True) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.over = False
        self.at_rest = at_rest
        self.broken_downstream = False
        self.born = self.now
        self.ended_at = 0.0
        self.error: HboneError | None = None

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def age_s(self) -> float:
        """How old it became."""
        return self.ended_at - self.born

    def abort(self, error: HboneError) -> None:
        assert not self.over
        self.over = True
        self.error = error
        self.ended_at = self.now

    def expire(self, error: HboneError) -> bool:
        if self.at_rest:
            self.abort(error)
        return self.at_rest


@hasty
async def test_a_silent_tunnel_is_reset() -> None:
    clock = TunnelClock(HOUR_S)
    silent, talking = Tunnel(), Tunnel()
    clock.watch(silent)
    clock.watch(talking)
    for _ in range(10):
        await asyncio.sleep(HOUR_S / 5)
        talking.received_bytes += 1
    assert isinstance(silent.error, IdleError)
    assert str(silent.error) == "no byte either way for 3600 s, which is the idle timeout"
    assert HOUR_S <= silent.age_s <= HOUR_S * 1.05
    assert not talking.over
    await asyncio.sleep(HOUR_S * 1.1)
    assert isinstance(talking.error, IdleError)
    clock.close()


@pytest.mark.parametrize("way", ["sent_bytes", "received_bytes"])
@hasty
async def test_one_byte_either_way_is_enough(way: str) -> None:
    clock = TunnelClock(100)
    tunnel = Tunnel()
    clock.watch(tunnel)
    for _ in range(20):
        await asyncio.sleep(90)
        setattr(tunnel, way, getattr(tunnel, way) + 1)
    assert not tunnel.over
    clock.close()


@hasty
async def test_without_deadlines_nothing_is_looked_at() -> None:
    clock = TunnelClock()
    tunnel = Tunnel()
    clock.watch(tunnel)
    assert not clock._sweep.running
    await asyncio.sleep(10 * HOUR_S)
    assert not tunnel.over
    clock.idle_s = 60
    await asyncio.sleep(70)
    assert isinstance(tunnel.error, IdleError), "a change counts for open tunnels"
    clock.close()


@hasty
async def test_switched_off_again() -> None:
    clock = TunnelClock(60)
    tunnel = Tunnel()
    clock.watch(tunnel)
    await asyncio.sleep(50)
    clock.idle_s = 0
    await asyncio.sleep(HOUR_S)
    assert not tunnel.over
    assert not clock._sweep.running


@hasty
async def test_a_tunnel_at_rest_ends_gently_before_its_lifetime_is_over() -> None:
    clock = TunnelClock(lifetime_s=LIFETIME_S)
    tunnels = [Tunnel() for _ in range(200)]
    for tunnel in tunnels:
        clock.watch(tunnel)
    await asyncio.sleep(LIFETIME_S)
    assert {type(tunnel.error) for tunnel in tunnels} == {LifetimeError}
    ages = sorted(tunnel.age_s for tunnel in tunnels)
    assert ages[0] >= LIFETIME_S * (1 - JITTER - GRACE)
    assert ages[-1] <= LIFETIME_S * (1 - GRACE) + LIFETIME_S * GRACE / 20 + 1
    assert ages[150] - ages[50] > LIFETIME_S * JITTER / 4, "they do not all end together"
    clock.close()


@hasty
async def test_a_busy_tunnel_ends_in_its_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)  # so that there is time for a pause
    clock = TunnelClock(lifetime_s=LIFETIME_S)
    tunnel = Tunnel()
    clock.watch(tunnel)
    while tunnel.now - tunnel.born < LIFETIME_S * (1 - GRACE):
        await asyncio.sleep(QUIET_S - 1)
        tunnel.sent_bytes += 1
    assert not tunnel.over
    await asyncio.sleep(2 * QUIET_S)
    assert isinstance(tunnel.error, LifetimeError)
    clock.close()


@pytest.mark.parametrize("busy", [True, False])
@hasty
async def test_a_tunnel_that_is_never_at_rest_is_reset_in_the_end(busy: bool) -> None:
    """Busy, or with bytes that wait for a peer who does not read."""
    clock = TunnelClock(lifetime_s=LIFETIME_S)
    tunnel = Tunnel(at_rest=busy)
    clock.watch(tunnel)
    while not tunnel.over:
        await asyncio.sleep(QUIET_S - 1)
        tunnel.sent_bytes += busy
    assert isinstance(tunnel.error, LifetimeResetError)
    assert LIFETIME_S * (1 - JITTER) <= tunnel.age_s <= LIFETIME_S * (1 + GRACE / 20) + 1
    clock.close()


@hasty
async def test_a_lifetime_of_its_own() -> None:
    clock = TunnelClock(lifetime_s=LIFETIME_S)
    longer, shorter, unending = Tunnel(), Tunnel(), Tunnel()
    clock.watch(longer)
    clock.watch(shorter, 60)
    clock.watch(unending, 0)
    await asyncio.sleep(61)
    assert shorter.age_s < 60, "though the clock was set for the longer one"
    await asyncio.sleep(LIFETIME_S)
    assert longer.over and not unending.over
    clock.close()


@hasty
async def test_a_tunnel_that_is_over_is_forgotten() -> None:
    clock = TunnelClock(60)
    over, ended, forgotten = Tunnel(), Tunnel(), Tunnel()
    over.over = True
    clock.watch(over)
    clock.watch(ended)
    clock.watch(forgotten)
    ended.over = True
    clock.forget(forgotten)
    clock.forget(forgotten)
    await asyncio.sleep(100)
    assert not forgotten.over
    clock.forget(ended)
    await asyncio.sleep(100)
    assert not clock._sweep.running, "nothing is left to look at"


@hasty
async def test_a_deadline_wakes_nobody_once_closed() -> None:
    clock = TunnelClock(60, 60)
    tunnel = Tunnel()
    clock.watch(tunnel)
    clock.close()
    await asyncio.sleep(HOUR_S)
    assert not tunnel.over
