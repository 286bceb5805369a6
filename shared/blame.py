"""Says what an error is about, where its own text does not."""

from __future__ import annotations

from shared.errors import HboneError, UnavailableError


def about(what: str, error: HboneError, more: str = "") -> UnavailableError:
    """`error` with `what` before its text and `more` behind it, and with its exit code."""
    blamed = UnavailableError(f"{what}: {error}{more}")
    blamed.exit_code = error.exit_code
    return blamed
