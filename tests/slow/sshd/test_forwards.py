"""Ports, sockets and the client's agent, forwarded both ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh
import pytest

from agent.ssh import audit
from agent.ssh.sshd import Sshd
from tests.support.ssh_clients import Client, Log, running
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_program, free_port

BODY = os.urandom(4 << 20)


@asynccontextmanager
async def echo(path: Path | None = None) -> AsyncIterator[int]:
    """A server that gives back what it gets, and ends when its client has ended; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write(b" and the end")
        writer.close()

    if path is None:
        server: asyncio.Server = await asyncio.start_server(serve, "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1]
    else:
        server = await asyncio.start_unix_server(serve, path)
        yield 0
    server.close()


async def comes_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes = BODY) -> None:
    """Holds that an echo gives all back, and that ends go through."""
    async with asyncio.timeout(PATIENCE_S):

        async def send() -> None:
            writer.write(body)
            await writer.drain()
            writer.write_eof()

        _, answer = await asyncio.gather(send(), reader.read(-1))
    writer.close()
    assert answer == body + b" and the end"


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To a port that a client has yet to open."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)


async def test_local_with_several_at_once(client: Client, sshd: Sshd, log: Log) -> None:
    port = free_port()
    async with echo() as target, running(client, "ssh", "-N", "-L", f"{port}:127.0.0.1:{target}", "box"):
        await asyncio.gather(*[comes_back(*await connected(port)) for _ in range(5)])
    assert await log.said("logs in")


async def test_remote_with_several_at_once(client: Client) -> None:
    port = free_port()
    async with echo() as target, running(client, "ssh", "-N", "-R", f"{port}:127.0.0.1:{target}", "box"):
        await asyncio.gather(*[comes_back(*await connected(port)) for _ in range(5)])


async def test_remote_at_any_port(client: Client) -> None:
    async with (
        echo() as target,
        running(client, "ssh", "-v", "-N", "-R", f"0:127.0.0.1:{target}", "box") as process,
    ):
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while not (line := await process.stderr.readline()).startswith(b"Allocated port "):
                assert line
        await comes_back(*await connected(int(line.split()[2])))


async def test_dynamic(client: Client) -> None:
    port = free_port()
    async with echo() as target, running(client, "ssh", "-N", "-D", str(port), "box"):
        reader, writer = await connected(port)
        writer.write(b"\x05\x01\x00" + b"\x05\x01\x00\x03\x09localhost" + target.to_bytes(2, "big"))
        assert (await reader.readexactly(12))[:4] == b"\x05\x00\x05\x00"
        await comes_back(reader, writer)


async def test_sockets_of_the_file_system(client: Client, tmp_path: Path) -> None:
    port, there = free_port(), tmp_path / "there"
    forwards = ("-L", f"{port}:{tmp_path}/app", "-R", f"{there}:{tmp_path}/app")
    async with echo(tmp_path / "app"), running(client, "ssh", "-N", *forwards, "box"):
        await comes_back(*await connected(port))
        async with asyncio.timeout(PATIENCE_S):
            while not there.exists():  # noqa: ASYNC110  a file, of which nothing tells
                await asyncio.sleep(0.02)
        await comes_back(*await asyncio.open_unix_connection(there))


async def test_nobody_at_the_far_end(client: Client) -> None:
    port = free_port()
    async with running(client, "ssh", "-N", "-L", f"{port}:127.0.0.1:{free_port()}", "box"):
        reader, writer = await connected(port)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_port_that_is_taken(client: Client, kind: str) -> None:
    if kind == "openssh":
        pytest.skip("it is content with the port at ::1")
    async with echo() as taken:
        done = await client.but("ExitOnForwardFailure yes").run(
            "ssh", "-N", "-R", f"{taken}:127.0.0.1:1", "box"
        )
    assert done.code == 255
    assert b"remote port forwarding failed" in done.err


async def test_loopback_only(client: Client) -> None:
    port = free_port()
    async with echo() as target, running(client, "ssh", "-N", "-R", f"*:{port}:127.0.0.1:{target}", "box"):
        await comes_back(*await connected(port), b"by loopback")
        assert listeners(port) == ["0100007F"]


