"""A program of somebody else's that prints a secret: started without a terminal, with a deadline, and with a
bound on what it prints. What it prints, on either stream, is in no error text or log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from shared.errors import TokenError

TIMEOUT_S = 20.0
"""Programs of Google's and Amazon's take one or two seconds, a cold start of Python among them some more."""

MAX_OUTPUT_BYTES = 64 * 1024
"""A token is a few KiB."""

END_S = 1.0
"""For what is left of a program that has been killed."""


async def output_of(
    command: Sequence[str], environ: Mapping[str, str], what: str, *, timeout_s: float = TIMEOUT_S
) -> bytes:
    """What the program prints to standard output. `environ` is added to our own environment, `what` is its
    name in error texts, `timeout_s` bounds the run. It has no standard input and, as the first of a session,
    no terminal that it could ask somebody on.

    Raises TokenError when it cannot be run, is late, fails, or prints too much.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **environ},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that its own children end with it
        )
    except OSError as error:
        raise TokenError(f"cannot run {what}: {error.strerror}", "file") from error
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            output = await _read(process.stdout)
            if len(output) > MAX_OUTPUT_BYTES:
                raise TokenError(f"{what} printed more than {MAX_OUTPUT_BYTES} bytes", "garbled")
            code = await process.wait()
    except TimeoutError as error:
        raise TokenError(f"{what} has not ended within {timeout_s:g} s", "unreachable") from error
    finally:
        await _end(process, process.stdout)
    if code != 0:
        text = f"{what} ended with exit code {code}; run it by hand to see why"
        raise TokenError(text, "refused")
    return output


async def _end(process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
    """Ends the program and its children, if it has not ended, and closes the pipe: by reading to its end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):  # a daemon that it has left behind may hold the pipe for ever
            while await output.read(MAX_OUTPUT_BYTES):
                pass
            await process.wait()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """All of it, or one byte more than the bound."""
    output = bytearray()
    while len(output) <= MAX_OUTPUT_BYTES and (part := await stream.read(MAX_OUTPUT_BYTES + 1 - len(output))):
        output += part
    return bytes(output)
