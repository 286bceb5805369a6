from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.port_range import PortRange
from agent.config.settings import from_env
from shared.address import MAX_PORT
from shared.errors import UsageError

PORTS = st.integers(1, MAX_PORT)


@given(PORTS, PORTS)
def test_what_it_shows_is_what_it_reads(one: int, other: int) -> None:
    ports = PortRange(min(one, other), max(one, other))
    assert PortRange.parse(str(ports)) == ports
    assert one in ports
    assert other in ports
    assert ports.first - 1 not in ports


@pytest.mark.parametrize("text", ["0", "65536", "9-8", "1-", "-1", "a", "1-2-3", "01", "1 - 2", "٣"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be ports or ranges|a range goes up"):
        PortRange.parse(text)


def test_the_variable() -> None:
    assert from_env({}).remote_ports == ()
    settings = from_env({"HBONE_REMOTE_PORTS": "9229, 8000-8010"})
    assert settings.remote_ports == (PortRange(9229, 9229), PortRange(8000, 8010))
    with pytest.raises(
        UsageError, match=r"^invalid HBONE_REMOTE_PORTS=all \(must be ports or ranges such as 8"
    ):
        from_env({"HBONE_REMOTE_PORTS": "all"})
