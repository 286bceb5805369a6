"""The connections to an app that speaks HTTP/2: a stream of one for each exchange.

How many connections there are, and what the app may send ahead on them.
"""

from __future__ import annotations

from collections.abc import Callable

from agent.proxy.exchange import Exchange, Waiting
from agent.proxy.http2_exchange import Http2Exchange, request_headers
from shared.address import Address
from shared.errors import UpstreamError
from shared.http2.session import SessionLimits
from shared.net.dial import Origin
from shared.net.legs.stream import Stream
from shared.net.pool.pool import Pool
from shared.net.pool.pool_limits import PoolLimits

STREAM_WINDOW_BYTES = 256 << 10
"""What an app may send ahead of a client that does not read; on loopback more is of no use."""

CONNECTION_WINDOW_BYTES = 64 << 20
"""More than all streams of a connection can hold, so that no client stops another's answer."""

LIMITS = SessionLimits(
    stream_window_bytes=STREAM_WINDOW_BYTES,
    most_stream_window_bytes=STREAM_WINDOW_BYTES,
    connection_window_bytes=CONNECTION_WINDOW_BYTES,
)


class Http2Pool:
    """Carries exchanges to the app at `app`. `upgraded` and `http1` as in `Http2Exchange`."""

    def __init__(
        self,
        app: Address,
        dial_timeout_s: float,
        *,
        upgraded: Callable[[Exchange, Stream], None],
        http1: Callable[[], None],
    ) -> None:
        self._app = app
        self._dial_timeout_s = dial_timeout_s
        self._upgraded = upgraded
        self._http1 = http1
        self._origin = Origin("http", str(app), app)
        limits = PoolLimits(
            connect_timeout_s=dial_timeout_s,
            max_age_s=0,
            ping_interval_s=0,  # some servers punish PINGs, and TCP tells at once when an app has ended
            resolve_interval_s=0,
            session=LIMITS,
        )
        # Without chance no dial waits for an earlier failure: an app that comes back is met at once.
        self._pool = Pool(limits=limits, chance=lambda: 0.0)

    @property
    def buffered_bytes(self) -> int:
        """What waits on all connections to be sent."""
        return self._pool.buffered_bytes

    def carry(self, exchange: Exchange) -> None:
        """Carries an exchange."""
        headers, ends = request_headers(exchange.head), exchange.stream.bodiless
        stream = self._pool.of(self._origin).open_now(headers, end_stream=ends)
        if stream is not None:
            self._opened(exchange, stream)
        else:
            Waiting(exchange, self._open(exchange), "stream to the app")

    def close(self) -> None:
        """Idle connections close now, others with their last exchange."""
        self._pool.drain()

    async def _open(self, exchange: Exchange) -> None:
        """Carries an exchange on a stream that has to be waited for."""
        headers, ends = request_headers(exchange.head), exchange.stream.bodiless
        try:
            stream = await self._pool.of(self._origin).open(headers, self._dial_timeout_s, end_stream=ends)
        except UpstreamError as error:
            exchange.unreachable(error, self._app, self._origin)
        else:
            self._opened(exchange, stream)

    def _opened(self, exchange: Exchange, stream: Stream) -> None:
        Http2Exchange(exchange, stream, upgraded=self._upgraded, http1=self._http1)
