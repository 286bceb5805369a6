"""What an SSH server says before anybody has logged in: its version, and its host key.

A key exchange is begun as any client does, with curve25519-sha256, and left once the server has shown its key
(RFC 4253 sections 4.2, 6 and 7; RFC 8731). Nothing is encrypted by then, no user is named, and no key is
believed: the signature over the exchange is not checked, as ssh-keyscan does not check it. So a fingerprint
told here is to be compared, not trusted.
"""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BANNER_BYTES = 8192
"""Before the version a server may say other lines; RFC 4253 section 4.2 has no bound, OpenSSH 50 lines."""

MAX_PACKET_BYTES = 35_000
"""RFC 4253 section 6.1."""

VERSION = b"SSH-2.0-hbone_doctor"

_KEXINIT, _ECDH_INIT, _ECDH_REPLY = 20, 30, 31
_DISCONNECT, _IGNORE, _DEBUG = 1, 2, 4

KEX = (b"curve25519-sha256", b"curve25519-sha256@libssh.org")
HOST_KEYS = (
    b"ssh-ed25519",
    b"ecdsa-sha2-nistp256",
    b"ecdsa-sha2-nistp384",
    b"ecdsa-sha2-nistp521",
    b"rsa-sha2-512",
    b"rsa-sha2-256",
)
"""As ssh prefers them."""

_CIPHERS = (b"chacha20-poly1305@openssh.com", b"aes256-gcm@openssh.com", b"aes256-ctr", b"aes128-ctr")
_MACS = (b"hmac-sha2-256-etm@openssh.com", b"hmac-sha2-256", b"hmac-sha1")

_LENGTH = struct.Struct(">I")


class SshError(Exception):
    """What came is not what RFC 4253 has."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """A server's public key, as it is on the wire."""

    blob: bytes

    @property
    def kind(self) -> str:
        """Such as `ssh-ed25519`. Raises SshError."""
        name, _ = _string(self.blob, 0)
        return "".join(chr(byte) for byte in name if 32 < byte < 127)[:40]

    @property
    def fingerprint(self) -> str:
        """As ssh shows it: SHA256:BASE64."""
        digest = hashlib.sha256(self.blob).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


class Greeting:
    """A client's half of the beginning: `feed` it what comes, and send what `to_send` has.

    `version` is the server's, once it is there; `host_key` its key. A server that refuses all our algorithms
    has a version and no key; `done` is then true, too.
    """

    def __init__(self) -> None:
        self.version = ""
        self.host_key: HostKey | None = None
        self.done = False
        """Nothing more is wanted."""
        self.to_send = bytearray(VERSION + b"\r\n")
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Raises SshError if the server speaks no SSH."""
        self._data += data
        if not self.version and not self._read_version():
            return
        while not self.done and (payload := self._packet()) is not None:
            self._read(payload)

    def _read_version(self) -> bool:
        while (end := self._data.find(b"\n")) >= 0:
            line = bytes(self._data[:end]).rstrip(b"\r")
            del self._data[: end + 1]
            if line.startswith(b"SSH-"):
                if not line.startswith((b"SSH-2.0-", b"SSH-1.99-")):
                    raise SshError("an old version of SSH")
                self.version = "".join(chr(byte) if 31 < byte < 127 else "?" for byte in line[:255])
                self._packets_follow()
                return True
            if line.startswith(b"HTTP/"):
                raise SshError("HTTP")
        if len(self._data) > MAX_BANNER_BYTES or (self._data and not 31 < self._data[0] < 127):
            raise SshError("no SSH")
        return False

    def _packets_follow(self) -> None:
        self.to_send += _framed(_key_init())

    def _packet(self) -> bytes | None:
        """The payload of the next whole packet."""
        if len(self._data) < 5:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if not 2 <= length <= MAX_PACKET_BYTES:
            raise SshError("a packet of an impossible length")
        if len(self._data) < 4 + length:
            return None
        padding = self._data[4]
        if padding + 1 > length:
            raise SshError("a packet with impossible padding")
        payload = bytes(self._data[5 : 4 + length - padding])
        del self._data[: 4 + length]
        return payload

    def _read(self, payload: bytes) -> None:
        kind = payload[0] if payload else 0
        if kind == _KEXINIT:
            if not _agreed(payload, KEX):
                self.done = True
            else:
                self.to_send += _framed(bytes([_ECDH_INIT]) + _packed(_public_key()))
        elif kind == _ECDH_REPLY:
            blob, _ = _string(payload, 1)
            _string(blob, 0)
            self.host_key = HostKey(blob)
            self.done = True
        elif kind == _DISCONNECT:
            self.done = True
        elif kind not in (_IGNORE, _DEBUG):
            raise SshError("a packet that does not belong there")


def _key_init() -> bytes:
    """SSH_MSG_KEXINIT (RFC 4253 section 7.1)."""
    lists: Sequence[Sequence[bytes]] = (
        KEX,
        HOST_KEYS,
        *(_CIPHERS, _CIPHERS),
        *(_MACS, _MACS),
        *((b"none",), (b"none",)),
        *((), ()),
    )
    names = b"".join(_packed(b",".join(one)) for one in lists)
    return bytes([_KEXINIT]) + os.urandom(16) + names + b"\0" + bytes(4)


def _agreed(payload: bytes, ours: Sequence[bytes]) -> bool:
    """Whether the server knows one of our key exchanges."""
    theirs, _ = _string(payload, 17)
    return bool(set(theirs.split(b",")) & set(ours))


def _public_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().public_key().public_bytes_raw()


def _packed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _framed(payload: bytes) -> bytes:
    """A packet (RFC 4253 section 6): a multiple of eight bytes, with four of padding at least."""
    padding = 8 - (5 + len(payload)) % 8
    padding += 8 if padding < 4 else 0
    return _LENGTH.pack(1 + len(payload) + padding) + bytes([padding]) + payload + bytes(padding)


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    """A string, and where it ends. Raises SshError."""
    if at + 4 > len(data):
        raise SshError("a string that is cut off")
    (length,) = _LENGTH.unpack_from(data, at)
    end = at + 4 + length
    if end > len(data):
        raise SshError("a string that is cut off")
    return data[at + 4 : end], end
