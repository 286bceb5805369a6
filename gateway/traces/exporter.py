"""The exporting process: `python -m gateway.traces.exporter`, with the pipe of spans as standard input.

Made of OpenTelemetry's SDK, which reads its own variables: where to, with which headers, certificates and
timeout, how often and how many at once (OTEL_BSP_SCHEDULE_DELAY, OTEL_BSP_MAX_EXPORT_BATCH_SIZE). The SDK's
processor of batches is not used: it has a thread and a queue, and here the pipe is the queue. While a batch
is on its way nothing is read.

Standard output tells hgate, a line of JSON for each batch, how many spans were exported or not, and why not.
It ends with the end of the pipe, by the line END, or when nobody reads its standard output; before that it
exports what it has.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway.traces.spans import END
from gateway.traces.trace_settings import ENDPOINTS
from shared import core_dumps, version
from shared.errors import EXIT_OK, EXIT_USAGE, NoRouteError
from shared.tls import istio_sni

READ_BYTES = 1 << 16

SCHEDULE_DELAY_MS = 5000
MAX_BATCH = 512
"""The specification's defaults."""

HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
"""Variables with secrets."""

LEAST_SECRET = 4
"""Characters; what is shorter is no secret, and would be found in the middle of words."""

MAX_REASONS, MAX_REASON_CHARS = 2, 500
"""Of what is told of a batch that failed."""

_LOCAL = TraceFlags(TraceFlags.SAMPLED)


class Spans:
    """Makes the SDK's spans of what hgate writes."""

    def __init__(self) -> None:
        self._resource = Resource.create()
        self._scope = InstrumentationScope("hbone", version.installed())

    def of(self, line: bytes) -> Iterator[ReadableSpan]:
        """The tunnel's span, and one for each phase of its opening. Raises ValueError, KeyError or TypeError
        if the line is none of hgate's."""
        told = json.loads(line)
        end, duration = told["end"], told["duration"]
        own = SpanContext(int(told["trace"], 16), int(told["span"], 16), is_remote=False, trace_flags=_LOCAL)
        parent = None
        if told.get("parent"):
            parent = SpanContext(own.trace_id, int(told["parent"], 16), is_remote=True, trace_flags=_LOCAL)
        events = []
        if told.get("setup") is not None:
            opened = end - duration + told["setup"]
            events.append(Event("open", {"hbone.attempts": told["attempts"]}, _ns(opened)))
        status = Status(StatusCode.ERROR, told.get("error")) if told.get("failed") else Status()
        yield self._span(
            f"tunnel {told['route']}" if told.get("route") else "tunnel",
            own,
            parent,
            (end - duration, end),
            attributes=_attributes(told),
            events=events,
            kind=SpanKind.SERVER if told.get("served") else SpanKind.CLIENT,
            status=status,
        )
        for name, began, ended in told.get("phases", ()):
            number = random.getrandbits(64) or 1
            context = SpanContext(own.trace_id, number, is_remote=False, trace_flags=_LOCAL)
            yield self._span(name, context, own, (end - began, end - ended))

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times_s: tuple[float, float],
        **more: Any,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            start_time=_ns(times_s[0]),
            end_time=_ns(times_s[1]),
            instrumentation_scope=self._scope,
            **more,
        )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


_ATTRIBUTES = {
    "sni": "tls.client.server_name",
    "route": "hbone.route",
    "origin": "hbone.origin",
    "target": "network.peer.address",
    "name": "hbone.tunnel.target",
    "status": "http.response.status_code",
    "identity": "hbone.identity",
    "attempts": "hbone.attempts",
    "sent": "hbone.bytes_sent",
    "received": "hbone.bytes_recv",
    "flags": "hbone.flags",
}
"""OpenTelemetry's names where it has one, else ours with the keys of the access log."""


def _attributes(told: dict[str, Any]) -> dict[str, Any]:
    attributes = {name: told[key] for key, name in _ATTRIBUTES.items() if key in told}
    host, _, port = told.get("peer", "").rpartition(":")
    if port.isdecimal():
        attributes |= {"client.address": host.strip("[]"), "client.port": int(port)}
    if "sni" in told:
        try:
            attributes["server.address"] = istio_sni.parse(told["sni"]).host
        except NoRouteError:
            attributes["server.address"] = told["sni"]
    return attributes


