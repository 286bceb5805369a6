"""Envoy's admin port: what it answers, and to whom.

Envoy's own admin interface answers whoever reaches it, web pages too whose name leads to loopback, and it can
end the process. Envoy's configuration can only bound its paths (`allow_paths`). So the interface is a socket
in krun's own folder (`envoy_bootstrap.ADMIN_SOCKET`), which krun's user alone can reach. This is the port in
front of it: it shows what is safe to show, changes what debugging needs, and answers no web page.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from shared.address import Address
from shared.net.http1 import request
from shared.ops.http_server import Handler, HttpServer, Request, Response

SHOWN = (
    "/certs",
    "/clusters",
    "/config_dump",
    "/help",
    "/init_dump",
    "/listeners",
    "/memory",
    "/ready",
    "/runtime",
    "/server_info",
    "/stats",
    "/stats/prometheus",
)
"""Without profiles and heap dumps, and without /hot_restart_version, as there is no hot restart."""

CHANGED = ("/logging", "/reset_counters")
"""By POST. The rest of Envoy's is krun's business: when it drains and ends, whether it is well."""

TIMEOUT_S = 4.0
"""For Envoy's answer, less than our client has."""

MAX_BYTES = 16 << 20
"""Of an answer; /stats and /config_dump of our configuration have some 100 KiB."""


class EnvoyAdmin:
    """The port of one Envoy."""

    def __init__(self, socket: Path) -> None:
        """`socket` is where that Envoy's admin interface listens."""
        self._socket = socket
        routes: dict[tuple[str, str], Handler] = {("GET", path): self._pass_on for path in SHOWN}
        routes |= {("POST", path): self._pass_on for path in CHANGED}
        self._server = HttpServer(routes, name="envoy admin", local_only=True)

    async def start(self, address: Address) -> Address:
        """Listens; returns the address with the port in place of 0. Raises UnavailableError."""
        return await self._server.start(address)

    async def close(self) -> None:
        """Listens no more, and ends what is open."""
        await self._server.close(0)

    async def _pass_on(self, asked: Request) -> Response:
        query = f"?{urlencode(asked.query)}" if asked.query else ""
        form = {"content-type": asked.headers.get("content-type", "")} if asked.body else {}
        answer = await request(
            asked.method if asked.method == "POST" else "GET",
            f"http://envoy{asked.path}{query}",
            headers=form,
            body=asked.body,
            timeout_s=TIMEOUT_S,
            max_bytes=MAX_BYTES,
            unix=self._socket,
        )
        return Response(answer.status, answer.headers.get("content-type", "text/plain"), answer.body)
