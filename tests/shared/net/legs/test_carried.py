"""A protocol in the bytes of a tunnel. What runs on it elsewhere: HTTP/2 (`test_connection_leg`), TLS (krun's
`test_inner_hbone`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from shared.errors import HboneError
from shared.net.http2.connection import Connection
from shared.net.legs.carried import CarriedLeg
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.read_buffer import READ_BUFFER, READ_BYTES
from shared.net.legs.stream import Stream
from shared.net.legs.tcp_end import unread
from tests.shared.net.loopback import until


class Told(asyncio.BufferedProtocol):
    """A protocol that writes down what it is told, and what it finds unread when its connection is lost."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.data = b""
        self.calls: list[str] = []
        self.keeps_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.calls.append("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self.data += bytes(READ_BUFFER[:nbytes])

    def eof_received(self) -> bool:
        self.calls.append("ended")
        return self.keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        self.data += unread(self.transport)
        self.calls.append(f"lost: {exc}" if exc else "lost")

    def pause_writing(self) -> None:
        self.calls.append("full")

    def resume_writing(self) -> None:
        self.calls.append("room")


class Relay:
    """The other end of the leg."""

    def __init__(self) -> None:
        self.data = b""
        self.calls: list[str] = []

    def received(self, leg: Leg, data: Buffer) -> None:
        self.data += bytes(data)

    def ended(self, leg: Leg) -> None:
        self.calls.append("ended")

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.calls.append(f"failed: {error}")

    def full(self, leg: Leg) -> None:
        self.calls.append("full")

    def drained(self, leg: Leg) -> None:
        self.calls.append("drained")


class Case:
    def __init__(self) -> None:
        connection = Connection(client=True)
        state = connection.session.open_stream([(b":method", b"GET")])
        self.told = Told()
        self.relay = Relay()
        self.leg = CarriedLeg(self.told, Stream(connection, state))
        self.leg.join(self.relay)


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    yield Case()


async def test_bytes_go_both_ways(case: Case) -> None:
    case.leg.write(b"hello")
    assert case.told.data == b"", "not in this turn: the buffer may be whose bytes these are"
    await until(lambda: case.told.data == b"hello")
    case.told.transport.write(b"world")
    assert case.relay.data == b"world"


async def test_each_direction_ends_by_itself(case: Case) -> None:
    case.told.transport.write_eof()
    case.told.transport.write(b"too late")
    assert (case.relay.calls, case.relay.data) == (["ended"], b"")
    case.leg.write(b"still read")
    case.leg.write_eof()
    await until(lambda: case.told.calls == ["made", "ended"])
    assert case.told.data == b"still read"
    case.leg.close()
    await until(lambda: case.told.calls[-1] == "lost")


async def test_a_protocol_that_closes_with_its_peer(case: Case) -> None:
    case.told.keeps_open = False
    case.leg.write_eof()
    await until(lambda: case.told.calls == ["made", "ended", "lost"])
    assert case.relay.calls == ["ended", "failed: connection closed by us"]


async def test_what_has_come_before_a_reset_can_be_read(case: Case) -> None:
    case.leg.write(b"the last")
    case.leg.abort()
    await until(lambda: len(case.told.calls) > 1)
    assert case.told.data == b"the last"
    assert case.told.calls == ["made", "lost: the tunnel that carried it is gone"]


async def test_a_paused_protocol_holds_its_peer_back(case: Case) -> None:
    case.told.transport.pause_reading()
    case.leg.write(bytes(2 * READ_BYTES))
    await asyncio.sleep(0)
    assert (case.told.data, case.relay.calls) == (b"", ["full"])
    assert case.leg.buffered_bytes == 2 * READ_BYTES
    case.told.transport.resume_reading()
    await until(lambda: len(case.told.data) == 2 * READ_BYTES)
    assert case.relay.calls[-1] == "drained"


async def test_one_that_is_aborted_is_gone(case: Case) -> None:
    case.told.transport.abort()
    assert case.told.transport.is_closing()
    case.told.transport.write(b"too late")
    await until(lambda: case.told.calls == ["made", "lost"])
    assert (case.relay.calls, case.relay.data) == (["failed: connection closed by us"], b"")
