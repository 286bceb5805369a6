"""Which address is whose, of Services as the API server has them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cluster import service_addresses
from gateway.cluster.cluster_app import _asking_or_ported
from gateway.cluster.service_addresses import addresses_of


def service(name: str, *, namespace: str = "prod", **spec: Any) -> dict[str, Any]:
    """What is kept of one."""
    found = {"kind": "Service", "metadata": {"name": name, "namespace": namespace}, "spec": spec}
    kept = _asking_or_ported(found)
    assert kept is not None
    return kept


def taken(host: str) -> bool:
    return host.endswith(".prod.svc.cluster.local")


def named(*services: dict[str, Any]) -> dict[str, str]:
    found, left_out = addresses_of(services, "cluster.local", taken)
    assert left_out == 0
    return found


def test_addresses_of_both_families() -> None:
    db = service("db", clusterIP="10.96.0.7", clusterIPs=["10.96.0.7", "fd00:0::0007"])
    web = service("web", clusterIP="10.96.0.8")
    assert named(db, web) == {
        "10.96.0.7": "db.prod.svc.cluster.local",
        "fd00::7": "db.prod.svc.cluster.local",
        "10.96.0.8": "web.prod.svc.cluster.local",
    }


@pytest.mark.parametrize(
    "spec", [{}, {"clusterIP": "None", "clusterIPs": ["None"]}, {"clusterIP": ""}, {"clusterIP": "garbage"}]
)
def test_a_service_without_an_address(spec: dict[str, Any]) -> None:
    assert named(service("db", **spec)) == {}


def test_a_service_that_no_route_takes() -> None:
    assert named(service("db", namespace="demo", clusterIP="10.96.0.7")) == {}


def test_the_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_addresses, "MAX_ADDRESSES", 2)
    services = [service(f"s{n}", clusterIP=f"10.96.0.{n}") for n in range(5)]
    found, left_out = addresses_of(services, "cluster.local", taken)
    assert (len(found), left_out) == (2, 3)
