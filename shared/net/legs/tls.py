"""The TLS leg: mutual TLS ended in this process, as one end of a tunnel (rules in `contract`). TLS
runs over a plain TCP transport by OpenSSL's memory BIOs; the owner decides who is let in.

The rules:

1. Who may come in is decided during the handshake. When it is complete the leg is held until the owner joins
   or aborts it: what OpenSSL wrote last is not sent yet, and the peer's early data waits in the BIO, at most
   one read, with the transport paused. `join` notices a peer that has left meanwhile.
2. close_notify ends one direction (RFC 8446 section 6.1). After ours the TCP connection stays open in both
   directions until the peer has ended too: a FIN of ours would become an END_STREAM in the tunnel, and
   HTTP/2 proxies take a complete response as leave to cut off the request (RFC 9113 section 8.1).
3. FIN without close_notify is truncation, whoever may have sent it: the leg breaks and the other leg is
   reset. There is no lenience for careless HTTP/1 clients, because the bytes are not known to be HTTP.
   `close` keeps to rule 2: what still comes is dropped, and FIN goes out last (`tcp_end.LastBytes`).
4. After a failed handshake or a TLS error the alert goes out, then FIN; what the peer still sends is read and
   dropped for a moment: closing over unread data sends RST, which can overtake the alert (RFC 9112 section
   9.6).
"""

from __future__ import annotations

import asyncio
import enum
from typing import Protocol, cast

from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from shared.errors import HboneError, StreamResetError, TlsFailureError
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer, RelayEnd
from shared.net.legs.read_buffer import READ_BUFFER
from shared.net.legs.small_writes import (
    MARK_BYTES,
    SMALL_BYTES,
    UNSENT_BYTES,
    SmallWrites,
    TransportLeg,
)
from shared.net.legs.tcp import peer_of
from shared.net.legs.tcp_end import (
    FIN_ON_CLOSE,
    RESET_ON_CLOSE,
    LastBytes,
    reset,
    set_end,
    unread,
)
from shared.net.legs.tls_handshake import ServerHandshake, outgoing, reason

HANDSHAKE_TIMEOUT_S = 10.0
"""From accept to the client's last handshake byte; Envoy's listeners allow 15 s, HTTP/2 prefaces 10 s."""

LINGER_S = 2.0
"""How long a refused peer may keep sending (rule 4): the round trip that the alert needs, generously."""

RECORD_BYTES = 16 << 10
"""Plaintext of the largest TLS record (RFC 8446 section 5.1); OpenSSL reads one record per call."""

RECORD_OVERHEAD_BYTES = 32
"""Header, nonce, type and tag of one record: 22 in TLS 1.3, 29 in TLS 1.2, rounded up."""

CONTROL_LIMIT_BYTES = 64 << 10
"""What OpenSSL may answer by itself while the peer reads nothing: 2000 key updates, which nobody needs."""


class Owner(Protocol):
    """Who accepted a TLS leg and decides about it. `established` or `refused` comes first, `closed` last."""

    def established(self, leg: TlsServerLeg) -> None:
        """The handshake is complete and the peer allowed: now join the leg or abort it."""

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


