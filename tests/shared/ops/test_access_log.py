"""Lines through real pipes, sockets, files and a terminal: their form, and that no output stops us."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Flag
from shared.ops.access_log import CLOSE_WAIT_S, MAX_BYTES, MAX_LINES, AccessLog, Fields
from shared.ops.log import MAX_VALUE_CHARS, Format, cut, redact
from tests.support.tcp_peer import PATIENCE_S

TOKEN = "eyJhbGciOiJub25lIn0.eyJhdWQiOiJ4In0.c2lnbmF0dXJl"

FINISHED: Fields = {
    "src_addr": "10.1.2.3:44312",
    "sni": "outbound_.8080_._.hello.demo.svc.cluster.local",
    "route": "*.demo.svc.cluster.local",
    "origin": "https://hello.a.run.app:443",
    "dst_addr": "[2001:db8::1]:443",
    "tunnel_target": "15003",
    "status": 200,
    "identity": "spiffe://cluster.local/ns/demo/sa/hello",
    "bytes_sent": 0,
    "bytes_recv": 12345678901,
    "duration_s": 0.0131,
    "flags": "-",
}


class Pipe:
    """A pipe as standard output, and what was read from it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.data = b""

    def read(self) -> bool:
        """Takes what there is, up to one pipe full; False if there was nothing."""
        try:
            data = os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return False
        self.data += data
        return bool(data)

    def lines(self) -> list[str]:
        while self.read():
            pass
        return self.data.decode("ascii").splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    one = Pipe()
    yield one
    os.close(one.reader)
    os.close(one.writer)


@pytest.fixture
def log(pipe: Pipe) -> AccessLog:
    """Of lines for people; the tests close it."""
    return AccessLog(pipe.writer, "text", "gateway")


@contextmanager
def output_of(format: Format) -> Iterator[tuple[AccessLog, Pipe]]:
    one = Pipe()
    log = AccessLog(one.writer, format, "gateway")
    try:
        yield log, one
    finally:
        log.close()
        os.close(one.reader)
        os.close(one.writer)


# The form of a line.


async def test_json(pipe: Pipe) -> None:
    log = AccessLog(pipe.writer, "json", "gateway")
    log.tunnel(**FINISHED)
    log.close()
    entry = json.loads(pipe.data if pipe.read() else b"")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("timestamp"))
    assert entry == {
        "severity": "INFO",
        "message": "connection complete",
        "logger": "hbone.access",
        "component": "gateway",
        "src.addr": "10.1.2.3:44312",
        "sni": "outbound_.8080_._.hello.demo.svc.cluster.local",
        "route": "*.demo.svc.cluster.local",
        "origin": "https://hello.a.run.app:443",
        "dst.addr": "[2001:db8::1]:443",
        "tunnel.target": "15003",
        "status": 200,
        "identity": "spiffe://cluster.local/ns/demo/sa/hello",
        "bytes_sent": 0,
        "bytes_recv": 12345678901,
        "duration": 0.0131,
        "flags": "-",
    }


async def test_text(log: AccessLog, pipe: Pipe) -> None:
    log.tunnel(**FINISHED)
    log.close()
    (line,) = pipe.lines()
    assert line.partition(" ")[2] == (
        "INFO hbone.access: connection complete src.addr=10.1.2.3:44312"
        " sni=outbound_.8080_._.hello.demo.svc.cluster.local route=*.demo.svc.cluster.local"
        " origin=https://hello.a.run.app:443 dst.addr=[2001:db8::1]:443 tunnel.target=15003 status=200"
        " identity=spiffe://cluster.local/ns/demo/sa/hello bytes_sent=0 bytes_recv=12345678901"
        " duration=13ms flags=-"
    )


async def test_only_what_is_given(log: AccessLog, pipe: Pipe) -> None:
    log.tunnel(src_addr="10.1.2.3:1", sni=None, duration_s=2, error="reset by peer")
    log.refused(src_addr="10.1.2.3:1", flags="NO_ROUTE", error="no route takes it")
    log.close()
    assert [line.partition(" ")[2] for line in pipe.lines()] == [
        'ERROR hbone.access: connection complete src.addr=10.1.2.3:1 duration=2000ms error="reset by peer"',
        "WARNING hbone.access: connection refused src.addr=10.1.2.3:1"
        ' flags=NO_ROUTE error="no route takes it"',
    ]


