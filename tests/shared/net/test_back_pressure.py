"""A whole tunnel whose reader does not read: what the process holds is bounded, and others go on.

Counted is what the process itself buffers: the transports' write buffers, what streams hold for a window to
open, and what a paused leg may still push. The kernel's socket buffers are its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import cast

import pytest

from shared.http2 import window_growth
from shared.http2.session import SessionLimits
from shared.net.http2.connection import CONGESTED_BYTES
from shared.net.legs.read_buffer import BULK_READ_BYTES, READ_BYTES
from shared.net.legs.stream import Stream
from shared.net.legs.tcp import TcpLeg
from tests.shared.net.loopback import FIN, Peer, World, turn, until

MIB = 1 << 20
BULK = random.Random(3).randbytes(MIB)
MUCH = 64
"""MiB: several times what socket buffers, windows and legs take together."""

LIMITS = SessionLimits()

GROWTH_BYTES = 8 * MIB
"""By which all windows together may grow here."""

TCP_MARK = 64 << 10
"""uvloop's own mark for a transport's write buffer."""


@pytest.fixture(autouse=True)
def growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_growth.PROCESS, "most", lambda: GROWTH_BYTES)


def tcp_unsent(world: World) -> Iterable[int]:
    """The write buffers of the TCP legs."""
    for relay in world.gateway_relays:
        yield cast("TcpLeg", relay.downstream)._transport.get_write_buffer_size()
    for relay in world.agent_relays:
        yield cast("TcpLeg", relay.upstream)._transport.get_write_buffer_size()


def stream_waiting(world: World) -> Iterable[int]:
    """What streams hold until a window opens."""
    for relay in world.gateway_relays:
        yield len(cast("Stream", relay.upstream).waiting)
    for relay in world.agent_relays:
        yield len(cast("Stream", relay.downstream).waiting)


def connections_unsent(world: World) -> Iterable[int]:
    for end in world.ends:
        assert end._transport is not None
        yield end._transport.get_write_buffer_size() + end.session.pending_bytes


def check_bounds(world: World) -> None:
    """What each leg and connection holds, against its mark and what a paused leg may push after that."""
    windows = max(state.window for end in world.ends for state in end.session.streams.values())
    assert windows <= LIMITS.stream_window_bytes + GROWTH_BYTES
    assert max(tcp_unsent(world)) <= TCP_MARK + LIMITS.stream_window_bytes + GROWTH_BYTES
    assert max(stream_waiting(world)) <= BULK_READ_BYTES
    streams = max(end.open_streams for end in world.ends)
    most = CONGESTED_BYTES + BULK_READ_BYTES + (streams + 1) * READ_BYTES
    assert max(connections_unsent(world)) <= most
    for end in world.ends:
        held = sum(state.held for state in end.session.streams.values())
        assert held <= LIMITS.connection_window_bytes + GROWTH_BYTES


async def stalled(world: World, sender: Peer) -> None:
    """Returns when the tunnel takes no more of what `sender` has to send."""
    quiet_turns = 0
    moved = -1
    while quiet_turns < 200:
        check_bounds(world)
        now = sum(
            relay.received_bytes + relay.sent_bytes for relay in world.gateway_relays + world.agent_relays
        )
        quiet_turns = quiet_turns + 1 if now == moved else 0
        moved = now
        await turn()
    assert sender.is_sending


async def taken(world: World, sender: Peer) -> None:
    """Returns when all that `sender` had to send has been taken."""
    while sender.is_sending:
        check_bounds(world)
        await turn()


@pytest.mark.parametrize("slow", ["client", "app"])
async def test_an_end_that_does_not_read(slow: str) -> None:
    async with World.running() as world:
        client, app = await world.tunnel()
        reader, sender = (client, app) if slow == "client" else (app, client)
        sender.send_soon(BULK * MUCH)
        await until(lambda: bool(world.gateway_relays and world.agent_relays))
        await until(lambda: max(stream_waiting(world)) > 0)
        await stalled(world, sender)
        gateway, agent = world.gateway_relays[0], world.agent_relays[0]
        assert (agent.received_bytes if slow == "client" else gateway.sent_bytes) < MUCH * MIB
        reader.start_reading()
        await taken(world, sender)
        sender.fin()
        assert await reader.ended() == FIN
        assert bytes(reader.received) == BULK * MUCH
        reader.fin()
        await world.over()


async def test_stalled_tunnels_do_not_stop_another_on_their_connection() -> None:
    async with World.running() as world:
        stuck = [await world.tunnel() for _ in range(8)]
        for client, app in stuck:
            app.send_soon(BULK * 16)
            client.send_soon(BULK * 16)
        await until(lambda: len(world.gateway_relays) == 8 and min(stream_waiting(world)) > 0)
        client, app = await world.tunnel()
        assert len(world.connections) == 1
        client.start_reading()
        app.start_reading()
        for _ in range(20):
            client.send_soon(BULK)
            app.send_soon(BULK)
            await client.all_sent()
            await app.all_sent()
            check_bounds(world)
        client.fin()
        app.fin()
        assert (await client.ended(), await app.ended()) == (FIN, FIN)
        assert bytes(client.received) == bytes(app.received) == BULK * 20
        for client, app in stuck:
            await client.rst()
            await app.close()
        await world.over()


async def test_tunnels_share_a_connection_fairly() -> None:
    async with World.running() as world:
        pairs = [await world.tunnel() for _ in range(4)]
        for client, app in pairs:
            client.start_reading()
            app.send_soon(BULK * 16)
        await until(lambda: any(not app.is_sending for _, app in pairs))
        shares = [len(client.received) for client, _ in pairs]
        assert min(shares) > max(shares) / 3, shares
        for client, app in pairs:
            await client.rst()
            await app.close()
        await world.over()