class Reason(logging.Handler):
    """Keeps what the SDK says of an export, which says why it failed: its results do not. It quotes headers
    that it cannot read, and URLs."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """`secrets` are left out."""
        super().__init__(logging.WARNING)
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._said: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.add(record.getMessage())

    def add(self, text: str) -> None:
        """The last MAX_REASONS count that differ in more than a number."""
        for secret in self._secrets:
            text = text.replace(secret, "...")
        kind = re.sub(r"[0-9.]+", "", text)
        self._said.pop(kind, None)
        self._said[kind] = text
        if len(self._said) > MAX_REASONS:
            del self._said[next(iter(self._said))]

    def take(self) -> str:
        """All of them, which are then forgotten."""
        text = "; ".join(self._said.values())[:MAX_REASON_CHARS]
        self._said.clear()
        return text


class Export:
    """Reads spans from `source`, exports them in batches, and reports to `report`."""

    def __init__(self, source: int, report: int, exporter: OTLPSpanExporter, reason: Reason) -> None:
        self._source = _own_end(source)
        self._report = report
        self._exporter = exporter
        self._reason = reason
        self._spans = Spans()
        self._delay_s = _number("OTEL_BSP_SCHEDULE_DELAY", SCHEDULE_DELAY_MS) / 1000
        self._most = _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", MAX_BATCH)
        self._batch: list[ReadableSpan] = []
        self._tunnels = 0
        self._rest = b""
        self._due = 0.0
        self._is_over = False

    def run(self) -> None:
        """Until END or the end of the source, or until nobody reads the report."""
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        poll.register(self._report, 0)  # tells only that its reader is gone
        while not self._is_over:
            left_ms = max(0.0, self._due - time.monotonic()) * 1000 if self._batch else None
            seen = dict(poll.poll(left_ms))
            self._read()
            self._is_over |= self._report in seen
            is_due = len(self._batch) >= self._most or time.monotonic() >= self._due
            if self._batch and (is_due or self._is_over):
                self._export()

    def _read(self) -> None:
        """Reads what is there, up to a batch."""
        while len(self._batch) < self._most and not self._is_over:
            try:
                data = os.read(self._source, READ_BYTES)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._add(line)
            self._is_over |= not data

    def _add(self, line: bytes) -> None:
        if line == END:
            self._is_over = True
            return
        try:
            spans = list(self._spans.of(line))
        except (ValueError, KeyError, TypeError) as error:
            self._tell(failed=1, why=f"no span of hgate's: {error!r}")
            return
        if not self._batch:
            self._due = time.monotonic() + self._delay_s
        self._batch += spans
        self._tunnels += 1

    def _export(self) -> None:
        batch, tunnels = self._batch, self._tunnels
        self._batch, self._tunnels = [], 0
        if self._send(batch):
            self._tell(exported=tunnels)
            self._reason.take()
        else:
            self._tell(failed=tunnels, why=self._reason.take())

    def _send(self, batch: Sequence[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:
            self._reason.add(f"{type(error).__name__}: {error}")
            return False

    def _tell(self, **report: object) -> None:
        try:
            os.write(self._report, json.dumps(report).encode() + b"\n")
        except OSError:
            self._is_over = True


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    """What variables say that may be secret: headers, and who we are in a URL."""
    for variable in (*HEADERS, *ENDPOINTS):
        value = environ.get(variable, "")
        parts = re.split(r"[,=]", value) if variable in HEADERS else urlsplit(value).netloc.split("@")[:-1]
        for part in (value if variable in HEADERS else "", *parts):
            yield from {
                text for text in (part, part.strip(), unquote(part).strip()) if len(text) >= LEAST_SECRET
            }


def _own_end(source: int) -> int:
    """The pipe `source`, opened once more, so that to read it never waits. All who have inherited a
    descriptor share whether reading waits (fcntl(2), F_SETFL), and whoever starts our successor with it sets
    it otherwise (libuv, uv_spawn)."""
    try:
        return os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # no /proc
        os.set_blocking(source, False)
        return source


def _number(variable: str, usual: int) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() and int(text) else usual


def main() -> int:
    """Exports until its end; returns the exit code."""
    core_dumps.forbid(os.environ)  # the headers may have a secret
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a service: hgate drains first
        signal.signal(number, signal.SIG_IGN)
    reason = Reason(_secrets(os.environ))
    # What it logs goes into hgate's log, as the reason of a batch that failed.
    sdk = logging.getLogger("opentelemetry")
    sdk.addHandler(reason)
    sdk.propagate = False
    exporter: OTLPSpanExporter | None
    try:
        exporter = OTLPSpanExporter()
    except Exception as error:  # of a variable that hgate does not read itself
        reason.add(f"{type(error).__name__}: {error}")
        exporter = None
    if why := reason.take():  # or it takes no notice of one
        print(json.dumps({"why": why}), flush=True)
    if exporter is None:
        return EXIT_USAGE
    Export(sys.stdin.fileno(), sys.stdout.fileno(), exporter, reason).run()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