async def test_a_workload_that_registered(log: AccessLog, pipe: Pipe) -> None:
    log.registered(src_addr="10.1.2.3:1", sni="hello.svc", identity="spiffe://a/b", flags="-")
    log.close()
    (line,) = pipe.lines()
    assert line.partition(" ")[2] == (
        "INFO hbone.access: workload registered src.addr=10.1.2.3:1 sni=hello.svc"
        " identity=spiffe://a/b flags=-"
    )


async def test_requests(log: AccessLog, pipe: Pipe) -> None:
    log.request(method="GET", authority="hello", path="/a", status=200, request_id="1-2", flags="-")
    log.request(method="GET", status=403, flags=Flag.DENY, error="denied")
    log.request(method="GET", status=503, flags=Flag.STATUS, error="it answered 503")
    log.request(method="GET", flags=Flag.DOWNSTREAM_RESET, error="the client broke off")
    log.close()
    assert [line.partition(" ")[2] for line in pipe.lines()] == [
        "INFO hbone.access: request complete method=GET authority=hello path=/a status=200 request.id=1-2"
        " flags=-",
        "WARNING hbone.access: request refused method=GET status=403 flags=DENY error=denied",
        'ERROR hbone.access: request complete method=GET status=503 flags=STATUS error="it answered 503"',
        'INFO hbone.access: request complete method=GET flags=DOWNSTREAM_RESET error="the client broke off"',
    ]


async def test_a_client_that_breaks_off_is_no_error_of_ours(log: AccessLog, pipe: Pipe) -> None:
    """Nor is one that breaks off before its tunnel stands."""
    log.tunnel(flags=Flag.DOWNSTREAM_RESET, error="connection reset")
    log.refused(flags=Flag.DOWNSTREAM_RESET, error="the client broke off")
    log.close()
    one, other = pipe.lines()
    for line in (one, other):
        assert " INFO hbone.access: connection complete flags=DOWNSTREAM_RESET " in line


@pytest.mark.parametrize(
    ("seconds", "text", "number"),
    [
        (0, "0.0ms", "0.0000"),
        (0.00041, "0.4ms", "0.0004"),
        (0.0131, "13ms", "0.0131"),
        (2, "2000ms", "2.0000"),
        (86400.0, "86400000ms", "86400.0000"),
    ],
)
async def test_duration(log: AccessLog, pipe: Pipe, seconds: float, text: str, number: str) -> None:
    """For people with its unit, in JSON a number of seconds."""
    log.tunnel(duration_s=seconds)
    log.close()
    log = AccessLog(pipe.writer, "json", "gateway")
    log.tunnel(setup_s=seconds, duration_s=seconds)
    log.close()
    for_people, line = pipe.lines()
    assert for_people.endswith(f" duration={text}")
    assert line.endswith(f',"setup":{number},"duration":{number}}}')
    assert json.loads(line)["duration"] == pytest.approx(seconds, abs=5e-5)


async def test_one_of_several_workers_has_its_number_in_each_line(pipe: Pipe) -> None:
    for format in ("json", "text"):
        log = AccessLog(pipe.writer, format, "hgate", worker=3)
        log.tunnel(sni="a")
        log.refused(flags="LIMIT")
        log.registered(sni="a")
        log.close()
    lines = pipe.lines()
    assert [json.loads(line)["worker"] for line in lines[:3]] == [3, 3, 3]
    assert [line.partition(" ")[2] for line in lines[3:]] == [
        "INFO hbone.access: connection complete worker=3 sni=a",
        "WARNING hbone.access: connection refused worker=3 flags=LIMIT",
        "INFO hbone.access: workload registered worker=3 sni=a",
    ]


hostile = st.text(st.characters() | st.sampled_from('\n\r\x00\x1b\x85\u2028"\\= ')) | st.just("x" * 5000)


@given(hostile, hostile)
def test_every_line_is_one_line(sni: str, error: str) -> None:
    async def write(log: AccessLog) -> None:
        log.tunnel(sni=sni, error=error, status=502)

    with output_of("json") as (log, pipe):
        asyncio.run(write(log))
        log.flush()
        (line,) = pipe.lines()
        entry = json.loads(line)
        assert entry["sni"] == cut(sni)
        assert entry["error"] == cut(redact(error))
    with output_of("text") as (log, pipe):
        asyncio.run(write(log))
        log.flush()
        (line,) = pipe.lines()
        assert line.isprintable()
        assert line.count(" sni=") >= 1 and len(line) < 30 * MAX_VALUE_CHARS


