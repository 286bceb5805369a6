"""Names to addresses, for every dial of a process.

The rules:

1. A look-up that nobody waits for any more is given up. Whoever asks for a name that is being looked up waits
   for that look-up; its own end is nobody else's.
2. Look-ups for clients have slots, which the parties (a client's address, a peer's identity) share
   fairly. The names of our own settings have slots of their own: no client delays them.
3. An answer is kept for as long as the name server says, within LEAST_S and POSITIVE_S: a hundred tunnels a
   second to one name are one question. A failure is kept too, for NEGATIVE_S if the name is known not to be
   there, else for FAILED_S.
4. When a name server is silent, so that another one has to be asked, the next look-ups begin with that one,
   for OTHER_SERVER_S.
5. The hosts file goes before the name servers, with a dot at the name's end or without. Other sources of
   nsswitch.conf are not asked.
6. A name with a dot at its end is absolute. For any other the search list of resolv.conf counts. If one
   candidate fails, the next is asked; but only one more when the name servers are silent or away, and that
   only if the first was the name as it is.

Which names are absolute is the caller's: those that clients write, and those of tunnel URLs (`Origin`), are.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from shared.address import Address
from shared.errors import LimitError
from shared.net.names.dns_query import (
    AGAIN_S,
    KINDS,
    NO_ADDRESS,
    NO_NAME,
    TIMEOUT,
    UNREACHABLE,
    Answer,
    ResolveError,
    look_up,
)
from shared.net.names.endpoint import OURS, Endpoint, endpoint
from shared.net.names.fair_slots import FairSlots, SlotLimits
from shared.net.names.hosts_file import HOSTS, HostsFile
from shared.net.names.resolv_conf import RESOLV_CONF, search_list
from shared.ops.lookup_counts import LookupCounts, ResolverNumbers, SlotNumbers
from shared.tasks import spawn

MAX_LOOKUPS = 256
"""Look-ups for clients at once. Each has two sockets, or six while the name server is silent; then 64 of them
end in a second."""

MAX_LOOKUPS_PER_CLIENT = 32
"""Of them, those of one party: eight of them leave nobody out."""

MAX_WAITING = 4096
MAX_WAITING_PER_CLIENT = 256
"""Entries that wait for a slot: with an honest name server a party's are served in a second."""

MAX_LOOKUPS_OF_OURS = 64

LEAST_S = 1.0
"""What is found for a client is still there when the pool dials it, whatever the name server says."""

POSITIVE_S = 5.0
"""CoreDNS gives the names of a cluster so long by default: a pod that has gone is not dialled for longer."""

NEGATIVE_S = 5.0
FAILED_S = 1.0

OTHER_SERVER_S = 30.0
"""Then the first of resolv.conf has its next chance; if it is silent still, one look-up is a second late."""

MAX_KEPT = 1024
"""Answers that are kept; the oldest goes."""

LIMIT = "max_lookups"
LIMIT_PER_CLIENT = "max_lookups_per_client"


def client_limits(most: int = MAX_LOOKUPS, most_each: int = MAX_LOOKUPS_PER_CLIENT) -> SlotLimits:
    """Limits of the look-ups for clients: so many at once, in all and of one party."""
    return SlotLimits(most, min(most, most_each), MAX_WAITING, MAX_WAITING_PER_CLIENT)


