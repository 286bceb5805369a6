"""SOCKS as a server reads it: version 5 without authentication (RFC 1928), and 4 with 4a, which curl and
browsers still speak. CONNECT only. Bytes in, bytes out."""

from __future__ import annotations

import ipaddress
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from shared.address import Address, check_host_name

MAX_BYTES = 1024
"""Of a greeting or a request: the longest there is has 9 + 2 * 256 bytes."""

MAX_TEXT = 255
"""Of a user's name or a host's in version 4, as in version 5."""

VERSIONS = (4, 5)
"""The first byte of a client says which it speaks; no request of HTTP begins with such a byte."""

_NO_AUTHENTICATION, _NO_METHOD = 0x00, 0xFF
_CONNECT = 0x01
_IPV4, _NAME, _IPV6 = 0x01, 0x03, 0x04
_GRANTED_4, _REJECTED_4 = 0x5A, 0x5B


class Reply(IntEnum):
    """What a client of version 5 is told (RFC 1928 section 6)."""

    GRANTED = 0
    FAILED = 1
    NOT_ALLOWED = 2
    NETWORK_UNREACHABLE = 3
    HOST_UNREACHABLE = 4
    REFUSED = 5
    COMMAND_UNKNOWN = 7
    ADDRESS_UNKNOWN = 8


class SocksError(ValueError):
    """The client says what we do not understand; `answer` is what it is told."""

    def __init__(self, text: str, answer: bytes = b"") -> None:
        super().__init__(text)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Request:
    """What a client wants to be connected to."""

    target: Address
    version: int

    def answer(self, reply: Reply) -> bytes:
        """The answer to it."""
        return _answer(self.version, reply)


class Negotiation:
    """One client's, up to its request. Give `receive` all that has come and is not used up yet."""

    def __init__(self) -> None:
        self._greeted = False

    def receive(self, data: bytes) -> tuple[int, bytes, Request | None]:
        """How much of `data` is used up, what to send, and the request once it is whole. If nothing is used
        up, more has to come. Raises SocksError."""
        if not data:
            return 0, b"", None
        if self._greeted:
            used, request = _request_5(data)
            return used, b"", request
        if data[0] == 4:
            used, request = _request_4(data)
            return used, b"", request
        if data[0] != 5:
            raise SocksError(f"the first byte is {data[0]:#04x}: no SOCKS; is it a proxy of another kind?")
        return self._greeting(data)

    def _greeting(self, data: bytes) -> tuple[int, bytes, None]:
        if len(data) < 2 or len(data) < 2 + data[1]:
            return 0, b"", None
        if _NO_AUTHENTICATION not in data[2 : 2 + data[1]]:
            answer = bytes((5, _NO_METHOD))
            raise SocksError("the client insists on a password, and there is none here", answer)
        self._greeted = True
        return 2 + data[1], bytes((5, _NO_AUTHENTICATION)), None


def _request_5(data: bytes) -> tuple[int, Request | None]:
    if len(data) < 5:
        return 0, None
    version, command, _, kind, first = data[:5]
    if version != 5:
        raise SocksError(f"a request of version {version} after a greeting of version 5")
    sizes = {_IPV4: 4, _IPV6: 16, _NAME: 1 + first}
    if kind not in sizes:
        raise SocksError(f"an address of kind {kind}", _answer(5, Reply.ADDRESS_UNKNOWN))
    end = 4 + sizes[kind] + 2
    if len(data) < end:
        return 0, None
    if command != _CONNECT:
        raise SocksError(f"command {command}: only CONNECT is there", _answer(5, Reply.COMMAND_UNKNOWN))
    packed = data[4 : end - 2]
    host = _name(packed[1:], 5) if kind == _NAME else str(ipaddress.ip_address(packed))
    return end, Request(_target(host, data[end - 2 : end], 5), 5)


def _request_4(data: bytes) -> tuple[int, Request | None]:
    if len(data) < 8:
        return 0, None
    user_end = data.find(0, 8)
    if user_end < 0:
        _bound(data[8:])
        return 0, None
    end = user_end + 1
    host = str(ipaddress.IPv4Address(data[4:8]))
    if data[4:7] == bytes(3) and data[7]:  # 4a: the name follows
        name_end = data.find(0, end)
        if name_end < 0:
            _bound(data[end:])
            return 0, None
        host = _name(data[end:name_end], 4)
        end = name_end + 1
    if data[1] != _CONNECT:
        raise SocksError(f"command {data[1]}: only CONNECT is there", _answer(4, Reply.COMMAND_UNKNOWN))
    return end, Request(_target(host, data[2:4], 4), 4)


def _bound(text: bytes) -> None:
    if len(text) > MAX_TEXT:
        raise SocksError(f"a name of more than {MAX_TEXT} bytes", _answer(4, Reply.FAILED))


def _name(text: bytes, version: int) -> str:
    """A host's name, or an address written as one, which clients send, too."""
    try:
        host = text.decode("ascii").lower().removesuffix(".")
        if "%" not in host:  # a zone means the client's own link, and any character may be in it
            with suppress(ValueError):
                return str(ipaddress.ip_address(host))
        check_host_name(host)
        return host
    except ValueError as error:
        raise SocksError("the name is no host name", _answer(version, Reply.ADDRESS_UNKNOWN)) from error


def _target(host: str, port: bytes, version: int) -> Address:
    (number,) = struct.unpack("!H", port)
    if not number:
        raise SocksError("port 0", _answer(version, Reply.REFUSED))
    return Address(host, number)


def _answer(version: int, reply: Reply) -> bytes:
    """With 0.0.0.0:0 as the address that was bound, which nobody needs."""
    if version == 4:
        return bytes((0, _REJECTED_4 if reply else _GRANTED_4)) + bytes(6)
    return bytes((5, reply, 0, _IPV4)) + bytes(6)
