"""What the tests of `hbone doctor` share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hbone.cloudrun.world import Credentials
from tests.hbone.doctor.looking import Bench


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.make(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def bench(credentials: Credentials, tmp_path: Path) -> Bench:
    return Bench(tmp_path, credentials)
