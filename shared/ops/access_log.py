"""The access log: one line per finished tunnel or refused connection, on standard output. krun has lines of
requests, too.

Keys and messages follow ztunnel's access log. Writing neither blocks nor ends the process:

1. Lines are collected, and written as one batch at the end of the event loop's turn.
2. A write never waits. What the reader does not take is tried again a little later.
3. At most MAX_LINES lines and MAX_BYTES bytes wait. Further lines are dropped and counted in `dropped`, and
   so is what waits when the output breaks.
4. Only `close` waits, for a reader that is merely slow, and not longer than CLOSE_WAIT_S.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Protocol, TypedDict, Unpack

from shared.errors import Flag
from shared.ops.log import (
    MAX_SCAN_CHARS,
    MAX_VALUE_CHARS,
    Format,
    choose_format,
    cut,
    redact,
    text_value,
    timestamp,
)

MAX_LINES = 10_000
"""Lines that may wait for the output: a second of a busy gateway."""

MAX_BYTES = 8 * 1024 * 1024
"""Bytes that may wait: MAX_LINES lines of some 400 bytes twice over."""

BATCH_LINES = 256
"""Lines in one write: more than a turn of the loop brings, and some 100 KiB when there is a backlog."""

RETRY_S = 0.02
"""Pause before a full output is tried again: a pipe of 64 KiB then still takes 8000 lines a second."""

TENTHS_BELOW_MS = 10
"""Durations below it are written with a tenth: on one machine a tunnel can take less than a millisecond. JSON
has four digits behind the point of a second for the same reason."""

CLOSE_WAIT_S = 0.5
"""Longest wait of `close`, in which a living reader empties many pipes."""

NO_FAILURES = frozenset({Flag.DOWNSTREAM_RESET, Flag.LIFETIME})
"""Flags of tunnels that have an error and are nobody's failure."""

LOGGER = "hbone.access"
"""Stands where other lines name their logger."""

# Severity and message of the kinds of line.
_COMPLETE: Final = ("INFO", "connection complete")
_FAILED: Final = ("ERROR", "connection complete")
_REFUSED: Final = ("WARNING", "connection refused")
_REGISTERED: Final = ("INFO", "workload registered")
_REQUEST: Final = ("INFO", "request complete")
_REQUEST_FAILED: Final = ("ERROR", "request complete")
_REQUEST_REFUSED: Final = ("WARNING", "request refused")
_KINDS: Final = (_COMPLETE, _FAILED, _REFUSED, _REGISTERED, _REQUEST, _REQUEST_FAILED, _REQUEST_REFUSED)


class HasFileno(Protocol):
    """A file, as far as it matters here."""

    def fileno(self) -> int:
        """The file descriptor."""


class Fields(TypedDict, total=False):
    """What a line can tell; a field that is absent or None is left out."""

    src_addr: str | None
    """The client, HOST:PORT."""
    sni: str | None
    """The server name that the client asked for."""
    route: str | None
    """The host glob of the route that took it."""
    origin: str | None
    """The service that ends the tunnel's HTTP/2."""
    dst_addr: str | None
    """Where the bytes went, HOST:PORT."""
    tunnel_target: str | None
    """What the tunnel request asked for."""
    stream: int | None
    """Number of the HTTP/2 stream on its connection."""
    method: str | None
    """Of an HTTP request."""
    authority: str | None
    """Whom it was for."""
    path: str | None
    """Of it, without the query."""
    status: int | None
    """HTTP status of the request, or of the tunnel request."""
    request_id: str | None
    """The request's x-request-id."""
    identity: str | None
    """The SPIFFE name that the peer proved."""
    forwarded_for: str | None
    """The client behind the peer, as the peer tells."""
    forwarded_identity: str | None
    """The SPIFFE name of that client, as the peer tells."""
    traceparent: str | None
    """W3C trace context of the tunnel request."""
    attempts: int | None
    """How often a stream was asked for, if more than once."""
    bytes_sent: int | None
    """Towards the service."""
    bytes_recv: int | None
    """From the service."""
    setup_s: float | None
    """Seconds from accept to the open tunnel; written likewise."""
    duration_s: float | None
    """Seconds from accept to end; a number in JSON (`0.0130`), with its unit in text (`13ms`, `0.4ms`)."""
    flags: str | None
    """The response flag, one of `Flag`."""
    error: str | None
    """Why it failed."""


