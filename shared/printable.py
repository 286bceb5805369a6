"""Text that a terminal can be given: others may have written a part of it, such as a name."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with every character that is not printable, such as a terminal's orders, as its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
