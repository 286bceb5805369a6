"""The limits of Cloud Run that the stand-in keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontEndLimits:
    """Cloud Run's limits."""

    request_timeout_s: float = 300.0
    """From a request's headers to the end of its response; 504, or a reset once the response has begun."""

    streams_per_connection: int = 100
    """What Google's front ends announce as MAX_CONCURRENT_STREAMS."""

    header_bytes: int = 60 << 10
    """URL and headers together, each field with 32 bytes more, as a container counts them (RFC 9113 section
    6.5.2); 431 beyond."""

    start_wait_s: float = 10.0
    """How long a request is held for an instance that starts; 429 then. Cloud Run: 10 s, or 3.5 times what an
    instance takes on average, if that is longer."""

    concurrency: int = 80
    """Requests that the one instance is given at once; 429 beyond."""