# Field and key in the order of a line.
_KEYS: Final = (
    ("src_addr", "src.addr"),
    ("sni", "sni"),
    ("route", "route"),
    ("origin", "origin"),
    ("dst_addr", "dst.addr"),
    ("tunnel_target", "tunnel.target"),
    ("stream", "stream"),
    ("method", "method"),
    ("authority", "authority"),
    ("path", "path"),
    ("status", "status"),
    ("request_id", "request.id"),
    ("identity", "identity"),
    ("forwarded_for", "forwarded.for"),
    ("forwarded_identity", "forwarded.identity"),
    ("traceparent", "traceparent"),
    ("attempts", "attempts"),
    ("bytes_sent", "bytes_sent"),
    ("bytes_recv", "bytes_recv"),
    ("setup_s", "setup"),
    ("duration_s", "duration"),
    ("flags", "flags"),
    ("error", "error"),
)


class AccessLog:
    """Writes access-log lines to a file or file descriptor, which stays the caller's to close.

    All calls are made on the event loop's thread.
    """

    def __init__(
        self, output: int | HasFileno, format: Format | None, component: str, *, worker: int | None = None
    ) -> None:
        """`format` None means text on a terminal, else JSON. `component` goes into every JSON line. `worker`
        is the number of this process among others that write to the same pipe: it goes into every line, and
        no line is cut by another's.

        Raises OSError if `output` is not open.
        """
        fd = output if isinstance(output, int) else output.fileno()
        is_json = choose_format(format, os.isatty(fd)) == "json"
        self._style = _json(component, worker) if is_json else _text(worker)
        self._output = _Output(fd)
        # A write of up to PIPE_BUF bytes is taken as a whole (POSIX write()); longer ones may mix.
        self._batch_bytes = MAX_BYTES if worker is None else select.PIPE_BUF
        self._lines: list[str] = []
        self._batch = b""
        self._batch_lines = 0
        self._batch_is_torn = False  # its beginning, a part of a line, is written already
        self._waiting_bytes = 0
        self._flush_handle: asyncio.Handle | None = None
        self._closed = False
        self.dropped = 0
        """Lines lost so far."""
        self.finished: Callable[[Any], None] | None = None
        """Called with the record of each tunnel's line (`shared.tunnel.tunnel_record`), if somebody makes
        more of it."""

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return len(self._lines) + self._batch_lines

    def tunnel(self, **fields: Unpack[Fields]) -> None:
        """A tunnel has ended."""
        failed = fields.get("error") and fields.get("flags") not in NO_FAILURES
        self._add(_FAILED if failed else _COMPLETE, fields)

    def refused(self, **fields: Unpack[Fields]) -> None:
        """A connection was turned away before it had a tunnel, or broke off itself."""
        self._add(_COMPLETE if fields.get("flags") == Flag.DOWNSTREAM_RESET else _REFUSED, fields)

    def request(self, **fields: Unpack[Fields]) -> None:
        """An HTTP request has been answered, or has failed."""
        kind = _REQUEST
        if fields.get("flags") == Flag.DENY:
            kind = _REQUEST_REFUSED
        elif fields.get("error") and fields.get("flags") not in NO_FAILURES:
            kind = _REQUEST_FAILED
        self._add(kind, fields)

    def registered(self, **fields: Unpack[Fields]) -> None:
        """A workload that has dialled us has its name now; a line of `tunnel` tells the end of that."""
        self._add(_REGISTERED, fields)

    def flush(self) -> None:
        """Writes what waits, as far as the output takes it now."""
        if self._closed:
            return
        self._cancel_flush()
        if not self._write():
            self._flush_handle = asyncio.get_running_loop().call_later(RETRY_S, self.flush)

    def close(self) -> None:
        """Writes what waits, for at most CLOSE_WAIT_S; the rest is dropped, as are lines that still come."""
        if self._closed:
            return
        self._closed = True
        self._cancel_flush()
        give_up = time.monotonic() + CLOSE_WAIT_S
        while not self._write():
            if not self._output.wait(give_up - time.monotonic()):
                self._drop_all()
                break
        self._output.close()

    def _add(self, kind: tuple[str, str], fields: Fields) -> None:
        if self._closed or self._waiting_bytes >= MAX_BYTES or self.waiting >= MAX_LINES:
            self.dropped += 1
            return
        error = fields.get("error")
        if error is not None:
            fields["error"] = redact(error[:MAX_SCAN_CHARS])
        line = self._style.line(kind, fields)
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self.flush)

    def _write(self) -> bool:
        """Writes as much as the output takes without waiting; True if nothing is left."""
        while self._batch or self._lines:
            if not self._batch:
                count = self._fitting()
                self._batch = "".join(self._lines[:count]).encode("ascii")
                del self._lines[:count]
                self._batch_lines = self._batch.count(b"\n")
            try:
                count = self._output.write(self._batch)
            except BlockingIOError:
                return False
            except OSError:
                self._drop_all()
                return True
            self._batch_is_torn = not self._batch.endswith(b"\n", 0, count)
            self._batch = self._batch[count:]
            self._batch_lines = self._batch.count(b"\n")
            self._waiting_bytes -= count
        return True

    def _fitting(self) -> int:
        """How many of the lines make the next batch, one at least."""
        size = 0
        for number, line in enumerate(self._lines[:BATCH_LINES]):
            size += len(line)
            if size > self._batch_bytes:
                return number or 1
        return BATCH_LINES

    def _drop_all(self) -> None:
        """Forgets what waits; after half a line the next begins afresh, if a full disk has room again."""
        self.dropped += self.waiting
        self._lines.clear()
        self._batch = b"\n" if self._batch_is_torn else b""
        self._batch_lines = 0
        self._waiting_bytes = len(self._batch)

    def _cancel_flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None


