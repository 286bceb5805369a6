"""`limits:` of the gateway's file, read with the rest of it."""

from __future__ import annotations

import pytest

from gateway.config.config import parse
from gateway.config.limit_settings import Limits
from shared.errors import ConfigError
from shared.net.pool.pool_limits import PoolLimits


def test_limits() -> None:
    config = parse(
        "routes: []\nlimits: {hello_timeout: 500ms, connect_timeout: 3, response_timeout: 5m,"
        " drain_delay: 2s, drain_timeout: 0, max_connections: 5, streams_per_connection: 7,"
        " splice_pipes: 0}",
        "f.yaml",
    )
    assert config.limits == Limits(0.5, 3.0, 300.0, 2.0, 0.0, 5, 7, splice_pipes=0)
    config = parse(
        "routes: []\nlimits: {connect_timeout: 3, streams_per_connection: 7, connections_per_origin: 8,"
        " max_waiting: 9, upstream_idle_timeout: 1m, max_connection_age: 2h, ping_interval: 0,"
        " resolve_interval: 10s}",
        "f.yaml",
    )
    assert config.limits.pool() == PoolLimits(3.0, 7, 8, 9, 60.0, 7200.0, 0.0, resolve_interval_s=10.0)
    assert Limits().pool() == PoolLimits()
    assert parse("routes: []\nlimits: {max_connections: 5}", "f.yaml").limits == Limits(max_connections=5)
    limits = parse("routes: []\nlimits: {max_retries: 0, retry_budget_percent: 0}", "f.yaml").limits
    assert limits == Limits(max_retries=0, retry_budget_percent=0)


def test_limits_of_open_tunnels() -> None:
    config = parse(
        "routes: []\nlimits: {idle_timeout: 2h, max_tunnel_lifetime: 0, max_buffered: 1GiB,"
        " stream_window: 65535, connection_window: 1MiB, max_connections_per_source: 3,"
        " max_connections_per_route: 4, half_closed_timeout: 15m}",
        "f.yaml",
    )
    assert config.limits == Limits(
        idle_timeout_s=7200,
        max_tunnel_lifetime_s=0,
        max_buffered_bytes=1 << 30,
        stream_window_bytes=65535,
        connection_window_bytes=1 << 20,
        max_connections_per_source=3,
        max_connections_per_route=4,
        half_closed_timeout_s=900.0,
    )
    assert parse("routes: []\nlimits: {max_buffered: 0}", "f.yaml").limits.max_buffered_bytes == 0


def test_stalled_tunnels_do_not_fill_a_connection_by_default() -> None:
    limits, session = Limits(), Limits().pool().session
    assert (session.stream_window_bytes, session.most_stream_window_bytes) == (1 << 20, 64 << 20)
    assert limits.connection_window_bytes > limits.streams_per_connection * session.stream_window_bytes


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("idle_timeout: 500ms", "idle_timeout: must be 0 or between 1s and 604800s, not 500ms"),
        (
            "max_tunnel_lifetime: never",
            "max_tunnel_lifetime: must be a duration such as 10s, 500ms or 5m, not 'never'",
        ),
        ("max_buffered: 64 MB", "max_buffered: must be a size such as 64KiB, 256MiB or 1GiB, not '64 MB'"),
        ("max_buffered: 1KiB", "max_buffered: must be 0 or in 1048576..1125899906842624 bytes, not 1KiB"),
        (
            "connection_window: 64KiB",
            "connection_window: it is smaller than one tunnel's window: 1 MiB, or stream_window",
        ),
        ("max_connections_per_source: -1", "max_connections_per_source: must be a whole number, not '-1'"),
        ("ping_interval: 500ms", "ping_interval: must be 0 or between 1s and 604800s, not 500ms"),
        ("helo_timeout: 1s", "helo_timeout: unknown field, did you mean hello_timeout?"),
        ("hello_timeout: 0", "hello_timeout: must be between 0.001s and 3600s, not 0"),
        ("drain_timeout: 2h", "drain_timeout: must be between 0s and 3600s, not 2h"),
        ("max_connections: 0", "max_connections: must be in 1..1000000, not 0"),
        ("streams_per_connection: many", "streams_per_connection: must be a whole number, not 'many'"),
        ("splice_pipes: 10001", "splice_pipes: must be in 0..10000, not 10001"),
    ],
)
def test_a_wrong_limit(limit: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"routes: []\nlimits:\n  {limit}", "F")
    assert str(caught.value) == f"F:3: limits.{reason}"
