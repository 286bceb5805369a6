"""Who was refused lately: what is kept, what is counted, and that both are bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ports.recent_refusals import MAX_EACH, MAX_TEXT_CHARS, MINUTES, RecentRefusals
from shared.errors import Flag, HboneError
from shared.tunnel.tunnel_record import TunnelRecord
from tests.support.wall_clock import Clock


def record(
    flag: Flag, name: str = "a.svc", peer: str = "10.0.0.1:5", text: str = "no", *, opened: bool = False
) -> TunnelRecord:
    return TunnelRecord(peer=peer, sni=name, flag=flag, error=HboneError(text), opened=opened)


@pytest.fixture
def turned() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def recent(turned: Clock) -> RecentRefusals:
    return RecentRefusals(turned)


def test_a_case_is_told_with_its_message_and_how_often(recent: RecentRefusals, turned: Clock) -> None:
    recent.add(record(Flag.NO_ROUTE, text="first"))
    turned.turn(10)
    recent.add(record(Flag.NO_ROUTE, peer="10.0.0.1:6", text="second"))
    turned.turn(5)
    assert recent.rows() == [
        {
            "flag": "NO_ROUTE",
            "count": 2,
            "cases": [
                {
                    "name": "a.svc",
                    "from": "10.0.0.1",
                    "identity": "",
                    "message": "second",
                    "was_open": False,
                    "count": 2,
                    "last_s_ago": 5,
                }
            ],
        }
    ]


def test_the_newest_case_comes_first(recent: RecentRefusals) -> None:
    for name in ("a", "b", "c", "a"):
        recent.add(record(Flag.CONNECT, name))
    (row,) = recent.rows()
    assert [(case["name"], case["count"]) for case in row["cases"]] == [("a", 2), ("c", 1), ("b", 1)]


def test_a_refusal_and_an_open_tunnel_that_broke_are_two_cases(recent: RecentRefusals) -> None:
    recent.add(record(Flag.UPSTREAM_RESET))
    recent.add(record(Flag.UPSTREAM_RESET, opened=True))
    (row,) = recent.rows()
    assert [case["was_open"] for case in row["cases"]] == [True, False]


@pytest.mark.parametrize("flag", [Flag.NONE, Flag.EMPTY, Flag.DOWNSTREAM_RESET, Flag.LIFETIME])
def test_what_is_nobody_s_failure_is_left_out(recent: RecentRefusals, flag: Flag) -> None:
    recent.add(record(flag))
    assert recent.rows() == []


def test_a_flood_of_one_flag_pushes_out_nothing_of_another_and_is_counted(recent: RecentRefusals) -> None:
    recent.add(record(Flag.CONNECT, "rare.svc"))
    for number in range(10 * MAX_EACH):
        recent.add(record(Flag.NO_ROUTE, f"random-{number}"))
    connect, flood = recent.rows()
    assert [case["name"] for case in connect["cases"]] == ["rare.svc"]
    assert flood["count"] == 10 * MAX_EACH
    assert [case["name"] for case in flood["cases"]][:2] == ["random-199", "random-198"]
    assert len(flood["cases"]) == MAX_EACH


def test_what_is_old_is_forgotten(recent: RecentRefusals, turned: Clock) -> None:
    recent.add(record(Flag.CONNECT, "old.svc"))
    turned.turn((MINUTES - 1) * 60)
    recent.add(record(Flag.CONNECT, "new.svc"))
    assert recent.rows()[0]["count"] == 2
    turned.turn(60)
    (row,) = recent.rows()
    assert (row["count"], [case["name"] for case in row["cases"]]) == (1, ["new.svc"])
    turned.turn(MINUTES * 60)
    assert recent.rows() == []


def test_a_name_of_the_hbone_port_is_what_was_asked_for(recent: RecentRefusals) -> None:
    asked = TunnelRecord(
        peer="[2001:db8::1]:7",
        name="db.svc:5432",
        identity="spiffe://a/b",
        flag=Flag.DENY,
        error=HboneError("x"),
    )
    recent.add(asked)
    (case,) = recent.rows()[0]["cases"]
    assert (case["name"], case["from"], case["identity"]) == ("db.svc:5432", "[2001:db8::1]", "spiffe://a/b")


def test_a_secret_in_a_message_is_hidden(recent: RecentRefusals) -> None:
    recent.add(record(Flag.IDENTITY_ERROR, text="answered: bearer abcdefghijklmnopqrstuvwxyz"))
    assert "abcdefgh" not in json.dumps(recent.rows())


TEXTS = st.text(max_size=3000)


@given(st.lists(st.tuples(st.sampled_from(Flag), TEXTS, TEXTS, TEXTS), max_size=60))
def test_whatever_peers_say_stays_short_printable_and_bounded(said: list[tuple[Flag, str, str, str]]) -> None:
    recent = RecentRefusals(Clock(0.0))
    for flag, name, peer, text in said:
        recent.add(record(flag, name, peer, text))
    for row in recent.rows():
        assert len(row["cases"]) <= min(MAX_EACH, row["count"])
        for case in row["cases"]:
            for field in ("name", "from", "message"):
                assert len(case[field]) <= MAX_TEXT_CHARS
                assert case[field].isprintable()
