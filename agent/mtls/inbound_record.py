"""What is known of a connection to the mTLS end when it is over, whichever end that is."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import HboneError


@dataclass(frozen=True, slots=True)
class InboundRecord:
    """What there is to say of one connection when it is over."""

    client: str
    """HOST:PORT of the TCP peer, the tunnel's end in this container."""

    app: str
    """HOST:PORT of the app."""

    identity: str
    """The SPIFFE name that the client proved and that was allowed; empty if it came to none."""

    sent_bytes: int
    """Plaintext, client to app."""

    received_bytes: int
    """Plaintext, app to client."""

    duration_s: float
    """From accept to the end."""

    error: HboneError | None
    """Why it was refused or broke; None after an orderly end."""
