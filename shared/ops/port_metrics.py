"""Metrics about the ports for operators themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shared.ops import families
from shared.ops.http_server import HttpServer

if TYPE_CHECKING:
    from prometheus_client import Metric


def port_families(servers: Sequence[HttpServer]) -> Iterator[Metric]:
    """What each has open, and has turned away."""
    yield families.OPS_CONNECTIONS.metric((server.name, server.open_connections) for server in servers)
    yield families.OPS_CONNECTIONS_LIMIT.metric(
        (server.name, server.limits.connections) for server in servers
    )
    yield families.OPS_EVICTED.metric((server.name, server.counts.evicted) for server in servers)
    yield families.OPS_REFUSALS.metric(
        (server.name, reason, count) for server in servers for reason, count in server.counts.refused.items()
    )
