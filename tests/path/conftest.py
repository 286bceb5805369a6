"""What holds for the tests of the whole path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.path.programs import MUCH_BYTES


@pytest.fixture(autouse=True)
def no_large_leftovers(tmp_path: Path) -> Iterator[None]:
    """pytest keeps the folders of three runs, which would be some gigabytes."""
    yield
    for file in tmp_path.iterdir():
        if file.stat().st_size >= MUCH_BYTES:
            file.unlink()
