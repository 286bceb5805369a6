"""Short answers on a stream: giving one, and reading why a peer refused.

A tunnel's peer either says 200 and carries bytes, or answers like any web server. What it then says belongs
in the log, never in the tunnel.
"""

from __future__ import annotations

import asyncio

from shared.errors import HboneError, StatusError
from shared.net.legs import Buffer, Leg
from shared.net.stream import Stream, header_value
from shared.wire.events import Headers

REASON_BYTES = 512
"""How much of a refusal's body is read: the first line is what counts."""

REASON_TIMEOUT_S = 2.0
"""How long a refusal's body may take; the status alone is good enough."""

_HINTS = {
    401: "the token is invalid, expired or for another audience",
    403: "no token, or the caller lacks roles/run.invoker",
    404: "no such service, its ingress setting keeps this caller out, or krun knows no such target",
    429: "no instance of the service is free",
    502: "the container does not answer as HTTP/2: is its port named h2c?",
    503: "the container crashed, or krun could not reach the target",
    504: "no answer within the service's request timeout",
}
"""What a status means when it comes from Cloud Run or krun (Cloud Run troubleshooting guide)."""


def answer(stream: Stream, status: int, text: str, extra: Headers = ()) -> None:
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


async def refusal(stream: Stream, status: int) -> StatusError:
    """Reads why the peer answered `status` instead of 200, lets the stream go, and returns it as an error."""
    reader = _FirstBytes()
    stream.join(reader)
    try:
        async with asyncio.timeout(REASON_TIMEOUT_S):
            await reader.done.wait()
    except TimeoutError:
        pass  # the status says enough
    stream.close()
    return StatusError(status, _text(stream, status, bytes(reader.data)))


def _text(stream: Stream, status: int, body: bytes) -> str:
    text = f"answered {status}"
    location = header_value(stream.headers, b"location")
    if location:
        text += f" to {_one_line(location)}"
    plain = header_value(stream.headers, b"content-type").startswith(b"text/plain")
    line = _one_line(body) if plain else ""
    if line:
        text += f": {line}"
    elif status in _HINTS:
        text += f": {_HINTS[status]}"
    return text


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
