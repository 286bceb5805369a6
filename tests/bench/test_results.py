from __future__ import annotations

import json
import platform
import ssl
from pathlib import Path
from typing import Any

import pytest

from bench.cases import CASES
from bench.image import OWN
from bench.measure import Measured, Sample
from bench.results import compare, document, load, machine, table
from bench.single import Curve, Figure

ROUND_TRIPS = next(case for case in CASES if case.name == "round trips of 64 bytes, 32 tunnels")


def sample(cpu_us: float, p99_us: float) -> Sample:
    return Sample(cpu_us / 1e6, 1e-6, 1000.0, p99_us / 2, p99_us, p99_us * 2)


def of_run(*ours_us: float) -> dict[str, Any]:
    """The results of a run in which the peer always takes 10 µs."""
    measured = Measured(
        ROUND_TRIPS,
        [sample(us, 90) for us in ours_us],
        [sample(10, 110) for _ in ours_us],
        [sample(0, 10) for _ in ours_us],
    )
    figures = [Figure("memory", "KiB", 2.0, 10.0, 0.25), Figure("krun true", "ms", 130.0, None, 120)]
    curves = [Curve("by tunnels", "tunnels", {1: 30.0, 4: 12.0}, {1: 40.0, 4: 11.0})]
    return json.loads(json.dumps(document([measured], figures, curves, machine(OWN))))


def line(text: str, part: str) -> str:
    (found,) = (line for line in text.splitlines() if part in line)
    return found


def test_the_table() -> None:
    text = table(of_run(9.0, 9.5, 10.5))
    cpu = line(text, "32 tunnels, µs a round trip ")
    assert cpu.split()[-6:] == ["10", "0.95", "(0.90-1.05)", "≤", "1", "met"]
    assert line(text, "45 / 90 / 180").split()[-4:] == ["0.80", "≤", "1", "met"]
    assert line(text, "memory").split()[-6:] == ["2.0", "10.0", "0.20", "≤", "0.25", "met"]
    assert line(text, "krun true").endswith("≤ 120 NOT MET")
    assert line(text, "by tunnels,").split()[-2:] == ["1", "4"]
    python = f"{platform.python_version()} ({OWN.whose})"
    assert line(text, "hgate and krun on") == f"hgate and krun on Python {python} with {ssl.OPENSSL_VERSION}"


DISTANT = [case for case in CASES if case.place.name == "40ms"]


def of_distance(first_byte_us: float, per_second: float) -> str:
    """The table of a run at 40 ms in which the peer takes 80 ms to the first byte, and does 100 MiB/s."""
    ours = Sample(1.0, 1e-6, per_second / 1024, first_byte_us, first_byte_us, first_byte_us)
    peer = Sample(1.0, 1e-6, 100 / 1024, 80_000, 80_000, 80_000)
    bulk = Sample(1.0, 1e-6, per_second / 1024, 0, 0, 0)
    measured = [Measured(case, [bulk if case.p50_mark is None else ours], [peer]) for case in DISTANT]
    return table(json.loads(json.dumps(document(measured, [], [], machine(OWN)))))


def test_distance() -> None:
    text = of_distance(40_000, 96)
    assert line(text, "first byte, warm, ms").split()[-6:] == ["40.0", "80.0", "0.50", "≤", "0.55", "met"]
    assert line(text, "bulk down, 1 tunnel, MiB/s").split()[-6:] == [
        "96.0",
        "100.0",
        "0.96",
        "≥",
        "0.95",
        "met",
    ]
    assert "40000 / 40000" not in text, "the latencies above are those that a process adds"
    text = of_distance(60_000, 50)
    assert line(text, "first byte, warm, ms").endswith("≤ 0.55 NOT MET")
    assert line(text, "bulk up, 8 tunnels, MiB/s").endswith("≥ 0.95 NOT MET")


def test_latencies_of_any_length_stay_apart() -> None:
    slow = of_run(9.0)
    slow["cases"][0]["medians"]["envoy"] |= {"p50_us": 71737.0, "p99_us": 228244.0, "p999_us": 1926000.0}
    text = table(slow)
    assert "45 / 90 / 180  71737 / 228244 / 1926000  " in line(text, "1926000")
    heads, _, numbers = (line(text, part) for part in ("latency, µs", "p50 / p99", "1926000"))
    assert heads.index("envoy") + len("envoy") == numbers.index("1926000") + len("1926000")


def test_a_mark_that_is_not_met_says_so() -> None:
    assert line(table(of_run(12.0, 13.0)), "32 tunnels, µs a round trip ").endswith("≤ 1 NOT MET")


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ((10.0, 10.2), (12.0, 12.5), "WORSE"),
        ((10.0, 10.2), (8.0, 8.2), "better"),
        ((10.0, 10.2), (10.3, 10.4), "+"),  # beyond the spread, within the noise
        ((9.0, 12.0), (11.0, 13.0), "+"),  # within the spread
    ],
)
def test_two_runs(old: tuple[float, ...], new: tuple[float, ...], word: str) -> None:
    text, worse = compare(of_run(*old), of_run(*new))
    last = text.splitlines()[-1].split()[-1]
    assert last.startswith(word)
    assert worse == (word == "WORSE")


def test_what_was_left_out_is_told() -> None:
    left_out = document([], [], [], machine(OWN), {"path": "haproxy"})
    assert line(table(left_out), "left out") == "path      left out: no haproxy"
    text, worse = compare(of_run(9.0), left_out)
    assert text.splitlines()[-1] == "hgate     not in the new results"
    assert not worse


def test_results_survive_their_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(of_run(9.0)))
    assert table(load(file)) == table(of_run(9.0))
