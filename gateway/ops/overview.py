"""What the admin port's page shows, as JSON, made of the parts of all workers.

A list has at most ROWS rows and says how many there are. So the page's size is bounded with any number of
tunnels, routes and origins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.ops.cures import CURES
from gateway.ports.recent_refusals import MINUTES
from shared.errors import Flag
from shared.ops.http_server import Request, Response
from shared.ops.readiness import READY

if TYPE_CHECKING:
    from gateway.rules.routes import Route

ROWS = 100
"""Rows of each list: what a person may look through."""

TOTALS = ("tunnels", "opened", "failed", "bytes_sent", "bytes_recv")
"""Of all routes together, as of each route."""

MAX_FIND_CHARS = 64
"""Of a text that is looked for: with it a worker's path has at most 3 x 4 x 64 bytes more."""

Row = dict[str, Any]
Part = dict[str, Any]
"""What one process knows, ready for JSON: `OverviewPart` makes it."""

_FLAGS = {str(flag): flag for flag in Flag}


def shown(
    parts: Mapping[int, Part],
    *,
    workers: int = 1,
    silent: Iterable[str] = (),
    reload_is_good: bool,
) -> Response:
    """What the page gets: the `parts` of the processes, by their number, as one. `silent` has a line for each
    worker that has not responded; `reload_is_good` says whether the file is in effect as it is now."""
    every = list(parts.values())
    origins = _merged(every, "origins", ("origin",), _add_origin)
    origins["rows"].sort(key=lambda row: (not row["failure"], row["origin"]))
    tunnels = [
        {**row, "worker": number, "id": f"{number} {row['id']}"} if workers > 1 else row
        for number, part in parts.items()
        for row in part["tunnels"]["rows"]
    ]
    tunnels.sort(key=lambda row: -row["bytes_sent"] - row["bytes_recv"])
    return Response.json(
        {
            "version": _version(),
            "now": max((part["now"] for part in every), default=0.0),
            "up_s": min((part["up_s"] for part in every), default=0),
            "workers": workers,
            "pending": [
                f"worker {number}: {part['readiness']}" if workers > 1 else part["readiness"]
                for number, part in parts.items()
                if part["readiness"] != READY
            ],
            "silent": list(silent),
            "reload_is_good": reload_is_good,
            "connections": sum(part["connections"] for part in every),
            "connections_limit": sum(part["connections_limit"] for part in every),
            "totals": {field: sum(part["totals"][field] for part in every) for field in TOTALS},
            "routes": _merged(every, "routes", ("host", "source"), _add_route),
            "origins": origins,
            "tunnels": {"of": sum(part["tunnels"]["of"] for part in every), "rows": tunnels[:ROWS]},
            "tokens": _merged(every, "tokens", ("identity", "audience"), _add_token),
            "certificates": _merged(every, "certificates", ("certificate", "path"), _add_certificate),
            "refusals_minutes": MINUTES,
            "refusals": _refusals(every),
        }
    )


def wanted(request: Request) -> str:
    """The text that what is shown is to have in it; "": whatever there is."""
    return request.query.get("find", "")[:MAX_FIND_CHARS]


def source_of(route: Route, file: Path) -> str:
    """Where a route comes from: its object in the cluster, or FILE:LINE."""
    return route.source or (f"{file}:{route.line}" if route.line is not None else str(file))


def cut(rows: list[Row]) -> Row:
    """A list of at most ROWS rows, which says how many there are."""
    return {"of": len(rows), "rows": rows[:ROWS]}


# What comes first.


def life(row: Row) -> float:
    """What has no end, or no token, comes first."""
    return float("-inf") if row["left_s"] is None else row["left_s"]


# Rows of several processes.


def _merged(parts: list[Part], name: str, key: tuple[str, ...], add: Callable[[Row, Row], None]) -> Row:
    """The lists called `name` as one: rows that are the same by their fields `key` are added up."""
    rows: dict[tuple[Any, ...], Row] = {}
    of = 0
    for part in parts:
        of = max(of, part[name]["of"])
        for row in part[name]["rows"]:
            place = tuple(row[field] for field in key)
            if place in rows:
                add(rows[place], row)
            else:
                rows[place] = dict(row)
    return {"of": max(of, len(rows)), "rows": list(rows.values())[:ROWS]}


def _sum(row: Row, other: Row, *fields: str) -> None:
    for field in fields:
        row[field] += other[field]


def _add_route(row: Row, other: Row) -> None:
    _sum(row, other, "connections", *TOTALS)


def _add_origin(row: Row, other: Row) -> None:
    _sum(row, other, "connections", "draining", "streams", "room", "waiting")
    if other["failure"] and (not row["failure"] or other["failed_s_ago"] < row["failed_s_ago"]):
        for field in ("failure", "failed_s_ago", "next_dial_s"):
            row[field] = other[field]


def _add_token(row: Row, other: Row) -> None:
    row["accepted"] = row["accepted"] or other["accepted"]
    row["left_s"] = min(
        row["left_s"], other["left_s"], key=lambda left: float("-inf") if left is None else left
    )
    row["failure"] = row["failure"] or other["failure"]


def _add_certificate(row: Row, other: Row) -> None:
    for field in ("left_s", "roots_left_s"):
        if other[field] is not None:
            row[field] = other[field] if row[field] is None else min(row[field], other[field])


def _refusals(parts: list[Part]) -> list[Row]:
    """Those of all by flag, with what each flag means and what can be done; the most frequent first."""
    counts: dict[str, int] = {}
    cases: dict[str, dict[tuple[Any, ...], Row]] = {}
    for part in parts:
        for of_flag in part["refusals"]:
            flag = of_flag["flag"]
            counts[flag] = counts.get(flag, 0) + of_flag["count"]
            known = cases.setdefault(flag, {})
            for case in of_flag["cases"]:
                place = case["name"], case["from"], case["was_open"]
                before = known.get(place)
                if before is None:
                    known[place] = dict(case)
                    continue
                newer = case if case["last_s_ago"] < before["last_s_ago"] else before
                known[place] = {**newer, "count": before["count"] + case["count"]}
    return [
        {
            "flag": flag,
            "count": count,
            "meaning": _FLAGS[flag].meaning.replace("`", ""),
            "cure": CURES[_FLAGS[flag]].text,
            "section": CURES[_FLAGS[flag]].section,
            "cases": sorted(cases[flag].values(), key=lambda case: case["last_s_ago"]),
        }
        for flag, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


@cache
def _version() -> str:
    # At the first request: it takes 20 ms, which a start can spare.
    from shared import version

    return version.describe("hgate")
