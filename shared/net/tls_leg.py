"""The TLS leg: mutual TLS ended in this process, as one end of a tunnel (rules in `legs.py`).

Owned here: the server's TLS context, the handshake and its refusals, and TLS over a plain TCP transport by
OpenSSL's memory BIOs. Whom to let in is the caller's rule (`verify`), where the bytes go is the owner's.
pyOpenSSL instead of the ssl module, which can neither end one direction of a connection nor refuse a client
certificate with an alert.

The rules:

1. Nothing leaves for the peer after its certificate until the owner has decided. What OpenSSL writes when
   the handshake completes is held; `join` sends it, `refuse` sends a fatal alert in its place. The peer's
   early data waits in the BIO, at most one read, with the transport paused; a peer that leaves meanwhile is
   noticed by `join`.
2. close_notify ends one direction (RFC 8446 section 6.1). After ours the TCP connection stays open in both
   directions until the peer has ended too: a FIN of ours would become an END_STREAM in the tunnel, and
   HTTP/2 proxies take a complete response as leave to cut off the request (RFC 9113 section 8.1).
3. FIN without close_notify is truncation, whoever may have sent it: the leg breaks and the other leg is
   reset. There is no lenience for careless HTTP/1 clients, because the bytes are not known to be HTTP.
4. After a refusal or a TLS error the alert goes out, then FIN; what the peer still sends is read and dropped
   for a moment: closing over unread data sends RST, which can overtake the alert (RFC 9112 section 9.6).
5. No session is resumed, so every connection proves its certificate anew.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from OpenSSL import SSL

from shared.errors import (
    ALERT_DECODE_ERROR,
    ClientHelloError,
    ConfigError,
    HboneError,
    RefusedError,
    StreamResetError,
    UnavailableError,
)
from shared.net.legs import Buffer, RelayEnd
from shared.net.read_buffer import READ_BUFFER
from shared.net.tcp import CLOSE_TIMEOUT_S, address_text, reset
from shared.wire import alerts
from shared.wire.frames import CANCEL

HANDSHAKE_TIMEOUT_S = 10.0
"""From accept to the client's last handshake byte; Envoy's listeners allow 15 s, HTTP/2 prefaces 10 s."""

LINGER_S = 2.0
"""How long a refused peer may keep sending (rule 4): the round trip that the alert needs, generously."""

RECORD_BYTES = 16 << 10
"""Plaintext of the largest TLS record (RFC 8446 section 5.1); OpenSSL reads one record per call."""

RECORD_OVERHEAD_BYTES = 32
"""Header, nonce, type and tag of one record: 22 in TLS 1.3, 29 in TLS 1.2, rounded up."""

CONTROL_BYTES = 4 << 10
"""Room for what OpenSSL sends by itself: alerts and key updates of some 30 bytes each."""

CONTROL_LIMIT_BYTES = 64 << 10
"""What OpenSSL may answer by itself while the peer reads nothing: 2000 key updates, which nobody needs."""

CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"
"""TLS 1.2: forward secrecy and AEAD only, what RFC 9325 section 4.2 recommends."""

CIPHERS_13 = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
"""TLS 1.3: all that `sealed_alert` can speak."""

ALPN = (b"istio-http/1.1", b"istio-http/1.0", b"istio", b"http/1.1", b"http/1.0")
"""The first that the client offers is taken, in the order of the Envoy end, so that no client sees a
difference. All promise an app that takes bytes or HTTP/1. Never istio-peer-exchange, after which Envoy puts
a preamble before the data, nor h2 and istio-h2, which could talk a client into HTTP/2. None in common: no
ALPN."""

_VERDICTS = {
    getattr(SSL.X509VerificationCodes, name): name.removeprefix("ERR_").lower().replace("_", " ")
    for name in dir(SSL.X509VerificationCodes)
    if name.startswith("ERR_")
}
_SERVER_SECRET = b"SERVER_TRAFFIC_SECRET_0"
_HANDSHAKE_RECORD = 22  # RFC 8446 section 5.1, ContentType
_ALERT_RECORD = 21
_SEALED_RECORD = 23
_FATAL = 2
_TAG_BYTES = 16
_IV_BYTES = 12


def server_context(
    certificates: Path, private_key: Path, roots: Path, verify: Callable[[bytes], None]
) -> SSL.Context:
    """The TLS context of a mesh server, from PEM files: chain with the leaf first, its key, and the roots
    that client certificates must lead to.

    `verify` gets the client's leaf certificate in DER once the chain and the possession of its key are
    proven and before anything is passed on; it raises DeniedError to refuse it.

    Raises:
        UnavailableError: a file is missing or cannot be read.
        ConfigError: a file has not what it should, or key and certificate do not belong together.
    """
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(CIPHERS)
    context.set_tls13_ciphersuites(CIPHERS_13)
    context.set_options(
        SSL.OP_CIPHER_SERVER_PREFERENCE | SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION
    )
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)  # the tickets that TLS 1.3 still sends resume nothing
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)  # 15 KiB less for each idle connection
    _load(certificates, "certificate chain", context.use_certificate_chain_file)
    _load(private_key, "private key of the certificate", lambda file: context.use_privatekey(_key(file)))
    _load(roots, "root certificates", context.load_verify_locations)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _chain_checked)
    context.set_alpn_select_callback(
        lambda _, offered: next((name for name in ALPN if name in offered), SSL.NO_OVERLAPPING_PROTOCOLS)
    )
    context.set_keylog_callback(_key_made)
    context.set_app_data(verify)
    return context


class Owner(Protocol):
    """Who accepted a TLS leg and decides about it. `established` or `refused` comes first, `closed` last."""

    def established(self, leg: TlsServerLeg) -> None:
        """The handshake is complete and the certificate verified: now join the leg or refuse it."""

    def refused(self, leg: TlsServerLeg, error: HboneError) -> None:
        """There will be no TLS connection; what the peer can be told it is being told."""

    def closed(self, leg: TlsServerLeg) -> None:
        """The TCP connection is gone."""


class _State(enum.Enum):
    ACCEPTED = enum.auto()  # no transport yet
    HANDSHAKE = enum.auto()  # up to the peer's last handshake byte
    HELD = enum.auto()  # the owner decides (rule 1)
    JOINED = enum.auto()  # a relay has it
    TURNED_AWAY = enum.auto()  # the alert is on its way, the rest is dropped (rule 4)
    CLOSING = enum.auto()  # over in good order, its last bytes are leaving
    GONE = enum.auto()  # reset by us, or lost


class _Notes:
    """What OpenSSL's callbacks leave for the leg; not the leg itself, to keep connections free of cycles."""

    __slots__ = ("secret", "verdict")

    def __init__(self) -> None:
        self.secret = b""  # the server's first TLS 1.3 traffic secret, until the owner has decided
        self.verdict = ""  # why the chain was refused


