"""The attackers, in a process of their own so that their work does not slow down who measures:
`python -m tests.stress.attack PORT KIND NAME [...]`, which prints JSON for what came of it.

Everything is bounded, and goes to loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shared import loop
from tests.stress.clients import at_a_time, connect
from tests.support import attacker, floods, stalls
from tests.support.attacker import End, Outcome
from tests.support.hellos import hello
from tests.support.stalls import Stall

PATH = b"/_hbone/echo"

BEGUN = "begun"
"""What the process says when it has been loaded."""

ROUNDS_S = 3.0
ROUND_S = 0.1
"""An attacker that was ended comes again for so long, but ten times a second at most: how fast a source may
connect is another matter than what it may do with a connection."""

MILLION_S = 120.0
"""For a million frames to go and to come back."""

AT_A_TIME = 32
IMPATIENT_PAUSE_S = 0.08
"""Impatient clients, and what each waits before it comes again: 400 a second, a third of what the machine can
serve, for it is not to be about overload."""

PROCESS_S = 240.0
"""For a whole attack; longer than any of them takes."""


def main() -> None:
    """Attacks, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.attack")
    parser.add_argument("port", type=int)
    parser.add_argument("kind", choices=("flood", "stall", "hello", "bytes", "impatient", "services"))
    parser.add_argument(
        "name",
        help="of the flood or stall; for bytes how many, for impatient the server name, for services that "
        "with {} for a number",
    )
    parser.add_argument("--ca", type=Path, help="the port's server has TLS, with this CA")
    parser.add_argument("--server", default="", help="its name")
    parser.add_argument("--connections", type=int, default=1, help="of a stall, or clients")
    parser.add_argument("--hold", type=float, default=1.0, metavar="S", help="a stall at most for so long")
    given = parser.parse_args()
    tls = None
    if given.ca:
        tls = ssl.create_default_context(cafile=str(given.ca))
        tls.set_alpn_protocols(["h2"])
    print(BEGUN, flush=True)
    outcomes = loop.run(_attack(given, End(tls=tls, name=given.server)))
    json.dump([dataclasses.asdict(outcome) for outcome in outcomes], sys.stdout)


async def _attack(given: argparse.Namespace, end: End) -> list[Outcome]:
    if given.kind == "flood":
        return await _rounds(given.port, given.name, end)
    if given.kind == "bytes":
        pieces = floods.one_byte_frames(PATH, int(given.name))
        return [await attacker.converse(pieces, given.port, MILLION_S, end)]
    if given.kind == "impatient":
        return [await _impatient(given.port, hello(given.name), given.connections)]
    if given.kind == "services":
        return [await _services(given.port, given.name, given.connections)]
    known = stalls.stalls(PATH) if given.kind == "stall" else stalls.slow_hellos()
    attempts = (_stall(given, known[given.name], end) for _ in range(given.connections))
    return [*await asyncio.gather(*attempts)]


async def _rounds(port: int, name: str, end: End) -> list[Outcome]:
    outcomes: list[Outcome] = []
    attack = floods.floods(PATH)[name]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ROUNDS_S
    while loop.time() < deadline:
        started = loop.time()
        outcomes.append(await attacker.flood(attack, port, end))
        await asyncio.sleep(started + ROUND_S - loop.time())
    return outcomes


async def _impatient(port: int, said: bytes, clients: int) -> Outcome:
    """Clients of hgate that say hello and break off at once."""

    async def visit(_: int) -> None:
        tunnel = await connect(port)
        tunnel.send(said)
        tunnel.reset()

    return await _visits(visit, clients)


async def _services(port: int, name: str, clients: int) -> Outcome:
    """Clients of hgate without a credential, each of which asks for a service of its own."""

    async def visit(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello(name.format(number)))
        await reader.read()
        writer.close()

    return await _visits(visit, clients)


async def _visits(visit: Callable[[int], Awaitable[None]], clients: int) -> Outcome:
    """So many clients, AT_A_TIME, each of which is told its number."""
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def one(number: int) -> None:
        await visit(number)
        await asyncio.sleep(IMPATIENT_PAUSE_S)

    await at_a_time(AT_A_TIME, range(clients), one)
    return Outcome(ended=True, sent=clients, seconds=loop.time() - started)


async def _stall(given: argparse.Namespace, attack: Stall, end: End) -> Outcome:
    try:
        return await attacker.stall(attack, given.port, given.hold, end)
    except OSError:
        return Outcome(ended=True)  # turned away at the door


class Attack:
    """A running attack; `outcomes` are there once the block of `started` has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def outcomes(self) -> list[Outcome]:
        """What came of it. AssertionError if it broke off."""
        async with asyncio.timeout(PROCESS_S):
            out, err = await self._process.communicate()
        assert self._process.returncode == 0, f"the attack broke off: {err.decode()[-300:]}"
        return [Outcome(**outcome) for outcome in json.loads(out)]


@asynccontextmanager
async def started(port: int, kind: str, name: str, *more: Any) -> AsyncIterator[Attack]:
    """Attacks `port` in another process, which is there when the block begins and gone when it ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.stress.attack", str(port), kind, name, *map(str, more)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        await process.stdout.readuntil(BEGUN.encode())
        yield Attack(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    main()