async def test_no_token_in_an_error(pipe: Pipe) -> None:
    log = AccessLog(pipe.writer, "json", "gateway")
    log.tunnel(error=f"401: token {TOKEN} was refused")
    log.close()
    assert json.loads(pipe.lines()[0])["error"] == "401: token [redacted] was refused"


async def test_text_on_a_terminal_json_elsewhere(pipe: Pipe) -> None:
    ours, terminal = pty.openpty()
    for output in (terminal, pipe.writer):
        log = AccessLog(output, None, "gateway")
        log.tunnel(flags="-")
        log.close()
    assert os.read(ours, 1000).endswith(b"Z INFO hbone.access: connection complete flags=-\r\n")
    assert json.loads(pipe.lines()[0])["flags"] == "-"
    os.close(ours)
    os.close(terminal)


# When lines are written.


async def test_one_write_for_each_turn_of_the_loop() -> None:
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a datagram for each write
    with reader, writer:
        reader.setblocking(False)
        log = AccessLog(writer, "text", "gateway")
        loop = asyncio.get_running_loop()
        for number in range(3):
            log.tunnel(status=number)
        first = await loop.sock_recv(reader, 10_000)
        log.tunnel(status=3)
        second = await loop.sock_recv(reader, 10_000)
        log.close()
        assert (first.count(b"\n"), second.count(b"\n")) == (3, 1)


