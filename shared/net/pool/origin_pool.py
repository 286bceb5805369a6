"""The connections to one origin: which of them gets a stream, dials, those who wait, which are drained.

The rules:

1. Streams go to the oldest connection that has room, so that the youngest can become idle and be closed.
2. One task at a time dials, whoever waits: a caller that gives up waiting ends no dial. It starts for those
   who wait, and for a spare connection once less than a fifth of one connection's streams is left.
3. Those who wait are served in order: for a stream, as room comes; for a connection, once a peer has said its
   SETTINGS. When a dial fails, all who wait are told at once, unless there are connections that may have room
   again: a mesh client has little time, and can be told the reason.
4. After a failure the next dial waits (`DialBackoff`), and callers wait for it; a caller that has not the
   time is told the last failure at once. A connection that ends before the peer's first SETTINGS is a
   failure, too.
5. A connection that is to get no new streams is drained: it ends with its last stream. So is one to a server
   whose certificate has ended.
6. A name is looked up again from time to time while there are connections; one whose peer's address is no
   longer in the answers is drained.
7. An origin that is kept warm has a connection at all times: the oldest stays though it is idle, and one that
   ends is replaced, after a failure as 4 says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shared.errors import DialError, HboneError, UpstreamError
from shared.http2.events import Headers
from shared.net.dial import Origin, dial_http2
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from shared.net.names.endpoint import Resolve
from shared.net.pool.dial_backoff import DialBackoff
from shared.net.pool.name_watch import NameWatch
from shared.net.pool.pool_limits import PoolLimits
from shared.net.pool.pooled_connection import PooledConnection
from shared.net.pool.stream_queue import Asked, Given, WaitQueue, stream_queue
from shared.ops import pool_counts
from shared.ops.pool_counts import OriginCounts
from shared.tasks import spawn

if TYPE_CHECKING:
    from shared.net.tls.revocation_watch import RevocationWatch

SPARE_PART = 5
"""A spare connection is dialled when less than 1/5 of a connection's streams is left: at 80 of 100. Below
five streams a connection there is none, it would be as many again."""

ABSENCES = 3
"""Answers in a row without a connection's address before it is drained: a name with many addresses may be
answered with some of them at a time."""

Dial = Callable[
    [Origin, float, Callable[[], Connection], Resolve, "RevocationWatch | None"], Awaitable[Connection]
]
"""As `dial_http2`, which is one."""


class OriginPool:
    """The connections to one origin; made by `Pool`."""

    def __init__(
        self,
        origin: Origin,
        *,
        limits: PoolLimits,
        counts: OriginCounts,
        backoff: DialBackoff,
        resolve: Resolve,
        chance: Callable[[], float],
        unused: Callable[[OriginPool], None],
        revocations: Callable[[Origin], RevocationWatch | None] = lambda origin: None,
        wall_clock: Callable[[], float] = time.time,
        dial: Dial = dial_http2,
        let_go: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        """`chance` gives numbers in 0..1; `unused(self)` is called whenever there is nothing to keep.
        `revocations` says which lists servers are held against; it may raise DialError. `wall_clock` has
        seconds since the epoch. `dial` makes connections; `let_go(connection)` is called when one is to get
        no new streams any more."""
        self.origin = origin
        self.members: list[PooledConnection] = []
        """Those that accept new streams, the oldest first."""
        self.draining: dict[PooledConnection, None] = {}
        """Those that do not, and are not gone yet."""
        self.backoff = backoff
        """How the last dials failed."""
        self._limits = limits
        self._counts = counts
        self._resolve = resolve
        self._chance = chance
        self._unused = unused
        self._revocations = revocations
        self._wall_clock = wall_clock
        self._make_connection = dial
        self._told_let_go = let_go
        self._queue = stream_queue(counts)
        self._awaiting_connection: WaitQueue[None, bool] = WaitQueue(counts)
        watched = origin.to_look_up if origin.proxy is None else origin.proxy.address  # of the peers
        self._name = NameWatch(watched, resolve, chance=chance, found=self._compare)
        self._dialling: asyncio.Task[None] | None = None
        self._asked_again = False  # while it was there already
        self._is_warm = False
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def connections(self) -> list[Connection]:
        """Those that accept new streams, the oldest first."""
        return [member.connection for member in self.members]

    @property
    def waiting(self) -> int:
        """How many wait, for a stream or for a connection."""
        return len(self._queue) + len(self._awaiting_connection)

    @property
    def unused(self) -> bool:
        """No connection, none on its way, and nobody who waits for one."""
        return not (
            self.members or self.draining or self._dialling is not None or self.waiting or self._is_warm
        )

    def keep_warm(self, wanted: bool) -> None:
        """Whether there is to be a connection at all times (rule 7)."""
        self._is_warm = wanted
        if self._lacks_connection():
            self._dial_more()
        for member in self.members:
            member.keep_time()
        self._tell_if_unused()

    def _is_kept(self, member: PooledConnection) -> bool:
        return self._is_warm and self.members[:1] == [member]

    # Streams.

    def open_now(self, headers: Headers, *, end_stream: bool = False) -> Stream | None:
        """A new stream on a connection that has room, or None."""
        stream = self._open(headers, end_stream)
        if stream is not None and self._lacks_spare():
            self._dial_more()
        return stream

    async def open(self, headers: Headers, timeout_s: float, *, end_stream: bool = False) -> Stream:
        """A new stream with these request headers; dials, or waits for room, when it must. After a wait the
        response headers may be there already.

        Raises:
            DialError: no connection could be made, or we are stopping.
            UpstreamError: after `timeout_s` seconds there is no connection, or all are full; or too many wait
                already.
        """
        stream = self.open_now(headers, end_stream=end_stream)
        if stream is not None:
            return stream
        return await self._wait(self._queue, (headers, end_stream), timeout_s)

    async def connected(self, timeout_s: float) -> None:
        """Returns once there is a connection to the origin whose peer has said its SETTINGS, so its name, its
        certificate and its protocol are known to be good; dials if there is none. For callers that have
        something to do only then.

        Raises:
            DialError: no connection could be made, or we are stopping.
            UpstreamError: after `timeout_s` seconds there is no connection; or too many wait already.
        """
        if not self._is_connected(None):
            await self._wait(self._awaiting_connection, None, timeout_s)

    async def _wait(self, queue: WaitQueue[Asked, Given], asked: Asked, timeout_s: float) -> Given:
        """What `queue` gives for `asked`; dials if it must."""
        try:
            self._refuse_to_wait(timeout_s)
            self._dial_more()
            return await queue.wait(asked, timeout_s)
        except TimeoutError as error:
            text = f"{self.origin}: {self._lacking()} within {timeout_s:g} s"
            raise UpstreamError(text, passes=not self._is_connected(None)) from error
        finally:
            self._tell_if_unused()

    def _is_connected(self, _: None) -> bool | None:
        return any(member.is_proven for member in self.members) or None

    def _refuse_to_wait(self, timeout_s: float) -> None:
        """Raises where waiting would be in vain."""
        if self._is_closed:
            raise self._stopping()
        if self.waiting >= self._limits.max_waiting:
            self._counts.refused_total += 1
            raise UpstreamError(f"{self.origin}: {self.waiting} wait for a stream, which is max_waiting")
        left = self.backoff.left(self._loop.time())
        if left >= timeout_s and not self.members:
            text = f"{self.backoff.reason}; the next attempt is due in {left:.1f} s"
            raise DialError(text, passes=True)  # that attempt tells whether it does

    def _lacking(self) -> str:
        count = sum(member.is_proven for member in self.members)
        what = f"no free stream on {count} connections" if count else "not connected"
        reason = self.backoff.reason
        return f"{what} (the last attempt: {reason})" if reason else what

    def _open_asked(self, asked: tuple[Headers, bool]) -> Stream | None:
        return self._open(*asked)

    def _open(self, headers: Headers, end_stream: bool) -> Stream | None:
        for member in self.members:
            if member.has_expired:
                self._retire(member, pool_counts.EXPIRED)
                return self._open(headers, end_stream)
            if member.room > 0:
                stream = member.connection.open(headers, end_stream=end_stream)
                member.count_streams()
                return stream
        return None

    def _lacks_spare(self) -> bool:
        """Whether less than 1/SPARE_PART of a connection's streams is left, on all of them, and no dial has
        just failed."""
        room = 0
        for member in reversed(self.members):  # the youngest has most
            left = max(0, member.room)
            room += left
            if room >= (member.connection.open_streams + left) // SPARE_PART:
                return False
        return not self.backoff.left(self._loop.time())

    # Dialling.

    def _dial_more(self) -> None:
        """Makes sure that somebody dials, if there may be another connection."""
        self._asked_again = self._dialling is not None
        if self._dialling is None and self._may_dial():
            self._dialling = spawn(self._dial_as_needed(), name=f"dial {self.origin}")
            self._dialling.add_done_callback(self._dialled)

    def _may_dial(self) -> bool:
        if self._is_closed or len(self.members) >= self._limits.connections_per_origin:
            return False
        # After a failure the next connection has to prove itself before there is another.
        return not self.backoff.reason or all(member.is_proven for member in self.members)

    async def _dial_as_needed(self) -> None:
        """One connection, and more as long as somebody waits, or the new one is nearly full already."""
        while True:
            left_s = self.backoff.left(self._loop.time())
            if left_s:
                await asyncio.sleep(left_s)
                if not (self.waiting or self._lacks_connection()):
                    return
            is_filled = False
            try:
                member = await self._dial()
                is_filled = member in self.members and self._lacks_spare()
            except HboneError as error:
                self._failed(error)
            if not ((self._lacks_connection() or is_filled) and self._may_dial()):
                return

    def _lacks_connection(self) -> bool:
        """Whether another connection than there are is waited for, or has to be there."""
        if self._queue:
            return True
        return not self.members and (bool(self._awaiting_connection) or self._is_warm)

    async def _dial(self) -> PooledConnection:
        member = PooledConnection(
            self._limits,
            jitter=self._chance(),
            is_worth_it=any(one.connection.has_carried for one in (*self.members, *self.draining)),
            changed=self._changed,
            lost=self._lost,
            retire=self._retire,
            is_kept=self._is_kept,
            wall_clock=self._wall_clock,
        )
        timeout_s = self._limits.connect_timeout_s
        try:
            watch = self._revocations(self.origin)
            connection = await self._make_connection(
                self.origin, timeout_s, member.make, self._resolve, watch
            )
            if watch is not None and (revoked := watch.verdict(connection.proof)):  # since the handshake
                raise DialError(f"connect to {self.origin}: {revoked}")
        except BaseException:
            member.discard()  # its time may have been up in the turn in which it came
            raise
        member.use_limits(self._limits)  # there may be new ones
        if member.room <= 0 or member.has_expired:
            # For those who wait this is a failure like any other: else they would dial again, and again.
            if member.has_expired:
                what = "the peer's certificate ends at this moment"
            elif connection.usable:
                what = "the peer allows no stream"
            else:
                what = "the peer ended the connection at once"
            connection.close()
            raise DialError(f"connect to {self.origin}: {what}", passes=not member.has_expired)
        self.members.append(member)
        self._counts.opened()
        self._changed(member)
        self._name.start(self._limits.resolve_interval_s, timeout_s)
        return member

    def _failed(self, error: Exception) -> None:
        self._counts.dials_failed_total += 1
        self.backoff.failed(self._loop.time(), str(error))
        if not self.members:
            self._refuse_all(error)

    def _refuse_all(self, error: Exception) -> None:
        self._queue.refuse(error)
        self._awaiting_connection.refuse(error)

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._dialling = None
        if not task.cancelled() and (error := task.exception()) is not None:  # its task has told the log
            self._failed(DialError(f"connect to {self.origin}: a fault of ours: {type(error).__name__}"))
        # For those who asked in the task's last moment.
        if self._lacks_connection() or (self._asked_again and self._lacks_spare()):
            self._dial_more()
        self._tell_if_unused()

    # What the connections tell.

    def _changed(self, member: PooledConnection) -> None:
        """Streams ended, the peer's limit changed, or the connection has become useless."""
        connection = member.connection
        if member in self.draining:
            self._end_if_unused(member)
        elif member in self.members:
            if not connection.usable:
                self._let_go(member, member.loss_reason)
                return
            if not member.is_proven and connection.speaks_http2:
                member.is_proven = True
                self.backoff.succeeded()
                self._awaiting_connection.serve(self._is_connected)
                if self._queue:
                    self._dial_more()
                member.keep_time()
            self._queue.serve(self._open_asked)
            member.count_streams()

    def _lost(self, member: PooledConnection) -> None:
        if member in self.draining:  # else it never was one of ours
            del self.draining[member]
            self._counts.draining -= 1
            self._counts.closed(member.reason)
            self._tell_if_unused()

    def _retire(self, member: PooledConnection, reason: str) -> None:
        """`member` gets no new streams, and ends with its last one."""
        if member not in self.members:
            return
        is_needed = member.connection.open_streams > 0
        self._let_go(member, reason)
        self._end_if_unused(member)
        if is_needed and not self.members and not self.backoff.left(self._loop.time()):
            self._dial_more()  # so that the next caller need not wait

    def _let_go(self, member: PooledConnection, reason: str) -> None:
        connection = member.connection
        if connection.lost and not connection.speaks_http2:
            self._counts.dials_failed_total += 1
            text = f"connect to {self.origin}: the peer ended the connection before it spoke HTTP/2"
            self.backoff.failed(self._loop.time(), text)
            if self.members == [member]:
                self._awaiting_connection.refuse(DialError(text, passes=True))
        self.members.remove(member)
        self.draining[member] = None
        self._told_let_go(connection)
        self._counts.draining += 1
        member.reason = member.reason or reason
        if not self.members:
            self._name.stop()
        if self._lacks_connection():
            self._dial_more()

    def _end_if_unused(self, member: PooledConnection) -> None:
        connection = member.connection
        if not (connection.open_streams or connection.lost):
            connection.close()

    def _compare(self, addresses: set[str]) -> None:
        """What a look-up has found: drains the connections to addresses that are long gone."""
        for member in list(self.members):
            member.absences = 0 if member.connection.peer_name in addresses else member.absences + 1
            # Draining ones are bounded: a name whose answers never repeat would drain one after the other.
            if member.absences >= ABSENCES and len(self.draining) < self._limits.connections_per_origin:
                self._retire(member, pool_counts.ADDRESS)

    def retire(self, connection: Connection) -> None:
        """It is to get no new streams, and ends with its last one, for what carries it is to end."""
        for member in list(self.members):
            if member.connection is connection:
                self._retire(member, pool_counts.GOAWAY)

    def end_revoked(self, watch: RevocationWatch) -> int:
        """Ends the connections to servers that are revoked by now; how many."""
        count = 0
        for member in (*self.members, *self.draining):
            error = watch.verdict(member.connection.proof)
            if error is not None and not member.connection.lost:
                member.reason = member.reason or pool_counts.REVOKED
                member.connection.expel(error)
                count += 1
        return count

    # Limits and the end.

    def set_limits(self, limits: PoolLimits) -> None:
        """From now on these count, for the connections that there are, too."""
        self._limits = limits
        for member in (*self.members, *self.draining):
            member.use_limits(limits)
        if self.members:
            self._name.start(limits.resolve_interval_s, limits.connect_timeout_s)
        self._queue.serve(self._open_asked)
        if self._lacks_connection():
            self._dial_more()

    def drain(self) -> None:
        """Takes no new stream: idle connections close now, others with their last stream; those who wait
        for one get DialError."""
        self._is_closed = True
        if self._dialling is not None:
            self._dialling.cancel()
        self._refuse_all(self._stopping())
        for member in list(self.members):
            self._retire(member, pool_counts.STOPPED)

    def _stopping(self) -> DialError:
        return DialError(f"connect to {self.origin}: we are stopping")

    def _tell_if_unused(self) -> None:
        if self.unused:
            self._unused(self)
