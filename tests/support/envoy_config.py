"""Envoy between two addresses, as its configuration: what the tests that write one have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.address import Address
from shared.trust.spiffe import SpiffeId

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


def tcp_chain(cluster: str, **more: Any) -> Json:
    """A filter chain that carries bytes to `cluster`; `more` are the proxy's other settings."""
    proxy = {
        "@type": f"{TYPES}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "outbound",
        "cluster": cluster,
        **more,
    }
    return {"filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}]}


def tls_socket(
    end: str, files: Sequence[Path], alpn: str = "", peer: SpiffeId | None = None, **more: Any
) -> Json:
    """A transport socket for an `end`, Upstream or Downstream, with the certificates, key and, if they count,
    roots in `files`, by which it knows the `peer`; `more` are the end's other settings."""
    chain, key, *roots = ({"filename": str(file)} for file in files)
    common: Json = {"tls_certificates": [{"certificate_chain": chain, "private_key": key}]}
    if alpn:
        common["alpn_protocols"] = [alpn]
    if roots:
        common["validation_context"] = {"trusted_ca": roots[0]}
    if peer:
        name = {"san_type": "URI", "matcher": {"exact": str(peer)}}
        common["validation_context"]["match_typed_subject_alt_names"] = [name]
    context = {
        "@type": f"{TYPES}.transport_sockets.tls.v3.{end}TlsContext",
        "common_tls_context": common,
        **more,
    }
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


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
