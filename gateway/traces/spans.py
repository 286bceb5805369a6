"""The span of a finished tunnel, handed to the exporting process through a pipe.

What it costs a tunnel: a line of JSON and one write that never waits. A line is at most PIPE_BUF bytes, so
the pipe takes it as a whole or not at all (POSIX, write()); a full pipe drops it, and it is counted. The pipe
is all that is kept. Several workers write to the same one.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.traces.samplers import Sampler
from shared.ops import families
from shared.ops.access_log import NO_FAILURES
from shared.ops.log import MAX_SCAN_CHARS, redact
from shared.tunnel import request_context
from shared.tunnel.tunnel_record import TunnelRecord

if TYPE_CHECKING:
    from prometheus_client import Metric

PIPE_BYTES = 1 << 20
"""Some thousand spans: a second of a busy gateway, or more than a batch. A user may have as much: pipe(7)."""

MAX_LINE_BYTES = select.PIPE_BUF

END = b"end"
"""The line behind the last span. The end of the pipe would do, if nobody else had it open."""

MAX_TEXT_CHARS = 500
"""Of an error, or of a name: so the line stays below its bound."""


@dataclass(frozen=True, slots=True)
class SpanPipe:
    """Both ends of the pipe. Neither waits."""

    read_end: int
    write_end: int

    @classmethod
    def open(cls) -> SpanPipe:
        """A new one."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the user has too many: then it is smaller
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return cls(read_end, write_end)

    def end(self) -> None:
        """Says that no more spans will come; without waiting, so a full pipe is not told."""
        with suppress(BlockingIOError):
            os.write(self.write_end, END + b"\n")

    def close(self) -> None:
        """Closes both ends."""
        os.close(self.read_end)
        os.close(self.write_end)


class Spans:
    """Writes the spans of this process's tunnels. All calls are made on the event loop's thread."""

    def __init__(self, write_end: int, sampler: Sampler, *, now: Callable[[], float] = time.time) -> None:
        """`now` is the wall clock in seconds since 1970."""
        self.dropped = 0
        """Spans that the pipe did not take."""
        self._write_end = write_end
        self._sampler = sampler
        self._now = now
        self._new = self.traceparents()

    def traceparents(self) -> Iterator[bytes]:
        """Traceparents of new traces, which say whether a trace is sampled."""
        return request_context.traceparents(self._sampler.takes)

    def finished(self, record: TunnelRecord) -> None:
        """Writes the span of a tunnel that is over, or was refused, if its trace is sampled."""
        traceparent = record.traceparent or next(self._new).decode()
        _, trace, span, flags = traceparent.split("-")[:4]
        is_sampled, parent = bool(int(flags, 16) & 1), ""
        if record.traceparent is not None and record.traced_by_peer:
            is_sampled = self._sampler.takes_child(trace, is_sampled)
            span, parent = os.urandom(8).hex(), span
        if not is_sampled:
            return
        line = json.dumps(self._fields(record, trace, span, parent), separators=(",", ":")).encode() + b"\n"
        try:
            if len(line) > MAX_LINE_BYTES:
                raise BlockingIOError
            os.write(self._write_end, line)
        except OSError:
            self.dropped += 1

    def families(self) -> Iterator[Metric]:
        """The metric about it."""
        yield families.TRACE_SPANS_DROPPED.value(self.dropped)

    def _fields(self, record: TunnelRecord, trace: str, span: str, parent: str) -> dict[str, Any]:
        """What the exporting process makes a span of; times are seconds before `end`, which is since 1970."""
        loop_now, error = asyncio.get_running_loop().time(), record.error
        is_failure = error is not None and record.flag not in NO_FAILURES
        fields = {
            "trace": trace,
            "span": span,
            "parent": parent,
            "end": self._now(),
            "duration": record.duration_s or 0.0,
            "setup": record.setup_s,
            "phases": [
                (name, round(loop_now - began, 6), round(loop_now - ended, 6))
                for name, began, ended in record.phases or ()
            ],
            "peer": record.peer,
            "sni": record.sni,
            "route": record.route,
            "origin": record.origin,
            "target": None if record.target is None else str(record.target),
            "name": record.name,
            "status": record.status,
            "identity": record.identity,
            "attempts": record.attempts,
            "sent": record.sent_bytes,
            "received": record.received_bytes,
            "flags": record.flag.value,
            "served": record.traced_by_peer,
            "error": None if error is None else redact(str(error)[:MAX_SCAN_CHARS]),
            "failed": is_failure,
        }
        return {
            key: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
            for key, value in fields.items()
            if value not in (None, "", [])
        }
