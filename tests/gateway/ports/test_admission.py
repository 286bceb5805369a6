"""Who is let in, by numbers, without a connection."""

from __future__ import annotations

import pytest

from gateway.config.limit_settings import Limits
from gateway.ports.admission import (
    LIMITS,
    Admission,
    Counts,
    Refusals,
    network_of,
    source_of,
)
from gateway.rules.routes import Route
from shared.address import Address
from shared.errors import LimitError

ROUTE = Route("*.demo", forward=Address("a", 1))


class Door:
    """An admission whose connections are counted here."""

    def __init__(self, limits: Limits, *, workers: int = 1) -> None:
        self.open = 0
        self.is_full = False
        self.admission = Admission(
            limits,
            share=lambda total: max(1, total // workers),
            open_connections=lambda: self.open,
            is_full=lambda: self.is_full,
        )

    def enter(self, peer: str) -> str:
        """Which limit refuses it, if one does."""
        try:
            self.admission.enter(peer)
        except LimitError as error:
            return error.limit
        self.open += 1
        return ""

    def leave(self, peer: str) -> None:
        self.open -= 1
        self.admission.leave(peer)


def test_connections_in_all() -> None:
    door = Door(Limits(max_connections=2))
    assert [door.enter(f"10.0.0.{number}:1") for number in range(3)] == ["", "", "max_connections"]
    door.leave("10.0.0.0:1")
    assert door.enter("10.0.0.9:1") == ""


def test_connections_of_one_address() -> None:
    door = Door(Limits(max_connections_per_source=2))
    assert [door.enter(f"[fd00::1]:{port}") for port in range(3)] == ["", "", "max_connections_per_source"]
    assert door.enter("[fd00::2]:1") == "", "another has its own"
    assert door.admission.sources.largest == 2
    door.leave("[fd00::1]:0")
    assert door.enter("[fd00::1]:9") == ""


def test_without_a_bound_one_address_may_have_all() -> None:
    door = Door(Limits(max_connections=3))
    assert [door.enter(f"10.0.0.1:{port}") for port in range(4)] == ["", "", "", "max_connections"]
    assert door.admission.most_per_source == 3


def test_nobody_while_buffers_are_full() -> None:
    door = Door(Limits())
    door.is_full = True
    assert door.enter("10.0.0.1:1") == "max_buffered"
    door.is_full = False
    assert door.enter("10.0.0.1:1") == ""


def test_the_tables_hold_only_who_is_there() -> None:
    door = Door(Limits())
    for number in range(1000):
        peer = f"10.0.{number % 200}.1:{number}"
        assert door.enter(peer) == ""
        door.admission.enter_route(ROUTE)
        door.leave(peer)
        door.admission.leave_route(ROUTE.host)
    assert door.admission.sources == door.admission.routes == {}


@pytest.mark.parametrize(
    ("route", "limits", "most"),
    [
        (ROUTE, Limits(max_connections=9), 9),
        (ROUTE, Limits(max_connections_per_route=2), 2),
        (Route("*.demo", max_connections=3), Limits(max_connections_per_route=2), 3),
        (Route("*.demo", max_connections=0), Limits(max_connections=9, max_connections_per_route=2), 9),
    ],
)
def test_connections_on_one_route(route: Route, limits: Limits, most: int) -> None:
    admission = Door(limits).admission
    for _ in range(most):
        admission.enter_route(route)
    with pytest.raises(LimitError, match=rf"^{most} connections on route \*\.demo are open, which is"):
        admission.enter_route(route)
    admission.enter_route(Route("*.other"))
    admission.leave_route(route.host)
    admission.enter_route(route)


def test_a_limit_that_is_lowered_refuses_and_ends_nobody() -> None:
    door = Door(Limits())
    assert [door.enter("10.0.0.1:1") for _ in range(5)] == [""] * 5
    door.admission.use_limits(Limits(max_connections_per_source=2))
    assert door.enter("10.0.0.1:1") == "max_connections_per_source"
    for _ in range(4):
        door.leave("10.0.0.1:1")
    assert door.enter("10.0.0.1:1") == ""


def test_a_worker_has_its_share() -> None:
    limits = Limits(max_connections=8, max_connections_per_source=4, max_connections_per_route=6)
    admission = Door(limits, workers=2).admission
    assert (admission.most_connections, admission.most_per_source, admission.most_per_route(ROUTE)) == (
        4,
        2,
        3,
    )


def test_refusals_by_limit() -> None:
    refusals = Refusals()
    refusals.add(LimitError("text", "max_buffered"))
    [family] = refusals.families()
    assert {sample.labels["limit"] for sample in family.samples} == set(LIMITS)
    assert {sample.labels["limit"]: sample.value for sample in family.samples if sample.value} == {
        "max_buffered": 1
    }


def test_routes_as_metrics() -> None:
    admission = Door(Limits(max_connections_per_route=5)).admission
    admission.enter_route(ROUTE)
    admission.opening.add(ROUTE.host)
    routes = [ROUTE, Route("*.other", max_connections=7)]
    now, most, opening, starting = admission.route_families(routes)
    assert [sample.value for sample in opening.samples] == [1, 0]
    assert [sample.value for sample in starting.samples] == [0, 0]
    assert [sample.value for sample in now.samples] == [1, 0]
    assert [sample.value for sample in most.samples] == [5, 7]


def test_counts_forget_what_is_none() -> None:
    counts = Counts()
    counts.add("a")
    counts.add("a")
    counts.drop("a")
    assert (counts, counts["a"], counts["b"], counts.largest) == ({"a": 1}, 1, 0, 1)
    counts.drop("a")
    counts.drop("a")
    assert (counts, counts.largest) == ({}, 0)


@pytest.mark.parametrize(
    ("peer", "source"), [("10.0.0.1:4431", "10.0.0.1"), ("[fd00::1]:4431", "[fd00::1]"), ("unknown", "")]
)
def test_the_address_without_its_port(peer: str, source: str) -> None:
    assert source_of(peer) == source


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("10.0.0.1:4431", "10.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]:4431", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::]:1", "2001:db8:1:2::/64"),
        ("[2001:db8:1:3::]:1", "2001:db8:1:3::/64"),
        ("[fe80::1%eth0]:1", "fe80::/64"),
        ("[::ffff:10.0.0.1]:1", "10.0.0.1"),
        ("unknown", "unknown"),
        ("", "unknown"),
    ],
)
def test_whose_share_a_client_s_look_ups_are(peer: str, network: str) -> None:
    assert network_of(peer) == network
