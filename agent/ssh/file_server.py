"""sftp and scp on standard input and output: a program of its own, which the built-in sshd starts as the
session's user where the image has no such programs.

`python -I -m agent.ssh.file_server sftp VERSION`, or with the command that scp asks for: `scp -t FOLDER`. The
version is the client's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any

from asyncssh import SFTPServer
from asyncssh.logging import logger
from asyncssh.scp import run_scp_server
from asyncssh.sftp import run_sftp_server

SFTP = "sftp"
SFTP_VERSION = 3

READ_BYTES = 256 * 1024


class _Channel:
    """What asyncssh's servers use of a channel, for three pipes."""

    def __init__(self) -> None:
        self.logger = logger
        self.code = 0

    def is_closing(self) -> bool:
        return False

    def exit(self, status: int) -> None:
        self.code = status

    def abort(self) -> None:
        self.code = 1

    def get_environment(self) -> dict[str, str]:
        return dict(os.environ)


class _Input:
    """Standard input. Each read first waits until what is to be written has gone, so answers that nobody
    reads do not heap up."""

    def __init__(
        self, reader: asyncio.StreamReader, output: _Output, channel: _Channel, client_version: str
    ) -> None:
        self._client_version = client_version
        self._reader = reader
        self._output = output
        self.channel = channel
        self.logger = logger

    async def readexactly(self, size: int) -> bytes:
        await self._output.drain()
        return await self._reader.readexactly(size)

    async def read(self, size: int = -1) -> bytes:
        await self._output.drain()
        return await self._reader.read(size)

    async def readline(self) -> bytes:
        await self._output.drain()
        return await self._reader.readline()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._client_version if name == "client_version" else default


class _Output:
    """Standard output."""

    def __init__(self, writer: asyncio.StreamWriter, channel: _Channel) -> None:
        self._writer = writer
        self.channel = channel
        self.logger = logger

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        return  # what is still to be written is waited for at the end

    async def emptied(self) -> None:
        self._writer.transport.set_write_buffer_limits(high=0)
        await self._writer.drain()

    async def wait_closed(self) -> None:
        return


class _Errors:
    """Standard error, for the line why scp's command cannot be served."""

    def __init__(self, channel: _Channel) -> None:
        self.channel = channel

    def write(self, data: bytes) -> None:
        os.write(2, data)


async def serve(command: str, client_version: str) -> int:
    """Serves until the input ends; returns the exit code. The client's version counts, for OpenSSH's client
    gives the two names of a symbolic link in the other order (its PROTOCOL, section 4.1)."""
    loop = asyncio.get_running_loop()
    channel = _Channel()
    reader = asyncio.StreamReader(READ_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0))
    output, errors = await _output(1, channel), _Errors(channel)
    given = _Input(reader, output, channel, client_version)
    files: Any = SFTPServer(channel)  # type: ignore[arg-type]
    try:
        if command == SFTP:
            await run_sftp_server(files, given, output, SFTP_VERSION)  # type: ignore[arg-type]
        else:
            served = run_scp_server(files, command, given, output, errors)  # type: ignore[arg-type]
            if served is not None:
                await served
        await output.emptied()
    except (ConnectionError, asyncio.IncompleteReadError):
        return 1
    return channel.code


async def _output(fd: int, channel: _Channel) -> _Output:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0)
    )
    return _Output(asyncio.StreamWriter(transport, protocol, None, loop), channel)


def main(arguments: list[str]) -> int:
    """Serves what the first argument says."""
    if len(arguments) != 2:
        print("usage: file_server sftp|'scp -t|-f PATH' CLIENT_VERSION", file=sys.stderr)
        return 64
    logging.getLogger("asyncssh").setLevel(logging.CRITICAL)
    return asyncio.run(serve(*arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
