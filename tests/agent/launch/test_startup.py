from __future__ import annotations

import asyncio
import re

import pytest

from agent.config.probe import Probe
from agent.launch.startup import answers, ready
from shared.address import Address
from shared.errors import UnavailableError
from shared.tasks import spawn
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import PATIENCE_S, TcpServer


@pytest.fixture
async def never() -> asyncio.Future[None]:
    """An end that does not come."""
    return asyncio.get_running_loop().create_future()


async def test_a_port_that_opens(never: asyncio.Future[None]) -> None:
    port = closed_port()
    waiting = spawn(ready(Probe(Address("127.0.0.1", port)), PATIENCE_S, never), name="wait")
    await asyncio.sleep(0)
    assert not waiting.done()
    async with TcpServer.listening(port):
        assert await waiting


async def test_the_wait_ends_with_the_app(never: asyncio.Future[None]) -> None:
    never.set_result(None)
    assert not await ready(Probe(Address("127.0.0.1", closed_port())), PATIENCE_S, never)


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (Probe(Address("127.0.0.1", 9)), "app does not listen on 127.0.0.1:9 after 0.05 s: it must listen"),
        (
            Probe(url="http://127.0.0.1:9/x"),
            "app does not answer http://127.0.0.1:9/x after 0.05 s: see HBONE_ST",
        ),
    ],
    ids=["port", "url"],
)
async def test_the_wait_has_a_deadline(probe: Probe, text: str, never: asyncio.Future[None]) -> None:
    with pytest.raises(UnavailableError, match=re.escape(text)):
        await ready(probe, 0.05, never)


async def test_nothing_is_waited_for(never: asyncio.Future[None]) -> None:
    assert await ready(Probe(), 0.0, never)


@pytest.mark.parametrize(("status", "good"), [(200, True), (302, True), (404, False), (503, False)])
async def test_a_url_answers(status: int, good: bool) -> None:
    async with TcpServer.listening() as server:
        asked = spawn(answers(Probe(url=f"http://127.0.0.1:{server.port}/ready?a=b")), name="ask")
        app = await server.accept()
        assert (await app.read_until(b"\r\n\r\n")).startswith(b"GET /ready?a=b HTTP/1.1\r\n")
        await app.send(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
        assert await asked is good
