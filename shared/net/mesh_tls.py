"""TLS contexts for HTTP/2 between members of the mesh, both of whom prove a SPIFFE ID: HBONE, either end.

Owned here: what Python's ssl is told of a folder of certificates, when the folder is read again, and whether
the server that a client reached is one it wants. Who may come in to a server is its rules' matter
(`gateway/hbone_rules.py`). Counterparts: `tls.py` for the outer TLS of Cloud Run, `tls_context.py` for the
mTLS inside a tunnel.
"""

from __future__ import annotations

import functools
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, UnavailableError
from shared.identity.spiffe import AllowList, peer_id
from shared.net.certificate_files import CertificateFiles
from shared.net.tls import ALPN_H2

log = logging.getLogger("hbone.mesh_tls")

MAX_FOLDERS = 64
"""Client folders whose context is kept; beyond it the least used is read again, about a millisecond."""


@dataclass(frozen=True, slots=True)
class MeshIdentity:
    """Who we are to an origin in the mesh, and who it has to be."""

    folder: Path
    """Our certificate, key and roots, under the file names of `shared/identity/authority.py`."""

    peers: tuple[str, ...]
    """Patterns of `spiffe.AllowList`, one of which the server's SPIFFE ID has to match; its certificate needs
    no host name."""

    server_name: str = ""
    """SNI to send. Empty: none, as ztunnel has it, which several identities share an address with."""


def server_context(folder: Path, *, tls12: bool) -> ServerContext:
    """For a server that wants a certificate of every client; `tls12` lets TLS 1.2 in beside 1.3.

    Raises:
        UnavailableError: a file of `folder` is missing or cannot be read.
        ConfigError: a file has not what it should, or key and certificate do not belong together.
    """
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    _prepare(context, folder)
    context.minimum_version = ssl.TLSVersion.TLSv1_2 if tls12 else ssl.TLSVersion.TLSv1_3
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


def check_server(identity: MeshIdentity, tls: ssl.SSLObject) -> None:
    """Raises DeniedError unless the server at the other end is one of `identity.peers`."""
    AllowList(identity.peers).check(peer_id(tls.getpeercert(binary_form=True) or b""))


def identity_files(folder: Path) -> tuple[Path, Path, Path]:
    """Certificate chain, key and roots of `folder`."""
    from shared.identity.authority import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE

    return folder / CERTIFICATES_FILE, folder / PRIVATE_KEY_FILE, folder / ROOTS_FILE


@functools.lru_cache(maxsize=MAX_FOLDERS)
def _client_files(folder: Path) -> CertificateFiles[ssl.SSLContext]:
    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # the mesh's names are SPIFFE IDs
        _prepare(context, folder)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    files = CertificateFiles(identity_files(folder), make, log=log, purpose=f"identity {folder}")
    files.read()
    return files


def _prepare(context: ssl.SSLContext, folder: Path) -> None:
    chain, key, roots = identity_files(folder)
    for file in (chain, key, roots):
        try:
            file.open("rb").close()  # ssl's own errors name neither the file nor, for some, the reason
        except OSError as error:
            raise UnavailableError(f"{file}: {error.strerror or error}") from error
    try:
        # A password that no key has: without one OpenSSL would ask the terminal for an encrypted key's.
        context.load_cert_chain(chain, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            str(chain), None, "", f"no certificate chain for the key in {key}: {_reason(error)}"
        ) from error
    try:
        context.load_verify_locations(roots)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(str(roots), None, "", f"no usable root certificates: {_reason(error)}") from error
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([ALPN_H2])


def _reason(error: OSError) -> str:
    found = getattr(error, "reason", None) or error.strerror or str(error)
    return str(found).lower().replace("_", " ")


# Last words. The event loops drop what OpenSSL has to say when a handshake fails, so that the client sees a
# connection closed for no reason; the alert that tells it is kept on the error.


class _ServerTls(ssl.SSLObject):
    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            error.last_words = self.outgoing.read()  # type: ignore[attr-defined]  # read by `last_words`
            raise


class ServerContext(ssl.SSLContext):
    """A context whose failed handshakes leave their alert on the error (`last_words`)."""

    sslobject_class = _ServerTls

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *arguments: Any, **options: Any
    ) -> ssl.SSLObject:
        tls = super().wrap_bio(incoming, outgoing, *arguments, **options)
        if isinstance(tls, _ServerTls):
            tls.outgoing = outgoing
        return tls


def last_words(error: OSError) -> bytes:
    """What a server of ours has still to send after its handshake failed with `error`: OpenSSL's alert."""
    found: bytes = getattr(error, "last_words", b"")
    return found
