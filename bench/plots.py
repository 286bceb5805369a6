"""A run's results as pictures (SVG): the ratios with their marks, and the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Json = dict[str, Any]

OURS, PEER = "#1f77b4", "#999999"


def draw(results: Json, folder: Path) -> list[Path]:
    """Writes the pictures into `folder` and returns their paths."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hbone"  # the same results make the same file
    written = [_ratios(results, folder / "ratios.svg")]
    if results["curves"]:
        written.append(_curves(results, folder / "growth.svg"))
    return written


def _ratios(results: Json, path: Path) -> Path:
    from matplotlib import pyplot

    cases = list(reversed(results["cases"]))
    figure, axes = pyplot.subplots(figsize=(9, 0.24 * len(cases) + 1.2), layout="constrained")
    places = range(len(cases))
    ratios = [case["ratio"] for case in cases]
    below = [case["ratio"] - case["ratio_low"] for case in cases]
    above = [case["ratio_high"] - case["ratio"] for case in cases]
    axes.barh(places, ratios, color=OURS, height=0.6)
    axes.errorbar(ratios, places, xerr=[below, above], fmt="none", ecolor="black", elinewidth=0.8)
    for place, case in zip(places, cases, strict=True):
        if case["mark"] is not None:
            axes.plot([case["mark"]] * 2, [place - 0.45, place + 0.45], color="red", linewidth=1.5)
    axes.axvline(1.0, color=PEER, linewidth=1)
    axes.set_yticks(places, [f"{case['place']}: {case['name']}" for case in cases], fontsize=7)
    axes.set_xlabel("CPU time, ratio to Envoy in the same place (less is better; red: the mark)", fontsize=8)
    axes.margins(y=0.01)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _curves(results: Json, path: Path) -> Path:
    from matplotlib import pyplot

    curves = results["curves"]
    figure, (row,) = pyplot.subplots(
        1, len(curves), figsize=(3.2 * len(curves), 2.8), layout="constrained", squeeze=False
    )
    for axes, curve in zip(row, curves, strict=True):
        for name, color in (("ours", OURS), ("peer", PEER)):
            points = {int(number): value for number, value in curve[name].items()}
            label = "Envoy" if name == "peer" else "hbone"
            axes.plot(list(points), list(points.values()), marker="o", color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(curve["name"], fontsize=8)
        axes.set_xlabel(curve["by"], fontsize=7)
        axes.set_ylabel("CPU, µs a round trip", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
