from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_results import of_run


def test_the_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # of the extra `bench`, which `make test` does without
    from bench.plots import draw

    written = draw(of_run(9.0, 11.0), tmp_path)
    assert [path.name for path in written] == ["ratios.svg", "growth.svg"]
    assert all(path.read_text().startswith("<?xml") for path in written)
    before = [path.read_bytes() for path in written]
    draw(of_run(9.0, 11.0), tmp_path)
    assert [path.read_bytes() for path in written] == before