class _Style:
    """How a line is spelt: what stands around its timestamp, before each field, and at its end."""

    def __init__(
        self,
        around: dict[tuple[str, str], tuple[str, str]],
        key: str,
        quote: Callable[[str], str],
        duration: Callable[[float], str],
        end: str,
    ) -> None:
        self._around = around
        self._keys = tuple((name, key.format(public), name.endswith("_s")) for name, public in _KEYS)
        self._quote = quote
        self._duration = duration
        self._end = end

    def line(self, kind: tuple[str, str], fields: Fields) -> str:
        """One line, in ASCII and with its line end."""
        before, after = self._around[kind]
        parts = [before, timestamp(time.time()), after]
        quote, get = self._quote, fields.get
        for name, key, is_duration in self._keys:
            value: Any = get(name)
            if value is None:
                continue
            if isinstance(value, str):
                parts.append(key + quote(value if len(value) <= MAX_VALUE_CHARS else cut(value)))
            elif is_duration:
                parts.append(key + self._duration(value))
            else:
                parts.append(f"{key}{value}")
        parts.append(self._end)
        return "".join(parts)


def _json(component: str, worker: int | None) -> _Style:
    after = f'","logger":"{LOGGER}","component":{encode_basestring_ascii(component)}'
    after += "" if worker is None else f',"worker":{worker}'
    around = {
        (severity, message): (f'{{"severity":"{severity}","message":"{message}","timestamp":"', after)
        for severity, message in _KINDS
    }
    return _Style(around, ',"{}":', encode_basestring_ascii, "{:.4f}".format, "}\n")


def _text(worker: int | None) -> _Style:
    behind = "" if worker is None else f" worker={worker}"
    around = {
        (severity, message): ("", f" {severity} {LOGGER}: {message}{behind}") for severity, message in _KINDS
    }
    return _Style(around, " {}=", text_value, _with_unit, "\n")


def _with_unit(seconds: float) -> str:
    millis = seconds * 1000
    return f"{millis:.1f}ms" if millis < TENTHS_BELOW_MS else f"{millis:.0f}ms"


class _Output:
    """A descriptor of our own onto somebody's standard output, written without ever waiting.

    O_NONBLOCK belongs to the open file and so to everyone who shares it, the shell and our children among
    them; it is never set there. A pipe or terminal is opened once more instead, a socket is told with every
    send, and a regular file does not wait for a reader.
    """

    def __init__(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        self._socket: socket.socket | None = None
        self._must_ask = False
        self._is_pipe = stat.S_ISFIFO(mode)
        if stat.S_ISSOCK(mode):
            self._fd = os.dup(fd)
            self._socket = socket.socket(fileno=self._fd)
            return
        if not stat.S_ISREG(mode):
            try:
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                return
            except OSError:
                # Another user's pipe, no /proc, or no reader any more: ask before each write.
                self._must_ask = True
        self._fd = os.dup(fd)

    def write(self, data: bytes) -> int:
        """How many bytes of `data` were taken.

        Raises:
            BlockingIOError: none, for the reader has left too much standing.
            OSError: the output is broken, or the disk is full.
        """
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        if self._must_ask:
            if not self.wait(0):
                raise BlockingIOError
            # A pipe that is ready takes this much without waiting (POSIX write(), PIPE_BUF).
            data = data[: select.PIPE_BUF]
        if self._is_pipe:
            # It takes this much whole or not at all, so that a line of the log, which shares krun's standard
            # error with us, cannot come into the middle of ours.
            data = data[: data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or len(data)]
        return os.write(self._fd, data)

    def wait(self, seconds: float) -> bool:
        """Whether a write can make progress, or fail, within `seconds`."""
        if seconds < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Lets go of our descriptor."""
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self._fd)
