"""A network of the test's own."""

from __future__ import annotations

from tests.path.conftest import network

__all__ = ["network"]