async def test_what_others_write_too_gets_whole_lines() -> None:
    """A pipe takes up to PIPE_BUF bytes in one piece; more would mix with the lines of other processes."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a datagram for each write
    with reader, writer:
        reader.setblocking(False)
        log = AccessLog(writer, "text", "gateway", worker=1)
        for number in range(100):
            log.tunnel(status=number, error="x" * 300)
        log.tunnel(error="y" * select.PIPE_BUF)
        log.flush()
        writes: list[bytes] = []
        with suppress(BlockingIOError):
            while True:
                writes.append(reader.recv(100_000))
                log.flush()
        log.close()
    assert all(write.endswith(b"\n") for write in writes)
    assert len(b"".join(writes).splitlines()) == 101
    assert max(len(write) for write in writes[:-1]) <= select.PIPE_BUF
    assert len(writes) < 20, "as many lines as fit go out together"


async def test_a_regular_file_is_shared_with_its_other_writers(tmp_path: Path) -> None:
    with (tmp_path / "stdout").open("wb", buffering=0) as file:
        file.write(b"before\n")
        log = AccessLog(file, "text", "gateway")
        log.tunnel(flags="-")
        log.close()
        file.write(b"after\n")
    before, line, after = (tmp_path / "stdout").read_text().splitlines()
    assert (before, after) == ("before", "after") and line.endswith("flags=-")


# Outputs that do not take it.


async def test_a_full_pipe_bounds_and_counts_and_recovers(log: AccessLog, pipe: Pipe) -> None:
    fill(log, MAX_LINES + 10)
    assert (log.waiting, log.dropped) == (MAX_LINES, 10)
    log.flush()
    in_pipe = MAX_LINES - log.waiting
    assert 0 < in_pipe < MAX_LINES
    fill(log, MAX_LINES)
    assert (log.waiting, log.dropped) == (MAX_LINES, 10 + MAX_LINES - in_pipe)
    while log.waiting:
        assert pipe.read()
        log.flush()
    log.close()
    assert len(pipe.lines()) == MAX_LINES + in_pipe
    assert all(line.endswith("flags=-") for line in pipe.lines())


async def test_long_lines_are_bounded_too(pipe: Pipe) -> None:
    log = AccessLog(pipe.writer, "json", "gateway")
    while not log.dropped:
        log.tunnel(error="\0" * MAX_VALUE_CHARS)
    assert log.waiting < MAX_LINES
    assert MAX_BYTES / (7 * MAX_VALUE_CHARS) < log.waiting < MAX_BYTES / (6 * MAX_VALUE_CHARS) + 1
    log.close()


async def test_what_the_reader_left_is_tried_again_by_itself(log: AccessLog, pipe: Pipe) -> None:
    fill(log, 2000)  # 170 KiB: the pipe takes 64
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.reader, readable.set)
    async with asyncio.timeout(10):
        while pipe.data.count(b"\n") < 2000:
            await readable.wait()
            readable.clear()
            pipe.read()
    loop.remove_reader(pipe.reader)
    assert (log.waiting, log.dropped) == (0, 0)
    log.close()


async def test_the_shared_pipe_stays_blocking(log: AccessLog, pipe: Pipe) -> None:
    fill(log, MAX_LINES)
    log.flush()
    assert not fcntl.fcntl(pipe.writer, fcntl.F_GETFL) & os.O_NONBLOCK
    log.close()


async def test_a_pipe_that_cannot_be_opened_again(tmp_path: Path) -> None:
    fifo = tmp_path / "stdout"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY)
    os.close(reader)
    log = AccessLog(writer, "text", "gateway")  # no reader: opening it for writing fails
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fill(log, 2000)
    log.flush()
    assert 0 < log.waiting < 2000
    data = b""
    while log.waiting:
        data += os.read(reader, 1 << 20)
        log.flush()
    data += os.read(reader, 1 << 20)
    assert (data.count(b"\n"), log.dropped) == (2000, 0)
    for fd in (reader, writer):
        os.close(fd)
    log.close()


async def test_a_full_socket_does_not_block() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        log = AccessLog(writer, "text", "gateway")
        fill(log, MAX_LINES)
        log.flush()
        assert 0 < log.waiting < MAX_LINES
        assert writer.getblocking()
        log.close()


async def test_a_broken_pipe_costs_lines_only() -> None:
    reader, writer = os.pipe()
    log = AccessLog(writer, "json", "gateway")
    os.close(reader)
    for dropped in (3, 6):
        fill(log, 3)
        log.flush()
        assert (log.waiting, log.dropped) == (0, dropped)
    log.close()
    log.tunnel(flags="-")
    assert log.dropped == 7
    os.close(writer)


async def test_a_full_disk_tears_a_line_and_the_next_begins_afresh(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (tmp_path / "stdout").open("wb") as file:
            log = AccessLog(file, "text", "gateway")
            fill(log, 1)
            log.flush()
            length = os.stat(file.fileno()).st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 * length + 10, hard))
            fill(log, 3)
            log.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert log.dropped == 2
            fill(log, 1)
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    first, second, torn, last = (tmp_path / "stdout").read_text().splitlines()
    assert all(line.endswith(" flags=-") for line in (first, second, last))
    assert len(torn) == 10


# The end.


async def test_close_waits_for_a_reader_that_is_merely_slow() -> None:
    reader, writer = os.pipe()
    log = AccessLog(writer, "text", "gateway")
    fill(log, MAX_LINES)
    received: list[bytes] = []

    def read_all() -> None:
        while data := os.read(reader, 4096):
            received.append(data)

    thread = threading.Thread(target=read_all)
    thread.start()
    log.close()
    os.close(writer)
    thread.join()
    os.close(reader)
    assert (b"".join(received).count(b"\n"), log.dropped) == (MAX_LINES, 0)


async def test_close_does_not_wait_long(log: AccessLog, pipe: Pipe) -> None:
    fill(log, MAX_LINES)
    began = time.monotonic()
    log.close()
    log.close()
    assert CLOSE_WAIT_S - 0.01 < time.monotonic() - began < CLOSE_WAIT_S + PATIENCE_S
    assert log.dropped > 0 and log.waiting == 0


async def test_nothing_is_written_after_close(log: AccessLog, pipe: Pipe) -> None:
    log.tunnel(flags="-")
    log.close()
    log.flush()
    log.refused(flags="DENY")
    assert (len(pipe.lines()), log.dropped) == (1, 1)


def test_a_process_outlives_its_standard_output() -> None:
    script = """if True:
        import asyncio, sys
        from shared.ops.access_log import AccessLog

        async def main():
            log = AccessLog(sys.stdout, None, "gateway")
            await asyncio.to_thread(sys.stdin.readline)  # until standard output is closed
            for _ in range(100):
                log.tunnel(flags="-")
            log.close()
            print(log.dropped, file=sys.stderr)

        asyncio.run(main())
        """
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(b"\n", timeout=30)
    assert (process.returncode, errors) == (0, b"100\n")


def fill(log: AccessLog, lines: int) -> None:
    for _ in range(lines):
        log.tunnel(flags="-")
