"""How many tokens may be asked for audiences that have not proved themselves: from one source, and in all."""

from __future__ import annotations

import pytest

from gateway.config.limit_settings import Limits
from gateway.sni import new_audiences
from gateway.sni.new_audiences import NewAudiences
from shared.errors import LimitError
from tests.support.wall_clock import Clock

HERE, THERE = "10.0.0.1:4711", "10.0.0.2:4711"


def made(clock: Clock, in_all: int, per_source: int) -> NewAudiences:
    limits = Limits(max_new_audiences=in_all, max_new_audiences_per_source=per_source)
    return NewAudiences(limits, now=clock)


def limit_of(audiences: NewAudiences, peer: str = HERE) -> str:
    """Which limit refuses the next one; empty: it is counted."""
    try:
        audiences.spend(peer, "a")
    except LimitError as error:
        return error.limit
    return ""


def test_of_one_source() -> None:
    clock = Clock()
    audiences = made(clock, 100, 3)
    assert [limit_of(audiences) for _ in range(5)] == ["", "", "", *["max_new_audiences_per_source"] * 2]
    assert limit_of(audiences, "10.0.0.1:1") == "max_new_audiences_per_source", "the port makes no difference"
    assert limit_of(audiences, THERE) == ""
    same_network = (f"[2001:db8::{number}]:1" for number in range(4))  # as admission.network_of has it
    assert [limit_of(audiences, peer) for peer in same_network].count("") == 3
    clock.turn(20)
    assert [limit_of(audiences) for _ in range(2)] == ["", "max_new_audiences_per_source"]
    clock.turn(3600)
    assert [limit_of(audiences) for _ in range(4)] == ["", "", "", "max_new_audiences_per_source"]


def test_of_all_together() -> None:
    clock = Clock()
    audiences = made(clock, 6, 2)
    found = [limit_of(audiences, f"10.0.0.{number // 2}:1") for number in range(8)]
    assert found == ["", "", "", "", "", "", "max_new_audiences", "max_new_audiences"]
    assert (audiences.most, audiences.left) == (6, 0.0)
    clock.turn(10)
    assert audiences.left == pytest.approx(1.0)
    assert [limit_of(audiences, f"10.0.1.{number}:1") for number in range(2)] == ["", "max_new_audiences"]


def test_a_refusal_counts_nothing() -> None:
    clock = Clock()
    audiences = made(clock, 6, 2)
    for _ in range(100):
        limit_of(audiences)
    assert audiences.left == 4.0
    clock.turn(30)
    assert limit_of(audiences) == ""


def test_a_check_counts_nothing_either() -> None:
    audiences = made(Clock(), 6, 2)
    for _ in range(100):
        audiences.check(HERE, "a")
    assert audiences.left == 6.0
    audiences.spend(HERE, "a")
    audiences.spend(HERE, "a")
    with pytest.raises(LimitError):
        audiences.check(HERE, "a")


@pytest.mark.parametrize(
    ("in_all", "per_source", "counted"), [(0, 0, 1000), (0, 5, 5), (5, 0, 5)], ids=["none", "source", "all"]
)
def test_no_bound(in_all: int, per_source: int, counted: int) -> None:
    audiences = made(Clock(), in_all, per_source)
    assert [limit_of(audiences) for _ in range(1000)].count("") == counted
    assert audiences.most == in_all


def test_what_a_refusal_says() -> None:
    audiences = made(Clock(), 100, 1)
    audiences.spend(HERE, "https://a")
    with pytest.raises(LimitError) as caught:
        audiences.spend(HERE, "https://b")
    assert str(caught.value) == (
        "no token is asked for https://b: no tunnel was ever opened with one, and 10.0.0.1 had 1 such"
        " audiences tried within a minute, which is max_new_audiences_per_source; if these are services of"
        " yours, raise it"
    )
    assert caught.value.flag == "LIMIT"
    audiences = made(Clock(), 1, 0)
    audiences.spend(HERE, "https://a")
    with pytest.raises(LimitError, match=r"and clients together had 1 .* which is max_new_audiences; "):
        audiences.spend(THERE, "https://b")


def test_workers_share() -> None:
    limits = Limits(max_new_audiences=100, max_new_audiences_per_source=20)
    audiences = NewAudiences(limits, share=lambda total: total // 4, now=Clock())
    assert [limit_of(audiences) for _ in range(100)].count("") == 5
    assert audiences.most == 25


def test_new_limits_count_at_once() -> None:
    limits = Limits(max_new_audiences=2, max_new_audiences_per_source=2)
    audiences = NewAudiences(limits, now=Clock())
    assert [limit_of(audiences) for _ in range(3)] == ["", "", "max_new_audiences_per_source"]
    audiences.use_limits(Limits(max_new_audiences=10, max_new_audiences_per_source=5))
    assert [limit_of(audiences) for _ in range(6)].count("") == 5
    assert audiences.most == 10


def test_only_so_many_sources_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_audiences, "MAX_SOURCES", 3)
    clock = Clock()
    audiences = made(clock, 0, 1)
    for number in range(3):
        assert limit_of(audiences, f"10.0.0.{number}:1") == ""
    clock.turn(59)
    assert limit_of(audiences, "10.0.0.3:1") == "", "the one that has had none for longest is forgotten"
    assert limit_of(audiences, "10.0.0.1:1") == "max_new_audiences_per_source"
    assert limit_of(audiences, "10.0.0.0:1") == ""
    assert len(audiences._sources) == 3
