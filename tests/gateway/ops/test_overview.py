"""What the page gets: the parts of several workers as one, and what it says of an unusual world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.ops import overview
from gateway.ops.overview import ROWS, Part, life
from gateway.rules.routes import Route
from tests.support.overview_parts import part, tunnel

ROUTE = {
    "host": "*.svc",
    "source": "hgate.yaml:3",
    "kind": "tunnel, POST",
    "to": "https://a/",
    "token": "",
    "connections": 1,
    "tunnels": 1,
    "opened": 5,
    "failed": 2,
    "bytes_sent": 10,
    "bytes_recv": 20,
}
ORIGIN = {
    "origin": "https://a at b",
    "connections": 1,
    "draining": 0,
    "streams": 2,
    "room": 98,
    "waiting": 0,
    "failure": "",
    "failed_s_ago": 0,
    "next_dial_s": 0.0,
}
TOKEN = {"identity": "me", "audience": "https://a", "accepted": False, "left_s": 100, "failure": ""}
CERTIFICATE = {
    "certificate": "hbone",
    "path": "/c",
    "identity": "spiffe://a/b",
    "left_s": 9,
    "roots_left_s": None,
}


def refusal(count: int, *cases: dict[str, Any], flag: str = "NO_ROUTE") -> dict[str, Any]:
    return {"flag": flag, "count": count, "cases": list(cases)}


def case(name: str = "x", *, count: int = 1, ago: float = 1.0, message: str = "no") -> dict[str, Any]:
    of = {"name": name, "from": "10.0.0.1", "identity": "", "message": message}
    return {**of, "was_open": False, "count": count, "last_s_ago": ago}


def shown(*parts: Part, **how: Any) -> Any:
    response = overview.shown(
        dict(enumerate(parts, 1)), **{"workers": len(parts), "reload_is_good": True, **how}
    )
    assert (response.status, response.content_type) == (200, "application/json")
    return json.loads(response.body)


def test_numbers_are_sums_and_times_the_latest() -> None:
    page = shown(part(total=1, now=5.0, up_s=60), part(total=2, now=6.5, up_s=3))
    assert page["totals"] == dict.fromkeys(("tunnels", "opened", "failed", "bytes_sent", "bytes_recv"), 3)
    assert (page["connections"], page["connections_limit"]) == (2, 200)
    assert (page["now"], page["up_s"], page["workers"]) == (6.5, 3, 2)


def test_a_route_that_all_have_is_one_row() -> None:
    other = ROUTE | {"host": "b.svc"}
    page = shown(part(routes=[ROUTE, other]), part(routes=[ROUTE | {"bytes_sent": 5}, other]))
    assert [row["host"] for row in page["routes"]["rows"]] == ["*.svc", "b.svc"]
    assert page["routes"]["of"] == 2
    first = page["routes"]["rows"][0]
    assert (first["tunnels"], first["failed"], first["bytes_sent"], first["bytes_recv"]) == (2, 4, 15, 40)


def test_an_origin_that_one_cannot_reach_is_told_and_comes_first() -> None:
    failing = ORIGIN | {
        "origin": "https://z",
        "connections": 0,
        "failure": "refused",
        "failed_s_ago": 4,
        "next_dial_s": 2.5,
    }
    page = shown(part(origins=[ORIGIN, failing | {"failure": ""}]), part(origins=[failing]))
    assert [row["origin"] for row in page["origins"]["rows"]] == ["https://z", "https://a at b"]
    assert (page["origins"]["rows"][0]["failure"], page["origins"]["rows"][0]["next_dial_s"]) == (
        "refused",
        2.5,
    )


def test_tunnels_of_workers_have_their_number_and_those_that_carried_most_come_first() -> None:
    page = shown(part(tunnels=[tunnel("a", 5)]), part(tunnels=[tunnel("b", 9), tunnel("c", 1)]))
    assert [(row["from"], row["worker"]) for row in page["tunnels"]["rows"]] == [("b", 2), ("a", 1), ("c", 2)]
    assert len({row["id"] for row in page["tunnels"]["rows"]}) == 3


def test_what_is_not_ready_is_told() -> None:
    assert shown(part(), part(readiness="draining"))["pending"] == ["worker 2: draining"]
    assert shown(part(readiness="not ready, pending: warm"))["pending"] == ["not ready, pending: warm"]
    assert shown(part(), part())["pending"] == []


def test_one_process_is_no_worker() -> None:
    assert "worker" not in shown(part(tunnels=[tunnel("a")]))["tunnels"]["rows"][0]


def test_lists_are_cut_and_say_of_how_many() -> None:
    many = [tunnel(str(number), number) for number in range(3 * ROWS)]
    page = shown(part(tunnels=many), part(tunnels=many))
    assert (page["tunnels"]["of"], len(page["tunnels"]["rows"])) == (6 * ROWS, ROWS)
    routes = [ROUTE | {"host": f"{number}.svc"} for number in range(3 * ROWS)]
    page = shown(part(routes=routes), part(routes=routes))
    assert (page["routes"]["of"], len(page["routes"]["rows"])) == (3 * ROWS, ROWS)


@pytest.mark.parametrize(
    ("left", "other", "least"), [(100, 50, 50), (None, 50, None), (50, None, None), (1, 2, 1)]
)
def test_of_a_token_the_worst_is_told(left: int | None, other: int | None, least: int | None) -> None:
    page = shown(
        part(tokens=[TOKEN | {"left_s": left}]),
        part(tokens=[TOKEN | {"left_s": other, "failure": "refused", "accepted": True}]),
    )
    (row,) = page["tokens"]["rows"]
    assert (row["left_s"], row["failure"], row["accepted"]) == (least, "refused", True)


def test_of_a_certificate_the_first_end_is_told() -> None:
    page = shown(
        part(certificates=[CERTIFICATE]), part(certificates=[CERTIFICATE | {"left_s": 4, "roots_left_s": 7}])
    )
    (row,) = page["certificates"]["rows"]
    assert (row["left_s"], row["roots_left_s"]) == (4, 7)


def test_refusals_of_all_have_cause_cure_and_a_section() -> None:
    page = shown(
        part(refusals=[refusal(3, case(count=3, ago=9.0, message="old"))]),
        part(
            refusals=[
                refusal(2, case(count=2, ago=1.0, message="new"), case("y", ago=5.0)),
                refusal(9, flag="CONNECT"),
            ]
        ),
    )
    connect, no_route = page["refusals"]
    assert (connect["flag"], connect["count"], connect["cases"]) == ("CONNECT", 9, [])
    assert (no_route["count"], no_route["meaning"]) == (
        5,
        "no route matches the name; at krun: no such target",
    )
    assert no_route["cure"].startswith("If the name is a service of yours, add a route for it")
    assert no_route["section"] == "hgate-refuses-a-connection"
    told = [(one["name"], one["count"], one["message"], one["last_s_ago"]) for one in no_route["cases"]]
    assert told == [("x", 5, "new", 1.0), ("y", 1, "no", 5.0)]


def test_a_page_changes_no_part() -> None:
    lists = {"routes": [ROUTE], "origins": [ORIGIN], "tokens": [TOKEN], "certificates": [CERTIFICATE]}
    one = part(**lists, refusals=[refusal(1, case())], tunnels=[tunnel("a")])
    before = json.dumps(one)
    shown(one, one)
    assert json.dumps(one) == before


def test_no_worker_answers() -> None:
    page = shown(
        workers=2, silent=["worker 1 does not answer", "worker 2 does not answer"], reload_is_good=False
    )
    assert page["silent"] == ["worker 1 does not answer", "worker 2 does not answer"]
    assert (page["tunnels"], page["reload_is_good"], page["up_s"]) == ({"of": 0, "rows": []}, False, 0)


def test_what_has_no_token_comes_before_what_ends_soon() -> None:
    rows: list[dict[str, Any]] = [{"left_s": 5}, {"left_s": None}, {"left_s": -3}]
    assert sorted(rows, key=life) == [{"left_s": None}, {"left_s": -3}, {"left_s": 5}]


def test_where_a_route_comes_from() -> None:
    file = Path("/etc/hgate/hgate.yaml")
    assert overview.source_of(Route("a", line=7), file) == "/etc/hgate/hgate.yaml:7"
    assert overview.source_of(Route("a", source="Service demo/hello"), file) == "Service demo/hello"
    assert overview.source_of(Route("a"), file) == "/etc/hgate/hgate.yaml"
