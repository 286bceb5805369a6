"""Requests from the ops process of several workers to one of them, and the responses.

A request is one datagram: the path, and one end of a new stream socket (SCM_RIGHTS) for the response alone.
So there is no named socket that others could connect to, a late or incomplete response disturbs no other,
and the replacement of a worker reads on where the worker stopped. The response to a request that has waited
too long finds its socket closed. A response is a line `STATUS LENGTH CONTENT-TYPE` and the body.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from gateway.ports.listeners import Key
from shared.address import Address
from shared.errors import HboneError, UpstreamError
from shared.ops.http_server import Handler, Request, Response
from shared.tasks import spawn

MAX_PATH_BYTES = 1024
"""Of a request, with what is looked for; all of them are our own."""

MAX_RESPONSE_BYTES = 256 << 20
"""The tunnels of a million connections, at some 250 bytes each. A longer response is a mistake."""

MAX_REQUESTS = 64
"""Requests that a worker answers at once; one more is dropped."""

RESPONSE_S = 60.0
"""Seconds for a response to be made and read. The client gives up earlier. A reload of a large file takes
longest."""


@dataclass(frozen=True, slots=True)
class ParentLink:
    """What connects a worker with the processes beside it."""

    requests: socket.socket
    """Where the requests of the ops process arrive."""
    parent_pipe: int
    """A pipe whose other end closes when the parent is gone."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Which of several workers this process is; by default it is the only one, without a parent."""

    number: int = 1
    """Counts from 1."""
    count: int = 1
    """How many workers there are."""
    link: ParentLink | None = None
    ports: Mapping[Key, Address] = field(default_factory=dict)
    """The addresses to listen on in place of those with port 0: all workers have the same."""
    hbone_ports: Mapping[Key, Address] = field(default_factory=dict)
    """The same for the HBONE port."""
    post_ports: Mapping[Key, Address] = field(default_factory=dict)
    """The same for its POSTs."""
    reverse_ports: Mapping[Key, Address] = field(default_factory=dict)
    """The same for the reverse port."""
    span_pipe: int | None = None
    """Where spans go, if traces are made: the write end, which is the parent's to close."""

    def share(self, total: int) -> int:
        """This worker's part of a limit that holds for all workers together. A worker among others has at
        least 1."""
        if self.count == 1:
            return total
        return max(1, total // self.count + (self.number <= total % self.count))


class LinkClient:
    """Sends requests to one worker."""

    def __init__(self, number: int, requests: socket.socket) -> None:
        """`requests` is connected to the worker's socket and does not block."""
        self.number = number
        self._requests = requests

    async def get(self, path: str, timeout_s: float) -> Response:
        """Raises UpstreamError if there is no response within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(path)
        except TimeoutError as error:
            cause = f"no response within {timeout_s:g} s"
            raise UpstreamError(f"worker {self.number} does not answer {path}: {cause}") from error
        except (OSError, EOFError, ValueError) as error:
            raise UpstreamError(f"worker {self.number} does not answer {path}: {error}") from error

    async def _get(self, path: str) -> Response:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._requests, [path.encode()], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            head = (await reader.readuntil(b"\n")).decode()
            status, length, content_type = head.rstrip("\n").split(" ", 2)
            if int(length) > MAX_RESPONSE_BYTES:
                raise ValueError(f"{length} bytes are more than {MAX_RESPONSE_BYTES}")
            return Response(int(status), content_type, await reader.readexactly(int(length)))
        finally:
            writer.transport.abort()


class LinkServer:
    """Answers the requests to this worker; `handlers` has one for each path."""

    def __init__(self, requests: socket.socket, handlers: Mapping[str, Handler]) -> None:
        """`requests` does not block."""
        self._requests = requests
        self._handlers = handlers
        self._open = 0

    def start(self) -> None:
        """Starts to answer requests."""
        asyncio.get_running_loop().add_reader(self._requests.fileno(), self._receive)

    def close(self) -> None:
        """Stops to receive requests."""
        asyncio.get_running_loop().remove_reader(self._requests.fileno())

    def _receive(self) -> None:
        try:
            path, fds, _, _ = socket.recv_fds(self._requests, MAX_PATH_BYTES, 1)
        except OSError:
            return  # none there after all
        for fd in fds:
            connection = socket.socket(fileno=fd)
            if self._open < MAX_REQUESTS:
                self._open += 1
                spawn(self._answer(path.decode(), connection), name=f"answer {path.decode()}")
            else:
                connection.close()

    async def _answer(self, path: str, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            _, writer = await asyncio.open_unix_connection(sock=connection)
            try:
                async with asyncio.timeout(RESPONSE_S):
                    response = await self._response(path)
                    head = f"{response.status} {len(response.body)} {response.content_type}\n"
                    writer.write(head.encode() + response.body)
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
            finally:
                writer.transport.abort()
        except (TimeoutError, OSError):
            pass  # the ops process has given up
        finally:
            self._open -= 1

    async def _response(self, target: str) -> Response:
        path, _, query = target.partition("?")
        handler = self._handlers.get(path)
        if handler is None:
            return Response.text(404, f"unknown path: {path}")
        try:
            answer = handler(Request("GET", path, dict(parse_qsl(query))))
            return await answer if inspect.isawaitable(answer) else answer
        except HboneError as error:
            return Response.text(500, str(error))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The client's and the server's end of a worker's requests."""
    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.setblocking(False)
    server.setblocking(False)
    return client, server


def watch_parent(pipe: int, gone: asyncio.Event) -> None:
    """Sets `gone` when the other end of `pipe` closes, which it does however the parent has ended."""

    def closed() -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        gone.set()

    asyncio.get_running_loop().add_reader(pipe, closed)
