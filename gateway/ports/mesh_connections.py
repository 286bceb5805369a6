"""Connections of the mesh's members: from TCP accept through the mTLS handshake to HTTP/2, and to their end.

A connection is one of the mesh's or none: TLS, a certificate that leads to the roots and names one SPIFFE ID,
ALPN h2. A failure in TLS is answered with OpenSSL's alert, a later one with GOAWAY; `refused` is called for
both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol, cast

from gateway.ports.admission import (
    DESCRIPTORS,
    AcceptProtocol,
    Counts,
    memory_full,
    source_of,
)
from gateway.ports.hello import ALERT_LINGER_S
from gateway.ports.member_connection import MemberConnection
from shared.errors import (
    DeniedError,
    EmptyConnectionError,
    ExpiredError,
    HboneError,
    LimitError,
    RefusedError,
    TlsFailureError,
)
from shared.net.dial import reason
from shared.net.http2.connection import Connection
from shared.net.http2.liveness import while_connected
from shared.net.legs.carried import CarriedLeg
from shared.net.legs.carried_tls import CarriedTls
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream
from shared.net.legs.tcp import peer_of
from shared.net.legs.tcp_end import reset
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_expiry import GRACE_S, CertificateExpiry
from shared.net.tls.certificate_files import CertificateFiles
from shared.net.tls.mesh_tls import ServerContext, alert_of, server_context
from shared.net.tls.revocation_watch import RevocationWatch
from shared.tasks import spawn
from shared.trust.spiffe import ids_of

log = logging.getLogger("hbone.gateway")

KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""A peer that vanished without a word is noticed after two minutes of silence: 60 s, then three probes."""

IN_TUNNEL = while_connected(60.0)
"""The same for a connection in a tunnel, by PING: TCP knows of its carrier only."""

LEAST_HANDSHAKE_S = 0.001
"""What is left for TLS of a deadline that the first byte has used up; the loop accepts no zero."""

DRAIN_BYTES = 4096
"""Read at a time of what a refused client still sends."""


class MeshPort(Protocol):
    """What a port's settings say of its connections."""

    @property
    def certificates(self) -> Path:
        """Folder with our certificate, key and roots."""

    @property
    def tls12(self) -> bool:
        """Whether TLS 1.2 is let in beside 1.3."""

    @property
    def handshake_timeout_s(self) -> float:
        """From accept to the end of the handshake."""

    @property
    def max_connections(self) -> int:
        """Open at once, handshakes included."""

    @property
    def max_connections_per_source(self) -> int:
        """Of them from one address; 0: as many as in all."""

    @property
    def crl(self) -> Path | None:
        """File with certificate revocation lists, None without."""


