"""What the tests of the whole path have."""

from __future__ import annotations

from tests.path.conftest import app, no_large_leftovers

__all__ = ["app", "no_large_leftovers"]
