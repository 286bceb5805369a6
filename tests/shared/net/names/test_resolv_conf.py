from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared.net.names.resolv_conf import SearchList, search_list

POD = """search demo.svc.cluster.local svc.cluster.local cluster.local
nameserver 10.96.0.10
options ndots:5
"""


def read(folder: Path, text: str) -> SearchList:
    file = folder / "resolv.conf"
    file.write_text(text)
    return search_list(file)


def test_a_pod_s(tmp_path: Path) -> None:
    found = read(tmp_path, POD)
    assert found == SearchList(("demo.svc.cluster.local", "svc.cluster.local", "cluster.local"), 5)
    assert found.candidates("db.prod") == [
        "db.prod.demo.svc.cluster.local.",
        "db.prod.svc.cluster.local.",
        "db.prod.cluster.local.",
        "db.prod.",
    ]


def test_with_ndots_1_a_dotted_name_is_asked_as_it_is_first(tmp_path: Path) -> None:
    found = read(tmp_path, POD.replace("ndots:5", "ndots:1"))
    assert found.candidates("istiod.istio-system.svc") == [
        "istiod.istio-system.svc.",
        "istiod.istio-system.svc.demo.svc.cluster.local.",
        "istiod.istio-system.svc.svc.cluster.local.",
        "istiod.istio-system.svc.cluster.local.",
    ]
    assert found.candidates("db")[-1] == "db."


@pytest.mark.parametrize(
    ("text", "domains", "ndots"),
    [
        ("search a.example\nsearch b.example C.example.", ("b.example", "c.example"), 1),
        ("domain a.example", ("a.example",), 1),
        ("search a.example\ndomain b.example", ("b.example",), 1),
        ("search .", (), 1),
        ("search", (), 1),
        ("search a\noptions timeout:1 ndots:3 rotate", ("a",), 3),
        ("search a\noptions ndots:99", ("a",), 15),
        ("search a\noptions ndots:x ndots:", ("a",), 1),
        ("# search a\n;search b\nsearch c", ("c",), 1),
        ("search " + " ".join(f"d{number}" for number in range(99)), tuple(f"d{n}" for n in range(32)), 1),
    ],
)
def test_what_counts(tmp_path: Path, text: str, domains: tuple[str, ...], ndots: int) -> None:
    assert read(tmp_path, text) == SearchList(domains, ndots)


def test_without_a_search_list_it_is_the_host_s_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "vm.corp.example")
    assert read(tmp_path, "nameserver 10.0.0.1\n") == SearchList(("corp.example",))
    assert search_list(tmp_path / "none") == SearchList(("corp.example",))
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    assert search_list(tmp_path / "none") == SearchList()


def test_a_candidate_too_long_to_exist_is_left_out() -> None:
    name = ".".join(["x" * 60] * 4)
    assert SearchList(("svc.cluster.local",)).candidates(name) == [f"{name}."]
