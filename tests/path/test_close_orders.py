"""Orders of FIN and RST through hgate and krun as processes, byte for byte; drains and deaths in the middle.

The bytes are plain ones behind a real ClientHello: what a TLS library would do with an end is not looked at
here. How each end is judged is `tests/support/close_model.py`'s.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hbone.demo.processes import Process
from shared.address import Address
from shared.errors import EXIT_OK
from shared.tasks import spawn
from tests.shared.net.loopback import until
from tests.support.close_model import FIN, RST, Carried, End
from tests.support.hellos import hello
from tests.support.world import PATIENCE_S, word_after

FEW = 1000
MUCH = 3 << 20
"""More than every window and buffer of ours; the kernel may hold as much."""

SMALL_BUFFER_BYTES = 64 << 10

ACKNOWLEDGED_S = 0.05
"""After which the kernel has acknowledged what it has room for: RST then destroys nothing."""

DRAIN_S = 1.0
"""Of the processes that are to give up in the middle."""


class Passage:
    """hgate, krun, and a listening app."""

    def __init__(self, folder: Path, drain_s: float) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        self.listener.setblocking(False)
        krun = {
            "XDS_ADDR": "-",
            "HBONE_LISTEN": "127.0.0.1:0",
            "HBONE_INBOUND": "none",
            "HBONE_STARTUP_PROBE": "-",
            "HBONE_INBOUND_LISTEN": str(Address(*self.listener.getsockname())),
            "HBONE_DRAIN_TIMEOUT": str(drain_s),
            "HBONE_LOG_FORMAT": "json",
        }
        self.krun = Process("krun", ["-m", "agent"], krun, folder)
        file = folder / "hgate.yaml"
        file.write_text(
            f"""\
listen: ["127.0.0.1:0"]
admin: off
metrics: off
health: off
limits: {{drain_timeout: {drain_s}s}}
routes:
  - host: "*.demo.svc.cluster.local"
    tunnel: "http://{{service}}.example/_hbone/15003"
    connect: "{word_after(self.krun, "tunnels on ")}"
    token: none
