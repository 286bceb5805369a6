"""The one table in which a stress run says what was demanded and what was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

WIDTHS = (30, 46, 64, 4)
"""Columns in characters: with their borders 157, which a wide terminal shows and a log keeps."""

HEAD = ("scenario", "demanded", "measured", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a demand, what came of it, and the verdict."""

    scenario: str
    demanded: str
    measured: str
    passed: bool


def render(rows: Iterable[Row]) -> str:
    """All rows as text with columns of fixed width; a long cell takes several lines."""
    line = "-+-".join("-" * width for width in WIDTHS)
    parts = [_cells(HEAD), line]
    for row in rows:
        verdict = "PASS" if row.passed else "FAIL"
        parts.append(_cells((row.scenario, row.demanded, row.measured, verdict)))
    return "\n".join(parts)


def _cells(cells: tuple[str, ...]) -> str:
    wrapped = [textwrap.wrap(text, width) or [""] for text, width in zip(cells, WIDTHS, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped))):
        texts = (column[number] if number < len(column) else "" for column in wrapped)
        lines.append(
            " | ".join(f"{text:{width}}" for text, width in zip(texts, WIDTHS, strict=True)).rstrip()
        )
    return "\n".join(lines)
