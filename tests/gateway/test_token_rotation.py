"""A token's life in the gateway: under load, in its metrics and on its admin port."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from shared.net.legs.stream import Stream, header_value
from shared.trust.token_claims import claims_of
from tests.support.gateway_load import EchoService, flowing, staying
from tests.support.gateway_world import tunnel
from tests.support.hellos import ACCESS_DENIED, hello
from tests.support.metadata_server import Answer, MetadataServer
from tests.support.running_gateway import running
from tests.support.tcp_peer import PATIENCE_S
from tests.support.wall_clock import Clock, Mint

ROTATIONS = 100


class CheckingService(EchoService):
    """An echo for whoever shows a token that has not expired; anybody else gets 401."""

    clock: Callable[[], float]

    def __init__(self) -> None:
        super().__init__()
        self.tokens: set[str] = set()
        self.rejected = 0

    def serve(self, stream: Stream) -> None:
        shown = header_value(stream.headers, b"authorization") or b""
        token = shown.decode().removeprefix("Bearer ")
        if claims_of(token)["exp"] <= self.clock():
            self.rejected += 1
            stream.respond([(b":status", b"401")], end_stream=True)
            return
        self.tokens.add(token)
        super().serve(stream)


async def test_a_hundred_rotations_disturb_no_tunnel(tmp_path: Path) -> None:
    clock, chance = Clock(), random.Random(1)
    mint = Mint(clock)
    async with CheckingService.listening() as service, MetadataServer(mint) as metadata:
        service.clock = clock
        route = tunnel(service.port, token={"audience": "https://{service}.example"})
        environ = {"GCE_METADATA_HOST": metadata.host}
        async with (
            running(tmp_path / "hgate.yaml", [route], environ=environ, wall_clock=clock) as gateway,
            staying(gateway.port, 20) as tunnels,
            flowing(gateway.port) as load,
        ):
            for number in range(1, ROTATIONS + 1):
                if number % 10 == 0:  # the server is away: the old token serves
                    metadata.answer = lambda _: Answer(status=503)
                    clock.turn(3310)
                    await metadata.seen(len(metadata.requests) + 1)
                    await load.more(3)
                    metadata.answer = mint
                    clock.turn(chance.uniform(300, 3000))  # some of them wait for the next one
                elif number % 7 == 0:
                    clock.turn(8 * 3600)  # the machine slept
                else:
                    clock.turn(chance.uniform(3310, 3530))
                async with asyncio.timeout(PATIENCE_S):
                    while len(mint.minted) <= number and not load.failed:
                        await load.more(1)
                await load.more(3)
            await tunnels.talk()
            assert load.failed == {}
            assert service.rejected == 0
            assert len(service.tokens) >= ROTATIONS
            assert len(mint.minted) - len(service.tokens) <= 1
            identity = f"metadata server at {metadata.host}"
            labels = {"identity": identity, "audience": "https://hello.example"}
            minted = await gateway.metric("hbone_token_refreshes_total", **labels, result="success")
            failed = await gateway.metric("hbone_token_failures_total", **labels, reason="refused")
            assert (minted, failed) == (len(mint.minted), len(metadata.requests) - len(mint.minted))
            (told,) = await gateway.dump("/tokens")
            assert (told["identity"], told["audience"]) == (identity, "https://hello.example")
            assert told["expires_in_s"] > 0
            assert not any(token in str(told) for token in service.tokens)
            assert await gateway.metric("hbone_token_entries") == 1
            assert await gateway.metric("hbone_token_entries_limit") == 1000
            assert not any(token in message for token in mint.minted for message in gateway.records.messages)


async def test_a_service_that_rejects_every_token_has_one_more_minted(tmp_path: Path) -> None:
    clock = Clock()
    mint = Mint(clock)
    async with CheckingService.listening() as service, MetadataServer(mint) as metadata:
        service.clock = lambda: clock() + 7200  # its clock is wrong
        route = tunnel(service.port, token={"audience": "https://{service}.example"})
        environ = {"GCE_METADATA_HOST": metadata.host}
        async with running(tmp_path / "hgate.yaml", [route], environ=environ, wall_clock=clock) as gateway:
            for _ in range(10):
                client = await gateway.client(hello())
                assert await client.rest() == ACCESS_DENIED
                assert (await gateway.line())["status"] == 401
            assert service.rejected == 11, "the first tunnel asked twice, with two tokens"
            assert len(mint.minted) == 2
            clock.turn(10)
            client = await gateway.client(hello())
            assert await client.rest() == ACCESS_DENIED
            assert (service.rejected, len(mint.minted)) == (13, 3)
            labels = {"identity": f"metadata server at {metadata.host}", "audience": "https://hello.example"}
            assert await gateway.metric("hbone_token_failures_total", **labels, reason="rejected") == 2
