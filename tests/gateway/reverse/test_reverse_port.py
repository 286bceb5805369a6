"""The reverse port: its bounds, what a tunnel gets from it, and its end; real mTLS throughout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.reverse.reverse_port import CLOSE_S
from gateway.reverse.workload_upstream import WORKLOAD_RULES
from shared.errors import StatusError, StreamResetError, UpstreamError
from shared.http2.frames import REFUSED_STREAM
from shared.trust.spiffe import SpiffeId
from tests.support import reverse_port
from tests.support.hbone_port import TRUST_DOMAIN
from tests.support.reverse_port import NAME, WORKLOAD, ReversePort
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

OTHER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "other")


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[ReversePort]:
    async with reverse_port.serving(tmp_path, wait_s=0.0) as port:
        yield port


# Limits.


async def test_max_connections(tmp_path: Path) -> None:
    async with reverse_port.serving(tmp_path, max_connections=1) as port:
        assert port.value("hbone_reverse_connections_limit") == 1
        async with port.workload():
            client = await TcpPeer.connect(port.port)
            assert await client.was_reset()
            await client.close()
            line = await port.line()
            assert (line["flags"], line["error"]) == (
                "LIMIT",
                "1 connections are open, which is max_connections",
            )


async def test_max_names(tmp_path: Path) -> None:
    async with reverse_port.serving(tmp_path, max_names=1) as port, port.workload():
        assert port.value("hbone_reverse_names_limit") == 1
        async with port.dialled("other.demo.svc.cluster.local", OTHER) as other:
            stream, verdict = await other.verdict()
            assert verdict.refusal == "1 names are registered, which is max_names"
            stream.respond(204, end=True)
            assert (await port.line())["flags"] == "LIMIT"


async def test_max_connections_per_name(tmp_path: Path) -> None:
    async with reverse_port.serving(tmp_path, max_connections_per_name=1) as port, port.workload():
        assert port.value("hbone_reverse_largest_name_limit") == 1
        assert port.value("hbone_reverse_largest_name") == 1
        async with port.dialled() as second:
            _, verdict = await second.verdict()
            assert verdict.refusal == "1 connections have this name, which is max_connections_per_name"
            assert (await port.line())["flags"] == "LIMIT"


# Tunnels.


async def test_a_tunnel(port: ReversePort) -> None:
    async with port.workload() as workload:
        opening = port.open()
        request = await workload.request()
        assert (request[b":method"], request[b":path"]) == (b"POST", b"/_hbone/15003")
        assert request[b":authority"] == NAME.encode()
        assert b"authorization" not in dict(request.fields), "the connection is proof enough"
        request.respond(200)
        stream = await opening
        stream.write(b"there")
        assert await request.read(5) == b"there"
        assert port.listener.rows(0)[0]["streams"] == 1
        stream.abort()


async def test_a_client_waits_for_a_workload_that_comes(tmp_path: Path) -> None:
    async with reverse_port.serving(tmp_path, wait_s=PATIENCE_S) as port:
        opening = port.open()
        async with port.workload() as workload:
            (await workload.request()).respond(200)
            (await opening).abort()


async def test_the_workload_says_no(port: ReversePort) -> None:
    async with port.workload() as workload:
        opening = port.open()
        (await workload.request()).respond(503, end=True)
        with pytest.raises(StatusError, match="answered 503"):
            await opening


async def test_no_answer_in_time(port: ReversePort) -> None:
    async with port.workload() as workload:
        opening = port.open(timeout_s=0.1)
        request = await workload.request()
        with pytest.raises(UpstreamError, match="no response headers within"):
            await opening
        await request.broken()


async def test_tunnels_go_to_whom_has_fewest(port: ReversePort) -> None:
    async with port.workload() as one, port.workload() as two:
        streams = []
        for _ in range(4):
            opening = port.open()
            for workload in (one, two):
                await workload.peer.answered()
                if not workload.requests.empty():
                    (await workload.request()).respond(200)
            streams.append(await opening)
        assert [row["streams"] for row in port.listener.rows(0)] == [2, 2]
        for stream in streams:
            stream.abort()


async def test_refused_by_one_it_goes_to_the_next(port: ReversePort) -> None:
    async with port.workload() as one, port.workload() as two:
        opening = port.open()
        request = await one.request()
        request.reset(REFUSED_STREAM)
        (await two.request()).respond(200)
        (await opening).abort()


async def test_refused_by_all_it_ends(port: ReversePort) -> None:
    async with port.workload() as workload:
        opening = port.open()
        for _ in range(1 + WORKLOAD_RULES.max_retries):
            (await workload.request()).reset(REFUSED_STREAM)
        with pytest.raises(StreamResetError, match="REFUSED_STREAM"):
            await opening


# Start and end.


async def test_rows_for_the_admin_port(port: ReversePort) -> None:
    async with port.workload() as workload:
        (row,) = port.listener.rows(asyncio.get_running_loop().time())
        assert row["origin"] == f"reverse://{NAME}"
        assert (row["src.addr"], row["identity"], row["streams"]) == (workload.address, str(WORKLOAD), 0)


async def test_who_leaves_says_so_and_goes_on_serving(port: ReversePort) -> None:
    async with port.workload() as workload:
        address = port.port
        await port.listener.leave()
        await workload.peer.until(lambda: workload.peer.goaway)
        with pytest.raises(ConnectionRefusedError):
            await TcpPeer.connect(address)
        stream, request = await port.opened(workload)
        stream.write(b"in time")
        assert await request.read(7) == b"in time"
        stream.write_eof()
        request.end()
        assert await request.rest() == b""
        await port.listener.close()
        await workload.peer.until(lambda: workload.peer.lost)
        assert (await port.line())["flags"] == "-"


async def test_close_does_not_wait_for_open_tunnels(port: ReversePort) -> None:
    async with port.workload() as workload:
        await port.opened(workload)
        async with asyncio.timeout(CLOSE_S + PATIENCE_S):
            await port.listener.close("the test is over")
        await workload.peer.until(lambda: workload.peer.lost)
        assert (await port.line())["error"] == "registration lost: the test is over"
        (lost,) = port.listener._registrations._refusals.recent.rows()
        assert (lost["flag"], lost["cases"][0]["message"]) == (
            "UPSTREAM_RESET",
            "registration lost: the test is over",
        )
