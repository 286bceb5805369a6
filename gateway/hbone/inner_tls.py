"""The mesh's TLS that hgate speaks inside of a route's tunnel, for members whose bytes are plain (`inner:
none`).

1. Who answers is judged in the handshake: chain, pattern of SPIFFE IDs, revocation lists. With TLS 1.3 the
   far side judges us after that: its refusal breaks a tunnel that is open already.
2. The ClientHello is made before the tunnel is asked for, so that it can go with the request. Each attempt
   has the same one: only what the last attempt brings is read.
3. New tunnels get the files as they are now, open ones keep what they were opened with. A tunnel whose far
   side is revoked is ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from OpenSSL import SSL

from shared.errors import (
    ConfigError,
    DeniedError,
    DialError,
    ExpelledError,
    HboneError,
    UnavailableError,
)
from shared.http2.frames import CANCEL
from shared.net.legs.carried import CarriedLeg
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream
from shared.net.legs.tls import TlsServerLeg
from shared.net.legs.tls_client import TlsClientLeg
from shared.net.legs.tls_handshake import client_context
from shared.net.relay.relay import Relay
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_files import CertificateFiles
from shared.net.tls.mesh_tls import MeshIdentity, revocation_watch
from shared.net.tls.revocation_watch import Counted, PastLists
from shared.net.tls.root_files import trust_bundles
from shared.trust.peer_policy import PeerPolicy
from shared.trust.revocations import Proof

log = logging.getLogger("hbone.gateway")

ALPN = ("istio",)
"""What a sidecar offers for TCP: from then on the bytes are the app's."""


class Owner(Protocol):
    """Whose tunnel it is. One of the first two is called once, unless the tunnel is aborted before."""

    def inner_established(self, leg: Leg) -> None:
        """The handshake is complete, and the far side is the right one: now join the leg or abort it."""

    def inner_failed(self, error: HboneError) -> None:
        """There will be no TLS; the far side has been told. What `error` was before is its cause."""

    def abort(self, error: HboneError) -> None:
        """The far side is revoked: ends the tunnel at once."""


class InnerTls:
    """What all tunnels of one identity share. Its files are followed.

    Raises:
        UnavailableError: a file is missing.
        ConfigError: a file has not what it should.
    """

    def __init__(self, identity: MeshIdentity) -> None:
        purpose = f"inner tls {identity.folder}"
        paths = certificate_folder.find(identity.folder)
        policy = PeerPolicy(identity.peers, trust=identity.trust)
        self.revocations = revocation_watch(identity, purpose=purpose)
        """The lists that far sides are held against."""
        self._open: set[InnerConnection] = set()
        self._over: Callable[[InnerTls], None] | None = None

        def make() -> SSL.Context:
            bundles = trust_bundles(paths.bundles)

            def verify(chain: list[bytes]) -> None:
                policy.check(bundles.proved(chain))
                if self.revocations is not None:
                    self.revocations.check(chain)

            return client_context(*paths.all, verify, ALPN)

        self._files = CertificateFiles(paths.followed, make, log=log, purpose=purpose)
        self._files.read()
        if self.revocations is not None:
            self.revocations.read()
            self.revocations.follow(self._end_revoked)
            self.revocations.start()

    def context(self) -> SSL.Context:
        """For a tunnel that begins now."""
        return self._files.current(asyncio.get_running_loop().time())

    def prove(self, leg: TlsServerLeg) -> Proof:
        """What to remember of the far side's chain. Raises DeniedError if it has been revoked since."""
        return () if self.revocations is None else self.revocations.check(leg.proved_chain())

    def add(self, connection: InnerConnection) -> None:
        """`connection` is of it, and is to be opened."""
        self._open.add(connection)

    def drop(self, connection: InnerConnection) -> None:
        """It is gone."""
        self._open.discard(connection)
        if not self._open:
            self._close_if_retired()

    def retire(self, over: Callable[[InnerTls], None]) -> None:
        """No route has it any more: the lists are followed as long as there are tunnels of it. Then `over`
        is called."""
        self._over = over
        if not self._open:
            self._close_if_retired()

    def _close_if_retired(self) -> None:
        over, self._over = self._over, None
        if over is not None:
            self.close()
            over(self)

    def close(self) -> None:
        """Follows the lists no more."""
        if self.revocations is not None:
            self.revocations.close()

    def _end_revoked(self) -> int:
        return sum(map(self._end_if_revoked, list(self._open)))

    def _end_if_revoked(self, connection: InnerConnection) -> bool:
        error = None if self.revocations is None else self.revocations.verdict(connection.proof)
        if error is None:
            return False
        connection.expel(ExpelledError(f"inside the tunnel: {error}", CANCEL))
        return True


