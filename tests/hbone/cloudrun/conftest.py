"""Certificates and keys, made once for all tests of the stand-in."""

from __future__ import annotations

import pytest

from tests.hbone.cloudrun.world import Credentials


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.make(tmp_path_factory.mktemp("cloudrun"))
