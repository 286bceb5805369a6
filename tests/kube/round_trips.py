"""Round trips in open tunnels, for `tests.kube.scale`: `python -m tests.kube.round_trips PORT NAME`.

Says `open` when all tunnels are, and when standard input ends the seconds of each round trip, as JSON. The
exit code is 1 if a tunnel broke.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from tests.support.hellos import hello

TUNNELS = 4
PAUSE_S = 0.01


async def main(port: int, name: str) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    first = hello(name)
    opened = []
    for _ in range(TUNNELS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        await reader.readexactly(len(first))
        opened.append((reader, writer))
    print("open", flush=True)
    trips: list[float] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not over.is_set():
            began = time.perf_counter()
            writer.write(b"there and back")
            await reader.readexactly(14)
            trips.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
        writer.close()

    await asyncio.gather(*(talk(*each) for each in opened))
    print(json.dumps(trips))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
