"""The mesh's TLS, mostly a server's: the context that OpenSSL gets, and one handshake under it. Bytes in and
bytes out.

pyOpenSSL instead of the ssl module, which can neither end one direction of a connection nor ask us about a
client certificate during the handshake. No session is resumed: every connection proves its certificate anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL
from OpenSSL.crypto import FILETYPE_ASN1, X509, dump_certificate

from shared import regular_files
from shared.errors import (
    ALERT_DECODE_ERROR,
    ClientHelloError,
    ConfigError,
    HboneError,
    StreamResetError,
    TlsFailureError,
    UnavailableError,
)
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer
from shared.net.tls.contexts import (
    MESH_FLAGS,
    OLDEST,
    check_roots,
)
from shared.net.tls.private_key import parse
from shared.tls import alerts

CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"
"""TLS 1.2: forward secrecy and AEAD only, what RFC 9325 section 4.2 recommends."""

CIPHERS_13 = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
"""TLS 1.3, best first (RFC 8446 appendix B.4)."""

CONTROL_BYTES = 4 << 10
"""Room for what OpenSSL sends by itself: the handshake's flights, alerts and key updates of some 30 bytes."""

_VERDICTS = {
    getattr(SSL.X509VerificationCodes, name): name.removeprefix("ERR_").lower().replace("_", " ")
    for name in dir(SSL.X509VerificationCodes)
    if name.startswith("ERR_")
}
_ALERTS = ("tlsv1 ", "tlsv13 ", "sslv3 alert ", "ssl/tls alert ")
"""How OpenSSL's reasons begin that a peer's alert has caused."""

_HANDSHAKE_RECORD = 22  # RFC 8446 section 5.1, ContentType


# The context.


def server_context(
    certificates: Path,
    private_key: Path,
    roots: Path,
    verify: Callable[[list[bytes]], None],
    alpn: Sequence[str] = (),
    *,
    tls13_only: bool = False,
    no_common: Callable[[list[str]], None] = lambda offered: None,
) -> SSL.Context:
    """The TLS context of a mesh server, from PEM files: chain with the leaf first, its key, and the roots
    that client certificates must lead to. By ALPN the first of `alpn` that a client offers is agreed. With
    none in common `no_common` gets what the client offers, and raises RefusedError to refuse it: then the
    handshake fails with the alert no_application_protocol. Else the client goes on without ALPN, as one does
    that offers nothing. With `tls13_only` there is no TLS 1.2.

    `verify` gets the client's chain in DER, the leaf first and its root last, during the handshake, when
    OpenSSL has verified the chain. It raises DeniedError to refuse the client: then the handshake fails, with
    an alert of OpenSSL's. The client has yet to prove that it has the leaf's key.

    Raises:
        UnavailableError: a file is missing or cannot be read.
        ConfigError: a file has not what it should, or key and certificate do not belong together.
    """
    context = _context(SSL.TLS_SERVER_METHOD, certificates, private_key, roots, verify)
    if tls13_only:
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
    names = [name.encode("ascii") for name in alpn]

    def select(_: SSL.Connection, offered: list[bytes]) -> Any:
        chosen = next((name for name in names if name in offered), None)
        if chosen is None:  # what `no_common` raises comes out of `do_handshake`, as `verify`'s does
            no_common([name.decode("latin-1") for name in offered])
        return SSL.NO_OVERLAPPING_PROTOCOLS if chosen is None else chosen

    context.set_alpn_select_callback(select)
    return context


def client_context(
    certificates: Path,
    private_key: Path,
    roots: Path,
    verify: Callable[[list[bytes]], None],
    alpn: Sequence[str],
) -> SSL.Context:
    """The same for a client of the mesh, which offers all of `alpn`; `verify` gets the server's chain. Raises
    as `server_context`."""
    context = _context(SSL.TLS_CLIENT_METHOD, certificates, private_key, roots, verify)
    context.set_alpn_protos([name.encode("ascii") for name in alpn])
    return context


