"""What the gateway's tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support import gateway_world
from tests.support.gateway_world import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with gateway_world.world(tmp_path) as world:
        yield world
