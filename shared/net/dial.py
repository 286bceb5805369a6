"""Connections that we open, TCP and HTTP/2, with a deadline and errors that name the target."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shared.address import Address
from shared.errors import ConfigError, DeniedError, DialError, UnavailableError
from shared.net.names import happy_eyeballs, names
from shared.net.names.dns_query import ResolveError
from shared.net.names.endpoint import Resolve, endpoint
from shared.net.tls.contexts import ALPN_H2, certificate_end, client_context

if TYPE_CHECKING:
    from typing import Protocol

    from shared.net.http_proxy import HttpProxy
    from shared.net.legs.stream import Stream
    from shared.net.legs.tcp import TcpLeg
    from shared.net.tls.mesh_tls import MeshIdentity
    from shared.net.tls.revocation_watch import RevocationWatch
    from shared.trust.revocations import Proof

    class Dialled(Protocol):
        """What is told of the server that it is connected to: an HTTP/2 connection, or what becomes one
        (`EarlyConnection`)."""

        proof: Proof
        certificate_ends: float

        def abort(self, cause: str) -> None: ...


P = TypeVar("P", bound=asyncio.BaseProtocol)
D = TypeVar("D", bound="Dialled")

_NONBLOCK: int = getattr(socket, "SOCK_NONBLOCK", 0)
"""Linux makes a socket so in one system call; macOS in two."""


async def dial(address: Address, timeout_s: float) -> TcpLeg:
    """Connects to `address` and returns the connection as a leg.

    Raises:
        DialError: refused, unreachable, no such name, or not connected within `timeout_s` seconds.
    """
    from shared.net.legs.tcp import TcpLeg  # ssh users would wait 1 ms for what they need later

    return await dial_protocol(address, timeout_s, TcpLeg)


async def dial_protocol(address: Address, timeout_s: float, make: Callable[[socket.socket | None], P]) -> P:
    """Connects to `address` and runs the protocol of `make` on the connection; `make` is told the socket, if
    that is one of ours, which the transport then closes.

    Raises:
        DialError: as `dial`.
    """
    loop = asyncio.get_running_loop()
    try:
        sock = _at_once(address) if address.is_loopback else None
        if sock is not None:
            _, protocol = await loop.create_connection(partial(make, sock), sock=sock)
            return protocol
        async with asyncio.timeout(timeout_s):
            if address.is_ip:  # nothing is to be looked up: a socket of our own would cost 65 µs more
                _, protocol = await loop.create_connection(partial(make, None), address.host, address.port)
            else:
                sock = await happy_eyeballs.dial(address)
                _, protocol = await loop.create_connection(partial(make, sock), sock=sock)
            return protocol
    except OSError as error:
        raise _not_connected(address, error, timeout_s) from error


def _at_once(address: Address) -> socket.socket | None:
    """A connection to a loopback address, an agent's every tunnel: there the kernel shakes hands with itself
    before `connect` returns. None if it did not, as with a listener whose queue is full. Raises OSError."""
    family, name = endpoint(address.host, address.port)
    sock = socket.socket(family, socket.SOCK_STREAM | _NONBLOCK)
    if not _NONBLOCK:
        sock.setblocking(False)
    failure = sock.connect_ex(name)
    if failure == errno.EINPROGRESS:
        failure = sock.connect_ex(name)  # what came of it: 0 on Linux, EISCONN on macOS
    if failure in (0, errno.EISCONN):
        return sock
    sock.close()
    if failure == errno.EALREADY:
        return None
    raise OSError(failure, os.strerror(failure))


async def dial_socket(address: Address, timeout_s: float) -> socket.socket:
    """Connects to `address` and returns the bare, non-blocking socket, the caller's to close.

    Raises:
        DialError: as `dial`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await happy_eyeballs.dial(address)
    except OSError as error:
        raise _not_connected(address, error, timeout_s) from error


def _not_connected(address: Address, error: OSError, timeout_s: float) -> DialError:
    cause = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else reason(error)
    return DialError(f"connect to {address}: {cause}")


