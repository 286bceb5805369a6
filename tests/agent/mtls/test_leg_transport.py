"""An HTTP/2 connection on a leg: whose turn it is. `test_http_ends.py` has what passes."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from agent.mtls import leg_transport
from agent.mtls.http_connection import LIMITS
from agent.mtls.leg_transport import LegTransport
from shared.net.http2.connection import Connection
from shared.net.legs.tls import TlsServerLeg
from tests.agent.proxy.test_http1_server import FakeLeg
from tests.support.attack_frames import PREFACE, settings


class Leg(FakeLeg):
    """With what a transport is asked for beside."""

    def set_write_buffer_limits(self, high: int | None) -> None: ...

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


async def test_work_that_takes_long_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop reads up to 32 times while reads are full, and the connection measures larger reads only."""
    monkeypatch.setattr(leg_transport, "FAIR_S", 0.0)
    leg = Leg()
    connection = Connection(client=False, limits=LIMITS)
    transport = LegTransport(cast(TlsServerLeg, leg), connection)
    transport.begin(b"")
    transport.received(leg, PREFACE + settings({}))
    assert not leg.reads
    await asyncio.sleep(0)
    assert leg.reads
    transport.received(leg, settings({}))
    transport.pause_reading()
    await asyncio.sleep(0)
    assert not leg.reads, "the connection's own pause stays"
    transport.resume_reading()
    assert leg.reads
    transport.lost(None)
