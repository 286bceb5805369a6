"""Google's services, which the tests of this folder play."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.google import Google


@pytest.fixture
async def google() -> AsyncIterator[Google]:
    async with Google() as services:
        yield services