def reason(error: OSError) -> str:
    """The cause of a failed connection in a few words, without the address that asyncio puts into it."""
    # Only OpenSSL's own errors have these attributes.
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {getattr(error, 'verify_message', None) or error}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'reason', None) or error}"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return "connection reset"
    return error.strerror or str(error) or type(error).__name__


class Origin:
    """Where a tunnel's HTTP/2 ends; all tunnels to an equal one share connections. Nobody changes one.

    No dataclass: making that costs 0.7 ms of each start, and its hash is to be made once.
    """

    __slots__ = ("_hash", "_is", "address", "ca", "host", "identity", "proxy", "scheme", "searched")

    def __init__(
        self,
        scheme: str,
        host: str,
        address: Address,
        ca: Path | None = None,
        identity: MeshIdentity | None = None,
        searched: bool = False,
        proxy: HttpProxy | None = None,
    ) -> None:
        self.scheme = scheme
        """https, or http for h2c with prior knowledge."""
        self.host = host
        """Name in the URL: SNI and certificate check."""
        self.address = address
        """Where to connect; differs from the URL's host for private endpoints and tests."""
        self.ca = ca
        """PEM file of trusted certificates; None: the system's."""
        self.identity = identity
        """Who we are there, and who it has to be, instead of `host` and `ca`."""
        self.searched = searched
        """Whether the search list of resolv.conf counts for the name in `address`: an operator has written it
        as a place to dial. That of a URL is absolute, for what clients make of it would be asked for many
        times."""
        self.proxy = proxy
        """What leads to `address`; None: it is dialled itself."""
        self._is = (scheme, host, address, ca, identity, searched, proxy)
        self._hash = hash(self._is)  # a tunnel looks its origin up in several tables

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin) and self._is == other._is

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        by = f" by {self.proxy}" if self.proxy is not None else ""
        return f"{self.scheme}://{self.host} at {self.address}{by}"

    @property
    def to_look_up(self) -> Address:
        """`address` as the resolver is asked for it."""
        return self.address if self.searched else self.address.absolute


async def dial_http2(
    origin: Origin,
    timeout_s: float,
    make: Callable[[], D],
    resolve: Resolve = names.resolve,
    revocations: RevocationWatch | None = None,
    told: Callable[[str, str], None] | None = None,
) -> D:
    """Connects to `origin`, with TLS if its scheme is https, and runs an HTTP/2 connection from `make` on it.
    `resolve` looks its name up, a server with an identity must not be on `revocations`. `told` gets the name
    of each step and what came of it.

    Raises:
        DialError: TCP or TLS failed, the peer does not speak HTTP/2, or it all took over `timeout_s` seconds.
        UnavailableError: the file of trusted certificates cannot be used, and never could.
    """
    loop = asyncio.get_running_loop()
    context, name = _tls_to(origin)
    try:
        async with asyncio.timeout(timeout_s):
            sock = await _reached(origin, resolve, told)
            transport, made = await loop.create_connection(
                cast("Callable[[], Any]", make),
                sock=sock,
                ssl=context,
                server_hostname=name if context else None,
            )
            connection: D = made
    except TimeoutError as error:
        text = f"connect to {origin}: not connected within {timeout_s:g} s"
        raise DialError(text, passes=True) from error
    except OSError as error:
        raise DialError(f"connect to {origin}: {reason(error)}", passes=_passes(error)) from error
    if context is not None:
        tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
        if told is not None:
            cipher = tls.cipher()
            alpn = tls.selected_alpn_protocol() or "none"
            told("TLS", f"{tls.version()}, {cipher[0] if cipher else 'no cipher'}, ALPN {alpn}")
        _check(connection, tls, origin, revocations)
    return connection


