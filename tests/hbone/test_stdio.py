"""Standard input and output as a leg: pipes, sockets, files, devices and terminals, joined by the real relay
to a TCP connection whose other end the test plays."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hbone.stdio import FULL_BYTES, StdioLeg
from shared.address import Address
from shared.errors import HboneError, StreamResetError
from shared.net.dial import dial
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.relay.relay import Relay
from tests.hbone.descriptors import Descriptors, read, readable
from tests.shared.net.loopback import until
from tests.support.hellos import hello
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

MIB = 1 << 20


def some_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)


# A tunnel.


@dataclass
class Tunnel:
    leg: StdioLeg
    far: TcpPeer
    relay: Relay
    over: asyncio.Event

    async def end_of_input(self) -> None:
        """FIN or RST arrives at the far side: terminals end in either way."""
        async with asyncio.timeout(PATIENCE_S):
            await self.far.was_reset()

    async def end(self) -> HboneError | None:
        async with asyncio.timeout(PATIENCE_S):
            await self.over.wait()
            await self.leg.flushed()
        return self.relay.error


@asynccontextmanager
async def tunnel(input_fd: int, output_fd: int, *, early: bytes = b"") -> AsyncIterator[Tunnel]:
    """Joins the descriptors to a connection; the far side has sent `early` before."""
    async with TcpServer.listening() as server:
        upstream = await dial(Address("127.0.0.1", server.port), PATIENCE_S)
        far = await server.accept()
        if early:
            await far.send(early)
            await until(lambda: upstream.early_bytes == len(early))
        over = asyncio.Event()
        leg = StdioLeg(input_fd, output_fd)
        relay = Relay(leg, upstream, lambda _: over.set())
        relay.start()
        try:
            yield Tunnel(leg, far, relay, over)
        finally:
            relay.abort(HboneError("the test is over"))
            leg.abort()


class Keeper:
    """A relay's end that keeps what it is told."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_full = False
        self.error: HboneError | None = None
        self.ends = 0
        self._changed = asyncio.Event()

    async def has(self, count: int) -> None:
        await self.until(lambda: len(self.data) >= count)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def received(self, leg: Leg, data: Buffer) -> None:
        self.data += data
        self._changed.set()

    def ended(self, leg: Leg) -> None:
        self.ends += 1
        self._changed.set()

    def failed(self, leg: Leg, error: HboneError) -> None:
        assert self.error is None, "said once"
        self.error = error
        self._changed.set()

    def full(self, leg: Leg) -> None:
        assert not self.is_full
        self.is_full = True

    def drained(self, leg: Leg) -> None:
        assert self.is_full
        self.is_full = False
        self._changed.set()


# Pipes, as ssh has them.


async def test_pipes_carry_both_ways_and_the_input_ends_first(fds: Descriptors) -> None:
    (stdin, person_out), (person_in, stdout) = fds.pipe(), fds.pipe()
    async with tunnel(stdin, stdout) as it:
        os.write(person_out, b"ping")
        assert await it.far.read(4) == b"ping"
        await it.far.send(b"pong")
        assert await read(person_in, 4) == b"pong"

        os.write(person_out, b"last words")
        fds.close(person_out)
        assert await it.far.rest() == b"last words"

        await it.far.send(b"an answer all the same")
        it.far.end()
        assert await read(person_in, 1000) == b"an answer all the same"
        assert await it.end() is None
    assert it.leg.error is None


async def test_pipes_the_far_side_ends_first(fds: Descriptors) -> None:
    (stdin, person_out), (person_in, stdout) = fds.pipe(), fds.pipe()
    async with tunnel(stdin, stdout) as it:
        await it.far.send(b"bye")
        it.far.end()
        assert await read(person_in, 1000) == b"bye", "and the end: ssh waits for it"
        os.write(person_out, b"one thing more")
        fds.close(person_out)
        assert await it.far.rest() == b"one thing more"
        assert await it.end() is None


