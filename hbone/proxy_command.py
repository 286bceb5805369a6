"""`hbone URL`: standard input and output through a tunnel, as ssh's ProxyCommand wants it.

ssh shows a user nothing of why its ProxyCommand failed but what that writes to standard error, and waits for
the end of its output: so one line there, then the end (ssh_config(5), ProxyCommand).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from hbone.stdio import StdioLeg
from hbone.target import TunnelTarget
from shared.errors import EXIT_OK
from shared.identity.tokens import FileToken, MetadataToken, NoToken, TokenSource
from shared.net.address import Address
from shared.net.answers import refusal
from shared.net.connection import Connection
from shared.net.dial import Origin, dial_http2
from shared.net.relay import Relay
from shared.wire import tunnel_request

CONNECT_TIMEOUT_S = 10.0
"""For TCP and TLS."""

RESPONSE_TIMEOUT_S = 60.0
"""For the response: a service that has scaled to zero starts first."""


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
    and none where there is no TLS to keep it secret."""
    if none or (target.scheme == "http" and token_file is None and audience is None):
        return NoToken()
    if token_file is not None:
        return FileToken(token_file)
    return MetadataToken(audience or target.audience, metadata_host)


async def run(options: ProxyOptions) -> int:
    """Carries standard input and output until both directions have ended; returns the exit code.

    Raises:
        HboneError: the tunnel could not be opened, or broke.
    """
    target = options.target
    token = await options.token.token()
    origin = Origin(target.scheme, target.address.host, options.connect or target.address, options.ca)
    connection = await dial_http2(origin, CONNECT_TIMEOUT_S, lambda: Connection(client=True))
    try:
        request = tunnel_request.post(target.scheme, target.authority, target.path, token)
        stream = connection.open(request)
        status = await stream.response(RESPONSE_TIMEOUT_S)
        if status != 200:
            raise await refusal(stream, status)
        over: asyncio.Future[Relay] = asyncio.get_running_loop().create_future()
        Relay(StdioLeg(), stream, over.set_result).start()
        relay = await over
        if relay.error is not None:
            raise relay.error
        return EXIT_OK
    finally:
        connection.close()
