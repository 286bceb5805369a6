"""An answer that has no room, or that nobody reads."""

from __future__ import annotations

import os

from shared.errors import EXIT_OK, EXIT_UNAVAILABLE
from tests.hbone.commands import running

PRINT = ("register", "--print", "https://h.example", "-n", "demo", "--gateway", "10.0.0.1")


async def test_a_full_disk() -> None:
    async with running(*PRINT, shell='exec "$@" >/dev/full') as command:
        ended = await command.ended()
    assert ended.stderr == "hbone: cannot write the answer: No space left on device\n"
    assert ended.code == EXIT_UNAVAILABLE


async def test_the_reader_has_gone() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    async with running(*PRINT, stdout=theirs) as command:
        os.close(theirs)
        ended = await command.ended()
    assert ended.stderr == "hbone: cannot write the answer: Broken pipe\n"
    assert ended.code == EXIT_UNAVAILABLE


async def test_there_is_nowhere_to_write() -> None:
    async with running(*PRINT, shell='exec "$@" >&-') as command:
        ended = await command.ended()
    assert (ended.code, ended.stdout, ended.stderr) == (EXIT_OK, b"", "")
