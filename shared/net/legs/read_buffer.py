"""The one buffer that all connections of the process read into.

What is read is scanned and passed on within one call of the event loop, so no two reads are ever under way
at once, and an idle connection needs no buffer of its own: that is most of a tunnel's memory.
Bytes that are needed beyond the call are copied.
"""

from __future__ import annotations

READ_BYTES = 4 * (16384 - 9)
"""One read: it makes exactly four of the DATA frames that a session writes, each of which fills a TLS record.
64 KiB would leave 36 bytes for a fifth, here to be written and at the far side to be read; 16 KiB reads cost
system calls."""

LARGE_READ_BYTES = 256 << 10
"""One read of an HTTP/2 connection that is busy with large frames: several of them are for the same stream,
and go on in one write. The event loop has read as much of TLS at once in any case."""

BULK_READ_BYTES = 4 * READ_BYTES
"""One read of a busy TCP connection: with the headers of its sixteen frames it is one write of 256 KiB. Most
of what a byte costs is the kernel's work for each write, above all to wake its reader."""

LARGE_READ_BUFFER = memoryview(bytearray(LARGE_READ_BYTES))

READ_BUFFER = LARGE_READ_BUFFER[:READ_BYTES]
BULK_READ_BUFFER = LARGE_READ_BUFFER[:BULK_READ_BYTES]

LARGEST_BLOCK_BYTES = 1 << 20
"""What a large read is copied into on its way out, twice with TLS, fits several times."""

# A block as large as that is freed once: from then on glibc takes such blocks from the heap, and keeps twice
# as much of it when they are freed (mallopt(3), M_MMAP_THRESHOLD). Else each of them is got from the kernel
# and given back to it, page by page.
bytes(LARGEST_BLOCK_BYTES)