class InnerTlsOfRoutes:
    """Those of all routes, each made when the first tunnel needs it. Identities come from the file: there are
    no more than routes."""

    def __init__(self) -> None:
        self._made: dict[MeshIdentity, InnerTls] = {}
        self._retired: set[InnerTls] = set()  # and they have tunnels
        self._past: PastLists | None = None

    def of(self, identity: MeshIdentity) -> InnerTls:
        """Raises DialError if the files of `identity` cannot be used, and never could."""
        found = self._made.get(identity)
        if found is None:
            try:
                found = InnerTls(identity)
            except (ConfigError, UnavailableError) as error:
                raise DialError(f"inside the tunnel: our own certificates: {error}") from error
            self._made[identity] = found
        return found

    def keep_only(self, identities: Iterable[MeshIdentity]) -> None:
        """Others than `identities` are no route's any more."""
        for identity in self._made.keys() - set(identities):
            tls = self._made.pop(identity)
            self._retired.add(tls)
            tls.retire(self._is_over)

    def _is_over(self, tls: InnerTls) -> None:
        self._retired.discard(tls)
        if tls.revocations is not None:
            self._past = self._past or PastLists()
            self._past.add(tls.revocations)

    def revocations(self) -> Iterator[Counted]:
        """All lists that far sides are held against, and were."""
        for tls in (*self._made.values(), *self._retired):
            if tls.revocations is not None:
                yield tls.revocations
        if self._past is not None:
            yield self._past

    def close(self) -> None:
        """Follows no files any more."""
        self.keep_only(())


class InnerConnection:
    """The TLS of one tunnel, an owner of its leg. It is made before the tunnel is asked for; `begin` comes
    once it is there."""

    __slots__ = ("_carried", "_carrier", "_half_closed_timeout_s", "_leg", "_owner", "_tls", "proof")

    def __init__(
        self,
        tls: InnerTls,
        server_name: str,
        owner: Owner,
        *,
        handshake_timeout_s: float,
        half_closed_timeout_s: float,
    ) -> None:
        """`server_name` is sent as SNI, empty: none. The handshake may take `handshake_timeout_s` seconds
        from `begin` on; one direction may be silent for `half_closed_timeout_s` once the other has ended."""
        self.proof: Proof = ()
        self._tls = tls
        self._owner: Owner | None = owner
        self._half_closed_timeout_s = half_closed_timeout_s
        self._leg: TlsClientLeg | None = TlsClientLeg(
            tls.context(), self, server_name, handshake_timeout_s=handshake_timeout_s
        )
        self._carried: CarriedLeg | None = None
        self._carrier: Relay | None = None
        tls.add(self)

    @property
    def buffered_bytes(self) -> int:
        """What has come in the tunnel and is not deciphered; what waits to be sent is the leg's."""
        return 0 if self._carried is None else self._carried.buffered_bytes

    @property
    def error(self) -> HboneError | None:
        """Why the tunnel that carries it broke, if it did."""
        return None if self._carrier is None else self._carrier.error

    def hello(self) -> bytes:
        """The ClientHello, for whoever sends it with the request; `begin` then sends none."""
        return b"" if self._leg is None else self._leg.take_hello()

    def begin(self, stream: Stream) -> None:
        """Shakes hands in the tunnel of `stream`."""
        assert self._leg is not None
        carried = self._carried = CarriedLeg(self._leg, stream)
        self._carrier = Relay(
            carried, stream, lambda _: None, half_closed_timeout_s=self._half_closed_timeout_s
        )
        self._carrier.start()

    def expel(self, error: ExpelledError) -> None:
        """Ends it, and its owner's tunnel, at once."""
        owner, leg = self._owner, self._leg
        if owner is not None:
            owner.abort(error)
        if leg is not None:
            leg.abort()  # if the tunnel is over, and its last bytes are leaving

    def abort(self) -> None:
        """Nobody wants it any more."""
        leg, self._owner = self._leg, None
        if self._carrier is None:
            self._leg = None  # the two name each other, and nobody will say that it is closed
            self._tls.drop(self)
        elif leg is not None:
            leg.abort()

    # Owner of the leg.

    def established(self, leg: TlsServerLeg) -> None:
        try:
            self.proof = self._tls.prove(leg)
        except DeniedError as error:  # revoked since it was let in
            leg.abort()
            self._fail(error)
            return
        leg.certificate = b""  # of no use any more
        if self._owner is not None:
            self._owner.inner_established(leg)

    def refused(self, leg: TlsServerLeg, error: HboneError) -> None:
        self._fail(self.error or error)

    def closed(self, leg: TlsServerLeg) -> None:
        self._tls.drop(self)
        self._leg = self._carried = self._carrier = self._owner = None  # they name each other

    def _fail(self, error: HboneError) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            failure = DialError(f"inside the tunnel: {error}")
            failure.__cause__ = error
            owner.inner_failed(failure)
