"""How the front of several workers asks one of them: a question and its answer.

Owned here: both ends of that. What can be asked is `app.py`'s, what is made of the answers `front.py`'s; who
starts both is `parent.py`.

A question is one datagram: the path, and one end of a fresh stream socket (SCM_RIGHTS) for the answer alone.
So nothing of it has a name that others could connect to, an answer that is late or cut off harms no other,
and a worker's replacement reads on where it stopped: a question that waited too long finds nobody at its end.
An answer is a line `STATUS LENGTH CONTENT-TYPE` and the body.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.ports.listeners import Key
from shared.address import Address
from shared.errors import HboneError, UpstreamError
from shared.ops.http_server import Handler, Request, Response
from shared.tasks import spawn

MAX_PATH_BYTES = 256
"""A question's; they are our own."""

MAX_ANSWER_BYTES = 256 << 20
"""All tunnels of a million connections, some 250 bytes each; beyond it something is wrong."""

MAX_QUESTIONS = 64
"""Answered at once; one more is dropped."""

ANSWER_S = 60.0
"""For an answer to be made and taken; who asks gives up earlier. A reload of a large file is the longest."""


@dataclass(frozen=True, slots=True)
class Crew:
    """What a worker has to know of the others."""

    number: int
    """Its own, from 1."""
    count: int
    """How many there are."""
    questions: socket.socket
    """Where the front's questions arrive."""
    lifeline: int
    """A pipe whose other end closes when the parent is gone."""
    ports: Mapping[Key, Address]
    """The listening addresses in place of those with port 0."""
    hbone_ports: Mapping[Key, Address] = field(default_factory=dict)
    """The same for the HBONE port."""
    reverse_ports: Mapping[Key, Address] = field(default_factory=dict)
    """The same for the reverse port."""

    def share(self, total: int) -> int:
        """This worker's part of a limit that holds for all together, at least 1."""
        return max(1, total // self.count + (self.number <= total % self.count))


class Asker:
    """Asks one worker."""

    def __init__(self, number: int, questions: socket.socket) -> None:
        """`questions` is connected to the worker's; not blocking."""
        self.number = number
        self._questions = questions

    async def ask(self, path: str, timeout_s: float) -> Response:
        """The answer. Raises UpstreamError if there is none within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(path)
        except TimeoutError as error:
            cause = f"nothing within {timeout_s:g} s"
            raise UpstreamError(f"worker {self.number} does not answer {path}: {cause}") from error
        except (OSError, EOFError, ValueError) as error:
            raise UpstreamError(f"worker {self.number} does not answer {path}: {error}") from error

    async def _ask(self, path: str) -> Response:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._questions, [path.encode()], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            head = (await reader.readuntil(b"\n")).decode()
            status, length, content_type = head.rstrip("\n").split(" ", 2)
            if int(length) > MAX_ANSWER_BYTES:
                raise ValueError(f"{length} bytes are more than {MAX_ANSWER_BYTES}")
            return Response(int(status), content_type, await reader.readexactly(int(length)))
        finally:
            writer.transport.abort()


class Answerer:
    """Answers what the front asks this worker; `answers` has a handler for each path."""

    def __init__(self, questions: socket.socket, answers: Mapping[str, Handler]) -> None:
        """`questions` is not blocking."""
        self._questions = questions
        self._answers = answers
        self._open = 0

    def start(self) -> None:
        """From now on answers."""
        asyncio.get_running_loop().add_reader(self._questions.fileno(), self._take)

    def close(self) -> None:
        """Answers no more."""
        asyncio.get_running_loop().remove_reader(self._questions.fileno())

    def _take(self) -> None:
        try:
            path, fds, _, _ = socket.recv_fds(self._questions, MAX_PATH_BYTES, 1)
        except OSError:
            return  # none there after all
        for fd in fds:
            connection = socket.socket(fileno=fd)
            if self._open < MAX_QUESTIONS:
                self._open += 1
                spawn(self._answer(path.decode(), connection), name=f"answer {path.decode()}")
            else:
                connection.close()

    async def _answer(self, path: str, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            _, writer = await asyncio.open_unix_connection(sock=connection)
            try:
                async with asyncio.timeout(ANSWER_S):
                    response = await self._response(path)
                    head = f"{response.status} {len(response.body)} {response.content_type}\n"
                    writer.write(head.encode() + response.body)
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
            finally:
                writer.transport.abort()
        except (TimeoutError, OSError):
            pass  # the front has given up
        finally:
            self._open -= 1

    async def _response(self, path: str) -> Response:
        handler = self._answers.get(path)
        if handler is None:
            return Response.text(404, f"no such question: {path}")
        try:
            answer = handler(Request("GET", path))
            return await answer if inspect.isawaitable(answer) else answer
        except HboneError as error:
            return Response.text(500, str(error))


def pair() -> tuple[socket.socket, socket.socket]:
    """The asker's and the answerer's end of a worker's questions."""
    asker, answerer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    asker.setblocking(False)
    answerer.setblocking(False)
    return asker, answerer


def hold(lifeline: int, gone: asyncio.Event) -> None:
    """Sets `gone` when the other end of the pipe `lifeline` closes, however its holder has ended."""

    def closed() -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        gone.set()

    asyncio.get_running_loop().add_reader(lifeline, closed)
