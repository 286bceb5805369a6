"""Envoy between two addresses, as its configuration: what the tests that write one have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.address import Address

Json = dict[str, Any]

TYPES = "type.googleapis.com/envoy.extensions"
"""What the types of its extensions begin with."""

LOOPBACK = Address("127.0.0.1", 0)

HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
"""A cluster's `typed_extension_protocol_options`: HTTP/2 without being asked for it."""


def bootstrap(filter_chain: Json, *clusters: Json, runtime: Json | None = None) -> Json:
    """One listener and an admin port, each on any port of loopback, and these clusters. `runtime` has values
    of runtime flags."""
    listener = {"name": "in", "address": _address(LOOPBACK), "filter_chains": [filter_chain]}
    return {
        "admin": {"address": _address(LOOPBACK)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
        "layered_runtime": {"layers": [{"name": "static", "static_layer": runtime or {}}]},
    }


def http_chain(stat_prefix: str, routes: Sequence[Json], *, before: Sequence[Json] = (), **more: Any) -> Json:
    """A filter chain that serves HTTP, whatever the host, by `routes`. `before` are the HTTP filters before
    the router, `more` the connection manager's other settings."""
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"},
    }
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": stat_prefix,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [*before, router],
        **more,
    }
    return {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}


def cluster_of(name: str, address: Address, **more: Json) -> Json:
    """The cluster `name`, which is `address`; `more` are its other settings."""
    endpoint = {"endpoint": {"address": _address(address)}}
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
        **more,
    }


def _address(address: Address) -> Json:
    return {"socket_address": {"address": address.host, "port_value": address.port}}
