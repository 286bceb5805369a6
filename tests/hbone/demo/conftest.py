"""One running demo world for the tests that only look at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hbone.demo import mesh
from hbone.demo.mesh import Mesh


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    started = mesh.start(tmp_path_factory.mktemp("a demo"), "builtin")
    yield started
    started.stop()
