from __future__ import annotations

import pytest

from bench.single import Figure


@pytest.mark.parametrize(
    ("figure", "ratio", "met"),
    [
        (Figure("", "", 3.0, 10.0, 0.25), 0.3, False),
        (Figure("", "", 2.0, 10.0, 0.25), 0.2, True),
        (Figure("", "ms", 121.0, None, 120), None, False),
        (Figure("", "ms", 119.0, None, 120), None, True),
        (Figure("", "ms", 119.0, 50.0), 2.38, None),
    ],
)
def test_a_mark_is_a_ratio_where_there_is_a_peer(
    figure: Figure, ratio: float | None, met: bool | None
) -> None:
    assert (figure.ratio, figure.met) == (ratio, met)
