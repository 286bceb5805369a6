"""Who gets how many of the open files; `test_app.py` has a krun that has too few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.settings import from_env
from agent.tunnels.descriptors import (
    LEAST,
    OWN_FILES,
    STS_FILES,
    Shares,
    egress_share,
    share_out,
)

COUNTS = st.integers(1, 100_000)


def test_what_fits_is_what_was_wanted() -> None:
    wanted = Shares(1000, 1000, 1000)
    assert share_out(5064, wanted, files_per_tunnel=3, token_exchange=False) == wanted
    assert share_out(5063, wanted, files_per_tunnel=3, token_exchange=False) != wanted
    assert share_out(5127, wanted, files_per_tunnel=3, token_exchange=True) != wanted


@pytest.mark.parametrize(
    ("files", "shares"),
    [
        (4096, Shares(842, 1000, 506)),
        (2048, Shares(330, 746, 248)),
        (1024, Shares(160, 360, 120)),
        (64, Shares(16, 16, 16)),
    ],
)
def test_each_kind_has_its_share(files: int, shares: Shares) -> None:
    assert share_out(files, Shares(1000, 1000, 1000), files_per_tunnel=3, token_exchange=False) == shares


def test_connections_leave_the_rest_to_requests() -> None:
    found = share_out(2048, Shares(1000, 5000, 10), files_per_tunnel=1, token_exchange=False)
    assert found == Shares(992, 2048 - OWN_FILES - 992 - 10, 10)


def test_tunnels_get_what_requests_do_not_want() -> None:
    found = share_out(2048, Shares(5000, 100, 10), files_per_tunnel=1, token_exchange=False)
    assert found == Shares(2048 - OWN_FILES - 110, 100, 10)


@given(files=COUNTS, tunnels=COUNTS, requests=COUNTS, connections=COUNTS, per_tunnel=st.sampled_from([1, 3]))
def test_nobody_gets_more_than_there_is_or_than_was_wanted(
    files: int, tunnels: int, requests: int, connections: int, per_tunnel: int
) -> None:
    wanted = Shares(tunnels, requests, connections)
    found = share_out(files, wanted, files_per_tunnel=per_tunnel, token_exchange=True)
    for got, most in (
        (found.tunnels, tunnels),
        (found.requests, requests),
        (found.connections, connections),
    ):
        assert min(LEAST, most) <= got <= most
    used = OWN_FILES + STS_FILES + found.tunnels * per_tunnel + found.requests + found.connections
    assert used <= max(files, OWN_FILES + STS_FILES + LEAST * (per_tunnel + 2))


def test_the_app_s_own_connections_have_a_quarter_at_most() -> None:
    settings = from_env({"HBONE_EGRESS": "1=db:1", "HBONE_EGRESS_GATEWAY": "hgate"})
    assert [egress_share(settings, files) for files in (100_000, 4000, 400, 1)] == [1000, 1000, 100, LEAST]
    assert egress_share(from_env({}), 100_000) == 0
