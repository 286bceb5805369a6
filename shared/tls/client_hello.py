"""The first thing a TLS client says: which name it wants, which protocols it speaks inside.

A ClientHello is read from the plaintext records at the start of a connection (RFC 8446 sections 4.1.2 and
5.1, RFC 5246 section 7.4.1.2, RFC 6066 section 3, RFC 7301 section 3.1), only as far as routing needs it.
No byte is changed, and nothing is kept between calls.

The rules:

1. "More bytes are needed" is None, never an error; an error, once raised for some bytes, is raised for all
   longer ones, so the caller may ask again after each read.
2. Framing (record headers, the declared length) is checked as soon as it is there. The hello itself is read
   once, when it is complete: a call with an incomplete one reads no more than MAX_RECORDS headers.
3. Whatever the bytes, the outcome is a ClientHello, None or a ClientHelloError.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from shared.errors import ClientHelloError, NotTlsError

MAX_RECORDS = 64
"""Most TLS records that one hello may be split over. OpenSSL and BoringSSL accept splits after any byte, and
clients that split do it into a few; one byte per record is an attack on whoever reassembles."""

MAX_HELLO_BYTES = 16384
"""Longest hello, by the length field of its handshake header. BoringSSL, so Envoy, accepts no longer one
(kMaxMessageLen); RFC 8446 would allow 2^24-1 bytes. A post-quantum hello has about 1700."""

MAX_PEEK_BYTES = MAX_HELLO_BYTES + 4 + 5 * MAX_RECORDS
"""With this many bytes at hand, `parse` answers something else than None: the hello, its handshake header,
and the headers of its records. A buffer of this size is enough."""

MAX_NAME_BYTES = 255
"""Longest server name on the wire, the limit of BoringSSL and OpenSSL; DNS ends at 253 characters."""

_RECORD_HEADER_BYTES = 5  # type, version, length
_MAX_RECORD_BYTES = 16384  # RFC 8446 section 5.1: 2^14 bytes of plaintext
_CONTENT_HANDSHAKE = 22
_VERSION_MAJOR = 3
_VERSION_MINORS = (1, 2, 3)  # TLS 1.0 to 1.2; TLS 1.3 writes 0x0301 or 0x0303

_MESSAGE_HEADER_BYTES = 4  # type, length
_MESSAGE_CLIENT_HELLO = 1

_FIXED_BYTES = 34  # legacy_version, random
_MAX_SESSION_ID_BYTES = 32

_EXTENSION_SERVER_NAME = 0
_EXTENSION_ALPN = 16
_NAME_TYPE_HOST = 0
_NAME_HEADER_BYTES = 5  # length of the list, type and length of its one name

_RECORD_HEADER = Struct("!BBBH")
_EXTENSION_HEADER = Struct("!HH")
_NAME_HEADER = Struct("!HBH")
_U16 = Struct("!H")


@dataclass(frozen=True)
class ClientHello:
    """What routing needs of a hello."""

    server_name: str | None
    """The server name in lower case, without the trailing dot; None if the client sent none."""

    alpn: tuple[str, ...]
    """The protocol names in the client's order, one character per byte (they may be any bytes, GREASE
    ones are); empty if the client sent none."""

    size: int
    """Bytes of the TLS records that carry the hello; what follows them is something else."""


def parse(data: bytes | bytearray | memoryview) -> ClientHello | None:
    """Reads the hello at the start of `data`, all bytes that the client has sent so far.

    None means that it is not complete. Raises NotTlsError if this is no TLS handshake and ClientHelloError
    if it is malformed or larger than MAX_RECORDS or MAX_HELLO_BYTES.
    """
    spans: list[tuple[int, int]] = []
    header = b""
    needed = seen = end = 0
    while True:
        length = _record_length(data, end)
        if length is None:
            return None
        start = end + _RECORD_HEADER_BYTES
        end = start + length
        seen += length
        if not needed:
            header += bytes(data[start : min(end, start + _MESSAGE_HEADER_BYTES - len(header))])
            needed = _message_bytes(header)
        if needed and seen > needed:
            # RFC 8446 section 5.1: a message before a change of keys ends where its record ends.
            raise ClientHelloError("malformed client hello: more handshake data in its last record")
        if end > len(data):
            return None
        spans.append((start, end))
        if seen == needed:
            return _read(_body(data, spans), end)
        if len(spans) == MAX_RECORDS:
            raise ClientHelloError(f"client hello too large: more than {MAX_RECORDS} tls records")


def _record_length(data: bytes | bytearray | memoryview, at: int) -> int | None:
    """Length of the record at `at`, without its header; None if the header is not complete."""
    have = len(data) - at
    if have < _RECORD_HEADER_BYTES:
        # The two bytes that tell TLS from something else are judged alone: who speaks another protocol may
        # send fewer than five and wait for an answer.
        kind = data[at] if have > 0 else _CONTENT_HANDSHAKE
        major = data[at + 1] if have > 1 else _VERSION_MAJOR
        if kind != _CONTENT_HANDSHAKE or major != _VERSION_MAJOR:
            raise _no_handshake_record(at, kind, major)
        return None
    kind, major, minor, length = _RECORD_HEADER.unpack_from(data, at)
    if kind != _CONTENT_HANDSHAKE or major != _VERSION_MAJOR:
        raise _no_handshake_record(at, kind, major)
    if minor not in _VERSION_MINORS:
        raise ClientHelloError(f"malformed client hello: record version 0x03{minor:02x}")
    if length == 0:
        raise ClientHelloError("malformed client hello: empty tls record")
    if length > _MAX_RECORD_BYTES:
        raise ClientHelloError(f"client hello too large: tls record of {length} bytes")
    return int(length)


def _no_handshake_record(at: int, kind: int, major: int) -> ClientHelloError:
    if at > 0:
        return ClientHelloError("malformed client hello: broken off by a record that is no handshake")
    got = f"0x{kind:02x}" if kind != _CONTENT_HANDSHAKE else f"0x{kind:02x} 0x{major:02x}"
    return NotTlsError(f"not tls: connection starts with {got}, is mTLS off at the client?")


def _message_bytes(header: bytes) -> int:
    """Bytes of the handshake message with this header, header included; 0 if the header is incomplete."""
    if header and header[0] != _MESSAGE_CLIENT_HELLO:
        raise ClientHelloError(f"malformed client hello: handshake message of type {header[0]}")
    if len(header) < _MESSAGE_HEADER_BYTES:
        return 0
    length = int.from_bytes(header[1:], "big")
    if length > MAX_HELLO_BYTES:
        raise ClientHelloError(f"client hello too large: {length} bytes, more than {MAX_HELLO_BYTES}")
    return _MESSAGE_HEADER_BYTES + length


def _body(data: bytes | bytearray | memoryview, spans: list[tuple[int, int]]) -> bytes:
    """The handshake message out of its records, without its header.

    One copy, and no view outlives this function: a view held by an error's traceback would forbid the
    owner of a bytearray to resize it.
    """
    view = memoryview(data)
    if len(spans) == 1:
        start, end = spans[0]
        return bytes(view[start + _MESSAGE_HEADER_BYTES : end])
    return b"".join([view[start:end] for start, end in spans])[_MESSAGE_HEADER_BYTES:]


def _read(body: bytes, size: int) -> ClientHello:
    server_name: str | None = None
    alpn: tuple[str, ...] | None = None
    at = _extensions_start(body)
    end = len(body)
    while at < end:
        if at + _EXTENSION_HEADER.size > end:
            raise ClientHelloError("malformed client hello: extension cut off")
        kind, length = _EXTENSION_HEADER.unpack_from(body, at)
        start = at + _EXTENSION_HEADER.size
        at = start + length
        if at > end:
            raise ClientHelloError("malformed client hello: extension cut off")
        if kind == _EXTENSION_SERVER_NAME:
            if server_name is not None:
                raise ClientHelloError("malformed client hello: two server_name extensions")
            server_name = _server_name(body[start:at])
        elif kind == _EXTENSION_ALPN:
            if alpn is not None:
                raise ClientHelloError("malformed client hello: two alpn extensions")
            alpn = _alpn(body[start:at])
    return ClientHello(server_name, alpn or (), size)


def _extensions_start(body: bytes) -> int:
    """Offset of the first extension; the length of `body` if there is no block of extensions (TLS 1.2)."""
    end = len(body)
    if end <= _FIXED_BYTES:
        raise ClientHelloError("malformed client hello: cut off before the session id")
    session_id = body[_FIXED_BYTES]
    if session_id > _MAX_SESSION_ID_BYTES:
        raise ClientHelloError(f"malformed client hello: session id of {session_id} bytes")
    at = _FIXED_BYTES + 1 + session_id
    if at + _U16.size > end:
        raise ClientHelloError("malformed client hello: cut off before the cipher suites")
    suites: int = _U16.unpack_from(body, at)[0]
    if suites == 0 or suites % 2:
        raise ClientHelloError(f"malformed client hello: cipher suites of {suites} bytes")
    at += _U16.size + suites
    if at >= end:
        raise ClientHelloError("malformed client hello: cut off before the compression methods")
    if body[at] == 0:
        raise ClientHelloError("malformed client hello: no compression method")
    at += 1 + body[at]
    if at == end:
        return at
    if at + _U16.size > end:
        raise ClientHelloError("malformed client hello: cut off before the extensions")
    extensions: int = _U16.unpack_from(body, at)[0]
    at += _U16.size
    if at + extensions != end:
        raise ClientHelloError("malformed client hello: extensions do not end where the hello ends")
    return at


def _server_name(extension: bytes) -> str:
    """The one host name in a server_name extension (RFC 6066 section 3).

    The RFC leaves room for other types of names; TLS libraries accept one entry, a host name, and so do we:
    the name that we route by must be the one that the TLS end sees.
    """
    if len(extension) < _NAME_HEADER_BYTES:
        raise ClientHelloError("malformed client hello: server name cut off")
    listed, kind, length = _NAME_HEADER.unpack_from(extension)
    if kind != _NAME_TYPE_HOST:
        raise ClientHelloError(f"malformed client hello: server name of type {kind}")
    if listed + _U16.size != len(extension) or length + _NAME_HEADER_BYTES != len(extension):
        raise ClientHelloError("malformed client hello: server_name is no list of one name")
    if length > MAX_NAME_BYTES:
        raise ClientHelloError(f"malformed client hello: server name of {length} bytes")
    name = extension[_NAME_HEADER_BYTES:].decode("latin-1").removesuffix(".")
    if not name:
        raise ClientHelloError("malformed client hello: empty server name")
    if not name.isascii() or not name.isprintable() or " " in name:
        raise ClientHelloError(f"malformed client hello: server name {name!a} is not printable ASCII")
    return name.lower()


def _alpn(extension: bytes) -> tuple[str, ...]:
    """The names in an ALPN extension (RFC 7301 section 3.1)."""
    end = len(extension)
    if end <= _U16.size or _U16.unpack_from(extension)[0] + _U16.size != end:
        raise ClientHelloError("malformed client hello: alpn is no list of names")
    names = []
    at = _U16.size
    while at < end:
        start = at + 1
        at = start + extension[at]
        if at == start or at > end:
            raise ClientHelloError("malformed client hello: alpn name empty or cut off")
        names.append(extension[start:at].decode("latin-1"))
    return tuple(names)