def listeners(port: int) -> list[str]:
    """The addresses, in hexadecimal, on which somebody listens on a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [words[1][:-5] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"]


async def test_the_clients_agent(client: Client, tmp_path: Path) -> None:
    socket = tmp_path / "agent"
    agent = await asyncio.create_subprocess_exec(
        find_program("ssh-agent"), "-D", "-a", str(socket), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        env = {"SSH_AUTH_SOCK": str(socket)}
        async with asyncio.timeout(PATIENCE_S):
            while not socket.exists():  # noqa: ASYNC110  likewise
                await asyncio.sleep(0.02)
        add = await asyncio.create_subprocess_exec(
            find_program("ssh-add"), "-q", str(client.key), env={**os.environ, **env}
        )
        assert await add.wait() == 0
        done = await client.run("ssh", "-A", "box", "ssh-add -l; echo $SSH_AUTH_SOCK", env=env)
        assert b"user_key@test" in done.out, done.err
        assert str(socket).encode() not in done.out
        done = await client.run("ssh", "-a", "box", "echo .$SSH_AUTH_SOCK.", env=env)
        assert done.out == b"..\n"
    finally:
        agent.kill()
        await agent.wait()


# A client of our own, for what OpenSSH's does not do.


@asynccontextmanager
async def by_hand(client: Client) -> AsyncIterator[asyncssh.SSHClientConnection]:
    async with asyncssh.connect(
        client.address.host,
        client.address.port,
        username="root" if os.geteuid() == 0 else None,
        client_keys=[str(client.key)],
        known_hosts=None,
        config=None,
        agent_path=None,
    ) as connection:
        yield connection


async def test_a_thousand_channels(client: Client, sshd: Sshd, kind: str) -> None:
    async with by_hand(client) as connection:

        async def one() -> bool:
            try:
                await connection.create_session(asyncssh.SSHClientSession)
            except asyncssh.ChannelOpenError:
                return False
            return True

        async with asyncio.timeout(PATIENCE_S):
            opened = sum(await asyncio.gather(*(one() for _ in range(1000))))
        assert opened <= audit.MAX_SESSIONS
        if kind == "builtin":
            assert sshd.audit.refused["sessions"] or sshd.audit.refused["channels"]
        assert (await client.ssh("echo others go on")).out == b"others go on\n"


async def test_signals(client: Client, kind: str) -> None:
    if kind == "openssh":
        pytest.skip("it passes no signals on to sessions of root")
    async with by_hand(client) as connection:
        process = await connection.create_process(
            "trap 'echo usr1; exit 4' USR1; echo ready; while :; do sleep 0.05; done"
        )
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == "ready\n"
            process.send_signal("USR1")
            assert await process.stdout.readline() == "usr1\n"
            assert (await process.wait()).exit_status == 4
            process = await connection.create_process("kill -TERM $$")
            done = await process.wait()
        assert done.exit_signal is not None and done.exit_signal[0] == "TERM"


async def test_a_client_that_asks_and_never_reads(client: Client, sshd: Sshd, kind: str) -> None:
    """Requests whose answers heap up: it is not read from before it reads."""
    if kind != "builtin":
        pytest.skip("OpenSSH's own business")
    async with by_hand(client) as connection:
        transport = connection._transport
        assert transport is not None
        transport.pause_reading()
        sent = 0
        for _ in range(400):
            for _ in range(500):
                connection.send_packet(80, asyncssh.packet.String("no such request"), b"\1")
                sent += 1
            await asyncio.sleep(0)
        await asyncio.sleep(0.5)
        (one,) = [task for task in asyncio.all_tasks() if task.get_name() == "ssh 1"]
        assert not one.done()
        assert transport.get_write_buffer_size() > 1 << 20  # it cannot send on: nobody reads it
        connection.abort()
    assert (await client.ssh("echo others go on")).out == b"others go on\n"


async def test_a_client_with_a_huge_window_that_never_reads(client: Client, sshd: Sshd, kind: str) -> None:
    """What a session and a forward send to it is held up at its connection, whatever its windows say."""
    if kind != "builtin":
        pytest.skip("OpenSSH's own business")
    sent, full = bytes(1 << 16), asyncio.Event()

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while not full.is_set():
                writer.write(sent)
                try:
                    async with asyncio.timeout(1.0):
                        await writer.drain()
                except TimeoutError:
                    full.set()
        writer.transport.abort()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with by_hand(client) as connection, server:
        transport = connection._transport
        assert transport is not None
        window = 1 << 31
        await connection.create_session(
            asyncssh.SSHClientSession, "head -c 100000000 /dev/zero", encoding=None, window=window
        )
        await connection.create_connection(
            asyncssh.SSHTCPSession, "127.0.0.1", port, encoding=None, window=window
        )
        transport.pause_reading()
        async with asyncio.timeout(PATIENCE_S):
            await full.wait()
        (one,) = sshd.audit.connections
        assert sum(activity.sent for activity in one.activities) < 50_000_000
        transport.resume_reading()
        done = await connection.run("echo others go on")
        assert done.stdout == "others go on\n"
    assert (await client.ssh("echo others go on")).out == b"others go on\n"
