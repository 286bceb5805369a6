"""A connection to a member of the mesh, and who the member is."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from shared.errors import DeniedError, RefusedError, TlsFailureError
from shared.net.http2.connection import Connection
from shared.net.tls.certificate_expiry import CertificateExpiry
from shared.net.tls.contexts import ALPN_H2, certificate_end, proved_chain
from shared.net.tls.mesh_tls import chain_end, proved_identity
from shared.net.tls.revocation_watch import RevocationWatch
from shared.trust.spiffe import SpiffeId


class MemberConnection(Connection):
    """An accepted HTTP/2 connection to a member of the mesh: `identity`, or `refusal` if it is none."""

    identity: SpiffeId | None = None
    refusal: RefusedError | None = None
    revocations: RevocationWatch | None = None
    expiry: CertificateExpiry | None = None
    """There from its admission on."""
    wall_clock: Callable[[], float]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        try:
            tls = transport.get_extra_info("ssl_object")
            identity = member_identity(tls, self.wall_clock())
            self.certificate_ends = chain_end(tls)
            if self.revocations is not None:
                self.proof = self.revocations.check(proved_chain(tls))
            self.identity = identity
        except RefusedError as error:
            self.refusal = error
            self.expel(error)


def member_identity(tls: ssl.SSLObject, now: float) -> SpiffeId:
    """Who the peer of a complete handshake is; `now` in seconds since the epoch. Raises RefusedError."""
    if tls.selected_alpn_protocol() != ALPN_H2:
        raise TlsFailureError("the client does not offer HTTP/2 (ALPN h2)")
    identity = proved_identity(tls)
    # TLS 1.2 can resume a session without a look at the certificate that it began with.
    if tls.session_reused and certificate_end(tls) < now:
        raise DeniedError(f"peer certificate denied: that of {identity} has expired")
    return identity
