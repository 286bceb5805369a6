"""The contract between the keeper of a workload's certificate and the authorities that sign it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Signed:
    """What an authority answered."""

    chain_pem: bytes
    """The new certificate and the intermediates that lead to a root, leaf first."""

    roots_pem: bytes = b""
    """The roots that the authority names itself; empty: it names none, and they are had elsewhere."""


class Signer(Protocol):
    """An authority that signs certificates for us."""

    @property
    def name(self) -> str:
        """Which one, with its address, for log lines and error texts."""
        ...

    async def sign(self, request_pem: bytes, lifetime_s: float) -> Signed:
        """A certificate for the request (PKCS #10, RFC 2986), valid for about `lifetime_s` seconds; the
        authority has the last word about that. Takes no longer than the signer's own timeouts.

        Raises SigningError, whose text names the authority and has nothing of any secret.
        """
        ...
