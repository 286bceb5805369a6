"""One gRPC call with one request and one answer, on a connection of its own, with a deadline and a bound.

Owned here: the connection and the waiting. `grpc_message` has what goes over it, `Connection` HTTP/2 itself.
Does not pool, retry or stream: for calls that are made a few times a day.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.address import Address
from shared.errors import DialError, HboneError, StreamResetError, UpstreamError
from shared.http2.grpc_message import (
    CODES,
    PREFIX_BYTES,
    framed,
    request_headers,
    status,
    unframed,
)
from shared.net.dial import demand_http2, dial_socket, reason
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Buffer, Leg


@dataclass(frozen=True, slots=True)
class Reply:
    """How a call ended."""

    code: str
    """A status of `grpc_message.CODES`."""

    text: str
    """What the server says about it, for people, neither bounded nor printable."""

    message: bytes = field(repr=False)
    """The answer; empty unless `code` is OK."""


async def call(
    address: Address,
    path: str,
    message: bytes,
    *,
    tls: ssl.SSLContext,
    server_name: str,
    metadata: Mapping[str, str],
    timeout_s: float,
    max_bytes: int,
) -> Reply:
    """Calls `path` (`/PACKAGE.SERVICE/METHOD`) with `message` at `address` and returns how it ended, whatever
    the status.

    `server_name` is sent as SNI and has to be in the server's certificate; `tls` has to offer HTTP/2
    (ALPN_H2). `metadata` is sent along, its names in lower case. `timeout_s` bounds all of it in seconds,
    `max_bytes` the answer. Raises DialError when no connection comes about, UpstreamError when the answer is
    broken, late or too long, both naming `address`; ValueError, without the value, when `metadata` cannot be
    sent.
    """
    headers = request_headers(server_name, path, metadata, timeout_s)
    answer = _Answer(PREFIX_BYTES + max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            connection = await _connect(address, tls, server_name, timeout_s)
            try:
                stream = connection.open(headers)
                stream.join(answer)
                stream.write(framed(message))
                stream.write_eof()
                await answer.whole()
            finally:
                # One call is all that it was for; a goodbye would need a deadline again.
                connection.abort("the call is over")
    except TimeoutError as error:
        raise UpstreamError(f"no complete answer from {address} within {timeout_s:g} s") from error
    except StreamResetError as error:
        raise UpstreamError(f"call of {address} failed: {error}") from error
    if len(answer.body) > answer.max_bytes:
        raise UpstreamError(f"answer from {address} is longer than {max_bytes} bytes")
    code, text = status(stream.headers, stream.trailers)
    try:
        return Reply(code, text, unframed(bytes(answer.body)) if code == CODES[0] else b"")
    except ValueError as error:
        raise UpstreamError(f"broken answer from {address}: {error}") from error


async def _connect(address: Address, tls: ssl.SSLContext, server_name: str, timeout_s: float) -> Connection:
    sock = await dial_socket(address, timeout_s)
    try:
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(client=True), sock=sock, ssl=tls, server_hostname=server_name
        )
    except OSError as error:
        raise DialError(f"connect to {address} as {server_name}: {reason(error)}") from error
    demand_http2(connection, transport.get_extra_info("ssl_object"), address)
    return connection


class _Answer:
    """Keeps an answer's body, up to a bound (a leg's `RelayEnd`)."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.body = bytearray()
        self._done = asyncio.Event()
        self._error: HboneError | None = None

    async def whole(self) -> None:
        """Returns at the answer's end, or when it is too long. Raises StreamResetError when it breaks off."""
        await self._done.wait()
        if self._error is not None:
            raise self._error

    def received(self, leg: Leg, data: Buffer) -> None:
        self.body += data
        if len(self.body) > self.max_bytes:
            self._done.set()

    def ended(self, leg: Leg) -> None:
        self._done.set()

    def failed(self, leg: Leg, error: HboneError) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def full(self, leg: Leg) -> None: ...

    def drained(self, leg: Leg) -> None: ...