async def test_much_at_once_both_ways(fds: Descriptors) -> None:
    (stdin, person_out), (person_in, stdout) = fds.pipe(), fds.pipe()
    up, down = some_bytes(3 * MIB), some_bytes(3 * MIB + 1)

    def talk() -> None:
        os.set_blocking(person_out, True)
        view = memoryview(up)
        while view:
            view = view[os.write(person_out, view[: 1 << 16]) :]
        os.close(person_out)

    async with tunnel(stdin, stdout) as it, asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(talk))
        it.far.send_soon(down)
        it.far.end()
        heard = group.create_task(read(person_in, len(down) + 1))
        assert await it.far.rest() == up
        assert await heard == down
        assert await it.end() is None
    assert (it.relay.sent_bytes, it.relay.received_bytes) == (len(up), len(down))


async def test_the_far_side_breaks_off(fds: Descriptors) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    async with tunnel(stdin, stdout) as it:
        it.far.reset()
        error = await it.end()
    assert isinstance(error, StreamResetError)
    assert it.leg.error is None, "it was not us"
    fds.close(stdout)  # as the process does that ends now
    assert await read(person_in, 1) == b""


# One socket as both, as ssh has it with ProxyUseFdpass' relatives and inetd.


@pytest.mark.parametrize("number", ["the same number", "two numbers"])
async def test_one_socket_as_both(fds: Descriptors, number: str) -> None:
    ours, outside = fds.sockets()
    output = ours if number == "the same number" else fds.copy(ours)
    async with tunnel(ours, output) as it:
        os.write(outside, b"ping")
        assert await it.far.read(4) == b"ping"
        await it.far.send(b"pong")
        it.far.end()
        assert await read(outside, 1000) == b"pong", "and the end, by shutdown: the other way goes on"
        os.set_blocking(outside, True)
        os.write(outside, b"more")
        assert await it.far.read(4) == b"more"
        with socket.socket(fileno=os.dup(outside)) as half:
            half.shutdown(socket.SHUT_WR)
        assert await it.far.rest() == b""
        assert await it.end() is None


async def test_one_socket_as_both_its_peer_resets(fds: Descriptors) -> None:
    ours, outside = fds.sockets()
    async with tunnel(ours, fds.copy(ours)) as it:
        await it.far.send(b"unread")
        await readable(outside)
        fds.close(outside)  # with unread bytes: ECONNRESET for us
        assert await it.end() is not None
        assert it.leg.abandoned
        assert await it.far.was_reset()


# Files and devices, which no event loop can watch.


async def test_a_file_in_and_a_file_out(fds: Descriptors, tmp_path: Path) -> None:
    source, sink = tmp_path / "in", tmp_path / "out"
    source.write_bytes(some_bytes(2 * MIB + 17))
    async with tunnel(fds.file(source), fds.file(sink, os.O_WRONLY | os.O_CREAT)) as it:
        it.far.send_soon(some_bytes(MIB + 3))
        it.far.end()
        assert await it.far.rest() == source.read_bytes()
        assert await it.end() is None
    assert sink.read_bytes() == some_bytes(MIB + 3)


