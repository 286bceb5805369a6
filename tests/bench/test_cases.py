from __future__ import annotations

from bench.cases import CASES, GIB


def test_a_case_is_found_by_its_place_and_name() -> None:
    names = [(case.place.name, case.name) for case in CASES]
    assert len(names) == len(set(names))


def test_the_marks_of_the_table() -> None:
    marks = {(case.place.name, case.name): case.mark for case in CASES if case.mark}
    assert marks["hgate", "new tunnels, 64 at a time"] == 0.7
    assert marks["krun", "new tunnels, 64 at a time"] == 1.0
    assert marks["forward", "bulk up, 1 tunnel"] == 0.9
    assert {case.latency_mark for case in CASES} == {None, 1.0}


def test_bulk_is_counted_in_gib() -> None:
    assert {case.per for case in CASES if case.scenario[0] == "bulk"} == {GIB}
    assert {case.per for case in CASES if case.scenario[0] != "bulk"} == {1}
