"""The mesh's TLS inside of a route's tunnel (`inner: none`): the hops of a walk behind the tunnel itself."""

from __future__ import annotations

import asyncio

from gateway.hbone.inner_tls import InnerConnection, InnerTls
from gateway.rules.routes import Target
from shared.doctor.failures import Failed, Failure
from shared.doctor.hops import Hop
from shared.doctor.service_path import SETTLE_S, Deadlines, ServicePath, certificate_until
from shared.doctor.stream_bytes import StreamBytes
from shared.doctor.walk import Check
from shared.errors import ConfigError, DeniedError, HboneError, UnavailableError
from shared.net.legs.contract import Leg
from shared.net.legs.tls import TlsServerLeg
from shared.net.tls.certificate_expiry import end_of
from shared.trust.spiffe import peer_id

FIRST_BYTES = 64
"""Read of what the app may say first: that it says something is enough."""


class InnerPath:
    """The TLS inside of the tunnel that `path` opens to `target`; the `Owner` of its connection."""

    def __init__(self, target: Target, path: ServicePath, deadlines: Deadlines) -> None:
        self._target = target
        self._path = path
        self._hop_s = deadlines.hop_s
        self._tls: InnerTls | None = None
        self._connection: InnerConnection | None = None
        self._leg: asyncio.Future[TlsServerLeg] = asyncio.get_running_loop().create_future()
        self._received: StreamBytes | None = None

    def checks(self) -> list[Check]:
        """The hops PEER and POLICY; none for a tunnel without such TLS."""
        if self._target.inner_identity is None:
            return []
        return [
            Check(Hop.PEER, self._shake_hands, self._hop_s, Failure.PEER_FAILED),
            Check(Hop.POLICY, self._stay, self._hop_s, Failure.POLICY_DENIED),
        ]

    def close(self) -> None:
        """Ends it in good order. The path's own end comes after it, and waits for the last bytes."""
        if self._received is not None:
            self._leg.result().close()
        elif self._connection is not None:
            self._connection.abort()
        if self._tls is not None:
            self._tls.close()

    async def _shake_hands(self) -> str:
        identity, stream = self._target.inner_identity, self._path.stream
        assert identity is not None and stream is not None
        try:
            self._tls = InnerTls(identity)
        except (ConfigError, UnavailableError) as error:
            raise Failed(Failure.OWN_CERTIFICATE, str(error)) from error
        self._connection = InnerConnection(
            self._tls,
            self._target.inner_sni,
            self,
            handshake_timeout_s=self._hop_s,
            half_closed_timeout_s=self._hop_s,
        )
        self._connection.begin(stream)
        try:
            leg = await self._leg
            chain = leg.proved_chain()
            ends = end_of(chain)
            who = peer_id(chain[0])
        except HboneError as error:
            is_other = isinstance(error.__cause__ or error, DeniedError)
            raise Failed(Failure.PEER_IDENTITY if is_other else Failure.PEER_FAILED, str(error)) from error
        self._received = StreamBytes(leg, FIRST_BYTES)
        return f"{who}, {certificate_until(ends)}"

    async def _stay(self) -> str:
        """Whether we are still welcome. Nothing is sent: the protocol inside is the app's."""
        received = self._received
        assert received is not None
        try:
            async with asyncio.timeout(SETTLE_S):
                await received.more()
        except TimeoutError:
            return f"not refused within {SETTLE_S:g} s"
        if received.data:
            return "the app speaks first"
        text = str(received.error) if received.error is not None else "the connection was closed"
        raise Failed(Failure.POLICY_DENIED, f"after the handshake: {text}")

    # Owner of the TLS.

    def inner_established(self, leg: Leg) -> None:
        assert isinstance(leg, TlsServerLeg)
        if self._leg.done():
            leg.abort()
        else:
            self._leg.set_result(leg)

    def inner_failed(self, error: HboneError) -> None:
        if not self._leg.done():
            self._leg.set_exception(error)

    def abort(self, error: HboneError) -> None:
        """The server was revoked meanwhile, which a walk is too short to see."""
        self.inner_failed(error)
