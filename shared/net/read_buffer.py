"""The one buffer that all connections of the process read into.

A read is taken, scanned and passed on within one call of the event loop, so no two reads are ever under way
at once, and an idle connection needs no buffer of its own: that is most of a tunnel's memory.
Whoever wants to keep bytes beyond the call copies them.
"""

from __future__ import annotations

READ_BYTES = 64 << 10
"""One read: 256 KiB reads fell out of the cache and cost 20 % more CPU per byte, 16 KiB ones cost system
calls (ARCHITECTURE.md, decisions)."""

READ_BUFFER = memoryview(bytearray(READ_BYTES))
