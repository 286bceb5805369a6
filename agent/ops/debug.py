"""What krun's admin port shows: settings, state, tunnels, connections and certificates, without secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agent.config.explain import explained
from agent.config.layers import Layers

if TYPE_CHECKING:
    from agent.egress.egress_tunnel import EgressTunnel
    from agent.egress.plain_requests import PlainExchange
    from agent.tunnels.remote_ports import RemoteConnection
    from shared.net.http2.connection import Connection
    from shared.tunnel.tunnel_server import ServedTunnel


def settings(layers: Layers) -> list[dict[str, str]]:
    """Each variable with its value and where that comes from."""
    return [{"variable": one.variable, "value": one.value, "origin": one.origin} for one in explained(layers)]


def tunnels(
    of: Iterable[ServedTunnel | RemoteConnection | EgressTunnel | PlainExchange],
) -> list[dict[str, Any]]:
    """Those that are not over."""
    return [
        {
            "peer": one.record.peer,
            "target": one.record.name,
            "address": None if one.record.target is None else str(one.record.target),
            "identity": one.record.identity or None,
            "state": "connecting" if one.relay is None else "open",
            "age_s": round(one.age_s, 3),
            "bytes_sent": 0 if one.relay is None else one.relay.sent_bytes,
            "bytes_recv": 0 if one.relay is None else one.relay.received_bytes,
            "buffered_bytes": one.buffered_bytes,
        }
        for one in of
    ]


def connections(of: Iterable[Connection]) -> list[dict[str, Any]]:
    """The HTTP/2 connections, from front ends or to gateways."""
    return [
        {"peer": one.peer_name, "streams": one.open_streams, "buffered_bytes": one.buffered_bytes}
        for one in of
    ]


def certificates() -> list[dict[str, Any]]:
    """Those in use."""
    from shared.credentials.certificates import certificates_in_use

    return certificates_in_use.rows()
