"""Requests to the app, passed on in HTTP/1.1 or HTTP/2.

Cloud Run sends everything to the one port of the container, so what is no tunnel is the app's. The built-in
mTLS end hands over what the mesh's clients ask for.

    app_proxy               what the rest of krun sees of it
    proxy/app_requests      the requests that are under way, and which protocol carries each
    proxy/downstream        the client's side of a request: a stream of HTTP/2, or
    proxy/http1_server      a connection that speaks HTTP/1.1
    proxy/fields            what passes of headers and trailers
    proxy/exchange          a request and its answer, seen from the client
    proxy/app_protocol      what the app speaks
    proxy/http1_*           connections to an HTTP/1.1 app, which are kept; WebSockets by Upgrade
    proxy/http2_*           streams to an HTTP/2 app; WebSockets by extended CONNECT
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from shared.address import Address
from shared.net.relay.memory_budget import Holder
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S
from shared.net.relay.tunnel_clock import TunnelClock

if TYPE_CHECKING:
    from agent.proxy.app_requests import AppRequests
    from agent.proxy.downstream import Caller, Downstream
    from agent.proxy.request_record import RequestRecord


class AppProxy:
    """Passes requests on to the app at `app`."""

    def __init__(
        self,
        app: Address,
        dial_timeout_s: float,
        protocol: Literal["auto", "http1", "h2c"] = "auto",
        *,
        clock: TunnelClock | None = None,
        half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S,
        failed: Callable[[int, str], None] = lambda status, text: None,
        finished: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        """`clock` watches WebSockets, which are tunnels once they stand; so does `half_closed_timeout_s`.
        `failed(status, text)` is called for each request that is answered with `status` and `text` in place
        of the app, or whose answer is cut off. `finished` gets the records of callers' requests."""
        self._app = app
        self._dial_timeout_s = dial_timeout_s
        self._protocol = protocol
        self._clock = clock
        self._half_closed_timeout_s = half_closed_timeout_s
        self._failed = failed
        self._finished = finished
        self._requests: AppRequests | None = None

    @property
    def open_requests(self) -> int:
        """Requests to the app whose answers have not ended."""
        return 0 if self._requests is None else self._requests.open_requests

    @property
    def buffered_bytes(self) -> int:
        """What is held for them, both ways; looks at each of them."""
        return sum(holder.buffered_bytes for holder in self.holders()) + self.shared_bytes

    @property
    def shared_bytes(self) -> int:
        """What is held for none of them in particular: on the connections to an HTTP/2 app."""
        return 0 if self._requests is None else self._requests.shared_bytes

    def holders(self) -> Iterable[Holder]:
        """Whatever holds bytes for a request, open or not."""
        return () if self._requests is None else self._requests.holders()

    def take(self, stream: Downstream, caller: Caller | None = None) -> None:
        """Answers a request with the app's answer, or with a status that says why there is none. `caller` has
        sent it through an mTLS end; None: it came through Cloud Run's front end."""
        (self._requests or self._begin()).take(stream, caller)

    def close(self) -> None:
        """Ends what is left, and lets go of the connections to the app."""
        if self._requests is not None:
            self._requests.close()

    def _begin(self) -> AppRequests:
        from agent.proxy.app_requests import AppRequests  # what a container with tunnels only need not load

        self._requests = AppRequests(
            self._app,
            self._dial_timeout_s,
            None if self._protocol == "auto" else self._protocol,
            clock=self._clock,
            half_closed_timeout_s=self._half_closed_timeout_s,
            failed=self._failed,
            finished=self._finished,
        )
        return self._requests
