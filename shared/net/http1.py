"""One request over HTTP/1.1, with a deadline and a bound: for the metadata server and token services.

Owns one exchange on a connection of its own, closed afterwards. Does not pool, retry, follow redirects or
speak HTTP/2; tunnels go through `pool` and `stream`. h11 holds the protocol's rules, this file the socket.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shared.address import Address
from shared.errors import DialError, UpstreamError
from shared.net import http_proxy
from shared.net.dial import reason
from shared.net.names import happy_eyeballs
from shared.net.tls.contexts import ALPN_HTTP1, client_context

if TYPE_CHECKING:
    import h11

    from shared.net.http_proxy import HttpProxy

READ_BYTES = 16 * 1024
"""How much one read takes: the answers that we ask for are a few KiB."""

LEAST_BUFFER_BYTES = 64 * 1024
"""For what has come and is not read. There is room for the whole answer: when the server closes while reading
is paused, uvloop drops what it has not delivered yet (0.23)."""

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer; the body, which may be a token, is kept out of `repr`."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case; the values of a name that comes several times are joined by `, `."""
    body: bytes = field(repr=False)

    def json_object(self) -> dict[str, Any] | None:
        """The JSON object in the body, None if that is something else."""
        import json

        try:
            parsed = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: what to dial and what to ask for there."""

    scheme: str
    host: str
    port: int
    authority: str
    """The host header: as written in the URL, brackets and port included."""
    request_target: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Target:
        """Reads an `http` or `https` URL. Raises ValueError with the reason when it is none."""
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError("URL with characters that have to be escaped")
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS:
            raise ValueError(f"URL with scheme {parts.scheme!r} instead of http or https")
        if not parts.hostname:
            raise ValueError("URL without a host")
        if "@" in parts.netloc:
            raise ValueError("URL with a user name")
        port = DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
        if port == 0:
            raise ValueError("URL with port 0")
        request_target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, parts.hostname, port, parts.netloc, request_target)


async def get(
    url: str,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    max_bytes: int,
    tls: ssl.SSLContext | None = None,
    unix: Path | None = None,
    proxy: HttpProxy | None = None,
) -> Response:
    """`request` with GET and no body."""
    return await request(
        "GET",
        url,
        headers=headers,
        timeout_s=timeout_s,
        max_bytes=max_bytes,
        tls=tls,
        unix=unix,
        proxy=proxy,
    )


async def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: bytes = b"",
    timeout_s: float,
    max_bytes: int,
    tls: ssl.SSLContext | None = None,
    unix: Path | None = None,
    proxy: HttpProxy | None = None,
) -> Response:
    """Sends one request, with `body` if there is one, and returns the answer, whatever its status.

    `timeout_s` bounds the whole exchange in seconds, name lookup included, `max_bytes` the answer's body.
    `tls` is for https only and None means the system's trust. `unix` is a socket to connect to, without TLS,
    in place of the URL's host and port; `proxy` leads there, for https. Raises DialError when no connection
    comes about, UpstreamError when the answer is broken, late or too long, both naming host and port;
    ValueError when `url` or `headers` cannot be sent at all.
    """
    import h11

    target = Target.parse(url)
    try:
        fields = [("host", target.authority), ("connection", "close"), *headers.items()]
        if body:
            fields.append(("content-length", str(len(body))))
        head = h11.Request(method=method, target=target.request_target, headers=fields)
    except h11.LocalProtocolError:
        # Without the original: its text quotes the header's value, which may be a secret.
        raise ValueError(f"request to {target} cannot be sent: malformed header or path") from None
    deadline = asyncio.get_running_loop().time() + timeout_s
    if unix is None:
        limit = max(LEAST_BUFFER_BYTES, max_bytes)
        reader, writer = await _dial(target, tls, deadline, timeout_s, limit, proxy)
    else:
        reader, writer = await _dial_unix(unix, deadline, timeout_s)
    try:
        async with asyncio.timeout_at(deadline):
            return await _exchange(head, body, target, reader, writer, max_bytes)
    except TimeoutError as error:
        raise UpstreamError(f"no complete answer from {target} within {timeout_s:g} s") from error
    finally:
        # The exchange is over or lost either way; a polite TLS goodbye would only need a deadline again.
        writer.transport.abort()


async def _dial(
    target: Target,
    tls: ssl.SSLContext | None,
    deadline: float,
    timeout_s: float,
    limit: int,
    proxy: HttpProxy | None,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context: ssl.SSLContext | None = None
    if target.scheme == "https":
        context = tls or client_context(None, asyncio.get_running_loop().time(), ALPN_HTTP1)
    name = target.host if context is not None else None
    try:
        async with asyncio.timeout_at(deadline) as waiting:
            address = Address(target.host, target.port)
            if proxy is None:
                sock = await happy_eyeballs.dial(address)
            else:
                sock, _ = await http_proxy.connect(proxy, address)
            return await asyncio.open_connection(sock=sock, ssl=context, server_hostname=name, limit=limit)
    except OSError as error:
        cause = f"no connection within {timeout_s:g} s" if waiting.expired() else reason(error)
        by = f" by {proxy}" if proxy is not None else ""
        raise DialError(f"cannot connect to {target}{by}: {cause}") from error


async def _dial_unix(
    path: Path, deadline: float, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout_at(deadline) as waiting:
            return await asyncio.open_unix_connection(path)
    except OSError as error:
        cause = f"no connection within {timeout_s:g} s" if waiting.expired() else error.strerror or str(error)
        raise DialError(f"cannot connect to {path}: {cause}") from error


async def _exchange(
    head: h11.Request,
    body: bytes,
    target: Target,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    max_bytes: int,
) -> Response:
    import h11

    connection = h11.Connection(h11.CLIENT)
    try:
        writer.write(connection.send(head) or b"")
        if body:
            writer.write(connection.send(h11.Data(body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        return await _receive(connection, target, reader, max_bytes)
    except OSError as error:
        raise UpstreamError(f"connection to {target} lost: {error}") from error
    except h11.RemoteProtocolError:
        # Without the original: its text quotes what came, which may be a secret.
        raise UpstreamError(f"broken answer from {target}: it is no complete HTTP/1.1 response") from None


async def _receive(
    connection: h11.Connection, target: Target, reader: asyncio.StreamReader, max_bytes: int
) -> Response:
    import h11

    head: h11.Response | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > max_bytes:
                raise UpstreamError(f"answer from {target} is longer than {max_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return Response(head.status_code, _joined(head.headers), bytes(body))
        elif not isinstance(event, h11.InformationalResponse):
            raise UpstreamError(f"broken answer from {target}: it is no complete HTTP/1.1 response")


def _joined(fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in fields:
        # latin-1 maps every byte, so whatever came can be looked at (RFC 9110 section 5.5).
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
