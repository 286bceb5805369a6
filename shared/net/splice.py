"""TCP to TCP through the kernel: no byte of it enters this process (splice(2)).

Used where a connection is passed on as it is, after the peek. The relay's rules (`relay.py`) hold here as
well; the legs are bare sockets, because the event loop's transports would read them.

Bytes go socket → pipe → socket. A pipe is taken from a small stock for as long as it holds bytes: when all
that was read could be written, the ordinary case, it goes back before the call ends. So an idle connection
has none, and their number does not meet the kernel's limit on pipe memory (pipe(7), pipe-user-pages-soft).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable

from shared.errors import HboneError, StreamResetError
from shared.net.tcp import RESET_ON_CLOSE
from shared.wire.frames import CANCEL

PIPE_BYTES = 1 << 20
"""A pipe's size: 1 MiB moves a GiB with 0.23 s of CPU, the kernel's default of 64 KiB with 0.43 s. It is also
the most that an ordinary user may ask for (pipe-max-size)."""

SPARE_PIPES = 16
"""Empty pipes that are kept: as many as connections are likely to be stalled at the same moment."""

ROUNDS = 4
"""Pipes' worth that one direction moves before other connections have their turn."""

_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class _Pipe:
    """A pipe, with what is in it."""

    __slots__ = ("bytes", "read_end", "write_end")

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.bytes = 0
        with contextlib.suppress(OSError):  # over this user's limit: the default size works too
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)


_spare: list[_Pipe] = []


def _take_pipe() -> _Pipe:
    return _spare.pop() if _spare else _Pipe()


def _give_back(pipe: _Pipe) -> None:
    if pipe.bytes or len(_spare) >= SPARE_PIPES:
        pipe.close()
    else:
        _spare.append(pipe)


class _Direction:
    """One way: what `source` receives goes to `sink`."""

    __slots__ = ("_loop", "_pipe", "_reading", "_relay", "_writing", "ended", "moved_bytes", "sink", "source")

    def __init__(self, relay: SpliceRelay, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.moved_bytes = 0
        self.ended = False  # FIN received and passed on
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self._pipe: _Pipe | None = None
        self._reading = False
        self._writing = False

    def start(self) -> None:
        self._watch(reading=True, writing=False)

    @property
    def held_bytes(self) -> int:
        return 0 if self._pipe is None else self._pipe.bytes

    def stop(self) -> None:
        self._watch(reading=False, writing=False)
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def move(self) -> None:
        """Moves what can be moved now, and watches for when there is more to do."""
        for _ in range(ROUNDS):
            try:
                drained = self._drain()
            except OSError as error:
                self._relay.broke(self.sink, error)
                return
            try:
                if not drained or not self._fill():
                    return
            except OSError as error:
                self._relay.broke(self.source, error)
                return

    def _drain(self) -> bool:
        """Pipe → sink. False if the sink takes no more now."""
        pipe = self._pipe
        if pipe is None:
            return True
        while pipe.bytes:
            try:
                moved = os.splice(pipe.read_end, self.sink.fileno(), pipe.bytes, flags=_FLAGS)
            except BlockingIOError:
                self._watch(reading=False, writing=True)
                return False
            pipe.bytes -= moved
            self.moved_bytes += moved
        self._pipe = None
        _give_back(pipe)
        self._watch(reading=True, writing=False)
        return True

    def _fill(self) -> bool:
        """Source → pipe. False if there is nothing to read now, or nothing any more."""
        pipe = _take_pipe()
        try:
            pipe.bytes = os.splice(self.source.fileno(), pipe.write_end, PIPE_BYTES, flags=_FLAGS)
        except OSError as error:
            _give_back(pipe)
            if isinstance(error, BlockingIOError):
                return False
            raise
        if pipe.bytes:
            self._pipe = pipe
            return True
        _give_back(pipe)
        self.ended = True
        self._watch(reading=False, writing=False)
        with contextlib.suppress(OSError):  # it has broken meanwhile: then this was all it could be told
            self.sink.shutdown(socket.SHUT_WR)
        self._relay.direction_ended()
        return False

    def _watch(self, *, reading: bool, writing: bool) -> None:
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._loop.add_reader(self.source, self.move)
            else:
                self._loop.remove_reader(self.source)
        if writing != self._writing:
            self._writing = writing
            if writing:
                self._loop.add_writer(self.sink, self.move)
            else:
                self._loop.remove_writer(self.sink)


class SpliceRelay:
    """Joins two connected, non-blocking sockets, which it closes in the end; `finished(self)` is called once.

    The names are those of `relay.Relay`, so that whoever keeps a record of tunnels need not know the kind.
    `broken_downstream` says of an `error` that it was the client's side that broke.
    """

    def __init__(
        self,
        downstream: socket.socket,
        upstream: socket.socket,
        finished: Callable[[SpliceRelay], None],
    ) -> None:
        self.error: HboneError | None = None
        self.broken_downstream = False
        self.over = False
        self._finished = finished
        self._up = _Direction(self, downstream, upstream)
        self._down = _Direction(self, upstream, downstream)

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
        self._up.start()
        self._down.start()

    def abort(self, error: HboneError) -> None:
        """Ends both connections with RST."""
        if not self.over:
            self.error = error
            self._close(reset=True)

    @property
    def buffered_bytes(self) -> int:
        """What waits in pipes: the kernel's memory, but charged to us."""
        return self._up.held_bytes + self._down.held_bytes

    def expire(self, error: HboneError) -> bool:
        """Ends it in good order if it is at rest (relay.py, rule 6). False if a direction has ended, or bytes
        wait in a pipe. Both peers get FIN at once: there is no stream that would be cut off by it."""
        if self.over or self._up.ended or self._down.ended or self.buffered_bytes:
            return False
        self.error = error
        self._close(reset=False)
        return True

    def direction_ended(self) -> None:
        """One direction has passed its FIN on."""
        if self._up.ended and self._down.ended:
            self._close(reset=False)

    def broke(self, sock: socket.socket, error: OSError) -> None:
        """Reading or writing `sock` failed (relay.py, rules 4 and 5)."""
        if self.over:
            return
        delivered_all = self._down.ended if sock is self._up.sink else self._up.ended
        if not delivered_all:
            self.broken_downstream = sock is self._up.source
            self.error = StreamResetError(f"connection reset: {error.strerror or error}", CANCEL)
        self._close(reset=not delivered_all)

    def _close(self, *, reset: bool) -> None:
        self.over = True
        self._up.stop()
        self._down.stop()
        for sock in (self._up.source, self._up.sink):
            if reset:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            sock.close()
        self._finished(self)