class MeshConnections:
    """The open connections. `make(lost)` makes one, which calls `lost` at its end; `admitted(member)` is
    called when its handshake is over, `refused(peer, duration_s, error)` for every connection that came to
    nothing, `changed()` when their number may have changed.
    """

    def __init__(
        self,
        settings: MeshPort,
        *,
        share: Callable[[int], int],
        is_full: Callable[[], bool] = lambda: False,
        make: Callable[[Callable[[Connection], None]], MemberConnection],
        refused: Callable[[str, float, HboneError], None],
        changed: Callable[[], None],
        admitted: Callable[[MemberConnection], None] = lambda member: None,
        prepare: Callable[[ServerContext], None] = lambda context: None,
        expired: Callable[[MemberConnection, ExpiredError], None] = lambda member, error: member.drain(),
        expel: Callable[[MemberConnection, DeniedError], None] = lambda member, error: member.expel(error),
        drain_timeout_s: float,
        purpose: str = "hbone",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`share` is this process's part of a bound; `is_full` says that memory for buffers is used up.
        `prepare` tells the TLS context more. `expired` has an open connection whose peer's certificate has
        ended accept no new streams, `expel` ends one after `drain_timeout_s` seconds of that, or at once if
        the peer is revoked. `purpose` is the word for the port in the log and the file; `wall_clock` has
        seconds since the epoch."""
        self.settings = settings
        self.drain_timeout_s = drain_timeout_s
        """It may change at any time."""
        self.sources = Counts()
        self._share = share
        self._is_full = is_full
        self._make = make
        self._admitted = admitted
        self._purpose = purpose
        self._refused = refused
        self._changed = changed
        self._handshakes: set[asyncio.Task[None]] = set()
        self._members: set[MemberConnection] = set()
        self._expired = expired
        self._expel = expel
        self._wall_clock = wall_clock
        self._draining = False
        self.revocations: RevocationWatch | None = None
        """The lists that peers are held against."""
        paths = certificate_folder.find(settings.certificates)
        if settings.crl is not None:
            self.revocations = RevocationWatch(settings.crl, paths.roots, purpose=purpose)
            self.revocations.follow(self._end_revoked)

        def make_context() -> ServerContext:
            context = server_context(settings.certificates, tls12=settings.tls12)
            prepare(context)
            return context

        self._files = CertificateFiles(paths.followed, make_context, log=log, purpose=purpose)

    def __len__(self) -> int:
        return len(self._handshakes) + len(self._members)

    @property
    def own_name(self) -> str:
        """Our SPIFFE ID, by the certificate that peers are shown; empty if there is none in it."""
        return name_in(self._files.chain_pem)

    @property
    def most(self) -> int:
        """How many may be open at once."""
        return self._share(self.settings.max_connections)

    @property
    def buffered_bytes(self) -> int:
        """What waits on all of them to be sent."""
        return sum(member.buffered_bytes for member in self._members)

    def read_certificates(self) -> None:
        """To be called before the first connection comes; the revocation lists are followed from then on.

        Raises:
            UnavailableError: a file is missing or cannot be read.
            ConfigError: a file has not what it should.
        """
        self._files.read()
        if self.revocations is not None:
            self.revocations.read()
            self.revocations.start()

    def protocol(self) -> asyncio.BaseProtocol:
        """For an accepted TCP connection."""
        return AcceptProtocol(self._accepted)

    def drain(self) -> None:
        """Accepts no new requests; each connection closes when its last one is over."""
        self._draining = True
        for member in list(self._members):
            member.drain()

    async def close(self, text: str) -> None:
        """Drops all connections at once; `text` says why."""
        if self.revocations is not None:
            self.revocations.close()
        for member in list(self._members):
            member.abort(text)
        handshakes = list(self._handshakes)
        for task in handshakes:
            task.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    def carried(self, stream: Stream) -> Leg:
        """The end of a connection that begins in the tunnel of `stream`. Its address is that of whoever has
        opened the tunnel's own connection.

        Raises LimitError if there is no room for one more.
        """
        peer = stream.connection.peer_name
        self._check_room(peer)
        member = self._make(self._lost)
        tls = CarriedTls(self._files.current(asyncio.get_running_loop().time()), member, server_side=True)
        self._begin(peer, member, partial(self._in_tunnel, tls, member))
        return CarriedLeg(tls, stream)

    # One connection.

    def _accepted(self, transport: asyncio.Transport) -> None:
        peer = peer_of(transport)
        try:
            self._check_room(peer)
            # A transport that is told to speak TLS tells nobody why that failed: we take its socket instead.
            sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except LimitError as error:
            reset(transport)
            self._refused(peer, 0.0, error)
            return
        except OSError as error:
            reset(transport)
            self._refused(peer, 0.0, LimitError(f"no file descriptor: {reason(error)}", DESCRIPTORS))
            return
        transport.abort()
        member = self._make(self._lost)
        self._begin(peer, member, partial(self._on_socket, sock, member))

    def _begin(self, peer: str, member: MemberConnection, handshake: Callable[[], Awaitable[None]]) -> None:
        self.sources.add(source_of(peer))
        task = spawn(self._admit(peer, member, handshake), name=f"{self._purpose} handshake {peer}")
        self._handshakes.add(task)
        self._changed()
        task.add_done_callback(self._handshake_over)

    def _check_room(self, peer: str) -> None:
        """Raises LimitError if there is none for one more from `peer`."""
        if len(self) >= self.most:
            text = f"{self.most} connections are open, which is max_connections"
            raise LimitError(text, f"{self._purpose}.max_connections")
        if self._is_full():
            raise memory_full()
        settings, source = self.settings, source_of(peer)
        most = self._share(settings.max_connections_per_source or settings.max_connections)
        if self.sources[source] >= most:
            text = f"{most} connections from {source} are open, which is max_connections_per_source"
            raise LimitError(text, f"{self._purpose}.max_connections_per_source")

    def _handshake_over(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._changed()

    async def _admit(
        self, peer: str, member: MemberConnection, handshake: Callable[[], Awaitable[None]]
    ) -> None:
        loop = asyncio.get_running_loop()
        accepted = loop.time()
        member.revocations = self.revocations
        member.wall_clock = self._wall_clock
        has_come = False
        try:
            await handshake()
            has_come = self._come(member)
            if member.refusal is not None:
                raise member.refusal
        except RefusedError as error:
            self._refused(peer, loop.time() - accepted, error)
        finally:
            if not has_come:  # else `_lost` says when it has gone
                self.sources.drop(source_of(peer))

    async def _on_socket(self, sock: socket.socket, member: MemberConnection) -> None:
        """Makes `member` the protocol of a duplicate of `sock`, so that ours can still say why not.

        Raises RefusedError once the client has been told.
        """
        loop = asyncio.get_running_loop()
        timeout_s = self.settings.handshake_timeout_s
        deadline = loop.time() + timeout_s
        with sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            try:
                async with asyncio.timeout_at(deadline):
                    await _readable(sock)  # a silent client costs no TLS
                if not sock.recv(1, socket.MSG_PEEK):
                    raise EmptyConnectionError("closed without a byte")
                await loop.connect_accepted_socket(
                    lambda: member,
                    sock.dup(),
                    ssl=self._files.current(loop.time()),
                    ssl_handshake_timeout=max(deadline - loop.time(), LEAST_HANDSHAKE_S),
                )
            except OSError as error:
                if isinstance(error, ssl.SSLError) and (words := alert_of(error)):
                    await _say(sock, words)
                raise _failure(error, timeout_s) from error

    async def _in_tunnel(self, tls: CarriedTls, member: MemberConnection) -> None:
        """The handshake in a tunnel. Raises RefusedError once the client has been told."""
        timeout_s = self.settings.handshake_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await tls.handshake()
        except OSError as error:
            raise _failure(error, timeout_s) from error
        if not member.lost:
            member.watch(IN_TUNNEL)

    def _come(self, member: MemberConnection) -> bool:
        """Its handshake is complete. False if it has been lost since."""
        if member.lost:
            return False
        self._members.add(member)
        self._handshakes.discard(cast("asyncio.Task[None]", asyncio.current_task()))  # counted once
        if self._draining:
            member.drain()
        self._watch_expiry(member)
        self._end_if_revoked(member)  # since the handshake
        self._admitted(member)
        return True

    def _watch_expiry(self, member: MemberConnection) -> None:
        member.expiry = CertificateExpiry(
            member.certificate_ends,
            str(member.identity),
            ended=partial(self._tell_expired, member),
            over=partial(self._expel, member),
            drain_timeout_s=lambda: self.drain_timeout_s,
            grace_s=0.0 if member.client else GRACE_S,
            wall_clock=self._wall_clock,
        )
        member.expiry.start()

    def _tell_expired(self, member: MemberConnection, error: ExpiredError) -> None:
        log.info(
            "%s: %s, at %s: no new tunnels, open ones have %g s",
            self._purpose,
            error,
            member.peer_name,
            self.drain_timeout_s,
        )
        self._expired(member, error)

    def _end_revoked(self) -> int:
        return sum(map(self._end_if_revoked, list(self._members)))

    def _end_if_revoked(self, member: MemberConnection) -> bool:
        error = None if self.revocations is None else self.revocations.verdict(member.proof)
        if error is None or member.lost:
            return False
        log.info("%s: %s is no longer let in: %s", self._purpose, member.identity, error)
        self._expel(member, error)
        return True

    def _lost(self, connection: Connection) -> None:
        if connection in self._members:
            self._members.discard(connection)
            if connection.expiry is not None:
                connection.expiry.close()
                connection.expiry = None  # the two name each other
            self.sources.drop(source_of(connection.peer_name))
        self._changed()


@lru_cache(maxsize=4)
def name_in(chain_pem: bytes) -> str:
    """The SPIFFE ID of the first certificate in `chain_pem`; empty if it has none, or cannot be read."""
    from cryptography.hazmat.primitives.serialization import Encoding

    from shared.trust import roots

    try:
        found = ids_of(roots.parse(chain_pem)[0].public_bytes(Encoding.DER))
    except ValueError:
        return ""
    return str(found[0]) if found else ""


async def _readable(sock: socket.socket) -> None:
    """Returns when there is something to read, be it the end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, ready.cancel)  # which, unlike a result, may come twice
    try:
        await asyncio.wait((ready,))
    finally:
        loop.remove_reader(sock)


async def _say(sock: socket.socket, words: bytes) -> None:
    """Sends `words` and FIN, and gives the client ALERT_LINGER_S to take them: closing with bytes of its own
    unread would make the kernel send RST, which destroys them on their way."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(ALERT_LINGER_S):
            await loop.sock_sendall(sock, words)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, DRAIN_BYTES):
                pass
    except OSError:
        pass  # gone, or too slow (TimeoutError): nobody is left to tell


def _failure(error: OSError, timeout_s: float) -> TlsFailureError:
    """Why a handshake has failed, which might take `timeout_s`."""
    if isinstance(error, ssl.SSLError):
        return TlsFailureError(f"tls handshake: {_tls_reason(error)}")
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return TlsFailureError(f"tls handshake: not done within {timeout_s:g} s")
    return TlsFailureError(f"tls handshake: {reason(error)}")


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"client certificate refused: {error.verify_message}"
    return str(error.reason or error).lower().replace("_", " ")
