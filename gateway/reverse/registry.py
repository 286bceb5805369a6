"""Which workloads have registered which names, and which of them the next tunnel goes to. No sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from gateway.ports.admission import REVERSE_NAMES, REVERSE_PER_NAME
from shared.errors import DialError, LimitError
from shared.trust.spiffe import SpiffeId


class CarriesStreams(Protocol):
    """What the registry reads of a workload's connection."""

    @property
    def room(self) -> int:
        """How many more streams can be opened now."""

    @property
    def open_streams(self) -> int:
        """How many are open."""


@dataclass(slots=True, eq=False)
class Registration:
    """One connection under its name."""

    name: str
    identity: SpiffeId
    connection: CarriesStreams
    peer: str
    """Where the workload has dialled from, HOST:PORT."""
    since: float
    """The loop's time."""


class Registry:
    """The table; at most `most_names` names, each with at most `most_per_name` registrations."""

    def __init__(self, most_names: int, most_per_name: int) -> None:
        self.most_names = most_names
        self.most_per_name = most_per_name
        self.names: dict[str, list[Registration]] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.names.values()))

    @property
    def largest(self) -> int:
        """How many registrations the name has that has most."""
        return max(map(len, self.names.values()), default=0)

    def check_room(self, name: str) -> None:
        """Raises LimitError if `name` cannot be registered (once more)."""
        if name not in self.names and len(self.names) >= self.most_names:
            raise LimitError(f"{self.most_names} names are registered, which is max_names", REVERSE_NAMES)
        if len(self.names.get(name, ())) >= self.most_per_name:
            text = f"{self.most_per_name} connections have this name, which is max_connections_per_name"
            raise LimitError(text, REVERSE_PER_NAME)

    def add(self, registration: Registration) -> None:
        """Adds it; the next tunnel may go to it. Raises LimitError."""
        self.check_room(registration.name)
        self.names.setdefault(registration.name, []).append(registration)
        self.changed(registration.name)

    def discard(self, registration: Registration) -> None:
        """Removes it, if it is there; no new tunnel goes to it."""
        registrations = self.names.get(registration.name, [])
        if registration in registrations:
            registrations.remove(registration)
            if not registrations:
                del self.names[registration.name]

    def best(self, name: str) -> Registration | None:
        """The registration for `name` with the fewest streams, of those that have room for one more."""
        with_room = [it for it in self.names.get(name, ()) if it.connection.room > 0]
        if not with_room:
            return None
        chosen = min(with_room, key=lambda it: it.connection.open_streams)
        registrations = self.names[name]
        registrations.remove(chosen)
        registrations.append(chosen)  # those with equally many streams take turns
        return chosen

    def changed(self, name: str) -> None:
        """There may be a choice where there was none."""
        for waiter in self._waiters.get(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, name: str, deadline: float, timeout_s: float) -> None:
        """Returns when there may be a choice. Raises DialError at the loop's time `deadline`; `timeout_s` is
        how long that was, for the error's text."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(name, set())
        waiters.add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError as error:
            count = len(self.names.get(name, ()))
            what = f"{count} workloads have no free stream" if count else "no workload has registered it"
            within = f" within {timeout_s:g} s" if timeout_s else ""
            raise DialError(f"reverse {name}: {what}{within}") from error
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(name) is waiters:
                del self._waiters[name]
