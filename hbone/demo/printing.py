"""How both demos print: a line for each hop, with the time that it took, and one at the end."""

from __future__ import annotations

from shared.errors import EXIT_INTERNAL, EXIT_OK


def show(who: str, what: str, seconds: float | None = None) -> None:
    """Prints a line; `who` is empty for a further line of the same."""
    took = "" if seconds is None else f"  [{seconds * 1000:.1f} ms]"
    print(f"  {who:12}{what}{took}", flush=True)


def verdict(good: bool) -> int:
    """Prints the last line; returns the exit code."""
    print("demo: everything arrived as it should" if good else "demo: FAILED, see above", flush=True)
    return EXIT_OK if good else EXIT_INTERNAL
