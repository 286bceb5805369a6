"""`hbone URL`: standard input and output through a tunnel, as ssh's ProxyCommand wants it.

ssh shows a user nothing of why its ProxyCommand failed but what that writes to standard error, and waits for
the end of its output: so one line there, then the end (ssh_config(5), ProxyCommand). A signal, and a reader
that has gone away, end it without a word, as they end any filter.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from hbone.stdio import StdioLeg
from hbone.target import TunnelTarget
from shared.errors import EXIT_OK, DialError, StatusError, TokenError, UpstreamError, UsageError
from shared.identity.tokens import FileToken, MetadataToken, NoToken, TokenSource
from shared.net.address import Address
from shared.net.answers import refusal
from shared.net.connection import Connection
from shared.net.dial import Origin, dial_http2
from shared.net.relay import Relay
from shared.net.stream import Stream
from shared.wire import tunnel_request

CONNECT_TIMEOUT_S = 10.0
"""For TCP and TLS."""

RESPONSE_TIMEOUT_S = 60.0
"""For the response: a service that has scaled to zero starts first."""

CLOSE_TIMEOUT_S = 20.0
"""How long a far side that has finished may take for our last bytes and its own close; less than the 30 s
after which the event loop gives up on a TLS connection without a word."""

_TOKEN_HINT = (
    "on your own machine, gcloud auth print-identity-token >FILE and --token-file FILE, or --no-token"
)


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """How to reach the target."""

    target: TunnelTarget
    token: TokenSource
    ca: Path | None = None
    """PEM file of certificates to trust; None: the system's."""
    connect: Address | None = None
    """Dial here instead of the URL's host."""


def token_source(
    target: TunnelTarget, *, token_file: Path | None, audience: str | None, none: bool, metadata_host: str
) -> TokenSource:
    """The token source that the flags say; by default a token for the URL's host from the metadata server,
    and none where there is no TLS to keep it secret.

    Raises:
        UsageError: `metadata_host` is no HOST or HOST:PORT.
    """
    if none or (target.scheme == "http" and token_file is None and audience is None):
        return NoToken()
    if token_file is not None:
        return FileToken(token_file)
    try:
        return MetadataToken(audience or target.audience, metadata_host)
    except ValueError as error:
        raise UsageError(f"invalid GCE_METADATA_HOST={metadata_host!a} ({error})") from error


async def run(options: ProxyOptions) -> int:
    """Carries standard input and output until both directions have ended. Returns the exit code: 0, or 128+N
    for signal N; that is SIGPIPE's when nobody reads our output any more.

    Raises:
        HboneError: the tunnel could not be opened, or broke.
    """
    loop = asyncio.get_running_loop()
    carrying = asyncio.current_task()
    assert carrying is not None
    stopped_by: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        stopped_by.append(number)
        carrying.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's SIG_IGN stays
            loop.add_signal_handler(number, stop, number)
    try:
        return await _carry(options)
    except asyncio.CancelledError:
        if not stopped_by:
            raise  # SIGINT: the event loop makes a KeyboardInterrupt of it
        return 128 + stopped_by[0]


async def _carry(options: ProxyOptions) -> int:
    target = options.target
    token = await _token(options.token)
    origin = Origin(target.scheme, target.host, options.connect or target.address, options.ca)
    gone = asyncio.Event()
    connection = await dial_http2(
        origin, CONNECT_TIMEOUT_S, lambda: Connection(client=True, on_lost=lambda _: gone.set())
    )
    try:
        if connection.lost:
            raise DialError(f"connect to {origin}: it ended the connection at once; does it take HTTP/2?")
        request = tunnel_request.post(target.scheme, target.authority, target.path, token)
        stream = connection.open(request)
        status = await stream.response(RESPONSE_TIMEOUT_S)
        if status != 200:
            error = await refusal(stream, status)
            raise StatusError(status, f"{target}: {error}")
        leg = StdioLeg()
        try:
            await _relay(leg, stream)
            await _finish(leg, connection, gone)
        except UpstreamError:
            if leg.abandoned:
                return 128 + signal.SIGPIPE
            raise
        finally:
            leg.abort()
        return EXIT_OK
    finally:
        connection.close()


async def _token(source: TokenSource) -> str | None:
    try:
        return await source.token()
    except TokenError as error:
        if isinstance(source, FileToken):
            raise
        raise TokenError(f"{error}; {_TOKEN_HINT}") from error


async def _relay(leg: StdioLeg, stream: Stream) -> None:
    """Returns when both directions have ended. Raises what broke one of them."""
    over = asyncio.Event()
    relay = Relay(leg, stream, lambda _: over.set())
    relay.start()
    try:
        await over.wait()
    finally:
        relay.abort(UpstreamError("interrupted"))
    if relay.error is not None:
        raise relay.error


async def _finish(leg: StdioLeg, connection: Connection, gone: asyncio.Event) -> None:
    """Both directions have ended, but their last bytes may still be on their way out, and would end with the
    process.

    Raises:
        UpstreamError: they were not taken.
    """
    connection.drain()
    await leg.flushed()
    if leg.error is not None:
        raise leg.error
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await gone.wait()
    except TimeoutError as error:
        raise UpstreamError(f"the last bytes were not taken within {CLOSE_TIMEOUT_S:g} s") from error
