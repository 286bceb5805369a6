"""What Kubernetes takes for a name."""

from __future__ import annotations

import pytest

from shared.credentials.kubernetes.kubernetes_names import check_namespace, check_service_account


@pytest.mark.parametrize("name", ["demo", "a", "a-b-1", "1a", "a" * 63])
def test_names_of_both(name: str) -> None:
    assert check_namespace(name) == name
    assert check_service_account(name) == name


@pytest.mark.parametrize("name", ["", "Demo", "-a", "a-", "a/b", "a" * 64, "a b", "a%2fb", "..", "ä", "a\n"])
def test_names_of_neither(name: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        check_namespace(name)
    with pytest.raises(ValueError, match="service account"):
        check_service_account(name)


def test_only_an_account_may_have_dots() -> None:
    assert check_service_account("a.b-c.d") == "a.b-c.d"
    with pytest.raises(ValueError):
        check_namespace("a.b")
    with pytest.raises(ValueError):
        check_service_account(".".join(["a" * 60] * 5))
