"""The addresses of one absolute name, asked of the name servers by c-ares on the event loop.

Each attempt at a question has a c-ares channel of its own, which costs 30 µs. So a look-up that nobody waits
for any more is given up at once, sockets and all. Each question has a port of its own, which makes its answer
hard to guess, and spares A and AAAA the race in the kernel's NAT that loses one of them (5 s on a node of
Kubernetes). A changed resolv.conf counts from the next look-up on. And c-ares' own cache, which has no bound,
stays empty.

pycares is imported with the first name that is looked up: 5 ms.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pycares

LOOK_UP_S = 4.0
"""For one name, all repetitions included. Two names (as it is, then with a suffix) have room in the 10 s of a
dial."""

AGAIN_S = (1.0, 1.5)
"""A question that is not answered is asked again after so long, of the next server if there are several; an
answer to the first is still welcome, which c-ares' own repetitions do not have."""

OTHER_FAMILY_S = 0.3
"""How long the second family is waited for once the first has addresses; what comes later is left out. RFC
8305 section 3 has 0.05 s, for those who add what comes later. A name server that drops AAAA costs as much."""

MAX_ADDRESSES = 64
"""Kept of one family: a longer answer is for balancing, and over TCP it may have thousands."""

DNS_PORT = 53

NO_NAME = "no_name"
NO_ADDRESS = "no_address"
FAILED = "failed"
REFUSED = "refused"
MALFORMED = "malformed"
TIMEOUT = "timeout"
UNREACHABLE = "unreachable"

KINDS = (NO_NAME, NO_ADDRESS, FAILED, REFUSED, MALFORMED, TIMEOUT, UNREACHABLE)
"""Why a look-up came to nothing: NXDOMAIN; a name without A and AAAA; SERVFAIL; REFUSED; an answer that is no
DNS; none in time; nobody at the name server's port, or no way there."""

_FAMILIES = (socket.AF_INET6, socket.AF_INET)


class ResolveError(OSError):
    """A name has no addresses, or nobody says which; `strerror` says why, `kind` is one of KINDS."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(None, text)
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Answer:
    """What a name stands for."""

    addresses: tuple[str, ...]
    """IPv6 before IPv4."""

    ttl_s: float
    """How long that holds, as the name server says."""


async def look_up(name: str, servers: Sequence[str] = (), first: int = 0) -> Answer:
    """The addresses of `name`, which is absolute. Cancelled, it leaves nothing behind. `servers` are asked,
    HOST:PORT each, or those of resolv.conf, in turn from the one at place `first` on.

    Raises:
        ResolveError: there are none, or the name servers do not say.
    """
    questions: list[_Question] = []
    try:
        for family in _FAMILIES:
            questions.append(_Question(name, family, servers, first))
        return await _answer(questions)
    finally:
        for question in questions:
            question.close()


async def _answer(questions: Sequence[_Question]) -> Answer:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LOOK_UP_S
    ends = [question.end for question in questions]
    await asyncio.wait(ends, timeout=LOOK_UP_S, return_when=asyncio.FIRST_COMPLETED)
    left_s = max(0.0, deadline - loop.time())
    found = any(question.nodes for question in questions)
    await asyncio.wait(ends, timeout=min(OTHER_FAMILY_S, left_s) if found else left_s)
    nodes = [node for question in questions for node in question.nodes]
    if not nodes:
        raise _failure(questions)
    addresses = dict.fromkeys(node.addr[0].decode("ascii") for node in nodes)
    return Answer(tuple(addresses), min(node.ttl for node in nodes))


def _failure(questions: Sequence[_Question]) -> ResolveError:
    """Of the families' failures the one that says most."""
    from pycares import errno

    servers = " or ".join(questions[0].servers) or "that nobody has told us"
    silent = f"no answer from the name server {servers} within {LOOK_UP_S:g} s"
    if not all(question.end.done() for question in questions):
        return ResolveError(TIMEOUT, silent)
    statuses = [question.end.result() for question in questions]
    kinds = {
        errno.ARES_ESERVFAIL: (FAILED, f"the name server {servers} failed to look it up (SERVFAIL)"),
        errno.ARES_ENOTIMP: (FAILED, f"the name server {servers} cannot look it up (NOTIMP)"),
        errno.ARES_EFORMERR: (FAILED, f"the name server {servers} does not understand us (FORMERR)"),
        errno.ARES_EREFUSED: (REFUSED, f"the name server {servers} refuses to look it up (REFUSED)"),
        errno.ARES_EBADRESP: (MALFORMED, f"the name server {servers} gives answers that are no DNS"),
        errno.ARES_ECONNREFUSED: (UNREACHABLE, f"the name server {servers} cannot be reached"),
        errno.ARES_ETIMEOUT: (TIMEOUT, silent),
        # One family's "there is the name" is worth more than "there is not": some servers do not know AAAA.
        errno.ARES_ENODATA: (NO_ADDRESS, f"the name has no address, says the name server {servers}"),
        errno.ARES_ENOTFOUND: (NO_NAME, f"no such name, says the name server {servers} (NXDOMAIN)"),
        errno.ARES_EBADNAME: (NO_NAME, "no name server can be asked for such a name"),
    }
    for status, (kind, text) in kinds.items():
        if status in statuses:
            return ResolveError(kind, text)
    said = " and ".join(errno.errorcode.get(status, "no addresses") for status in statuses if status)
    return ResolveError(FAILED, f"asking the name server {servers} failed: {said or 'an empty answer'}")


