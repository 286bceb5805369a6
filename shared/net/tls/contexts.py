"""The one factory of TLS contexts: versions, verify flags, ALPN and trusted certificates are set here only.

Three kinds of contexts come from it:

- `client_context`, `client_of`: to a server with a host name (tunnels, tokens, keys, Kubernetes, Istio's CA);
- `server_context`: for a server that asks for no certificate (the Cloud Run stand-in);
- `mesh_context`: mTLS between members of the mesh, who prove SPIFFE IDs.

The built-in mTLS end needs pyOpenSSL; it has OLDEST, MESH_FLAGS and `check_roots` from here. `proved_chain`
is what revocation lists and trust bundles judge after a handshake of any of them.

No context is made by `ssl.create_default_context`, because its verify flags depend on Python's version (3.13
adds VERIFY_X509_STRICT and VERIFY_X509_PARTIAL_CHAIN), so that one CA file would be good under one Python and
bad under another. Each flag is set explicitly, to the same value under every version:

- VERIFY_X509_STRICT is off. It refuses certificates whose form RFC 5280 forbids: no key identifiers (EKS' API
  servers, older corporate authorities), basicConstraints that are not critical, an authority without key
  usage. Their users cannot change them, and curl, Go and Envoy accept them. Signatures, validity times,
  names, CA:TRUE, path lengths and key usages are checked without it.
- VERIFY_X509_PARTIAL_CHAIN is on towards servers with host names: each certificate of the file is trusted, so
  an issuing authority is enough without its root, and a server's own certificate can be pinned, as with curl,
  Go and Python 3.13. It is off between members of the mesh: a chain has to lead to a root there, whose trust
  domain and revocation lists are those of the root.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import ssl
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from shared import regular_files
from shared.errors import ConfigError, UnavailableError
from shared.net.tls.certificate_files import CertificateFiles

log = logging.getLogger("hbone.tls")

ALPN_H2 = "h2"
ALPN_HTTP1 = "http/1.1"

OLDEST = ssl.TLSVersion.TLSv1_2
"""Protocol version that every end accepts at least; RFC 8996 forbids older ones."""

OUTER_FLAGS = ssl.VerifyFlags.VERIFY_X509_TRUSTED_FIRST | ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
"""How a server with a host name is verified."""

MESH_FLAGS = ssl.VerifyFlags.VERIFY_X509_TRUSTED_FIRST
"""How members of the mesh verify each other."""

MAX_FILES = 64
"""Files of trusted certificates whose context is kept; beyond it the least used is read again."""

Context = TypeVar("Context", bound=ssl.SSLContext)


# Contexts for a server with a host name.


def client_context(ca: Path | None, now: float, alpn: str = ALPN_H2) -> ssl.SSLContext:
    """Trusts the certificates in `ca` only, or the system's when None; offers `alpn` and nothing else. For a
    connection that begins `now` (the loop's clock, seconds).

    Kept per file, as loading the system's roots takes 10 ms and 3 MiB each time, and made anew when the file
    has changed. A new file that is no good leaves the old one in use.

    Raises:
        UnavailableError: the file cannot be read or holds no certificate, and never did.
    """
    if ca is None:
        _await_loading()
    return _followed(ca, alpn).current(now)


def load_ahead() -> None:
    """Begins to load the system's roots for `client_context(None, ...)`, in a thread: almost all of it is
    OpenSSL's own work (8 ms, 19 ms with OpenSSL 3.0), during which a command can import what it needs."""
    global _loading
    _loading = threading.Thread(target=_load_quietly, name="trusted certificates", daemon=True)
    _loading.start()


def read_again(ca: Path | None) -> None:
    """Reads the file at once, for tunnels to come. Raises UnavailableError if it is no good; then the old
    one stays in use."""
    _followed(ca, ALPN_H2).read()


def client_of(trusted: bytes | None, *, alpn: str) -> ssl.SSLContext:
    """A context that trusts the certificates in the PEM text `trusted` only, or the system's when None.
    Raises ValueError as `trust` does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks chain and host name
    _set_up(context, OUTER_FLAGS, (alpn,))
    if trusted is None:
        _trust_system(context)
    else:
        trust(context, trusted)
    if key_log := os.environ.get("SSLKEYLOGFILE"):
        # As ssl.create_default_context has it: whoever sets it wants to decrypt captured packets.
        context.keylog_filename = key_log
    return context


_loading: threading.Thread | None = None


def _load_quietly() -> None:
    with suppress(UnavailableError):  # whoever needs them tries again, and reports it
        _followed(None, ALPN_H2)


def _await_loading() -> None:
    global _loading
    if _loading is not None:
        _loading.join()
        _loading = None


@functools.lru_cache(maxsize=MAX_FILES)
def _followed(ca: Path | None, alpn: str) -> CertificateFiles[ssl.SSLContext]:
    def make() -> ssl.SSLContext:
        try:
            return client_of(None if ca is None else read_file(ca), alpn=alpn)
        except ValueError as error:
            raise UnavailableError(f"trusted certificates: {ca}: {error}") from error
        except UnavailableError as error:
            raise UnavailableError(f"trusted certificates: {error}") from error

    purpose = f"trusted certificates {ca}" if ca else "the system's trusted certificates"
    files = CertificateFiles(_files(ca), make, log=log, purpose=purpose, own=False)
    files.read()
    return files


def _files(ca: Path | None) -> list[Path]:
    if ca is not None:
        return [ca]
    system = ssl.get_default_verify_paths()  # a renewal of the folder's files changes the folder
    return [Path(path) for path in (system.cafile, system.capath) if path]


def _trust_system(context: ssl.SSLContext) -> None:
    context.load_default_certs()
    system = ssl.get_default_verify_paths()
    # The folder's files are looked up by name when a chain is verified: nothing of them is loaded yet.
    if not context.cert_store_stats()["x509"] and not (system.capath and os.listdir(system.capath)):
        log.warning(
            "this system has no trusted certificates, so no server will be trusted: install the package "
            "ca-certificates, or set SSL_CERT_FILE"
        )


# Contexts with a certificate of our own.


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Serves with a certificate chain and its key, both PEM; agrees on h2 by ALPN.

    Raises:
        UnavailableError: a file cannot be read, or they do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _set_up(context, OUTER_FLAGS, (ALPN_H2,))
    try:
        load_own(context, certificate, key)
    except (OSError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else error.strerror
        raise UnavailableError(f"certificate {certificate}, key {key}: {reason or error}") from error
    return context


def mesh_context(
    kind: type[Context],
    *,
    server: bool,
    oldest: ssl.TLSVersion = OLDEST,
    alpn: tuple[str, ...] = (ALPN_H2,),
) -> Context:
    """A context of `kind` for one end of a connection between members of the mesh: a certificate is required,
    and no host name is checked, because the name is a SPIFFE ID. It has no certificate (`load_own`) and no
    roots (`trust`) yet."""
    context = kind(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _set_up(context, MESH_FLAGS, alpn, oldest)
    return context


def load_own(context: ssl.SSLContext, chain: Path, key: Path | None = None) -> None:
    """Gives `context` our certificate chain and its key, which may be in the same file; both PEM.

    Raises OSError (ssl.SSLError is one) when a file cannot be used, ValueError when the key is encrypted:
    without a password OpenSSL would ask the terminal for one, and wait.
    """
    with ExitStack() as files:
        chain_file = files.enter_context(regular_files.opened(chain))
        key_file = None if key is None else files.enter_context(regular_files.opened(key))
        context.load_cert_chain(chain_file, key_file, password=_no_password)


def load_own_pem(context: ssl.SSLContext, pem: bytes) -> None:
    """The same for a chain and its key in one text, which is on no disk where the system has files in memory.
    Raises as `load_own`."""
    # Python's ssl loads files only.
    if not hasattr(os, "memfd_create"):
        _load_own_by_file(context, pem)
        return
    file = os.memfd_create("client certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(pem)
        load_own(context, Path(f"/proc/self/fd/{file}"))
    finally:
        os.close(file)


def _load_own_by_file(context: ssl.SSLContext, pem: bytes) -> None:
    """By a file that only we can read, and that is there for as long as OpenSSL reads it (macOS)."""
    import tempfile

    descriptor, name = tempfile.mkstemp()  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as writer:
            writer.write(pem)
        load_own(context, Path(name))
    finally:
        os.unlink(name)


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _set_up(
    context: ssl.SSLContext,
    flags: ssl.VerifyFlags,
    alpn: tuple[str, ...],
    oldest: ssl.TLSVersion = OLDEST,
) -> None:
    context.minimum_version = oldest
    context.verify_flags = flags
    context.set_alpn_protocols(list(alpn))


# Files of trusted certificates.


def check_file(file: Path) -> None:
    """Raises UnavailableError, which names `file`, unless it is good as a file of trusted certificates."""
    try:
        trust(_scratch(), read_file(file))
    except ValueError as error:
        raise UnavailableError(f"{file}: {error}") from error


def check_roots(file: Path) -> None:
    """Raises what `trust_roots` does."""
    trust_roots(_scratch(), file)


def trust_roots(context: ssl.SSLContext, file: Path) -> None:
    """Has `context` trust the mesh's root certificates in `file`.

    Raises:
        UnavailableError: it cannot be read.
        ConfigError: there is no certificate in it, or one that cannot be read.
    """
    pem = regular_files.read_needed(file, regular_files.MAX_PEM_BYTES, "root certificates")
    try:
        trust(context, pem)
    except ValueError as error:
        raise ConfigError(str(file), None, "", f"no usable root certificates: {error}") from error


def _scratch() -> ssl.SSLContext:
    """A context that only finds out whether a text can be trusted."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def trust(context: ssl.SSLContext, pem: bytes) -> None:
    """Has `context` trust the certificates in the PEM text `pem`, whatever stands between them.

    Raises ValueError with the reason when there is none in it, or one that cannot be read. An empty text is
    an error like the others: Python's own helper would take the system's certificates instead.
    """
    if not pem.strip():
        raise ValueError("empty")
    # Comments between certificates may have any characters; within a certificate they are an error.
    text = pem.decode("ascii", "backslashreplace")
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        if "-----BEGIN CERTIFICATE-----" in text:
            raise ValueError("a certificate that cannot be read") from error
        raise ValueError("no certificate in PEM") from error


def read_file(file: Path) -> bytes:
    """The content of a file of certificates. Raises UnavailableError, which names it, when it cannot be read,
    is longer than `regular_files.MAX_PEM_BYTES`, or is no regular file."""
    return regular_files.read_needed(file, regular_files.MAX_PEM_BYTES)


# After a handshake.


def proved_chain(tls: ssl.SSLObject) -> list[bytes]:
    """The chain that the peer of a complete handshake was verified by, in DER, the leaf first and its root
    last; the leaf alone of a session that TLS 1.2 has resumed."""
    if hasattr(tls, "get_verified_chain"):  # Python 3.13
        found: list[bytes] = tls.get_verified_chain()
    else:
        import _ssl

        chain = tls._sslobj.get_verified_chain() or ()  # type: ignore[attr-defined]
        found = [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in chain]
    return found or [tls.getpeercert(binary_form=True) or b""]


def certificate_end(tls: ssl.SSLObject) -> float:
    """When the certificate that the peer has shown ends, in seconds since the epoch; infinity if it was not
    to show one."""
    told = tls.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(told["notAfter"])) if "notAfter" in told else math.inf


def fault(error: OSError) -> str:
    """What OpenSSL or the system says was wrong, in a few words without a file's name."""
    found = getattr(error, "reason", None) or error.strerror or str(error)
    return str(found).lower().replace("_", " ")
