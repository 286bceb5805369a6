"""The clock that tests of tokens and their sources turn."""

from __future__ import annotations

import pytest

from tests.support.wall_clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