class TlsServerLeg(asyncio.BufferedProtocol):
    """The server's end of a TLS connection, as a leg; a protocol for a plain TCP transport.

    `context` is one of `server_context`. A handshake may take `handshake_timeout_s` seconds.
    """

    __slots__ = (
        "_control_bytes",
        "_ended",
        "_eof_sent",
        "_fin",
        "_first_byte",
        "_flight",
        "_full",
        "_handshake_timeout_s",
        "_notes",
        "_owner",
        "_paused",
        "_pushing",
        "_relay",
        "_spoken",
        "_state",
        "_timer",
        "_tls",
        "_transport",
        "alpn",
        "certificate",
        "peer_name",
    )

    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(
        self, context: SSL.Context, owner: Owner, *, handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> None:
        self._owner = owner
        self._handshake_timeout_s = handshake_timeout_s
        self._relay: RelayEnd | None = None
        self._state = _State.ACCEPTED
        self._notes = _Notes()
        self._tls = SSL.Connection(context, None)
        self._tls.set_app_data(self._notes)
        self._tls.set_accept_state()
        self._flight = b""  # what OpenSSL wrote last in the handshake, held
        self._first_byte = -1  # of the connection: is it TLS at all?
        self._spoken = False  # OpenSSL has written something to the peer
        self._paused = False  # the relay wants no data
        self._pushing = False
        self._ended = False  # close_notify came
        self._fin = False  # FIN came
        self._eof_sent = False  # close_notify was sent
        self._full = False
        self._control_bytes = 0
        self.certificate = b""
        """The client's leaf certificate in DER, verified; empty before `established`."""
        self.alpn = ""
        """The protocol agreed by ALPN; empty without, and before `established`."""
        self.peer_name = ""
        """The peer's address as host:port, for logs; still there when the connection is gone."""

    # Leg.

    def join(self, relay: RelayEnd) -> None:
        if self._state is not _State.HELD:
            relay.failed(self, StreamResetError("connection lost before the tunnel stood", CANCEL))
            return
        self._state = _State.JOINED
        self._relay = relay
        self._notes.secret = b""
        flight, self._flight = self._flight, b""
        self._transport.write(flight)
        self.resume_reading()

    def write(self, data: Buffer) -> None:
        size = len(data)
        if self._state is not _State.JOINED or self._eof_sent or not size:
            return
        try:
            self._tls.sendall(data)
        except SSL.Error as error:
            self._broke(error)
            return
        self._transport.write(self._output(size + (size // RECORD_BYTES + 1) * RECORD_OVERHEAD_BYTES))

    def write_eof(self) -> None:
        if self._state is not _State.JOINED or self._eof_sent:
            return
        self._eof_sent = True
        try:
            self._tls.shutdown()
        except SSL.Error as error:
            self._broke(error)
            return
        self._transport.write(self._output())

    def pause_reading(self) -> None:
        self._paused = True
        if self._state is _State.JOINED:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._state is _State.JOINED:
            self._push()
        if self._state is _State.JOINED and not self._paused and not self._fin:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._state in (_State.CLOSING, _State.TURNED_AWAY):
            return
        if self._state is not _State.JOINED:
            self.abort()
            return
        self.write_eof()
        if self._state is _State.JOINED:
            self._state = _State.CLOSING
            self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)
            self._transport.close()

    def abort(self) -> None:
        state, self._state = self._state, _State.GONE
        if state not in (_State.ACCEPTED, _State.GONE):
            reset(self._transport)

    def refuse(self, error: HboneError) -> None:
        """Ends a held leg with the alert that `error` calls for, if any; a leg in any other state is reset.

        In TLS 1.2 our own change of cipher is still held, so the alert goes as plaintext; in TLS 1.3 it is
        the first record under the server's traffic keys, and no other record under them ever leaves.
        """
        if self._state is not _State.HELD:
            self.abort()
            return
        self._flight = record = b""
        if error.alert is not None:
            if self._tls.get_protocol_version() == SSL.TLS1_2_VERSION:
                record = alerts.fatal(error.alert)
            elif self._notes.secret:
                record = sealed_alert(error.alert, self._tls.get_cipher_name() or "", self._notes.secret)
        self._notes.secret = b""
        self._turn_away(record)

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self.peer_name = address_text(transport.get_extra_info("peername"))
        self._timer = asyncio.get_running_loop().call_later(self._handshake_timeout_s, self._too_slow)
        if self._state is _State.ACCEPTED:
            self._state = _State.HANDSHAKE
        else:
            reset(self._transport)  # aborted before it had begun

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        if self._state is _State.JOINED:
            self._tls.bio_write(READ_BUFFER[:nbytes])
            self._push()
        elif self._state is _State.HANDSHAKE:
            if self._first_byte < 0:
                self._first_byte = READ_BUFFER[0]
            self._tls.bio_write(READ_BUFFER[:nbytes])
            self._shake()

    def eof_received(self) -> bool:
        if self._state is _State.HANDSHAKE:
            self._reject(StreamResetError("tls handshake: the client closed the connection", CANCEL))
        self._fin = True
        self._push()
        return self._state in (_State.HELD, _State.JOINED)  # FIN ends one direction only

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        state, self._state = self._state, _State.GONE
        relay, self._relay = self._relay, None
        self._notes.secret = b""
        del self._tls  # 40 KiB, which would wait for the garbage collector to find the relay's cycle
        if state is _State.HANDSHAKE:
            lost = StreamResetError(f"tls handshake: connection lost: {exc or 'closed'}", CANCEL)
            self._owner.refused(self, lost)
        elif state is _State.JOINED and relay is not None:
            relay.failed(self, StreamResetError(f"connection reset: {exc or 'closed by the peer'}", CANCEL))
        self._owner.closed(self)

    def pause_writing(self) -> None:
        self._full = True
        if self._relay is not None:
            self._relay.full(self)

    def resume_writing(self) -> None:
        self._full = False
        self._control_bytes = 0
        if self._relay is not None:
            self._relay.drained(self)

    # Handshake.

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except SSL.WantReadError:
            output = self._output()
            self._spoken = self._spoken or bool(output)
            self._transport.write(output)
            return
        except SSL.Error as error:
            self._reject(self._handshake_error(error), self._output())
            return
        self._timer.cancel()
        self._transport.pause_reading()
        self._state = _State.HELD
        self._flight = self._output()
        self._admit()

    def _admit(self) -> None:
        """Asks the context's rule about the certificate, then the owner about the connection."""
        certificate = self._tls.get_peer_certificate(as_cryptography=True)
        verify: Callable[[bytes], None] = self._tls.get_context().get_app_data()
        try:
            if certificate is None:  # the context requires one: a second lock on the same door
                raise RefusedError("tls handshake: no client certificate")
            der = certificate.public_bytes(Encoding.DER)
            verify(der)
        except HboneError as error:
            self.refuse(error)
            self._owner.refused(self, error)
            return
        self.certificate = der
        self.alpn = self._tls.get_alpn_proto_negotiated().decode("ascii")
        self._owner.established(self)

    def _handshake_error(self, error: SSL.Error) -> HboneError:
        reason = _reason(error)
        if self._notes.verdict:
            return RefusedError(f"tls handshake: client certificate refused: {self._notes.verdict}")
        if " alert " in reason:
            return StreamResetError(f"tls handshake: the client gave up: {reason}", CANCEL)
        if self._first_byte != _HANDSHAKE_RECORD:
            return ClientHelloError("tls handshake: the first bytes are no TLS, does the client know of it?")
        return RefusedError(f"tls handshake: {reason}")

    def _too_slow(self) -> None:
        self._reject(RefusedError(f"tls handshake: not complete within {self._handshake_timeout_s:g} s"))

    def _reject(self, error: HboneError, alert: bytes = b"") -> None:
        """Ends a handshake; without an alert of OpenSSL's a client that has heard nothing yet gets ours."""
        if not alert and not self._spoken:
            alert = alerts.fatal(error.alert or ALERT_DECODE_ERROR)
        self._turn_away(alert)
        self._owner.refused(self, error)

    def _turn_away(self, last: bytes) -> None:
        """Sends `last` and FIN, and drops what still comes (rule 4)."""
        self._timer.cancel()
        self._state = _State.TURNED_AWAY
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)
        self._transport.write(last)
        self._transport.write_eof()
        self._transport.resume_reading()

    # Data.

    def _push(self) -> None:
        """Hands plaintext to the relay until there is none or the relay wants none."""
        relay = self._relay
        if self._pushing or relay is None:
            return
        self._pushing = True
        ended = self._ended
        while not self._paused and not self._ended and self._state is _State.JOINED:
            try:
                data = self._tls.recv(RECORD_BYTES)
            except SSL.WantReadError:
                break
            except SSL.ZeroReturnError:
                self._ended = True
            except SSL.Error as error:
                self._broke(error)
            else:
                relay.received(self, data)
        self._pushing = False
        if self._state is _State.JOINED:
            self._answer()
        if self._state is not _State.JOINED:
            return
        if self._ended and not ended:
            relay.ended(self)
        elif self._fin and not self._ended and not self._paused:
            self._fail(StreamResetError("connection truncated: FIN without close_notify", CANCEL))

    def _answer(self) -> None:
        """Sends what OpenSSL wrote of its own accord while it read: key updates, warnings."""
        output = self._output()
        if not output:
            return
        self._transport.write(output)
        if self._full:
            self._control_bytes += len(output)
            if self._control_bytes > CONTROL_LIMIT_BYTES:
                self._fail(StreamResetError("tls: the peer asks for key updates and reads nothing", CANCEL))

    def _output(self, size: int = CONTROL_BYTES) -> bytes:
        """Takes all that OpenSSL has written; `size` bytes at least are taken in one go."""
        output = b""
        while True:
            try:
                chunk = self._tls.bio_read(size)
            except SSL.WantReadError:
                return output
            output = output + chunk if output else chunk
            if len(chunk) < size:
                return output

    def _broke(self, error: SSL.Error) -> None:
        """OpenSSL found the connection broken: a record that is none, or a fatal alert of the peer's."""
        self._turn_away(self._output())
        if self._relay is not None:
            self._relay.failed(self, StreamResetError(f"tls: {_reason(error)}", CANCEL))

    def _fail(self, error: StreamResetError) -> None:
        self.abort()
        if self._relay is not None:
            self._relay.failed(self, error)


def sealed_alert(description: int, cipher: str, secret: bytes) -> bytes:
    """A fatal alert as the first record under a TLS 1.3 traffic secret (RFC 8446 sections 5.2, 5.3, 7.3).

    OpenSSL sends alerts for its own reasons only. `cipher` is the name of one of CIPHERS_13.
    """
    algorithm = hashes.SHA384() if cipher.endswith("SHA384") else hashes.SHA256()

    def expand(label: bytes, size: int) -> bytes:
        label = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes((len(label),)) + label + b"\0"
        return HKDFExpand(algorithm, size, info).derive(secret)

    inner = bytes((_FATAL, description, _ALERT_RECORD))
    header = bytes((_SEALED_RECORD, 3, 3)) + (len(inner) + _TAG_BYTES).to_bytes(2, "big")
    aead: AESGCM | ChaCha20Poly1305
    if "CHACHA20" in cipher:
        aead = ChaCha20Poly1305(expand(b"key", 32))
    else:
        aead = AESGCM(expand(b"key", 16 if "AES_128" in cipher else 32))
    # The nonce is the IV combined with the record's number, which is 0.
    return header + aead.encrypt(expand(b"iv", _IV_BYTES), inner, header)


# OpenSSL's callbacks. None of them may raise: the traceback would go to standard error.


def _chain_checked(tls: SSL.Connection, certificate: object, error: int, depth: int, ok: int) -> bool:
    """OpenSSL's verdict on one certificate of the chain stands; it is only noted."""
    if not ok:
        tls.get_app_data().verdict = f"{_VERDICTS.get(error, f'error {error}')} (depth {depth})"
    return bool(ok)


def _key_made(tls: SSL.Connection, line: bytes) -> None:
    """Keeps the one secret that `refuse` needs, in memory only; the others go nowhere."""
    if line.startswith(_SERVER_SECRET):
        tls.get_app_data().secret = bytes.fromhex(line.rsplit(b" ", 1)[1].decode("ascii"))


def _load(file: Path, what: str, load: Callable[[Path], None]) -> None:
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        load(file)
    except OSError as error:
        raise UnavailableError(f"{what}: {file}: {error.strerror}") from error
    except SSL.Error as error:
        raise ConfigError(str(file), None, "", f"no usable {what}: {_reason(error)}") from error


def _key(file: Path) -> RSAPrivateKey | EllipticCurvePrivateKey:
    """Read without OpenSSL, which would ask the terminal for the passphrase of an encrypted key."""
    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except TypeError as error:
        raise ConfigError(str(file), None, "", "the private key is encrypted") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(str(file), None, "", "no private key in PEM") from error
    if not isinstance(key, RSAPrivateKey | EllipticCurvePrivateKey):
        raise ConfigError(str(file), None, "", "the private key is neither RSA nor EC")
    return key


def _reason(error: SSL.Error) -> str:
    """OpenSSL's first reason, which is the cause; those after it say whom else it failed."""
    entries = error.args[0] if error.args else None
    if isinstance(entries, list) and entries:
        return str(entries[0][-1]) or "unknown"
    return str(error) or type(error).__name__
