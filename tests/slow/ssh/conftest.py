"""The places of these tests: one at a time, for each is many processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slow.ssh.places import PLACES, Place, place


@pytest.fixture(scope="package", params=PLACES, ids=lambda one: f"{one[0]}, {one[1]}")
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Each kind of sshd by each way."""
    kind, way = request.param
    with place(kind, way, tmp_path_factory.mktemp("ssh")) as running:
        yield running
