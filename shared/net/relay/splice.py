"""TCP to TCP without a transport in between: what is much goes through the kernel alone (splice(2)).

Used where a connection is passed on as it is, after the peek. The rules of `Relay` hold here as well; the
legs are bare sockets, because the event loop's transports would read them. `EdgePoll` tells which of them are
ready, and `Pipes` lends the pipes.

How bytes move, in each direction on its own:

1. A read goes into the buffer that the process shares and is sent from there: for little data that is two
   system calls, while splicing takes three and a pipe.
2. A read that fills the buffer says that there is much: then bytes go socket → pipe → socket and never enter
   this process, until there is little again.
3. What the sink does not take waits where it is, in the pipe or in a copy of at most one read, and nothing is
   read until it has left. So a slow reader slows its sender down, and an idle tunnel has neither.
4. Where no pipe can be had, because all are lent to stalled connections or descriptors have run out, bytes
   are copied all the same: splicing is never what a tunnel fails for.
5. After TURN_BYTES others have their turn.

A connection that breaks is noticed by reading or by writing. Reading tells the truth: all bytes, then the end
or the error. An error that is met by writing may have overtaken bytes that wait to be read, and the kernel
tells it once only, to whoever asks first; the next read then looks like the end. So after a failed write no
end of that connection is believed, unless the error is EPIPE: that is what Linux says of a connection whose
FIN came before its RST (`tcp_reset`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable

from shared.errors import HboneError, StreamResetError
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer
from shared.net.legs.read_buffer import READ_BUFFER, READ_BYTES
from shared.net.legs.tcp_end import FIN_ON_CLOSE, RESET_ON_CLOSE, queued_bytes
from shared.net.relay.edge_poll import ENDS, EdgePoll
from shared.net.relay.half_closed_clock import HalfClosedClock
from shared.net.relay.pipes import PIPE_BYTES, Pipe, Pipes
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S, LINGER_S

TURN_BYTES = PIPE_BYTES
"""What one direction moves before other connections have their turn: some 0.3 ms."""

FIN_BYTES = 1
"""What FIN counts for among the bytes that a peer has to acknowledge, and may take its time for."""

_NONBLOCK = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
_READABLE = select.EPOLLIN | ENDS
_WRITABLE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR


class _Direction:
    """One way: what `source` receives goes to `sink`."""

    __slots__ = (
        "_bulk",
        "_held",
        "_pipe",
        "_relay",
        "_sink_fd",
        "doomed",
        "dropping",
        "ended",
        "last",
        "moved_bytes",
        "readable",
        "sink",
        "source",
        "source_fd",
        "writable",
    )

    def __init__(self, relay: SpliceRelay, source: socket.socket, sink: socket.socket, early: Buffer) -> None:
        self.source = source
        self.sink = sink
        self.moved_bytes = 0
        self.readable = False
        self.writable = True
        self.last = False  # the source has ended or broken, behind what can still be read
        self.ended = False  # FIN received and passed on
        self.doomed = False  # the source has broken: what looks like its end is none
        self.dropping = False  # the sink has ended and broken, so nobody wants it
        self.source_fd = source.fileno()
        self._sink_fd = sink.fileno()
        self._relay = relay
        self._held: memoryview | None = memoryview(early) if early else None  # unsent, read by ourselves
        self._pipe: Pipe | None = None  # unsent, in the kernel
        self._bulk = False

    @property
    def held_bytes(self) -> int:
        """Read and not yet written; a pipe's bytes are in the kernel's memory, but charged to us."""
        held = 0 if self._held is None else len(self._held)
        return held if self._pipe is None else held + self._pipe.bytes

    def move(self) -> bool:
        """Moves what can be moved now. True if it stopped only to let others have their turn."""
        relay = self._relay
        limit = self.moved_bytes + TURN_BYTES
        while self.moved_bytes < limit:
            if relay.over or not self.writable:
                return False
            if self._held is not None or self._pipe is not None:
                self._write()
            elif not self.readable:
                return False
            elif self.dropping:
                return self._drop()
            elif not (self._bulk and self._splice()):
                self._copy()
        return True

    def drop(self) -> None:
        """From now on what the source sends is read and dropped."""
        self.release()
        self.dropping = self.writable = True

    def release(self) -> None:
        """Forgets what is unsent."""
        self._held = None
        if self._pipe is not None:
            self._relay.pipes.give_back(self._pipe)
            self._pipe = None

    def _copy(self) -> None:
        try:
            size = self.source.recv_into(READ_BUFFER)
        except BlockingIOError:
            self.readable = False
            return
        except OSError as error:
            self._relay.source_broke(self, error)
            return
        if size == READ_BYTES:
            self._bulk = True
        elif not size:
            self._end()
            return
        elif not self.last:
            self.readable = False  # that was all, and more would be a new edge (epoll(7), Q9)
        try:
            sent = self.sink.send(READ_BUFFER[:size])
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._relay.sink_broke(self, error)
            return
        self.moved_bytes += sent
        if sent < size:
            self.writable = False
            self._held = memoryview(bytes(READ_BUFFER[sent:size]))

    def _splice(self) -> bool:
        """False if there is no pipe to be had."""
        pipe = self._relay.pipes.lend()
        if pipe is None:
            return False
        self._pipe = pipe
        try:
            pipe.bytes = os.splice(self.source_fd, pipe.write_end, PIPE_BYTES, flags=_NONBLOCK)
        except BlockingIOError:
            self.readable = False
            self.release()
        except OSError as error:
            self._relay.source_broke(self, error)
        else:
            self._bulk = pipe.bytes >= READ_BYTES
            if pipe.bytes:
                self._write()
            else:
                self._end()
        return True

    def _write(self) -> None:
        try:
            if self._held is not None:
                sent = self.sink.send(self._held)
                self.moved_bytes += sent
                self._held = self._held[sent:] if sent < len(self._held) else None
            pipe = self._pipe
            while pipe is not None and pipe.bytes:
                sent = os.splice(pipe.read_end, self._sink_fd, pipe.bytes, flags=_NONBLOCK)
                pipe.bytes -= sent
                self.moved_bytes += sent
        except BlockingIOError:
            self.writable = False
        except OSError as error:
            self._relay.sink_broke(self, error)
        else:
            if self._held is None:
                self.release()

    def _drop(self) -> bool:
        """As `move`, but the bytes go nowhere and are not counted."""
        left = TURN_BYTES
        while left > 0:
            try:
                size = self.source.recv_into(
                    READ_BUFFER, 0, socket.MSG_TRUNC
                )  # which copies nothing (tcp(7))
            except BlockingIOError:
                self.readable = False
                return False
            except OSError as error:
                self._relay.source_broke(self, error)
                return False
            if not size:
                self._end()
                return False
            left -= size
        return True

    def _end(self) -> None:
        self.readable = False
        self.release()
        if self.doomed:
            return
        self.ended = True
        if not self.dropping:
            with contextlib.suppress(OSError):  # it has broken meanwhile, which its own direction will tell
                self.sink.shutdown(socket.SHUT_WR)
        self._relay.direction_ended()


class SpliceRelay:
    """Joins two connected, non-blocking sockets, which it closes in the end; `finished(self)` is called once.

    `early` has been read from `downstream` already, and goes to `upstream` before anything else. The names
    are those of `relay.Relay`, so that whoever keeps a record of tunnels need not know the kind.
    """

    __slots__ = (
        "_down",
        "_edges",
        "_finished",
        "_half_closed",
        "_half_closed_timeout_s",
        "_linger",
        "_queued",
        "_up",
        "broken_downstream",
        "error",
        "over",
        "pipes",
    )

    def __init__(
        self,
        downstream: socket.socket,
        upstream: socket.socket,
        finished: Callable[[SpliceRelay], None],
        *,
        edges: EdgePoll,
        pipes: Pipes,
        early: Buffer = b"",
        half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S,
    ) -> None:
        """Raises OSError if there is no room for one more watch: then the sockets are still the caller's."""
        self.error: HboneError | None = None
        self.broken_downstream = False
        """Of an `error`: it was the client's side that broke."""
        self.over = False
        self.pipes = pipes
        self._edges = edges
        self._finished = finished
        self._up = _Direction(self, downstream, upstream, early)
        self._down = _Direction(self, upstream, downstream, b"")
        self._linger: asyncio.TimerHandle | None = None
        self._half_closed_timeout_s = half_closed_timeout_s
        self._half_closed: HalfClosedClock | None = None
        self._queued = False
        edges.watch(downstream.fileno(), self)
        try:
            edges.watch(upstream.fileno(), self)
        except OSError:
            edges.forget(downstream.fileno())
            raise
        for sock in (downstream, upstream):  # should the process die, nobody is to take that for an end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)

    @property
    def sent_bytes(self) -> int:
        """From downstream to upstream."""
        return self._up.moved_bytes

    @property
    def received_bytes(self) -> int:
        """From upstream to downstream."""
        return self._down.moved_bytes

    def start(self) -> None:
        """Begins to relay."""
        self._run(self._up)

    def abort(self, error: HboneError) -> None:
        """Ends both connections with RST."""
        if not self.over:
            self.error = error
            self._close(reset=True)

    @property
    def buffered_bytes(self) -> int:
        """What this process holds for both peers."""
        return self._up.held_bytes + self._down.held_bytes

    def expire(self, error: HboneError) -> bool:
        """Ends it in good order if it is at rest. False if a direction has ended, or bytes wait to be sent.
        Both peers get FIN at once: there is no stream that would be cut off by it."""
        directions = (self._up, self._down)
        if self.over or self.buffered_bytes or any(it.ended or it.dropping for it in directions):
            return False
        self.error = error
        self._close(reset=False)
        return True

    # edge_poll.Ready.

    def ready(self, fd: int, events: int) -> None:
        up, down = self._up, self._down
        source, sink = (up, down) if fd == up.source_fd else (down, up)
        if events & _READABLE:
            source.readable = True
            if events & ENDS:
                source.last = True
            if events & select.EPOLLERR and source.ended:
                self._ask_why(source.source, sink)  # nobody reads here any more, who would be told
                return
            self._run(source)
        if events & _WRITABLE and not sink.writable:
            sink.writable = True
            self._run(sink)

    def next_turn(self) -> None:
        self._queued = False
        self._run(self._up)
        self._run(self._down)

    # Called by the directions.

    def direction_ended(self) -> None:
        """One direction has passed its FIN on."""
        up, down = self._up, self._down
        if up.ended and down.ended:
            self._complete()
        elif (up.dropping and down.ended) or (down.dropping and up.ended):
            self._wait_for_the_rest()
        elif self._half_closed is None and not self.over:
            timeout_s = self._half_closed_timeout_s
            self._half_closed = HalfClosedClock(self, timeout_s, downstream_ended=up.ended)

    def source_broke(self, direction: _Direction, error: OSError) -> None:
        """Reading failed: before the end, so bytes are lost, or after everything else was over."""
        if self.over:
            return
        if direction.dropping and self._opposite(direction).ended:
            self._complete()
        else:
            self._break(error, downstream=direction is self._up)

    def sink_broke(self, direction: _Direction, error: OSError) -> None:
        """Writing failed. If the sink has ended before, it has delivered everything and wants nothing more;
        else bytes of it may wait to be read."""
        if self.over:
            return
        opposite = self._opposite(direction)
        if opposite.ended or error.errno == errno.EPIPE:
            direction.drop()
            if opposite.ended:
                self._wait_for_the_rest()
            self._run(direction)
            return
        opposite.doomed = opposite.readable = True
        opposite.move()
        if not self.over:
            self._break(error, downstream=direction is self._down)

    # The end.

    def _run(self, direction: _Direction) -> None:
        if direction.move() and not self._queued and not self.over:
            self._queued = True
            self._edges.again(self)

    def _opposite(self, direction: _Direction) -> _Direction:
        return self._down if direction is self._up else self._up

    def _ask_why(self, sock: socket.socket, into: _Direction) -> None:
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self.sink_broke(into, OSError(number, os.strerror(number)))

    def _wait_for_the_rest(self) -> None:
        """One side has ended and broken, and wants nothing more; the other one is let go."""
        # Else closing, with bytes of its peer unread, would destroy what the peer has not taken.
        if self._down.dropping and queued_bytes(self._down.source.fileno()) <= FIN_BYTES:
            self._complete()
        elif self._linger is None and not self.over:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._complete)

    def _break(self, error: OSError, *, downstream: bool) -> None:
        self.broken_downstream = downstream
        self.error = StreamResetError(f"connection reset: {error.strerror or error}", CANCEL)
        self._close(reset=True)

    def _complete(self) -> None:
        if not self.over:
            self._close(reset=False)

    def _close(self, *, reset: bool) -> None:
        self.over = True
        if self._linger is not None:
            self._linger.cancel()
        if self._half_closed is not None:
            self._half_closed.cancel()
            self._half_closed = None  # the two name each other
        for direction in (self._up, self._down):
            direction.release()
            sock = direction.source
            self._edges.forget(direction.source_fd)
            if not reset:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FIN_ON_CLOSE)
            sock.close()
        self._finished(self)
