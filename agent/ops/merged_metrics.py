"""One scrape for all in the container: krun's metrics, Envoy's and the app's, merged as by Istio's agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from agent.mtls.mtls_end import MtlsEnd
from agent.ops.krun_metrics import KrunMetrics
from shared.errors import HboneError, UpstreamError
from shared.ops.http_server import Request, Response
from shared.ops.repeated_log import RepeatedLog

log = logging.getLogger("hbone.metrics")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format. OpenMetrics cannot be joined from parts that end with `# EOF` each."""

APP_TIMEOUT_S = 3.0
"""For the app's answer, less than our client has."""

APP_BYTES = 16 << 20
"""Longest answer of the app."""

_END = b"# EOF"


class MergedMetrics:
    """What answers scrapes."""

    def __init__(self, own: KrunMetrics, mtls_end: MtlsEnd, app_url: str) -> None:
        """`app_url` is where the app shows its metrics; empty: nowhere."""
        self._own = own
        self._mtls_end = mtls_end
        self._app_url = app_url
        self._warnings = RepeatedLog(log)

    async def scrape(self, _: Request) -> Response:
        """All that can be had now. Who does not answer is left out, and counted."""
        envoy, app = await asyncio.gather(
            self._part("envoy", self._mtls_end.metrics()), self._part("app", self._app())
        )
        return Response(200, CONTENT_TYPE, joined(self._own.render(), envoy, app))

    def close(self) -> None:
        """Tells what has not been told yet."""
        self._warnings.close()

    async def _app(self) -> bytes:
        if not self._app_url:
            return b""
        from shared.net.http1 import get  # which a start without an app's metrics need not wait for

        answer = await get(
            self._app_url,
            headers={"accept": "text/plain;version=0.0.4"},
            timeout_s=APP_TIMEOUT_S,
            max_bytes=APP_BYTES,
        )
        if answer.status != 200:
            raise UpstreamError(f"{self._app_url}: status {answer.status}")
        return answer.body

    async def _part(self, of: str, asked: Awaitable[bytes]) -> bytes:
        try:
            return await asked
        except HboneError as error:
            self._own.scrape_failures[of] += 1
            setting = " (HBONE_APP_METRICS)" if of == "app" else ""
            self._warnings.warning(of, f"a scrape lacks the metrics of {of}{setting}: {error}")
            return b""


def joined(*parts: bytes) -> bytes:
    """The parts, each with whole lines, without OpenMetrics' ends."""
    lines = (line for part in parts for line in part.splitlines() if not line.startswith(_END))
    return b"".join(line + b"\n" for line in lines)