async def carry_http2(
    origin: Origin,
    stream: Stream,
    timeout_s: float,
    make: Callable[[], D],
    revocations: RevocationWatch | None = None,
    over: Callable[[D], None] = lambda _: None,
) -> D:
    """As `dial_http2`, but the connection to `origin`, which has TLS, is in a tunnel: that of `stream`, which
    was answered with 200. `over(connection)` is called when the tunnel is over, however that came.

    Raises:
        DialError: TLS failed, the peer does not speak HTTP/2, or it took over `timeout_s` seconds.
    """
    from shared.net.legs.carried import CarriedLeg
    from shared.net.legs.carried_tls import CarriedTls
    from shared.net.relay.relay import Relay

    try:
        context, name = _tls_to(origin)
    except DialError:
        stream.abort()
        raise
    assert context is not None
    connection = make()
    tls = CarriedTls(context, cast("asyncio.BufferedProtocol", connection), server_name=name)
    Relay(CarriedLeg(tls, stream), stream, lambda _: over(connection)).start()
    try:
        async with asyncio.timeout(timeout_s):
            await tls.handshake()
    except TimeoutError as error:
        text = f"connect to {origin}: no TLS handshake within {timeout_s:g} s"
        raise DialError(text, passes=True) from error
    except OSError as error:
        raise DialError(f"connect to {origin}: {reason(error)}", passes=_passes(error)) from error
    _check(connection, tls.tls, origin, revocations)
    return connection


def _tls_to(origin: Origin) -> tuple[ssl.SSLContext | None, str]:
    """The context for `origin`, None without TLS, and the SNI, empty for none. Raises DialError or
    UnavailableError."""
    now = asyncio.get_running_loop().time()
    identity = origin.identity
    if identity is None:
        return (client_context(origin.ca, now) if origin.scheme == "https" else None), origin.host
    from shared.net.tls import mesh_tls  # where there is no mesh, 1 ms less to start

    try:
        return mesh_tls.client_context(identity, now), identity.server_name
    except (ConfigError, UnavailableError) as error:
        raise DialError(f"connect to {origin}: our own certificates: {error}") from error


def _check(
    connection: Dialled, tls: ssl.SSLObject, origin: Origin, revocations: RevocationWatch | None
) -> None:
    """Tells `connection` what is known of the server. Drops it and raises DialError unless that is who it has
    to be, and speaks HTTP/2."""
    demand_http2(connection, tls, origin)
    if origin.identity is None:
        connection.certificate_ends = certificate_end(tls)
        return
    from shared.net.tls import mesh_tls

    try:
        proof = mesh_tls.check_server(origin.identity, tls, revocations)
        if revocations is not None:
            connection.proof = proof
        connection.certificate_ends = mesh_tls.chain_end(tls)
    except DeniedError as error:
        connection.abort("not who it should be")
        raise DialError(f"connect to {origin}: {error}") from error


def _passes(error: OSError) -> bool:
    """Whether a server that is just starting is a possible cause of a connection that failed."""
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return not isinstance(error, ResolveError)


async def _reached(
    origin: Origin, resolve: Resolve, told: Callable[[str, str], None] | None
) -> socket.socket:
    """A TCP connection to `origin`, or through its proxy to it. Raises OSError."""
    if origin.proxy is not None:
        from shared.net import http_proxy  # only people have one

        sock, status = await http_proxy.connect(origin.proxy, origin.address, resolve)
        if told is not None:
            told("proxy", f"{origin.proxy.address} answered {status}")
        return sock
    if told is None:
        return await happy_eyeballs.dial(origin.to_look_up, resolve)
    endpoints = await resolve(origin.to_look_up)
    if not origin.address.is_ip:
        told("DNS", f"{origin.address.host} is {', '.join(name[0] for _, name in endpoints)}")
    sock = await happy_eyeballs.connect(endpoints)
    peer = sock.getpeername()
    told("TCP", str(Address(peer[0], peer[1])))
    return sock


def demand_http2(connection: Dialled, tls: ssl.SSLObject, target: object) -> None:
    """Drops `connection` and raises DialError, which names `target`, unless HTTP/2 was agreed on by ALPN."""
    if tls.selected_alpn_protocol() != ALPN_H2:
        connection.abort("no HTTP/2")
        raise DialError(f"connect to {target}: the server does not offer HTTP/2 (ALPN h2)")
