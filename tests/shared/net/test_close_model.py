"""Random orders of data, pauses, FIN, RST, GOAWAY and loss, played against the real engine byte for byte.

The rules that have to hold are in `tests/support/close_model.py`. What is between the ends here is the whole
tunnel of `loopback.py`, over TCP and over TLS, and half of it, with h2 as the other half. The orders that
people think of are in `test_close_orders.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar, cast

import hypothesis
import pytest
import uvloop
from h2.errors import ErrorCodes
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.http2.peer_settings import FIRST_WINDOW
from shared.http2.session import DATA_BYTES, SessionLimits
from shared.net.http2.connection import Connection
from tests.shared.conftest import Credentials
from tests.shared.net.loopback import ACKNOWLEDGED_S, World, until
from tests.support import http2_peer
from tests.support.close_model import MOST_BYTES, Carried, End, StreamEnd
from tests.support.tcp_peer import PATIENCE_S

T = TypeVar("T")

TUNNELS = 3
"""At once: enough for one to be in another's way."""

STEPS = 30
"""Of one example."""

SMALL_BUFFER_BYTES = 64 << 10
"""What kernels hold where little is to be held. With less than a segment of loopback TCP crawls from probe to
probe."""

SMALL_WINDOWS = SessionLimits(stream_window_bytes=FIRST_WINDOW, connection_window_bytes=FIRST_WINDOW)

TURNS = 8
"""Turns of the loop after each step: enough for a small piece to cross, not enough for a large one."""

SIZES = st.one_of(
    st.sampled_from(
        [
            *(edge + more for edge in (DATA_BYTES, 16384, FIRST_WINDOW, 1 << 16) for more in (-1, 0, 1)),
            *(1, 2, 1000, 1 << 18, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, MOST_BYTES),
        ]
    ),
    st.integers(1, 1 << 16),
    st.integers(1, 1 << 21),
)
"""Around everything that has a size: a frame, a TLS record, the first window, a read, a stream's window."""


