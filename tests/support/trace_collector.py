"""A receiver of OTLP over HTTP: decodes what it gets with OpenTelemetry's own messages."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.tcp_peer import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Span:
    """One that has come."""

    name: str
    trace: str
    number: str
    parent: str
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: dict[str, float]
    """Their times since 1970, in seconds."""
    is_error: bool
    status_text: str
    resource: dict[str, Any]
    scope: str


class Collector:
    """Made by `collecting`."""

    def __init__(self) -> None:
        self.status = 200
        """What it answers."""
        self.lets_wait = Event()
        """Set: requests get no answer until `may_answer` is set, too, or for ten seconds."""
        self.may_answer = Event()
        self.headers: list[dict[str, str]] = []
        """Of each request."""
        self.requests = 0
        self.asked = asyncio.Event()
        """A request has come."""
        self.port = 0
        self._spans: asyncio.Queue[Span] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    @property
    def environ(self) -> dict[str, str]:
        """What hgate's environment needs for traces to come here at once."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "10",
        }

    async def span(self) -> Span:
        """The next that has come."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._spans.get()

    async def spans(self, count: int) -> list[Span]:
        """The next ones."""
        return [await self.span() for _ in range(count)]

    @property
    def is_empty(self) -> bool:
        """Whether no other has come."""
        return self._spans.empty()

    def got(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """A request; returns its status. In a thread of its own."""
        self.requests += 1
        self._loop.call_soon_threadsafe(self.asked.set)
        self.headers.append(headers)
        if self.lets_wait.is_set():
            self.may_answer.wait(10)
        if path != "/v1/traces" or self.status != 200:
            return self.status if self.status != 200 else 404
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    made = _span(span, resource, of_scope.scope.name)
                    self._loop.call_soon_threadsafe(self._spans.put_nowait, made)
        return 200


def _span(span: Any, resource: dict[str, Any], scope: str) -> Span:
    return Span(
        name=span.name,
        trace=span.trace_id.hex(),
        number=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        events={event.name: event.time_unix_nano / 1e9 for event in span.events},
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        status_text=span.status.message,
        resource=resource,
        scope=scope,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A receiver on a loopback port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(collector.got(self.path, headers, body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: its reader is the test."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """An exporter that was killed has broken off."""

    server = Server(("127.0.0.1", 0), Handler)
    collector.port = server.server_port
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        await asyncio.to_thread(server.shutdown)
        thread.join()
        server.server_close()
