"""Each entry leaves its target's promise whole, and so do the beginnings of the small ones and changed ones.

`run.py` looks for longer, guided by coverage. What it finds is cut down to a file in corpus/TARGET named by
what it is; until it is mended it stands in FAULTS.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, FuzzTarget, mutated, place_of

SMALL_BYTES = 600
"""Up to here every beginning of an entry is tried: twelve thousand executions in all, two seconds."""

FAULTS: dict[str, str] = {}
"""TARGET/ENTRY of what is broken now, and how."""


def replay(target: FuzzTarget, name: str, data: bytes) -> object:
    """The parameters of one entry's test."""
    place = f"{target.name}/{name}"
    marks = [pytest.mark.xfail(strict=True, reason=FAULTS[place])] if place in FAULTS else []
    return pytest.param(target, data, id=place, marks=marks)


@pytest.mark.parametrize(
    ("target", "data"),
    [replay(target, *entry) for target in TARGETS.values() for entry in target.entries().items()],
)
def test_an_entry_and_its_beginnings(target: FuzzTarget, data: bytes) -> None:
    target.check(data)
    if len(data) <= SMALL_BYTES:
        for end in range(len(data)):
            target.check(data[:end])


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@given(random=st.randoms(use_true_random=False))
def test_changed_entries(target: FuzzTarget, random: Random) -> None:
    kept = target.entries()
    data = mutated(random, list(kept.values()), target.max_bytes)
    try:
        target.check(data)
    except Exception as error:
        if place_of(error) not in {place_of(fault) for fault in faults(target)}:
            raise


def faults(target: FuzzTarget) -> Iterator[Exception]:
    """How the entries in FAULTS fail: a changed one may fail as they do."""
    for name, data in target.entries().items():
        if f"{target.name}/{name}" in FAULTS:
            try:
                target.check(data)
            except Exception as error:
                yield error


def test_every_fault_has_its_entry() -> None:
    kept = {f"{target.name}/{name}" for target in TARGETS.values() for name in target.entries()}
    assert set(FAULTS) <= kept