class Resolver:
    """Looks names up, for one event loop."""

    def __init__(
        self,
        servers: Sequence[str] = (),
        *,
        resolv_conf: Path = RESOLV_CONF,
        hosts: Path = HOSTS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`servers` are asked, HOST:PORT each, or those of /etc/resolv.conf. `now` gives seconds of a steady
        clock, by which answers are kept."""
        self.counts = LookupCounts(KINDS)
        self.clients = FairSlots(client_limits(), self._refused)
        """The slots of look-ups for clients."""
        ours = SlotLimits(MAX_LOOKUPS_OF_OURS, MAX_LOOKUPS_OF_OURS, MAX_WAITING, MAX_WAITING)
        self.ours = FairSlots(ours, self._refused)
        """Those of look-ups for ourselves."""
        self._servers = servers
        self._resolv_conf = resolv_conf
        self._hosts = HostsFile(hosts)
        self._now = now
        self._running: dict[str, _LookUp] = {}
        self._kept: dict[str, tuple[float, Answer | ResolveError]] = {}
        self._first_server = 0
        self._other_server_until = 0.0

    @property
    def kept(self) -> int:
        """How many answers are kept."""
        return len(self._kept)

    @property
    def numbers(self) -> ResolverNumbers:
        """How it stands, for metrics."""
        clients, ours = (
            SlotNumbers(slots.taken, slots.limits.most, slots.waiting, slots.limits.most_waiting)
            for slots in (self.clients, self.ours)
        )
        return ResolverNumbers(self.counts, clients, ours, self.kept, MAX_KEPT)

    async def resolve(self, address: Address, party: str = OURS) -> list[Endpoint]:
        """As `names.resolve`, of `address` with a name."""
        addresses = await self._addresses(address.host, party)
        return in_turn(endpoint(each, address.port) for each in addresses)

    async def _addresses(self, host: str, party: str) -> tuple[str, ...]:
        plain = host.removesuffix(".")
        if addresses := self._hosts.addresses(plain):
            return addresses
        if plain == "invalid" or plain.endswith(".invalid"):  # RFC 6761 section 6.4
            raise ResolveError(NO_NAME, "no such name: none that ends in .invalid exists")
        if host.endswith("."):
            try:
                return (await self._answer(host, party)).addresses
            except ResolveError as error:
                if error.kind == NO_NAME:
                    error = ResolveError(NO_NAME, f"{error.text}; asked without resolv.conf's search list")
                raise error from None
        failures: list[ResolveError] = []
        for candidate in search_list(self._resolv_conf).candidates(host):
            try:
                return (await self._answer(candidate, party)).addresses
            except ResolveError as error:
                failures.append(error)
                silent = error.kind in (TIMEOUT, UNREACHABLE)
                if silent and (len(failures) > 1 or candidate != f"{host}."):
                    break
        raise _worst(failures)

    async def _answer(self, name: str, party: str) -> Answer:
        """Of an absolute name."""
        answer = self._kept_answer(name)
        if answer is None and name not in self._running:
            slots = self.ours if party == OURS else self.clients
            await slots.enter(party)
            answer = self._kept_answer(name)
            if answer is not None or name in self._running:  # somebody else was served first
                slots.leave(party)
            else:
                return _or_raise(await self._started(name, slots, party).outcome())
        self.counts.reused += 1
        return _or_raise(await self._running[name].outcome() if answer is None else answer)

    def _started(self, name: str, slots: FairSlots, party: str) -> _LookUp:
        started = self._now()

        def over(outcome: Answer | ResolveError | None) -> None:
            slots.leave(party)
            if self._running.get(name) is one:
                del self._running[name]
            ended = self._now()
            self.counts.seconds += ended - started
            if outcome is None:
                self.counts.abandoned += 1
                return
            self._judge_server(first, ended - started, outcome, ended)
            if isinstance(outcome, Answer):
                self.counts.found += 1
                self._keep(name, ended + max(LEAST_S, min(POSITIVE_S, outcome.ttl_s)), outcome)
            else:
                self.counts.failed[outcome.kind] += 1
                is_known = outcome.kind in (NO_NAME, NO_ADDRESS)
                self._keep(name, ended + (NEGATIVE_S if is_known else FAILED_S), outcome)

        first = self._first_server if started < self._other_server_until else 0
        asked = partial(look_up, name, self._servers, first)
        one = self._running[name] = _LookUp(name, asked, over, lambda: self._running.pop(name, None))
        return one

    def _judge_server(self, first: int, took_s: float, outcome: Answer | ResolveError, now: float) -> None:
        """Rule 4, after a look-up that began with the name server at place `first`."""
        answered = isinstance(outcome, Answer) or outcome.kind not in (TIMEOUT, UNREACHABLE)
        if answered and took_s >= AGAIN_S[0]:
            self._first_server = first + 1
            self._other_server_until = now + OTHER_SERVER_S

    def _kept_answer(self, name: str) -> Answer | ResolveError | None:
        kept = self._kept.get(name)
        if kept is None:
            return None
        if self._now() < kept[0]:
            return kept[1]
        del self._kept[name]
        return None

    def _keep(self, name: str, until: float, outcome: Answer | ResolveError) -> None:
        self._kept.pop(name, None)
        self._kept[name] = until, outcome
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def _refused(self, party: str, is_own: bool) -> LimitError:
        if is_own:
            most = self.clients.limits.most_each
            text = f"{most} names are being looked up for {party or 'ourselves'}, which is {LIMIT_PER_CLIENT}"
            return LimitError(f"{text}; {MAX_WAITING_PER_CLIENT} more wait", LIMIT_PER_CLIENT)
        text = f"{self.clients.limits.most} names are being looked up, which is {LIMIT}"
        return LimitError(f"{text}; {MAX_WAITING} more wait", LIMIT)


class _LookUp:
    """One that is under way, for all who wait for it."""

    def __init__(
        self,
        name: str,
        asked: Callable[[], Awaitable[Answer]],
        over: Callable[[Answer | ResolveError | None], None],
        given_up: Callable[[], object],
    ) -> None:
        """`given_up` is called when nobody waits any more, `over` at the end: with None if given up."""
        self._over = over
        self._given_up = given_up
        self._waiting = 0
        self._task = spawn(_outcome(asked), name=f"look up {name}")
        self._task.add_done_callback(self._ended)

    async def outcome(self) -> Answer | ResolveError:
        """What it comes to."""
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self._task.done():
                self._given_up()  # who comes now needs another one
                self._task.cancel()

    def _ended(self, task: asyncio.Task[Answer | ResolveError]) -> None:
        self._over(None if task.cancelled() or task.exception() else task.result())


async def _outcome(asked: Callable[[], Awaitable[Answer]]) -> Answer | ResolveError:
    try:
        return await asked()
    except ResolveError as error:
        return error


_resolvers: WeakKeyDictionary[asyncio.AbstractEventLoop, Resolver] = WeakKeyDictionary()


def current() -> Resolver:
    """The resolver of the running event loop: every dial's, so that they share its answers and its bounds."""
    loop = asyncio.get_running_loop()
    found = _resolvers.get(loop)
    if found is None:
        found = _resolvers[loop] = Resolver()
    return found


def in_turn(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """One address of each family after the other (RFC 8305 section 4), without repetitions."""
    families: dict[int, list[Endpoint]] = {}
    for one in dict.fromkeys(endpoints):
        families.setdefault(one[0], []).append(one)
    rows = itertools.zip_longest(*families.values())
    return [one for row in rows for one in row if one is not None]


def _or_raise(outcome: Answer | ResolveError) -> Answer:
    if isinstance(outcome, ResolveError):
        raise ResolveError(outcome.kind, outcome.text)  # a new one: a traceback is one caller's
    return outcome


def _worst(failures: Sequence[ResolveError]) -> ResolveError:
    """What says most of why none of the candidates of a name has an address."""
    error = next((one for one in failures if one.kind not in (NO_NAME, NO_ADDRESS)), None)
    error = error or next((one for one in failures if one.kind == NO_ADDRESS), None) or failures[0]
    if len(failures) == 1:
        return error
    return ResolveError(error.kind, f"{error.text}; asked as it is, and with resolv.conf's search list")