def _context(
    method: int, certificates: Path, private_key: Path, roots: Path, verify: Callable[[list[bytes]], None]
) -> SSL.Context:
    context = SSL.Context(method)
    context.set_min_proto_version(OLDEST)
    store = context.get_cert_store()
    assert store is not None, "a context has one"
    store.set_flags(MESH_FLAGS)
    context.set_cipher_list(CIPHERS)
    context.set_tls13_ciphersuites(CIPHERS_13)
    context.set_options(
        SSL.OP_CIPHER_SERVER_PREFERENCE | SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION
    )
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)  # the tickets that TLS 1.3 still sends resume nothing
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)  # 15 KiB less for each idle connection
    _load(certificates, "certificate chain", context.use_certificate_chain_file)
    _load(private_key, "private key of the certificate", lambda _: context.use_privatekey(_key(private_key)))
    _load_roots(context, roots)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _chain_checked)
    context.set_app_data(verify)
    return context


# Its files.


def _load(file: Path, what: str, load: Callable[[Path], None]) -> None:
    try:
        with regular_files.opened(file) as path:
            load(Path(path))
    except OSError as error:
        raise UnavailableError(f"{what}: {file}: {error.strerror}") from error
    except SSL.Error as error:
        raise ConfigError(str(file), None, "", f"no usable {what}: {reason(error)}") from error


def _load_roots(context: SSL.Context, file: Path) -> None:
    check_roots(file)
    _load(file, "root certificates", context.load_verify_locations)


def _key(file: Path) -> RSAPrivateKey | EllipticCurvePrivateKey:
    try:
        return parse(regular_files.read(file, regular_files.MAX_PEM_BYTES))
    except ValueError as error:
        raise ConfigError(str(file), None, "", str(error)) from error


class _Notes:
    """What the callback leaves for the handshake; not the handshake itself, to keep connections free of
    cycles."""

    __slots__ = ("chain", "is_allowed", "verdict")

    def __init__(self) -> None:
        self.chain: list[bytes] = []  # in DER, as far as it is verified, the root first
        self.is_allowed = False
        self.verdict = ""  # why OpenSSL refused the chain


def _chain_checked(tls: SSL.Connection, certificate: X509, error: int, depth: int, ok: int) -> bool:
    """OpenSSL's verdict on one certificate of the chain, from the root on; `verify` has the last word.

    What it raises comes out of `do_handshake`: pyOpenSSL keeps it until OpenSSL has returned."""
    notes: _Notes = tls.get_app_data()
    if not ok:
        notes.verdict = f"{_VERDICTS.get(error, f'error {error}')} (depth {depth})"
        return False
    notes.chain.append(dump_certificate(FILETYPE_ASN1, certificate))
    if depth == 0:
        verify: Callable[[list[bytes]], None] = tls.get_context().get_app_data()
        verify(notes.chain[::-1])
        notes.chain.clear()
        notes.is_allowed = True
    return True


# One handshake.