class CloseOrders(RuleBasedStateMachine):
    """What all have in common: ends that are played, and the judgement."""

    carried_ones = Bundle("carried_ones")

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[Carried] = []
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._block = contextlib.AsyncExitStack()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        """Runs `step`, and the loop for some turns more."""

        async def stepped() -> T:
            async with asyncio.timeout(2 * PATIENCE_S):
                result = await step
            for _ in range(TURNS):
                await asyncio.sleep(0)
            return result

        return self._runner.run(stepped())

    def do(self, step: Callable[[], None]) -> None:
        """The same for what need not be waited for."""

        async def stepped() -> None:
            step()

        self.run(stepped())

    def ends(self) -> list[End | StreamEnd]:
        """Those that are still there."""
        return [end for carried in self.carried for end in carried.ends if not end.gone]

    # Steps.

    @precondition(lambda self: any(end.may_send for end in self.ends()))
    @rule(data=st.data(), size=SIZES)
    def send(self, data: st.DataObject, size: int) -> None:
        end = data.draw(st.sampled_from([end for end in self.ends() if end.may_send]))
        self.do(lambda: end.send(size))

    @precondition(lambda self: any(end.may_send for end in self.ends()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.do(data.draw(st.sampled_from([end for end in self.ends() if end.may_send])).finish)

    @precondition(lambda self: self.ends())
    @rule(data=st.data())
    def stop_reading(self, data: st.DataObject) -> None:
        self.do(data.draw(st.sampled_from(self.ends())).stop_reading)

    @precondition(lambda self: self.ends())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.do(data.draw(st.sampled_from(self.ends())).read)

    @precondition(lambda self: self.ends())
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        self.do(data.draw(st.sampled_from(self.ends())).break_off)

    @precondition(lambda self: self.ends())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.do(data.draw(st.sampled_from(self.ends())).close)

    @precondition(lambda self: any(end.may_send for end in self.ends()))
    @rule(data=st.data(), size=SIZES, patiently=st.booleans(), answer=SIZES)
    def answer_and_go(self, data: st.DataObject, size: int, patiently: bool, answer: int) -> None:
        """An end says all that it has to say, and is gone while the other one still talks."""
        carried, end = data.draw(
            st.sampled_from(
                [(carried, end) for carried in self.carried for end in carried.ends if end.may_send]
            )
        )
        other = carried.app if end is carried.client else carried.client

        async def steps() -> None:
            end.send(size)
            end.finish()
            if patiently:  # the kernel acknowledges within 40 ms
                await asyncio.sleep(ACKNOWLEDGED_S)
            end.break_off()

        self.run(steps())
        for count in (answer, 1):
            if other.may_send:
                self.do(lambda count=count: other.send(count))  # type: ignore[misc]  # a default

    @rule(turns=st.integers(1, 200))
    def wait(self, turns: int) -> None:
        async def wait() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(wait())

    # Judgement.

    @invariant()
    def look(self) -> None:
        for carried in self.carried:
            carried.look()

    async def _settled(self) -> None:
        try:
            await until(lambda: all(carried.settled for carried in self.carried))
        except TimeoutError:
            waiting = [carried.ends for carried in self.carried if not carried.settled]
            raise AssertionError(f"somebody waits for ever: {waiting}") from None

    def teardown(self) -> None:
        try:

            def settle() -> None:
                for carried in self.carried:
                    carried.settle()

            self.do(settle)
            self.run(self._settled())
            self.look()
        finally:
            for end in self.ends():
                self.do(end.break_off)
            self.run(self._block.aclose())
            self._runner.close()


class Tunnels(CloseOrders):
    """The whole tunnel: our engine at both ends of the connection."""

    credentials: ClassVar[Credentials | None] = None
    world: World

    @initialize(small_windows=st.booleans(), small_buffers=st.booleans())
    def begin(self, small_windows: bool, small_buffers: bool) -> None:
        files = self.credentials
        running = World.running(
            server_limits=SMALL_WINDOWS if small_windows else None,
            tls=None if files is None else (files.certificate, files.key, files.ca),
            buffer_bytes=SMALL_BUFFER_BYTES if small_buffers else None,
        )
        self.world = self.run(self._block.enter_async_context(running))

    @precondition(lambda self: len(self.carried) < TUNNELS)
    @rule()
    def open(self) -> None:
        async def opened() -> Carried:
            client, app = await self.world.tunnel()
            number = len(self.carried)
            await until(lambda: len(self.world.gateway_relays) == len(self.carried) + 1)
            return Carried(
                End(f"client {number}", client.sock, 2 * number),
                End(f"app {number}", app.sock, 2 * number + 1),
            )

        self.carried.append(self.run(opened()))

    @precondition(lambda self: self.world.ends)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """GOAWAY: nobody is harmed."""
        self.do(data.draw(st.sampled_from(self.world.ends)).drain)

    @precondition(lambda self: self.world.ends and self.carried)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The connection breaks, and with it what it carries."""
        end: Connection = data.draw(st.sampled_from(self.world.ends))
        for carried in self.carried:
            carried.disturbed = True  # all: which one is on which connection is not known here
        self.do(lambda: end.abort("lost"))


class Service(CloseOrders):
    """A service that h2 plays in place of krun: it does what our own engine would not."""

    world: World
    service: http2_peer.Service

    @initialize()
    def begin(self) -> None:
        self.service = self.run(self._block.enter_async_context(http2_peer.Service.listening()))
        running = World.running(service=self.service.port, buffer_bytes=SMALL_BUFFER_BYTES)
        self.world = self.run(self._block.enter_async_context(running))

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        result = super().run(step)
        self.pump()
        return result

    def pump(self) -> bool:
        for carried in self.carried:
            if isinstance(carried.app, StreamEnd):
                carried.app.pump()
        return False

    async def _settled(self) -> None:
        await until(lambda: self.pump() or all(carried.settled for carried in self.carried))

    @precondition(lambda self: len(self.carried) < TUNNELS)
    @rule()
    def open(self) -> None:
        async def opened() -> Carried:
            client = await self.world.client()
            stream = await self.service.request()
            stream.respond(200)
            number = len(self.carried)
            await until(lambda: len(self.world.gateway_relays) == number + 1)
            return Carried(
                End(f"client {number}", client.sock, 2 * number),
                StreamEnd(f"service {number}", stream, 2 * number + 1),
            )

        self.carried.append(self.run(opened()))

    @precondition(lambda self: any(not carried.app.gone for carried in self.carried))
    @rule(
        data=st.data(),
        ended=st.booleans(),
        code=st.sampled_from([ErrorCodes.NO_ERROR, ErrorCodes.CANCEL, ErrorCodes.INTERNAL_ERROR]),
    )
    def reset(self, data: st.DataObject, ended: bool, code: ErrorCodes) -> None:
        """RST_STREAM, right behind END_STREAM or without."""
        app = data.draw(st.sampled_from([one.app for one in self.carried if not one.app.gone]))

        def steps() -> None:
            if ended:
                app.finish()
            cast(StreamEnd, app).break_off(code)

        self.do(steps)

    @precondition(lambda self: self.service.connections and not self.service.connections[-1].lost)
    @rule()
    def goaway(self) -> None:
        """What is open goes on."""
        self.do(lambda: self.service.connections[-1].say_goaway(2**31 - 1))

    @precondition(lambda self: self.carried)
    @rule()
    def lose(self) -> None:
        """The connections break."""

        def steps() -> None:
            for carried in self.carried:
                carried.disturbed = True
            for peer in self.service.connections:
                if not peer.lost:
                    peer.drop()

        self.do(steps)


def test_a_service_that_is_not_ours() -> None:
    play(Service)


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_tunnels(transport: str, credentials: Credentials) -> None:
    class Machine(Tunnels):
        pass

    Machine.credentials = credentials if transport == "tls" else None
    play(Machine)


def play(machine: type[CloseOrders]) -> None:
    """As many examples as the profile has."""
    settings = hypothesis.settings(
        stateful_step_count=STEPS,
        suppress_health_check=list(hypothesis.HealthCheck),
        # To make a failing example smaller takes minutes: each try waits for what does not come.
        phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate],
    )
    run_state_machine_as_test(machine, settings=settings)
