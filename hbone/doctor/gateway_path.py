"""`hbone doctor --gateway`: the way of a member of the mesh through a gateway, which routes by SNI, to the
mTLS end of a workload.

The handshake is with the workload; what the gateway itself has to say it says as a TLS alert before the
workload has answered (`shared.errors`). After the handshake the client is done and the server may still
refuse: TLS 1.3 judges the client's certificate then, and a policy may do so with a close or an HTTP 403.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.address import Address
from shared.doctor import tls_faults
from shared.doctor.failures import Failed, Failure
from shared.doctor.far_text import one_line
from shared.doctor.hops import Hop
from shared.doctor.network_hops import addresses_of, connected, peer_of, shown
from shared.doctor.service_path import SETTLE_S
from shared.doctor.walk import Check, Report, Result, Skipped, walk
from shared.errors import DeniedError, UnavailableError
from shared.net.dial import reason
from shared.net.names.endpoint import Endpoint
from shared.net.tls.contexts import (
    certificate_end,
    fault,
    load_own,
    mesh_context,
    proved_chain,
    read_file,
    trust,
)
from shared.tls.istio_sni import ISTIO_ALPN
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import peer_id
from shared.trust.token_claims import at_utc

ISTIO_HTTP = "istio-http/1.1"

ALPN = (ISTIO_HTTP, "istio", "http/1.1")
"""What a sidecar offers for HTTP/1.1, and plain HTTP last."""

CLOSE_S = 0.5
"""For the server to end what we have ended."""

MAX_ANSWER_BYTES = 4096

_OF_SNI = {
    "UNRECOGNIZED_NAME": Failure.NO_ROUTE,
    "NO_APPLICATION_PROTOCOL": Failure.PEER_ALPN,
    "ACCESS_DENIED": Failure.ROUTE_DENIED,
    "INTERNAL_ERROR": Failure.ROUTE_FAILED,
    "DECODE_ERROR": Failure.NOT_GATEWAY,
    "WRONG_VERSION_NUMBER": Failure.NOT_GATEWAY,
}
"""Alerts in the handshake, before anything of the workload's."""

_WANTED = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")
"""TLS 1.3 has an alert of its own for it, older versions have not (RFC 8446 section 6.2)."""

_REFUSED = (
    "BAD_CERTIFICATE",
    "UNKNOWN_CA",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_UNKNOWN",
    "UNSUPPORTED_CERTIFICATE",
    "DECRYPT_ERROR",
)


@dataclass(frozen=True, slots=True)
class MeshClient:
    """Who looks, and what for."""

    gateway: Address
    sni: str
    certificates: Path | None
    """PEM; None: no certificate is shown."""

    key: Path | None
    """None: it is in the file of the certificates."""

    roots: Path | None
    """None: the peer's certificate is not checked."""

    peer: str | None
    """Pattern of the SPIFFE ID that the peer has to have."""

    def __str__(self) -> str:
        return f"{self.sni} through {self.gateway}"


async def examine(
    client: MeshClient, hop_s: float, tell: Callable[[Result], None] = lambda _: None
) -> Report:
    """Walks through the gateway; each hop has `hop_s` seconds, and `tell` gets it when it is done. Raises
    ValueError if `client.peer` is malformed."""
    policy = None if client.peer is None else PeerPolicy((client.peer,))
    path = _GatewayPath(client, policy)
    checks = [
        Check(Hop.CREDENTIALS, path.load, hop_s, Failure.OWN_CERTIFICATE),
        Check(Hop.DNS, path.look_up, hop_s, Failure.DNS_SILENT),
        Check(Hop.TCP, path.connect, hop_s, Failure.TCP_SILENT),
        Check(Hop.SNI, path.say_hello, hop_s, Failure.GATEWAY_SILENT),
        Check(Hop.ROUTE, path.arrive, hop_s, Failure.ROUTE_FAILED),
        Check(Hop.PEER, path.check_peer, hop_s, Failure.PEER_FAILED),
        Check(Hop.POLICY, path.stay, hop_s, Failure.POLICY_DENIED),
    ]
    try:
        return await walk(str(client), checks, tell)
    finally:
        await path.close()