class ServerHandshake:
    """One handshake under a context of `server_context`.

    Give `receive_data` what comes and send what `data_to_send` gives, until it is complete or has failed.
    """

    __slots__ = ("_first_byte", "_notes", "_spoken", "tls")

    def __init__(self, context: SSL.Context) -> None:
        self._notes = _Notes()
        self._first_byte = -1  # of the connection: is it TLS at all?
        self._spoken = False  # OpenSSL has written something to the client
        self.tls = SSL.Connection(context, None)
        self.tls.set_app_data(self._notes)
        self._choose_role()

    def _choose_role(self) -> None:
        self.tls.set_accept_state()

    def receive_data(self, data: Buffer) -> bool:
        """Whether the handshake is complete with `data`, some bytes.

        Raises:
            ClientHelloError: the client does not speak TLS.
            StreamResetError: the client gave up with an alert.
            TlsFailureError: OpenSSL refused the client; `alert_to_send` has its alert.
            DeniedError: the context's rule refused the client; likewise.
        """
        if self._first_byte < 0:
            self._first_byte = data[0]
        self.tls.bio_write(data)
        try:
            self.tls.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise self._failure(error) from error
        return True

    def data_to_send(self) -> bytes:
        """What the handshake is to send while it is not complete."""
        output = outgoing(self.tls)
        self._spoken = self._spoken or bool(output)
        return output

    def alert_to_send(self, error: HboneError) -> bytes:
        """What is left to send when `error` ends an incomplete handshake: OpenSSL's alert, or one of ours
        for a client that has heard nothing yet, and so has no keys."""
        output = outgoing(self.tls)
        if output or self._spoken:
            return output
        return alerts.fatal(error.alert or ALERT_DECODE_ERROR)

    def certificate(self) -> bytes:
        """The leaf certificate in DER that the client of a complete handshake has proved. Raises
        TlsFailureError when there is none, or when the context's rule was not asked about it."""
        certificate = self.tls.get_peer_certificate(as_cryptography=True)
        # The context requires both: a second lock on the same door.
        if certificate is None or not self._notes.is_allowed:
            raise TlsFailureError("tls handshake: no client certificate")
        return certificate.public_bytes(Encoding.DER)

    def proved_chain(self) -> list[bytes]:
        """The chain that the client of a complete handshake was verified by, in DER, the leaf first and its
        root last."""
        chain = self.tls.get_verified_chain(as_cryptography=True) or ()
        return [certificate.public_bytes(Encoding.DER) for certificate in chain]

    def cut_off(self) -> StreamResetError:
        """What to say of a client that ends the connection in the handshake."""
        return StreamResetError("tls handshake: the client closed the connection", CANCEL)

    def _failure(self, error: SSL.Error) -> HboneError:
        if self._notes.verdict:
            return TlsFailureError(f"tls handshake: client certificate refused: {self._notes.verdict}")
        cause = reason(error)
        if " alert " in cause:
            return StreamResetError(f"tls handshake: the client gave up: {cause}", CANCEL)
        if self._first_byte != _HANDSHAKE_RECORD:
            return ClientHelloError("tls handshake: the first bytes are no TLS, does the client know of it?")
        return TlsFailureError(f"tls handshake: {cause}")


class ClientHandshake(ServerHandshake):
    """The same for a client under a context of `client_context`. What `begin` gives is sent first; errors are
    about the server."""

    __slots__ = ()

    def __init__(self, context: SSL.Context, server_name: str) -> None:
        super().__init__(context)
        if server_name:
            self.tls.set_tlsext_host_name(server_name.encode("ascii"))

    def _choose_role(self) -> None:
        self.tls.set_connect_state()

    def begin(self) -> bytes:
        """The ClientHello."""
        with suppress(SSL.WantReadError):
            self.tls.do_handshake()
        return self.data_to_send()

    def cut_off(self) -> StreamResetError:
        return StreamResetError("tls handshake: the far side closed the connection", CANCEL)

    def _failure(self, error: SSL.Error) -> HboneError:
        if self._notes.verdict:
            return TlsFailureError(f"tls handshake: server certificate refused: {self._notes.verdict}")
        cause = reason(error)
        if cause.startswith(_ALERTS):
            return StreamResetError(f"tls handshake: refused by the far side: {cause}", CANCEL)
        return TlsFailureError(f"tls handshake: {cause}")


def outgoing(tls: SSL.Connection, size: int = CONTROL_BYTES) -> bytes:
    """Takes all that OpenSSL has written; `size` bytes at least are taken in one go."""
    output = b""
    while True:
        try:
            chunk = tls.bio_read(size)
        except SSL.WantReadError:
            return output
        output = output + chunk if output else chunk
        if len(chunk) < size:
            return output


def reason(error: SSL.Error) -> str:
    """OpenSSL's first reason, which is the cause; those after it say whom else it failed."""
    entries = error.args[0] if error.args else None
    if isinstance(entries, list) and entries:
        return str(entries[0][-1]) or "unknown"
    return str(error) or type(error).__name__
