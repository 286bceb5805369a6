"""What holds for every test: the event loop, and how many examples hypothesis tries.

Async tests run on uvloop, which serves in production. A folder's own conftest.py may choose otherwise for the
tests below it, and a test that names its loop itself is left alone.

HYPOTHESIS_PROFILE=deep tries 20,000 instead of 50 each, which takes minutes. No profile has a deadline: a
busy machine is no reason to fail.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import settings

pytest_plugins = ["tests.support.surroundings", "tests.support.secrets_search"]

settings.register_profile("fast", max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
