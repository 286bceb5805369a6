"""HTTP/2 connections to all origins, each shared by many tunnels. Names come from clients, so little is kept
of an origin that has no connections, and that is bounded: how its last dials failed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import ConfigError, DialError, UnavailableError
from shared.http2.events import Headers
from shared.net.dial import Origin, dial_http2
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from shared.net.names import names
from shared.net.names.endpoint import Resolve
from shared.net.pool.dial_backoff import DialBackoff
from shared.net.pool.origin_pool import Dial, OriginPool
from shared.net.pool.pool_limits import PoolLimits
from shared.ops.pool_counts import OriginCounts

if TYPE_CHECKING:
    from shared.net.tls.revocation_watch import RevocationWatch

MAX_WATCHES = 64
"""Files of revocation lists that are followed, as many as folders of identities are kept; beyond it the one
that has been followed longest is followed no longer, until somebody dials by it again."""

MAX_FAILING = 4096
"""Origins whose failed dials are remembered, as many as the gateway's cached targets; the oldest is
forgotten."""


class Pool:
    """The connections to all origins."""

    def __init__(
        self,
        *,
        limits: PoolLimits | None = None,
        counts: Callable[[Origin], OriginCounts] = lambda origin: OriginCounts(),
        resolve: Resolve = names.resolve,
        chance: Callable[[], float] = random.random,
        wall_clock: Callable[[], float] = time.time,
        dial: Dial = dial_http2,
        let_go: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        """`counts(origin)` says where to count, and `resolve` looks names up; `chance` gives the numbers in
        0..1 that spread what would else happen at once. Certificates end by `wall_clock`, in seconds since
        the epoch. `dial` makes connections; `let_go(connection)` is called when one is to get no new streams
        any more."""
        self.origins: dict[Origin, OriginPool] = {}
        """Those with a connection, or with one on its way."""
        self.limits = limits or PoolLimits()
        """To be changed by `set_limits`."""
        self.watches: dict[tuple[Path, Path], RevocationWatch] = {}
        """Revocation lists that are followed, by their file and the folder of the roots."""
        self._counts = counts
        self._resolve = resolve
        self._chance = chance
        self._wall_clock = wall_clock
        self._dial = dial
        self._let_go = let_go
        self._backoffs: dict[Origin, DialBackoff] = {}
        self._is_closed = False

    @property
    def buffered_bytes(self) -> int:
        """What waits on all connections to be sent."""
        return sum(
            member.connection.buffered_bytes
            for pool in self.origins.values()
            for member in (*pool.members, *pool.draining)
        )

    @property
    def failing(self) -> Mapping[Origin, DialBackoff]:
        """How the last dials failed, of origins without a connection."""
        return self._backoffs

    def of(self, origin: Origin) -> OriginPool:
        """The pool of one origin; to be asked for anew each time, as one without connections is dropped."""
        pool = self.origins.get(origin)
        if pool is None:
            pool = self.origins[origin] = OriginPool(
                origin,
                limits=self.limits,
                counts=self._counts(origin),
                backoff=self._backoffs.get(origin) or DialBackoff(self._chance),
                resolve=self._resolve,
                chance=self._chance,
                unused=self._forget,
                revocations=self._revocations,
                wall_clock=self._wall_clock,
                dial=self._dial,
                let_go=self._let_go,
            )
            if self._is_closed:
                pool.drain()
        return pool

    def open_now(self, origin: Origin, headers: Headers) -> Stream | None:
        """A new stream on a connection to `origin` that has room, or None."""
        pool = self.origins.get(origin)
        return None if pool is None else pool.open_now(headers)

    def is_connected(self, origin: Origin) -> bool:
        """Whether there is a connection to `origin` that accepts new streams, be it full now."""
        pool = self.origins.get(origin)
        return pool is not None and bool(pool.members)

    def keep_warm(self, origins: Collection[Origin]) -> None:
        """From now on these, and no others, have a connection at all times."""
        for origin, pool in list(self.origins.items()):
            if origin not in origins:
                pool.keep_warm(False)
        for origin in origins:
            self.of(origin).keep_warm(True)

    def set_limits(self, limits: PoolLimits) -> None:
        """From now on these count, for the connections that there are, too."""
        self.limits = limits
        for pool in list(self.origins.values()):
            pool.set_limits(limits)

    def drain(self) -> None:
        """Takes no new streams: idle connections close now, others with their last stream; whoever waits for
        a stream gets DialError."""
        self._is_closed = True
        for pool in list(self.origins.values()):
            pool.drain()

    async def close(self, timeout_s: float) -> None:
        """Drains, and returns when all connections are gone with what was written to them; what is left after
        `timeout_s` seconds is dropped."""
        for watch in self.watches.values():
            watch.close()
        self.drain()
        left = [member for pool in self.origins.values() for member in pool.draining]
        ends = [member.connection.wait_closed(timeout_s) for member in left]
        for member, is_gone in zip(left, await asyncio.gather(*ends), strict=True):
            if not is_gone:
                member.connection.abort(f"connection to {member.connection.peer_name} closed by us")

    def _revocations(self, origin: Origin) -> RevocationWatch | None:
        """The lists that servers of `origin` are held against, if any. Raises DialError if they cannot be
        used, and never could."""
        identity = origin.identity
        if identity is None or identity.crl is None:
            return None
        key = identity.crl, identity.folder
        watch = self.watches.get(key)
        if watch is None:
            from shared.net.tls.mesh_tls import revocation_watch

            watch = revocation_watch(identity, purpose=f"identity {identity.folder}")
            assert watch is not None
            try:
                watch.read()
            except (ConfigError, UnavailableError) as error:
                raise DialError(f"connect to {origin}: revocation lists: {error}") from error
            if len(self.watches) >= MAX_WATCHES:
                self.watches.pop(next(iter(self.watches))).close()
            self.watches[key] = watch
            watch.follow(self._end_revoked)
            watch.start()
        return watch

    def _end_revoked(self) -> int:
        count = 0
        for pool in list(self.origins.values()):
            identity = pool.origin.identity
            if identity is not None and identity.crl is not None:
                watch = self.watches.get((identity.crl, identity.folder))
                count += 0 if watch is None else pool.end_revoked(watch)
        return count

    def _forget(self, pool: OriginPool) -> None:
        origin = pool.origin
        if self.origins.get(origin) is pool:
            del self.origins[origin]
        self._backoffs.pop(origin, None)
        if pool.backoff.reason:
            self._backoffs[origin] = pool.backoff
            if len(self._backoffs) > MAX_FAILING:
                del self._backoffs[next(iter(self._backoffs))]