class TlsServerLeg(TransportLeg):
    """The server's end of a TLS connection, as a leg; a protocol for a plain TCP transport.

    `context` is one of `server_context`. A handshake may take `handshake_timeout_s` seconds.
    """

    __slots__ = (
        "_control_bytes",
        "_ended",
        "_eof_sent",
        "_fin",
        "_handshake",
        "_handshake_timeout_s",
        "_owner",
        "_paused",
        "_pushing",
        "_state",
        "_timer",
        "_tls",
        "alpn",
        "certificate",
        "peer_name",
    )

    __deletable__ = ("_handshake", "_tls")
    """For mypyc: what `connection_lost` deletes."""

    _timer: asyncio.TimerHandle

    def __init__(
        self, context: SSL.Context, owner: Owner, *, handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> None:
        super().__init__()
        self._owner = owner
        self._handshake_timeout_s = handshake_timeout_s
        self._state = _State.ACCEPTED
        self._handshake = ServerHandshake(context)
        self._tls = self._handshake.tls
        self._paused = False  # the relay wants no data
        self._pushing = False
        self._ended = False  # close_notify came
        self._fin = False  # FIN came
        self._eof_sent = False  # close_notify was sent
        self._control_bytes = 0
        self.certificate = b""
        """The client's leaf certificate in DER, verified; empty before `established`."""
        self.alpn = ""
        """The protocol agreed by ALPN; empty without, and before `established`."""
        self.peer_name = ""
        """The peer's address as host:port, for logs; still there when the connection is gone."""

    # Leg.

    @property
    def buffered_bytes(self) -> int:
        return self._unsent_bytes  # what is in OpenSSL's hands is one read at most

    def join(self, relay: RelayEnd) -> None:
        if self._state is not _State.HELD:
            relay.failed(self, StreamResetError("connection lost before the tunnel was open", CANCEL))
            return
        self._state = _State.JOINED
        self._relay = relay
        set_end(self._transport, RESET_ON_CLOSE)
        self._transport.write(outgoing(self._tls))
        self._send_early()
        self.resume_reading()

    def pass_to(self, relay: RelayEnd) -> None:
        """From now on pushes to `relay`, instead of the one that it was joined to."""
        self._relay = relay

    def write(self, data: Buffer) -> None:
        size = len(data)
        if self._state is not _State.JOINED or self._eof_sent or not size:
            return
        try:
            self._tls.sendall(data)
        except SSL.Error as error:
            self._broke(error)
            return
        sealed_bytes = size + (size // RECORD_BYTES + 1) * RECORD_OVERHEAD_BYTES
        self._send(outgoing(self._tls, sealed_bytes))

    def write_eof(self) -> None:
        if self._state is not _State.JOINED or self._eof_sent:
            return
        self._eof_sent = True
        try:
            self._tls.shutdown()
        except SSL.Error as error:
            self._broke(error)
            return
        self._send(outgoing(self._tls))

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
            self._relay = None
            if not self._transport.is_closing():
                self._send_small()
            self._closing = LastBytes(self._transport, peer_ended=self._ended or self._fin, fin=False)

    def abort(self) -> None:
        state, self._state = self._state, _State.GONE
        self._small = None
        if state not in (_State.ACCEPTED, _State.GONE):
            reset(self._transport)

    def own_certificate(self) -> bytes:
        """The certificate that the client was shown, in DER."""
        own = self._tls.get_certificate(as_cryptography=True)
        assert own is not None, "a server has one"
        return own.public_bytes(Encoding.DER)

    def proved_chain(self) -> list[bytes]:
        """The chain that the client was verified by, in DER, the leaf first and its root last."""
        return self._handshake.proved_chain()

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self.peer_name = peer_of(transport)
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
            self._shake(READ_BUFFER[:nbytes])

    def eof_received(self) -> bool:
        if self._state is _State.HANDSHAKE:
            self._reject(self._handshake.cut_off())
        self._fin = True
        if self._closing is not None:
            self._closing.peer_has_ended()
            return True  # which closes it in its own time
        self._push()
        return self._state in (_State.HELD, _State.JOINED)  # FIN ends one direction only

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._closing is not None:
            self._closing.cancel()
        if self._state is _State.JOINED and not self._ended:
            self._push_unread()
        state, self._state = self._state, _State.GONE
        self._small = None
        relay, self._relay = self._relay, None
        # 40 KiB, which would wait for the garbage collector to find the relay's cycle.
        del self._tls, self._handshake
        if state is _State.HANDSHAKE:
            lost = StreamResetError(f"tls handshake: connection lost: {exc or 'closed'}", CANCEL)
            self._owner.refused(self, lost)
        elif state is _State.JOINED and relay is not None:
            relay.failed(self, StreamResetError(f"connection reset: {exc or 'closed by the peer'}", CANCEL))
        self._owner.closed(self)

    def resume_writing(self) -> None:
        self._control_bytes = 0
        super().resume_writing()

    def _send_early(self) -> None:
        """It is joined, and nothing has been read for the relay yet."""

    # What waits to be sent, which is sealed already.

    def _send(self, data: bytes) -> None:
        if self._small is not None:
            self._small.add(data)
            if not self._full and self._unsent_bytes > MARK_BYTES:
                self._become_full()
        elif len(data) < SMALL_BYTES and self._transport.get_write_buffer_size() > UNSENT_BYTES:
            self._small = SmallWrites(self._transport, data)
            self._small.begin()
        else:
            self._transport.write(data)

    # Handshake.

    def _shake(self, data: memoryview) -> None:
        try:
            if not self._handshake.receive_data(data):
                self._transport.write(self._handshake.data_to_send())
                return
            self.certificate = self._handshake.certificate()
        except HboneError as error:
            self._reject(error)
            return
        self._timer.cancel()
        self._transport.pause_reading()
        self._state = _State.HELD
        self.alpn = self._tls.get_alpn_proto_negotiated().decode("ascii")
        self._owner.established(self)

    def _too_slow(self) -> None:
        self._reject(TlsFailureError(f"tls handshake: not complete within {self._handshake_timeout_s:g} s"))

    def _reject(self, error: HboneError) -> None:
        """Ends a handshake that has failed."""
        self._turn_away(self._handshake.alert_to_send(error))
        self._owner.refused(self, error)

    def _turn_away(self, last: bytes) -> None:
        """Sends `last` and FIN, and drops what still comes (rule 4)."""
        self._timer.cancel()
        self._state = _State.TURNED_AWAY
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)
        set_end(self._transport, FIN_ON_CLOSE)  # the alert says that it is no orderly end
        if not self._transport.is_closing():
            self._send_small()
        self._transport.write(last)
        self._transport.write_eof()
        self._transport.resume_reading()

    # Data.

    def _push(self) -> None:
        """Hands plaintext to the relay until there is none or the relay wants none."""
        if self._pushing:
            return
        self._pushing = True
        ended = self._ended
        while not self._paused and not self._ended and self._state is _State.JOINED:
            relay = self._relay
            if relay is None:
                break
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
        if self._ended and not ended and self._relay is not None:
            self._relay.ended(self)
        elif self._fin and not self._ended and not self._paused:
            self._fail(StreamResetError("connection truncated: FIN without close_notify", CANCEL))

    def _push_unread(self) -> None:
        """Pushes what came before the connection broke, read or unread. If it has close_notify, it is all: a
        peer that ends and closes at once, with bytes of ours unread, sends RST instead of FIN."""
        relay = self._relay
        if relay is None:
            return
        if words := unread(self._transport):
            self._tls.bio_write(words)
        try:
            while self._state is _State.JOINED:
                relay.received(self, self._tls.recv(RECORD_BYTES))
        except SSL.ZeroReturnError:
            self._ended = True
            relay.ended(self)
        except SSL.Error:
            return  # cut off, and `failed` says so

    def _answer(self) -> None:
        """Sends what OpenSSL wrote of its own accord while it read: key updates, warnings."""
        output = outgoing(self._tls)
        if not output:
            return
        self._send(output)
        if self._full:
            self._control_bytes += len(output)
            if self._control_bytes > CONTROL_LIMIT_BYTES:
                self._fail(StreamResetError("tls: the peer asks for key updates and reads nothing", CANCEL))

    def _broke(self, error: SSL.Error) -> None:
        """OpenSSL found the connection broken: a record that is none, or a fatal alert of the peer's."""
        self._turn_away(outgoing(self._tls))
        if self._relay is not None:
            self._relay.failed(self, StreamResetError(f"tls: {reason(error)}", CANCEL))

    def _fail(self, error: StreamResetError) -> None:
        self.abort()
        if self._relay is not None:
            self._relay.failed(self, error)
