"""Short answers on a stream: giving one, and reading why a peer refused.

A tunnel's peer either says 200 and carries bytes, or answers like any web server. What it then says belongs
in the log, never in the tunnel.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from shared.errors import HboneError, StatusError
from shared.http2.events import Headers
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.stream import Stream, header_value

REASON_BYTES = 512
"""How much of a refusal's body is read: the first line is what counts."""

REASON_TIMEOUT_S = 2.0
"""How long a refusal's body may take; the status alone is good enough."""

_TOKEN_REFUSED = "the token is invalid, expired or for another audience"
_TOKEN_WANTED = "no token was sent: the peer's own policy asks for one"
_NOT_ALLOWED = "the peer's own policy does not allow us"

_SERVICE_HINTS = {
    401: _TOKEN_REFUSED,
    403: "the caller lacks roles/run.invoker",
    404: "no such service, its ingress setting keeps this caller out, or krun knows no such target",
    429: "no instance of the service is free",
    502: "the container does not answer as HTTP/2: is its port named h2c?",
    503: "the container crashed, or krun could not reach the target",
    504: "no answer within the service's request timeout",
}
"""What a status means when it comes from Cloud Run or krun (Cloud Run troubleshooting guide)."""

_MESH_HINTS = {
    404: "the peer knows no such target",
    429: "the peer accepts no more tunnels",
    502: "the peer could not reach the target",
    503: "the peer could not reach the target",
    504: "the target did not answer the peer in time",
}
"""What it means when it comes from a member of the mesh, such as a ztunnel."""


class AskedOf:
    """Who was asked for a tunnel, and how: what the status of a refusal means depends on it. No dataclass:
    making one costs each start of `hbone` 0.25 ms."""

    __slots__ = ("in_mesh", "token_sent")

    def __init__(self, *, token_sent: bool, in_mesh: bool = False) -> None:
        """`token_sent`: the request carried a token. `in_mesh`: the far side is a member of the mesh, which
        decides by our certificate, and no service of Cloud Run."""
        self.token_sent = token_sent
        self.in_mesh = in_mesh

    def hint(self, status: int, challenge: bytes) -> str:
        """What `status` means, empty if nothing is known; `challenge` is the `www-authenticate` with it."""
        if status in (401, 403):
            return self._denied(status, wants_token=challenge[:6].lower() == b"bearer")
        return (_MESH_HINTS if self.in_mesh else _SERVICE_HINTS).get(status, "")

    def _denied(self, status: int, *, wants_token: bool) -> str:
        if not self.token_sent:
            if wants_token or not self.in_mesh:
                return _TOKEN_WANTED
            return f"{_NOT_ALLOWED} (no token was sent): do its rules name our identity and this target?"
        if not self.in_mesh:
            return _SERVICE_HINTS[status]
        return _TOKEN_REFUSED if wants_token else f"{_NOT_ALLOWED}, or {_TOKEN_REFUSED}"


class Answerable(Protocol):
    """A request that can be answered: a stream, or what stands for one."""

    @property
    def headers(self) -> Headers: ...
    def respond(self, headers: Headers) -> None: ...
    def write(self, data: Buffer) -> None: ...
    def close(self) -> None: ...


def answer(stream: Answerable, status: int, text: str, extra: Headers = ()) -> None:
    """Answers with a status, one line of text, and the headers `extra`."""
    body = text.encode() + b"\n"
    stream.respond(
        [
            (b":status", str(status).encode()),
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            *extra,
        ]
    )
    if header_value(stream.headers, b":method") != b"HEAD":  # the same headers, no content (RFC 9110 9.3.2)
        stream.write(body)
    stream.close()


async def refusal(stream: Stream, status: int, asked_of: AskedOf) -> StatusError:
    """Reads why the peer answered `status` instead of 200, lets the stream go, and returns it as an error."""
    reader = _FirstBytes()
    stream.join(reader)
    try:
        async with asyncio.timeout(REASON_TIMEOUT_S):
            await reader.done.wait()
    except TimeoutError:
        pass  # the status says enough
    stream.close()
    return StatusError(status, _text(stream, status, bytes(reader.data), asked_of))


def _text(stream: Stream, status: int, body: bytes, asked_of: AskedOf) -> str:
    text = f"answered {status}"
    location = header_value(stream.headers, b"location")
    if location:
        text += f" to {_one_line(location)}"
    plain = header_value(stream.headers, b"content-type").startswith(b"text/plain")
    line = _one_line(body) if plain else ""
    line = line or asked_of.hint(status, header_value(stream.headers, b"www-authenticate").strip())
    return f"{text}: {line}" if line else text


def _one_line(data: bytes) -> str:
    words = " ".join(data.decode("utf-8", "replace").split())
    return "".join(char if char.isprintable() else "?" for char in words)[:200]


class _FirstBytes:
    """Keeps the first bytes of a body (a leg's `RelayEnd`)."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.done = asyncio.Event()

    def received(self, leg: Leg, data: Buffer) -> None:
        self.data += data[: REASON_BYTES - len(self.data)]
        if len(self.data) >= REASON_BYTES:
            self.done.set()

    def ended(self, leg: Leg) -> None:
        self.done.set()

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.done.set()

    def full(self, leg: Leg) -> None: ...

    def drained(self, leg: Leg) -> None: ...
