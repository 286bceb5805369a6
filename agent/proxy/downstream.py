"""The client's side of a request, whatever carries it: an HTTP/2 stream, or an HTTP/1.1 connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.errors import StreamResetError
from shared.http2.events import Headers
from shared.net.legs.contract import Leg


class Downstream(Leg, Protocol):
    """What `shared.net.legs.stream.Stream` is on a server. Headers are HTTP/2's, with `:method`, `:scheme`,
    `:authority` and `:path`; a WebSocket is an extended CONNECT (RFC 8441)."""

    bodiless: bool
    """No body follows the headers."""

    on_gone: Callable[[StreamResetError], None] | None
    """Called when it breaks while it is joined to nobody."""

    @property
    def headers(self) -> Headers:
        """The request's."""

    @property
    def trailers(self) -> Headers | None:
        """The request's, once it has ended."""

    @property
    def over(self) -> bool:
        """Ended both ways, or reset."""

    @property
    def held_bytes(self) -> int:
        """What has come and nobody has taken for good, and what waits to be sent."""

    @property
    def unsent_bytes(self) -> int:
        """What waits to be sent."""

    def leave(self) -> None:
        """Undoes `join`: what comes is kept again, within a bound."""

    def inform(self, headers: Headers) -> None:
        """Sends an interim answer."""

    def respond(self, headers: Headers, *, end_stream: bool = False) -> None:
        """Sends the head of the answer; with `end_stream` it is all."""

    def end_with_trailers(self, trailers: Headers) -> None:
        """Ends the answer with trailers."""

    def reset(self, code: int) -> None:
        """Breaks it off, so that what the client has does not look whole; `code` is HTTP/2's."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends requests on a connection, where an mTLS end has proved it."""

    peer: str
    """The client's end of the connection, HOST:PORT."""

    identity: str
    """Its SPIFFE name."""

    certificate: bytes
    """What the app is told of its certificate, in x-forwarded-client-cert."""