class _Question:
    """A name's addresses of one family, asked as often as AGAIN_S says. `end` is done with c-ares' status:
    None for success."""

    def __init__(self, name: str, family: socket.AddressFamily, servers: Sequence[str], first: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.end: asyncio.Future[int | None] = self._loop.create_future()
        self.nodes: list[pycares.AddrInfoNode] = []
        """What was found."""
        self._make = partial(_Attempt, name, family, servers)
        self._first = first
        self._attempts: list[_Attempt] = []
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ask()

    @property
    def servers(self) -> list[str]:
        """Whom it asks: addresses, with the port if that is not DNS's own."""
        return self._attempts[0].servers

    def close(self) -> None:
        """Gives up what is under way."""
        if not self.end.done():
            self.end.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for attempt in self._attempts:
            attempt.close()

    def _ask(self) -> None:
        number = len(self._attempts)
        self._running += 1
        self._attempts.append(self._make(self._first + number, self._told))
        if number < len(AGAIN_S):
            self._timer = self._loop.call_later(AGAIN_S[number], self._ask_again)

    def _ask_again(self) -> None:
        if not self.end.done():
            with suppress(ResolveError):  # then those that are under way have to do
                self._ask()

    def _told(self, result: pycares.AddrInfoResult | None, status: int | None) -> None:
        from pycares import errno

        self._running -= 1
        is_answer = status in (None, errno.ARES_ENOTFOUND, errno.ARES_ENODATA)
        if not self.end.done() and (is_answer or not self._running):
            self.nodes = result.nodes[:MAX_ADDRESSES] if result is not None else []
            self.end.set_result(status)


class _Attempt:
    """One question to the name servers, from the one at place `first` on. `told` is called once, with what
    c-ares says."""

    def __init__(
        self,
        name: str,
        family: socket.AddressFamily,
        servers: Sequence[str],
        first: int,
        told: Callable[[pycares.AddrInfoResult | None, int | None], None],
    ) -> None:
        import pycares

        self._loop = asyncio.get_running_loop()
        self._none = pycares.ARES_SOCKET_BAD
        self._readers: set[int] = set()
        self._writers: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        try:
            # Without `lookups` and `resolvconf_path`: pycares 5.2 frees their texts before they are read.
            self._channel = pycares.Channel(
                timeout=LOOK_UP_S, tries=1, servers=servers or None, sock_state_cb=self._watch
            )
        except pycares.AresError as error:  # no memory, or no descriptor
            raise ResolveError(FAILED, f"no name server can be asked: {error}") from error
        known = self._channel.servers
        if first % len(known):
            first %= len(known)
            self._channel.servers = [*known[first:], *known[:first]]
        self._told = told
        self._channel.getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM, callback=self._over)
        self._keep_time()

    @property
    def servers(self) -> list[str]:
        """Whom it asks."""
        return [server.removesuffix(f":{DNS_PORT}").strip("[]") for server in self._channel.servers if server]

    def close(self) -> None:
        """Gives it up, if it is not over."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._channel.cancel()
        for descriptor in self._readers | self._writers:
            self._watch(descriptor, False, False)
        self._channel.close()  # its memory, in a thread of pycares

    def _over(self, result: pycares.AddrInfoResult | None, status: int | None) -> None:
        if not self._is_closed:
            self._told(result, status)

    # What c-ares wants of the event loop.

    def _watch(self, descriptor: int, readable: bool, writable: bool) -> None:
        if readable and not self._is_closed:
            self._readers.add(descriptor)
            self._loop.add_reader(descriptor, self._process, descriptor, self._none)
        elif descriptor in self._readers:
            self._readers.discard(descriptor)
            self._loop.remove_reader(descriptor)
        if writable and not self._is_closed:
            self._writers.add(descriptor)
            self._loop.add_writer(descriptor, self._process, self._none, descriptor)
        elif descriptor in self._writers:
            self._writers.discard(descriptor)
            self._loop.remove_writer(descriptor)

    def _process(self, readable: int, writable: int) -> None:
        if not self._is_closed:
            self._channel.process_fd(readable, writable)
            self._keep_time()

    def _keep_time(self) -> None:
        """Plans c-ares' next look at its clock: for a connection over TCP, and the next name server."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s: float = self._channel.timeout()  # type: ignore[no-untyped-call]  # 0: now, or never
        if due_s or self._readers:
            self._timer = self._loop.call_later(due_s, self._process, self._none, self._none)