"""
        )
        self.hgate = Process(
            "hgate", ["-m", "gateway", "--config", str(file), "--log-format", "json"], {}, folder
        )
        self.gateway = Address.parse(word_after(self.hgate, "listening on "))

    async def open(self) -> Carried:
        """A connection whose app has got the hello."""
        loop = asyncio.get_running_loop()
        near = socket.socket()
        near.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        said = hello()
        async with asyncio.timeout(PATIENCE_S):
            await loop.sock_connect(near, (self.gateway.host, self.gateway.port))
            client = End("client", near, 0, said)
            client.send(len(said))
            far, _ = await loop.sock_accept(self.listener)
        return Carried(client, End("app", far, 1))


@contextmanager
def path(folder: Path, drain_s: float = DRAIN_S) -> Iterator[Passage]:
    running = Passage(folder, drain_s)
    try:
        yield running
    finally:
        for process in (running.hgate, running.krun):
            process.stop()
        running.listener.close()


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Passage]:
    with path(tmp_path_factory.mktemp("close")) as running:
        yield running


async def settled(carried: Carried) -> None:
    """Everybody reads and ends; holds what has to hold, and lets go."""
    carried.settle()
    await until(lambda: carried.settled)
    carried.look()
    for end in carried.ends:
        if not end.gone:
            end.break_off()


# The orders. Each plays one, the client and the app in either role; what must have come is in the table.


async def ends_first(one: End, other: End, size: int) -> None:
    one.send(size)
    one.finish()
    other.read()
    await until(lambda: bool(other.end))
    other.send(size)
    other.finish()


async def both_at_once(one: End, other: End, size: int) -> None:
    for end in (one, other):
        end.send(size)
        end.finish()


async def breaks_off(one: End, other: End, size: int) -> None:
    one.send(size)
    other.send(size)
    other.read()
    await until(lambda: len(other.received) > 0)
    one.break_off()


async def breaks_off_after_the_others_end(one: End, other: End, size: int) -> None:
    other.send(size)
    other.finish()
    one.read()
    await until(lambda: bool(one.end))
    one.send(size)
    one.break_off()


async def ends_and_is_gone(one: End, other: End, size: int) -> None:
    """While the other still sends. By the app: an upload that is refused early."""
    one.send(size)
    one.finish()
    other.read()
    await until(lambda: one.has_ended)
    await asyncio.sleep(ACKNOWLEDGED_S)
    one.break_off()
    other.send(size)


async def slow_reader(one: End, other: End, size: int) -> None:
    other.send(size)
    other.finish()
    one.finish()
    for _ in range(10):
        one.read()
        await asyncio.sleep(0)
        one.stop_reading()
        await asyncio.sleep(0.02)


ORDERS: dict[Callable[[End, End, int], Awaitable[None]], tuple[str, str]] = {
    ends_first: (FIN, FIN),
    both_at_once: (FIN, FIN),
    breaks_off: ("", RST),
    breaks_off_after_the_others_end: (FIN, RST),
    ends_and_is_gone: ("", FIN),
    slow_reader: (FIN, FIN),
}
"""What the one and the other see in the end."""


@pytest.mark.parametrize("size", [0, FEW, MUCH])
@pytest.mark.parametrize("who", ["client", "app"])
@pytest.mark.parametrize("order", ORDERS)
async def test_orders(
    shared_path: Passage, order: Callable[[Any, Any, int], Awaitable[None]], who: str, size: int
) -> None:
    carried = await shared_path.open()
    one, other = carried.ends if who == "client" else reversed(carried.ends)
    await order(one, other, max(size, 1) if "breaks_off" in order.__name__ else size)
    await settled(carried)
    if size < MUCH or "gone" not in order.__name__:  # else not all may have been acknowledged
        assert (one.end, other.end) == ORDERS[order]


# A drain in the middle.


@pytest.mark.parametrize("who", ["hgate", "krun"])
async def test_a_tunnel_that_ends_during_a_drain(who: str, tmp_path: Path) -> None:
    with path(tmp_path, drain_s=PATIENCE_S) as running:
        carried = await running.open()
        client, app = carried.ends
        client.read()
        app.send(MUCH // 2)
        await until(lambda: len(client.received) > 0)
        stopping = spawn(asyncio.to_thread(getattr(running, who).stop), name="stop")
        process = getattr(running, who)
        await asyncio.to_thread(process.wait_for, lambda record: "draining" in str(record.get("message")))
        client.send(MUCH)
        client.finish()
        app.send(MUCH // 2)
        app.finish()
        await settled(carried)
        assert (client.end, app.end) == (FIN, FIN)
        assert await stopping == EXIT_OK


@pytest.mark.parametrize("how", ["drained for too long", "killed"])
@pytest.mark.parametrize("who", ["hgate", "krun"])
async def test_a_tunnel_that_outlasts_its_process(who: str, how: str, tmp_path: Path) -> None:
    """Of one that is killed the kernel would say FIN."""
    with path(tmp_path) as running:
        carried = await running.open()
        client, app = carried.ends
        client.read()
        app.read()
        app.send(FEW)
        await until(lambda: len(client.received) == FEW and len(app.received) == client.sent)
        process = getattr(running, who)
        await asyncio.to_thread(process._process.kill if how == "killed" else process.stop)
        carried.disturbed = True
        await until(lambda: carried.settled)
        carried.look()
        assert (client.end, app.end) == (RST, RST)
        for end in carried.ends:
            end.close()


@pytest.mark.parametrize("who", ["hgate", "krun"])
async def test_last_bytes_that_nobody_takes_are_never_ended_with_fin(who: str, tmp_path: Path) -> None:
    """Both have ended, and the drain is over while the last bytes still wait: RST, for it is not all."""
    with path(tmp_path) as running:
        carried = await running.open()
        client, app = carried.ends
        for end in (client, app):
            end.send(MUCH)
            end.finish()
        await asyncio.sleep(0.2)
        await asyncio.to_thread(getattr(running, who).stop)
        carried.disturbed = True
        for end in (client, app):
            end.read()
        await until(lambda: carried.settled)
        carried.look()
        for end in carried.ends:
            end.close()
