"""Defaults that have to fit together."""

from __future__ import annotations

from shared.net.pool.pool_limits import PoolLimits


def test_all_can_wait_who_can_be_served() -> None:
    limits = PoolLimits()
    assert limits.max_waiting == limits.streams_per_connection * limits.connections_per_origin


def test_google_s_front_ends_get_no_more_than_a_ping_in_a_minute() -> None:
    assert PoolLimits().ping_interval_s >= 60
