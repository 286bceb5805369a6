"""Commands by ssh: what goes in, what comes out, and how they end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agent.ssh.sshd import Sshd
from tests.support.ssh_clients import USER, Client, Log, running
from tests.support.tcp_peer import PATIENCE_S


async def test_output_errors_and_exit_code(client: Client) -> None:
    done = await client.ssh("cat; echo to standard error >&2; exit 7", stdin=b"from standard input")
    assert (done.code, done.out, done.err) == (7, b"from standard input", b"to standard error\n")


async def test_the_end_of_the_input_arrives(client: Client) -> None:
    done = await client.ssh("wc -c", stdin=bytes(3_000_000))
    assert done.out.strip() == b"3000000"


async def test_much_output_whose_reader_is_slow_is_whole(client: Client) -> None:
    async with running(client, "ssh", "box", "head -c 20000000 /dev/zero; exit 3") as process:
        assert process.stdout is not None
        total = 0
        while data := await process.stdout.read(65536):
            if not total:
                await asyncio.sleep(3)  # longer than the sshd waits for the output of what has ended
            total += len(data)
        assert total == 20_000_000
        assert await process.wait() == 3


async def test_a_signal_that_ends_the_command(client: Client) -> None:
    done = await client.ssh("kill -9 $$")
    assert done.code == 255  # ssh(1): or 255 if an error occurred; a signal is one


async def test_the_environment_is_the_apps(client: Client) -> None:
    done = await client.but("SetEnv LC_TEST=mine EVIL=1").ssh("env")
    told = dict(line.partition("=")[::2] for line in done.out.decode().splitlines())
    assert told["OF_THE_APP"] == "yes"
    assert told["HOME"] == str(client.folder / "home")
    assert told["USER"] == told["LOGNAME"] == USER
    assert told["LC_TEST"] == "mine"
    assert "EVIL" not in told
    assert told["SSH_CONNECTION"].endswith(f" 127.0.0.1 {client.address.port}")
    assert not [name for name in told if name.startswith("HBONE_")]


async def test_fifty_at_once(client: Client) -> None:
    waiting, all_in = set(range(50)), asyncio.Event()

    async def one(number: int) -> bytes:
        async with running(client, "ssh", "box", f"echo {number}; cat") as process:
            assert process.stdout is not None and process.stdin is not None
            line = await process.stdout.readline()
            waiting.discard(number)
            if not waiting:
                all_in.set()
            await all_in.wait()
            process.stdin.close()
            await process.wait()
            return line

    async with asyncio.timeout(PATIENCE_S):
        lines = await asyncio.gather(*map(one, range(50)))
    assert lines == [f"{number}\n".encode() for number in range(50)]


async def test_sessions_over_one_connection(client: Client, tmp_path: Path) -> None:
    shared = client.but("ControlMaster auto", f"ControlPath {tmp_path}/mux", "ControlPersist yes")
    try:
        first = await shared.ssh("echo $SSH_CONNECTION")
        others = await asyncio.gather(*(shared.ssh("echo $SSH_CONNECTION") for _ in range(8)))
        assert {one.out for one in others} == {first.out}
    finally:
        async with running(shared, "ssh", "-O", "exit", "box") as process:
            await process.wait()


async def test_a_client_that_leaves_takes_its_processes_along(client: Client, log: Log) -> None:
    command = "sh -c 'trap \"\" HUP; echo $$; while :; do sleep 1; done' & echo $$; exec sleep 1000"
    async with running(client, "ssh", "box", command) as process:
        assert process.stdout is not None
        pids = [int(await process.stdout.readline()) for _ in range(2)]
        process.kill()
        await process.wait()
        await gone(*pids)


async def test_what_a_command_leaves_behind_ends_with_it(client: Client) -> None:
    done = await client.ssh("sleep 1000 >/dev/null 2>&1 </dev/null & echo $!")
    await gone(int(done.out))


async def test_a_daemon_stays_until_krun_ends(client: Client, sshd: Sshd) -> None:
    done = await client.ssh("setsid sleep 1000 >/dev/null 2>&1 </dev/null & sleep 0.3; pgrep -n -x sleep")
    pid = int(done.out)
    await client.ssh("true")
    os.kill(pid, 0)
    await sshd.close()
    await gone(pid)


async def test_all_end_with_krun(client: Client, sshd: Sshd) -> None:
    async with running(
        client, "ssh", "box", "trap '' HUP TERM; echo $$; while :; do sleep 1; done"
    ) as process:
        assert process.stdout is not None
        pid = int(await process.stdout.readline())
        await sshd.close()
        await gone(pid)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 255


async def gone(*pids: int) -> None:
    """Waits until they have ended."""
    async with asyncio.timeout(PATIENCE_S):
        while any(map(is_running, pids)):  # noqa: ASYNC110  others' processes
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


async def test_a_session_has_no_files_of_krun_s(client: Client) -> None:
    """Copies of its own pipes would keep them open, and the client waiting, behind a daemon."""
    given = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(given, True)
    try:
        for options in ((), ("-tt",)):
            done = await client.run("ssh", *options, "box", "ls /proc/self/fd")
            assert done.out.split() == [b"0", b"1", b"2", b"3"], done.out  # 3 is the folder that is listed
    finally:
        os.close(given)
