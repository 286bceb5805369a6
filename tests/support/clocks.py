"""What a clock may be wrong by when a test compares two of its readings."""

from __future__ import annotations

ROUNDING_S = 0.002
"""uvloop's clock has whole milliseconds, and a difference of two floats is rounded by more, the longer the
machine has been up. A wait of a second may so be one of 0.999 by the clock."""