class _GatewayPath:
    def __init__(self, client: MeshClient, policy: PeerPolicy | None) -> None:
        self._client = client
        self._policy = policy
        self._context = mesh_context(ssl.SSLContext, server=False, alpn=ALPN)
        self._endpoints: Sequence[Endpoint] = ()
        self._socket: socket.socket | None = None
        self._seen: _Seen | None = None

    async def close(self) -> None:
        """Ends the connection in good order, if there is time: the app is not to log a fault."""
        if self._socket is not None:
            self._socket.close()
        seen = self._seen
        if seen is None or seen.transport is None:
            return
        seen.transport.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await seen.until(lambda: seen.lost)
        except TimeoutError:
            seen.transport.abort()

    async def load(self) -> str:
        client, context = self._client, self._context
        told = []
        try:
            if client.certificates is not None:
                load_own(context, client.certificates, client.key)
                told.append(f"certificate {client.certificates}")
            if client.roots is not None:
                trust(context, read_file(client.roots))
                told.append(f"roots {client.roots}")
            else:
                context.verify_mode = ssl.CERT_NONE
        except UnavailableError as error:
            raise Failed(Failure.OWN_CERTIFICATE, str(error)) from error
        except OSError as error:
            text = f"{client.certificates}, key {client.key or 'in it'}: {fault(error)}"
            raise Failed(Failure.OWN_CERTIFICATE, text) from error
        except ValueError as error:
            raise Failed(Failure.OWN_CERTIFICATE, str(error)) from error
        if not told:
            raise Skipped("no certificates given: none is shown, none is checked")
        return ", ".join(told)

    async def look_up(self) -> str:
        address = self._client.gateway
        self._endpoints = await addresses_of(address)
        if address.is_ip:
            raise Skipped(f"{address.host} is an address")
        return shown(address, self._endpoints)

    async def connect(self) -> str:
        self._socket = await connected(self._endpoints, self._client.gateway.port)
        return peer_of(self._socket)

    async def say_hello(self) -> str:
        """The handshake, of which the gateway sees the beginning only."""
        sock, self._socket = self._socket, None
        loop = asyncio.get_running_loop()
        try:
            _, self._seen = await loop.create_connection(
                _Seen, sock=sock, ssl=self._context, server_hostname=self._client.sni
            )
        except ssl.SSLCertVerificationError as error:
            raise Failed(Failure.PEER_UNTRUSTED, reason(error)) from error
        except OSError as error:
            raise _of_handshake(error) from error
        return f"{self._client.sni} has a route"

    async def arrive(self) -> str:
        """Nobody but the workload has a key for the handshake that is done."""
        return f"a workload answers, in {self._tls.version()}"

    @property
    def _tls(self) -> ssl.SSLObject:
        assert self._seen is not None and self._seen.transport is not None
        tls: ssl.SSLObject = self._seen.transport.get_extra_info("ssl_object")
        return tls

    async def check_peer(self) -> str:
        if self._client.roots is None:
            raise Skipped("nobody is checked without --ca")
        tls = self._tls
        try:
            identity = peer_id(proved_chain(tls)[0])
            if self._policy is not None:
                self._policy.check(identity)
        except DeniedError as error:
            raise Failed(Failure.PEER_IDENTITY, str(error)) from error
        ends = certificate_end(tls)
        return f"{identity}, certificate until {at_utc(ends)} ({(ends - time.time()) / 3600:.0f} h)"

    async def stay(self) -> str:
        """Whether we are still welcome: a server judges after its client's handshake is done."""
        seen, chosen = self._seen, self._tls.selected_alpn_protocol()
        assert seen is not None and seen.transport is not None
        if chosen is None or chosen in ISTIO_ALPN - {ISTIO_HTTP}:
            with_alpn = f"ALPN {chosen}" if chosen else "no ALPN"
            try:
                async with asyncio.timeout(SETTLE_S):
                    await seen.until(lambda: seen.lost)
            except TimeoutError:
                return f"not refused within {SETTLE_S:g} s ({with_alpn})"
            if seen.error is None and seen.data:
                return f"the app spoke first and ended ({with_alpn})"
            raise _of_end(seen)
        host = self._client.sni.rpartition("_.")[2]
        seen.transport.write(f"HEAD / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        await seen.until(lambda: seen.lost or b"\r\n" in seen.data)
        if not seen.data:
            raise _of_end(seen)
        line = one_line(bytes(seen.data.partition(b"\r\n")[0]))
        if line.split()[1:2] == ["403"]:
            raise Failed(Failure.POLICY_DENIED, f"HEAD / was answered {line}")
        return f"HEAD / was answered {line}"


class _Seen(asyncio.Protocol):
    """What a server says after the handshake, and how it ends."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.data = bytearray()
        self.lost = False
        self.error: Exception | None = None
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition()` holds, which is looked at whenever something has come."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        self.data += data[: MAX_ANSWER_BYTES - len(self.data)]
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.error = True, exc
        self._changed.set()


def _of_handshake(error: OSError) -> Failed:
    name = tls_faults.reason_of(error)
    if not name or "EOF" in name:
        return Failed(Failure.NOT_GATEWAY, reason(error))
    for end, failure in _OF_SNI.items():
        if name.endswith(end):
            return Failed(failure, reason(error))
    return Failed(_of_alert(name, Failure.PEER_FAILED), reason(error))


def _of_end(seen: _Seen) -> Failed:
    """Why a server ends a connection of which it has said nothing."""
    error = seen.error
    if isinstance(error, OSError) and (name := tls_faults.reason_of(error)):
        return Failed(_of_alert(name, Failure.POLICY_DENIED), reason(error))
    text = reason(error) if isinstance(error, OSError) else "the connection was closed"
    return Failed(Failure.POLICY_DENIED, f"after the handshake: {text}")


def _of_alert(name: str, other: Failure) -> Failure:
    if name.endswith(_WANTED):
        return Failure.CERTIFICATE_WANTED
    return Failure.CERTIFICATE_REFUSED if name.endswith(_REFUSED) else other
