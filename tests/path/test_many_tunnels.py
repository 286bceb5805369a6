"""200 tunnels at once over one HTTP/2 connection."""

from __future__ import annotations

import asyncio
import os
import ssl

from hbone.demo.mesh import SNI
from tests.support.world import PATIENCE_S, World, count, dump

TUNNELS = 200
ROUNDS = 4
ROUND_BYTES = 10_000

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(world: World, context: ssl.SSLContext) -> Client:
    return await asyncio.open_connection(
        world.gateway.host, world.gateway.port, ssl=context, server_hostname=SNI
    )


async def exchange(client: Client) -> bool:
    """Sends bytes that nobody else sends, and says whether these came back."""
    reader, writer = client
    data = os.urandom(ROUND_BYTES)
    writer.write(data)
    return await reader.readexactly(ROUND_BYTES) == data


async def end(client: Client) -> None:
    _, writer = client
    writer.close()
    await writer.wait_closed()


async def test_two_hundred_tunnels_share_one_connection(world: World) -> None:
    context = ssl.create_default_context(cafile=world.caller.roots)
    context.load_cert_chain(world.caller.certificates, world.caller.key)
    async with asyncio.timeout(PATIENCE_S):
        # One at first: until a peer has announced its limit, no more than 100 streams are opened.
        clients = [await connect(world, context)]
        assert await exchange(clients[0])
        clients += await asyncio.gather(*(connect(world, context) for _ in range(TUNNELS - 1)))
        for _ in range(ROUNDS):
            assert all(await asyncio.gather(*map(exchange, clients)))
        (connection,) = await asyncio.to_thread(dump, world.admin, "/connections")
        assert connection["streams"] == TUNNELS
        await asyncio.gather(*map(end, clients))
    await asyncio.to_thread(count, world.hgate, "connection complete", TUNNELS)
    (connection,) = await asyncio.to_thread(dump, world.admin, "/connections")
    assert connection["streams"] == 0
