"""A question to a worker and its answer."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from gateway.workers.worker_link import (
    MAX_QUESTIONS,
    Answerer,
    Asker,
    Crew,
    hold,
    pair,
)
from shared.errors import HboneError, UpstreamError
from shared.ops.http_server import Handler, Request, Response
from tests.support.tcp_peer import PATIENCE_S


@asynccontextmanager
async def link(answers: Mapping[str, Handler]) -> AsyncIterator[Asker]:
    asks, is_asked = pair()
    answerer = Answerer(is_asked, answers)
    answerer.start()
    with asks, is_asked:
        yield Asker(7, asks)
        answerer.close()


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
    ) as asker:
        assert await asker.ask("/a", PATIENCE_S) == Response(201, "x y/z", b"/a")
        assert (await asker.ask("/b", PATIENCE_S)).body == b"soon\n"


async def test_a_long_answer() -> None:
    body = os.urandom(5 << 20)
    async with link({"/a": lambda _: Response(200, "b", body)}) as asker:
        assert (await asker.ask("/a", PATIENCE_S)).body == body


async def test_an_answer_that_tells_of_a_failure() -> None:
    async with link({"/a": fail}) as asker:
        answer = await asker.ask("/a", PATIENCE_S)
        assert (answer.status, answer.body) == (500, b"the file has a mistake\n")
        assert (await asker.ask("/b", PATIENCE_S)).status == 404


async def test_no_answer_in_time() -> None:
    async with link({"/a": never, "/b": soon}) as asker:
        with pytest.raises(UpstreamError, match=r"^worker 7 does not answer /a: nothing within 0\.01 s$"):
            await asker.ask("/a", 0.01)
        assert (await asker.ask("/b", PATIENCE_S)).status == 200, "the next question is not held up"


async def test_many_questions_at_once() -> None:
    async with link({"/b": soon}) as asker:
        answers = await asyncio.gather(
            *(asker.ask("/b", PATIENCE_S) for _ in range(MAX_QUESTIONS)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, UpstreamError)]
        # The kernel's queue of datagrams is short; whoever finds no place hears so at once.
        assert all(str(error).startswith("worker 7 does not answer /b: ") for error in refused)
        assert len(refused) < MAX_QUESTIONS
        assert (await asker.ask("/b", PATIENCE_S)).status == 200


async def test_a_dead_worker_s_questions_are_its_replacement_s() -> None:
    asks, is_asked = pair()
    with asks, is_asked:
        asker = Asker(1, asks)
        with pytest.raises(UpstreamError, match="nothing within"):
            await asker.ask("/late", 0.01)
        replacement = Answerer(is_asked, {"/late": soon, "/b": soon})
        replacement.start()
        assert (await asker.ask("/b", PATIENCE_S)).body == b"soon\n"
        replacement.close()


async def test_an_answer_that_breaks_off() -> None:
    asks, is_asked = pair()

    def half() -> None:
        _, fds, _, _ = socket.recv_fds(is_asked, 100, 1)
        with socket.socket(fileno=fds[0]) as connection:
            connection.sendall(b"200 10 text/plain\nhalf")

    with asks, is_asked:
        asyncio.get_running_loop().add_reader(is_asked, half)
        with pytest.raises(UpstreamError, match=r"^worker 1 does not answer /a: "):
            await Asker(1, asks).ask("/a", PATIENCE_S)
        asyncio.get_running_loop().remove_reader(is_asked)


async def test_no_descriptor_is_left() -> None:
    async with link({"/b": soon}) as asker:
        await asker.ask("/b", PATIENCE_S)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            await asker.ask("/b", PATIENCE_S)
        assert len(os.listdir("/proc/self/fd")) <= before + 2, "one question's may not be closed yet"


async def test_the_lifeline() -> None:
    ours, theirs = os.pipe()
    gone = asyncio.Event()
    hold(ours, gone)
    await asyncio.sleep(0)
    assert not gone.is_set()
    os.close(theirs)
    async with asyncio.timeout(PATIENCE_S):
        await gone.wait()
    os.close(ours)


@pytest.mark.parametrize(("total", "count"), [(10_000, 3), (10, 4), (2, 2), (7, 1)])
def test_limits_are_shared_out(total: int, count: int) -> None:
    asks, is_asked = pair()
    with asks, is_asked:
        shares = [Crew(number, count, is_asked, 0, {}).share(total) for number in range(1, count + 1)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    with asks, is_asked:
        assert Crew(5, 8, is_asked, 0, {}).share(3) == 1, "each takes one at least"
