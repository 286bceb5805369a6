"""TLS contexts for HTTP/2 between members of the mesh, both of whom prove a SPIFFE ID: HBONE, either end.

From a folder of certificates, which is read again when it changes. A client also checks whether the server
that it reached is one that it wants.
"""

from __future__ import annotations

import functools
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, UnavailableError
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_expiry import end_of
from shared.net.tls.certificate_files import CertificateFiles
from shared.net.tls.contexts import (
    OLDEST,
    fault,
    load_own,
    mesh_context,
    proved_chain,
    trust_roots,
)
from shared.net.tls.revocation_watch import RevocationWatch
from shared.trust.peer_patterns import UNTOLD, TrustDomain
from shared.trust.peer_policy import PeerPolicy
from shared.trust.revocations import Proof
from shared.trust.spiffe import SpiffeId
from shared.trust.trust_bundles import TrustBundles

log = logging.getLogger("hbone.mesh_tls")

MAX_FOLDERS = 64
"""Client folders whose context is kept; beyond it the least used is read again, about a millisecond."""


@dataclass(frozen=True, slots=True)
class MeshIdentity:
    """Who we are to an origin in the mesh, and who it has to be."""

    folder: Path
    """Our certificate, key and roots, by any of the customary names."""

    peers: tuple[str, ...]
    """Patterns, one of which the server's SPIFFE ID has to match; its certificate needs no host name."""

    server_name: str = ""
    """SNI to send. Empty: none, as ztunnel has it, which several identities share an address with."""

    crl: Path | None = None
    """File with certificate revocation lists, which is followed; None: no server is revoked."""

    trust: TrustDomain = UNTOLD
    """Our own trust domain, with its aliases."""


def server_context(folder: Path, *, tls12: bool) -> ServerContext:
    """For a server that wants a certificate of every client; `tls12` lets TLS 1.2 in beside 1.3.

    Raises:
        UnavailableError: a file of `folder` is missing or cannot be read.
        ConfigError: a file has not what it should, or key and certificate do not belong together.
    """
    context = mesh_context(ServerContext, server=True, oldest=OLDEST if tls12 else ssl.TLSVersion.TLSv1_3)
    _load(context, folder)
    # Every connection proves its certificate anew, but for TLS 1.2, which has another way to resume than
    # tickets, and the ssl module no switch for it.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def client_context(identity: MeshIdentity, now: float) -> ssl.SSLContext:
    """For a connection that begins `now` (the loop's clock, seconds). Chain and key possession are checked by
    TLS, the server's name by `check_server`.

    Raises what `server_context` does, as long as the folder was never good.
    """
    return _client_files(identity.folder).current(now)


def check_server(
    identity: MeshIdentity, tls: ssl.SSLObject, revocations: RevocationWatch | None = None
) -> Proof:
    """What to remember of the server's certificate chain, nothing without `revocations`. Raises DeniedError
    unless the server at the other end is one of `identity.peers`, and not revoked."""
    PeerPolicy(identity.peers, trust=identity.trust).check(proved_identity(tls))
    return () if revocations is None else revocations.check(proved_chain(tls))


def proved_identity(tls: ssl.SSLObject) -> SpiffeId:
    """Who the peer of a complete handshake has proved to be, to a context made here. Raises DeniedError if
    its certificate is no workload's, or leads to a root of another trust domain."""
    context = tls.context
    bundles = context.bundles if isinstance(context, MeshContext) else TrustBundles()
    return bundles.proved(proved_chain(tls))


def chain_end(tls: ssl.SSLObject) -> float:
    """When the first certificate of the peer's verified chain ends, in seconds since the epoch. Raises
    DeniedError if one cannot be read."""
    return end_of(proved_chain(tls))


def revocation_watch(identity: MeshIdentity, *, purpose: str) -> RevocationWatch | None:
    """The lists that servers are held against, not read yet; None if `identity` names none."""
    if identity.crl is None:
        return None
    return RevocationWatch(identity.crl, certificate_folder.find(identity.folder).roots, purpose=purpose)


@functools.lru_cache(maxsize=MAX_FOLDERS)
def _client_files(folder: Path) -> CertificateFiles[MeshContext]:
    def make() -> MeshContext:
        context = mesh_context(MeshContext, server=False)
        _load(context, folder)
        return context

    paths = certificate_folder.find(folder)
    files = CertificateFiles(paths.followed, make, log=log, purpose=f"identity {folder}")
    files.read()
    return files


class MeshContext(ssl.SSLContext):
    """A context that knows whose names each root vouches for."""

    bundles: TrustBundles


def _load(context: MeshContext, folder: Path) -> None:
    paths = certificate_folder.find(folder)
    chain, key, roots = paths.all
    try:
        load_own(context, chain, key)
    except (ssl.SSLError, ValueError) as error:
        reason = fault(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            str(chain), None, "", f"no certificate chain for the key in {key}: {reason}"
        ) from error
    except OSError as error:
        raise UnavailableError(f"{error.filename}: {error.strerror or error}") from error
    trust_roots(context, roots)
    from shared.net.tls.root_files import trust_bundles  # cryptography, which not every start needs

    context.bundles = trust_bundles(paths.bundles)


# The event loops drop what OpenSSL has to say when a handshake fails, so that the client sees a
# connection closed for no reason; the alert that tells it is kept on the error.


class _ServerTls(ssl.SSLObject):
    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.alert_to_send = self.outgoing.read()  # type: ignore[attr-defined]
            raise


class ServerContext(MeshContext):
    """A context whose failed handshakes leave their alert on the error (`alert_of`)."""

    sslobject_class = _ServerTls

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *arguments: Any, **options: Any
    ) -> ssl.SSLObject:
        tls = super().wrap_bio(incoming, outgoing, *arguments, **options)
        if isinstance(tls, _ServerTls):
            tls.outgoing = outgoing
        return tls


def alert_of(error: OSError) -> bytes:
    """What a server of ours has still to send after its handshake failed with `error`: OpenSSL's alert."""
    found: bytes = getattr(error, "alert_to_send", b"")
    return found
