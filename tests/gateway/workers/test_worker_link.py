"""Requests to a worker, and its responses."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from gateway.workers.worker_link import (
    MAX_REQUESTS,
    LinkClient,
    LinkServer,
    Worker,
    socket_pair,
    watch_parent,
)
from shared.errors import HboneError, UpstreamError
from shared.ops.http_server import Handler, Request, Response
from tests.support.tcp_peer import PATIENCE_S


@asynccontextmanager
async def link(handlers: Mapping[str, Handler]) -> AsyncIterator[LinkClient]:
    ours, theirs = socket_pair()
    server = LinkServer(theirs, handlers)
    server.start()
    with ours, theirs:
        yield LinkClient(7, ours)
        server.close()


def fail(_: Request) -> Response:
    raise HboneError("the file has a mistake")


async def soon(_: Request) -> Response:
    await asyncio.sleep(0)
    return Response.text(200, "soon")


async def never(_: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_an_answer() -> None:
    async with link(
        {"/a": lambda request: Response(201, "x y/z", request.path.encode()), "/b": soon}
    ) as client:
        assert await client.get("/a", PATIENCE_S) == Response(201, "x y/z", b"/a")
        assert (await client.get("/b", PATIENCE_S)).body == b"soon\n"


async def test_a_long_answer() -> None:
    body = os.urandom(5 << 20)
    async with link({"/a": lambda _: Response(200, "b", body)}) as client:
        assert (await client.get("/a", PATIENCE_S)).body == body


async def test_an_answer_that_tells_of_a_failure() -> None:
    async with link({"/a": fail}) as client:
        answer = await client.get("/a", PATIENCE_S)
        assert (answer.status, answer.body) == (500, b"the file has a mistake\n")
        assert (await client.get("/b", PATIENCE_S)).status == 404


async def test_no_answer_in_time() -> None:
    async with link({"/a": never, "/b": soon}) as client:
        with pytest.raises(UpstreamError, match=r"^worker 7 does not answer /a: no response within 0\.01 s$"):
            await client.get("/a", 0.01)
        assert (await client.get("/b", PATIENCE_S)).status == 200, "the next request does not wait"


async def test_many_requests_at_once() -> None:
    async with link({"/b": soon}) as client:
        answers = await asyncio.gather(
            *(client.get("/b", PATIENCE_S) for _ in range(MAX_REQUESTS)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, UpstreamError)]
        # The kernel's queue of datagrams is short; a request that finds no place fails at once.
        assert all(str(error).startswith("worker 7 does not answer /b: ") for error in refused)
        assert len(refused) < MAX_REQUESTS
        assert (await client.get("/b", PATIENCE_S)).status == 200


async def test_the_replacement_of_a_worker_gets_its_requests() -> None:
    ours, theirs = socket_pair()
    with ours, theirs:
        client = LinkClient(1, ours)
        with pytest.raises(UpstreamError, match="no response within"):
            await client.get("/late", 0.01)
        replacement = LinkServer(theirs, {"/late": soon, "/b": soon})
        replacement.start()
        assert (await client.get("/b", PATIENCE_S)).body == b"soon\n"
        replacement.close()


async def test_an_answer_that_breaks_off() -> None:
    ours, theirs = socket_pair()

    def half() -> None:
        _, fds, _, _ = socket.recv_fds(theirs, 100, 1)
        with socket.socket(fileno=fds[0]) as connection:
            connection.sendall(b"200 10 text/plain\nhalf")

    with ours, theirs:
        asyncio.get_running_loop().add_reader(theirs, half)
        with pytest.raises(UpstreamError, match=r"^worker 1 does not answer /a: "):
            await LinkClient(1, ours).get("/a", PATIENCE_S)
        asyncio.get_running_loop().remove_reader(theirs)


async def test_no_descriptor_is_left() -> None:
    async with link({"/b": soon}) as client:
        await client.get("/b", PATIENCE_S)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            await client.get("/b", PATIENCE_S)
        assert len(os.listdir("/proc/self/fd")) <= before + 2, "one request's may not be closed yet"


async def test_the_end_of_the_parent() -> None:
    ours, theirs = os.pipe()
    gone = asyncio.Event()
    watch_parent(ours, gone)
    await asyncio.sleep(0)
    assert not gone.is_set()
    os.close(theirs)
    async with asyncio.timeout(PATIENCE_S):
        await gone.wait()
    os.close(ours)


@pytest.mark.parametrize(("total", "count"), [(10_000, 3), (10, 4), (2, 2), (7, 1)])
def test_limits_are_shared_out(total: int, count: int) -> None:
    shares = [Worker(number, count).share(total) for number in range(1, count + 1)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert Worker(5, 8).share(3) == 1, "at least one each"
    assert Worker().share(0) == 0