async def test_an_empty_file_ends_at_once(fds: Descriptors, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    person_in, stdout = fds.pipe()
    async with tunnel(fds.file(tmp_path / "empty"), stdout) as it:
        assert await it.far.rest() == b""
        await it.far.send(b"hello")
        it.far.end()
        assert await read(person_in, 100) == b"hello"
        assert await it.end() is None


async def test_dev_null_as_both(fds: Descriptors) -> None:
    async with tunnel(fds.file(os.devnull), fds.file(os.devnull, os.O_WRONLY)) as it:
        assert await it.far.rest() == b""
        await it.far.send(some_bytes(MIB))
        it.far.end()
        assert await it.end() is None


async def test_a_folder_is_no_input(fds: Descriptors, tmp_path: Path) -> None:
    async with tunnel(fds.file(tmp_path), fds.file(os.devnull, os.O_WRONLY)) as it:
        assert str(await it.end()) == "standard input: Is a directory"
        assert not it.leg.abandoned
        assert await it.far.was_reset()


async def test_a_full_disk(fds: Descriptors) -> None:
    stdin, _ = fds.pipe()
    async with tunnel(stdin, fds.file("/dev/full", os.O_WRONLY)) as it:
        await it.far.send(b"x")
        assert str(await it.end()) == "standard output: No space left on device"
        assert not it.leg.abandoned


async def test_a_full_disk_counts_also_when_the_input_has_ended(fds: Descriptors) -> None:
    async with tunnel(fds.file(os.devnull), fds.file("/dev/full", os.O_WRONLY)) as it:
        assert await it.far.rest() == b""
        await it.far.send(b"x")
        assert await it.end() is None, "the relay takes it for a reader that has seen enough"
        assert str(it.leg.error) == "standard output: No space left on device"


async def test_a_file_is_read_once_per_turn_however_often_it_was_paused(
    fds: Descriptors, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(some_bytes(10 * READ_BYTES))
    leg, keeper = StdioLeg(fds.file(tmp_path / "in"), fds.file(os.devnull, os.O_WRONLY)), Keeper()
    leg.join(keeper)
    for _ in range(5):
        leg.pause_reading()
        leg.resume_reading()
    await asyncio.sleep(0)
    assert len(keeper.data) == READ_BYTES
    await keeper.until(lambda: keeper.ends == 1)
    assert keeper.data == some_bytes(10 * READ_BYTES)


# Terminals.


async def test_a_terminal(fds: Descriptors) -> None:
    person, slave = fds.terminal()
    async with tunnel(slave, fds.copy(slave)) as it:
        os.write(person, b"ls\r")
        assert await it.far.read(3) == b"ls\r"
        await it.far.send(b"file\r\n")
        assert await read(person, 6) == b"file\r\n"
        it.far.end()
        await asyncio.wait_for(it.leg.flushed(), PATIENCE_S)
        os.write(person, b"more\r")
        assert await it.far.read(5) == b"more\r"
    assert os.get_blocking(slave), "the shell gets it back as it was"


async def test_a_terminal_hangs_up(fds: Descriptors) -> None:
    person, slave = fds.terminal()
    async with tunnel(slave, fds.copy(slave)) as it:
        fds.close(person)
        await it.end_of_input()


# A reader that goes away.


async def test_the_reader_has_gone(fds: Descriptors) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    async with tunnel(stdin, stdout) as it:
        fds.close(person_in)
        await it.far.send(b"x")
        assert str(await it.end()) == "standard output: Broken pipe"
        assert it.leg.abandoned
        assert await it.far.was_reset()


async def test_the_reader_goes_while_much_waits_for_it(fds: Descriptors) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    async with tunnel(stdin, stdout) as it:
        it.far.send_soon(some_bytes(4 * MIB))
        await readable(person_in)
        fds.close(person_in)
        assert str(await it.end()) == "standard output: Broken pipe"
        assert it.leg.abandoned


async def test_the_reader_has_gone_before_what_the_far_side_said_first(fds: Descriptors) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    fds.close(person_in)
    async with tunnel(stdin, stdout, early=b"SSH-2.0-OpenSSH_9.9\r\n") as it:
        assert str(await it.end()) == "standard output: Broken pipe"
        assert await it.far.was_reset()


async def test_a_reader_that_has_gone_before_join_is_told_at_join(fds: Descriptors) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    fds.close(person_in)
    leg, keeper = StdioLeg(stdin, stdout), Keeper()
    leg.write(b"SSH-2.0-OpenSSH_9.9\r\n")
    leg.join(keeper)
    assert str(keeper.error) == "standard output: Broken pipe"


# A slow reader.


async def test_what_waits_for_a_slow_reader_is_bounded(fds: Descriptors) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    leg, keeper = StdioLeg(stdin, stdout), Keeper()
    leg.join(keeper)
    sent = bytearray()
    while not keeper.is_full:
        assert len(sent) <= MIB, "nobody says that it is enough"
        chunk = some_bytes(READ_BYTES + len(sent) % 7)
        leg.write(chunk)
        sent += chunk
    assert len(sent) > FULL_BYTES
    assert await read(person_in, len(sent)) == sent
    await keeper.until(lambda: not keeper.is_full)
    leg.abort()


async def test_full_before_join_is_told_at_join(fds: Descriptors) -> None:
    (stdin, _), (_, stdout) = fds.pipe(), fds.pipe()
    leg, keeper = StdioLeg(stdin, stdout), Keeper()
    leg.write(bytes(2 * FULL_BYTES))
    leg.join(keeper)
    assert keeper.is_full
    leg.abort()


async def test_a_slow_reader_gets_everything_after_the_end(fds: Descriptors) -> None:
    person_in, stdout = fds.pipe()
    async with tunnel(fds.file(os.devnull), stdout) as it:
        down = some_bytes(300 << 10)
        await it.far.send(down)
        it.far.end()
        async with asyncio.timeout(PATIENCE_S):
            await it.over.wait()
        assert it.relay.received_bytes == len(down), "the tunnel is over, and the pipe holds 64 KiB of it"
        assert await read(person_in, len(down) + 1) == down
        assert await it.end() is None


async def test_reading_pauses(fds: Descriptors) -> None:
    (stdin, person_out), (_, stdout) = fds.pipe(), fds.pipe()
    leg, keeper = StdioLeg(stdin, stdout), Keeper()
    leg.pause_reading()
    leg.join(keeper)
    os.write(person_out, b"one")
    await readable(stdin)
    assert keeper.data == b""
    leg.resume_reading()
    await keeper.has(3)
    leg.pause_reading()
    fds.close(person_out)
    await readable(stdin)
    assert keeper.ends == 0
    leg.resume_reading()
    await keeper.until(lambda: keeper.ends == 1)
    assert keeper.data == b"one"
    leg.abort()


# The descriptors are given back as they were found.


ENDS: dict[str, Callable[[StdioLeg], object]] = {
    "write_eof": StdioLeg.write_eof,
    "close": StdioLeg.close,
    "abort": StdioLeg.abort,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
@pytest.mark.parametrize("waits", [False, True], ids=["empty", "waiting"])
async def test_blocking_mode_is_restored(fds: Descriptors, end: str, blocking: bool, waits: bool) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    shared = fds.copy(stdout)  # as a shell's other commands have it
    os.set_blocking(stdin, blocking)
    os.set_blocking(stdout, blocking)
    leg = StdioLeg(stdin, stdout)
    leg.join(Keeper())
    assert not os.get_blocking(shared)
    if waits:
        leg.write(bytes(MIB))
    ENDS[end](leg)
    if waits and end != "abort":
        assert await read(person_in, MIB) == bytes(MIB)
    await asyncio.wait_for(leg.flushed(), PATIENCE_S)
    assert os.get_blocking(shared) == blocking
    leg.abort()
    assert os.get_blocking(stdin) == blocking


async def test_one_socket_stays_non_blocking_until_the_output_is_over(fds: Descriptors) -> None:
    ours, outside = fds.sockets()
    leg, keeper = StdioLeg(ours, fds.copy(ours)), Keeper()
    leg.join(keeper)
    leg.write(bytes(MIB))
    with socket.socket(fileno=os.dup(outside)) as half:
        half.shutdown(socket.SHUT_WR)
    await keeper.until(lambda: keeper.ends == 1)
    assert not os.get_blocking(ours)
    leg.close()
    assert not os.get_blocking(ours)
    assert await read(outside, MIB + 1) == bytes(MIB)
    assert os.get_blocking(ours)


async def test_blocking_mode_is_restored_when_the_reader_has_gone(fds: Descriptors) -> None:
    (stdin, _), (person_in, stdout) = fds.pipe(), fds.pipe()
    leg = StdioLeg(stdin, stdout)
    fds.close(person_in)
    leg.write(b"x")
    assert os.get_blocking(stdout)
    assert leg.abandoned


async def test_a_leg_that_is_gone_takes_every_call(fds: Descriptors) -> None:
    with ExitStack() as after:
        for end in ENDS.values():
            (stdin, person_out), (_, stdout) = fds.pipe(), fds.pipe()
            leg, keeper = StdioLeg(stdin, stdout), Keeper()
            after.callback(leg.abort)
            leg.join(keeper)
            leg.write(b"x")
            leg.close()
            end(leg)
            leg.write(b"y")
            leg.pause_reading()
            leg.resume_reading()
            leg.write_eof()
            leg.close()
            leg.abort()
            os.write(person_out, b"z")
            await readable(stdin)
            assert (bytes(keeper.data), keeper.ends, keeper.error) == (b"", 0, None)


# What may go with the tunnel request.

IDENTIFICATION = b"SSH-2.0-OpenSSH_9.9\r\n"
HELLO = hello()


BEGINNINGS = {
    "identification": (IDENTIFICATION, IDENTIFICATION),
    "and a packet": (IDENTIFICATION + b"a packet", IDENTIFICATION),
    "half a line": (b"SSH-2.0-half a line", b""),
    "a line too long": (b"SSH-" + bytes(300) + b"\n", b""),
    "hello": (HELLO, HELLO),
    "and a record": (HELLO + b"more", HELLO),
    "half a hello": (HELLO[:100], b""),
    "no TLS": (b"\x16 is no TLS", b""),
    "Redis": (b"INCR visits\r\n", b""),
}
"""What has come, and what of it may go with the request."""


@pytest.mark.parametrize(("came", "first"), BEGINNINGS.values(), ids=BEGINNINGS)
async def test_what_may_arrive_more_than_once_is_the_first_flight(
    fds: Descriptors, came: bytes, first: bytes
) -> None:
    (read_end, write_end), (_, out) = fds.pipe(), fds.pipe()
    os.write(write_end, came)
    leg, keeper = StdioLeg(read_end, out), Keeper()
    assert [leg.first_flight(), leg.first_flight()] == [first, first]
    leg.drop_first(len(first))
    leg.join(keeper)
    os.write(write_end, b" and on")
    rest = came[len(first) :] + b" and on"
    await keeper.has(len(rest))
    assert keeper.data == rest
    leg.abort()


async def test_an_input_that_has_said_nothing_is_not_waited_for(fds: Descriptors) -> None:
    (read_end, write_end), (_, out) = fds.pipe(), fds.pipe()
    leg, keeper = StdioLeg(read_end, out), Keeper()
    assert leg.first_flight() == b""
    os.write(write_end, IDENTIFICATION)
    leg.join(keeper)
    await keeper.has(len(IDENTIFICATION))
    leg.abort()


async def test_an_input_that_had_ended_before(fds: Descriptors) -> None:
    (read_end, write_end), (_, out) = fds.pipe(), fds.pipe()
    os.close(write_end)
    leg, keeper = StdioLeg(read_end, out), Keeper()
    assert leg.first_flight() == b""
    leg.join(keeper)
    await keeper.until(lambda: keeper.ends == 1)
    leg.abort()


async def test_a_file_is_read_once_the_tunnel_is_open(fds: Descriptors, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(IDENTIFICATION)
    leg, keeper = StdioLeg(fds.file(path), fds.pipe()[1]), Keeper()
    assert leg.first_flight() == b""
    leg.join(keeper)
    await keeper.until(lambda: keeper.ends == 1)
    assert keeper.data == IDENTIFICATION
    leg.abort()
