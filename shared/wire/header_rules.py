"""What a decoded header list must be, and how much decoding one may cost.

Owned here: RFC 9113 sections 8.1.1 to 8.3 as a question with an answer (h2 has them as an error that ends the
connection), content-length, the size of a list, and an HPACK decoder with a bound where hpack has none. What
becomes of a stream with wrong headers is `session.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

import h2.exceptions
import h2.utilities
import hpack

from shared.wire.events import Headers

FIELD_OVERHEAD_BYTES = 32
"""What each field counts beyond its text (RFC 9113 section 6.5.2)."""

TABLE_UPDATES = 2
"""Changes of the dynamic table's size in one block: more are never needed (RFC 7541 section 4.2), and cost us
a microsecond for each byte of a block that has nothing else."""


def list_bytes(headers: Headers) -> int:
    """The size of a header list as MAX_HEADER_LIST_SIZE counts it (RFC 9113 section 6.5.2)."""
    return sum(len(name) + len(value) for name, value in headers) + FIELD_OVERHEAD_BYTES * len(headers)


def well_formed(headers: Headers, *, of_request: bool, trailers: bool = False) -> bool:
    """Whether a header section, or `trailers`, is one that RFC 9113 section 8 allows."""
    flags = h2.utilities.HeaderValidationFlags(
        is_client=not of_request,
        is_trailer=trailers,
        is_response_header=not of_request and not trailers,
        is_push_promise=False,
    )
    try:
        for _ in h2.utilities.validate_headers(headers, flags):
            pass  # it looks at each as it comes by
    except h2.exceptions.ProtocolError:
        return False
    return True


def content_length(headers: Headers) -> int | None:
    """What content-length promises in bytes, None without one.

    Raises:
        ValueError: it is no number, or there are several that differ (RFC 9110 section 8.6).
    """
    found: bytes | None = None
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit() or found not in (None, value):
                raise ValueError("content-length is not one number")
            found = value
    return None if found is None else int(found)


class BoundedDecoder(hpack.Decoder):
    """hpack's, which bounds the decoded list while it decodes, and here what stands in front of it too."""

    def __init__(self, max_header_list_bytes: int) -> None:
        super().__init__(max_header_list_bytes)
        self._updates = 0

    def decode(self, data: bytes, raw: bool = False) -> Iterable[hpack.HeaderTuple]:
        self._updates = 0
        return super().decode(data, raw)

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        self._updates += 1
        if self._updates > TABLE_UPDATES:
            raise hpack.HPACKDecodingError("too many table size updates")
        return super()._update_encoding_context(data)
