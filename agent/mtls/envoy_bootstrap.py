"""Envoy's configuration as the mTLS end on port 15003: its bootstrap, and its secrets' files.

There are two filter chains. On one Envoy serves HTTP (`envoy_http`), on the other it passes the bytes on,
unread. An app that speaks HTTP has the first, one that does not the second. Where nobody has said which
(`auto`) there are both, and Envoy chooses by what the client offers by ALPN: it is what the client speaks.

Pure functions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from agent.mtls.app_alpn import HTTP_NAMES, alpn_offer, http_offer
from agent.mtls.envoy_http import HttpSettings, app_protocol_options, http_filter
from agent.mtls.envoy_json import TYPES, Json
from agent.mtls.envoy_names import name_matchers
from agent.mtls.envoy_records import HTTP_CHAIN, TCP_CHAIN, connection_log
from shared.address import Address
from shared.net.tls import certificate_folder
from shared.trust.peer_policy import PeerPolicy

BUFFER_BYTES = 128 * 1024
"""Of each connection on each side. Envoy's default of 1 MiB could take 2 GiB at Cloud Run's 1000 tunnels."""

MAX_CONNECTIONS = 2048
"""Twice what Cloud Run gives one instance at most, for tunnels that are still closing."""

HANDSHAKE_TIMEOUT_S = 10
"""For a client's whole TLS handshake: several round trips between continents, and no more."""

ADMIN_SOCKET = "admin.sock"
"""No port: the admin interface can end Envoy, and checks nothing of a request."""

OWN_SECRET = "own"
ROOTS_SECRET = "roots"


def bootstrap(
    *,
    listen: Address,
    app: Address,
    policy: PeerPolicy,
    secrets_folder: Path,
    connect_timeout_s: float,
    http: HttpSettings,
) -> Json:
    """Envoy's configuration: mTLS on `listen`, what it carries to `app`, the admin interface on ADMIN_SOCKET
    in `secrets_folder`.

    `listen` has an IP address. `connect_timeout_s` is what the app may take to accept, in seconds. The files
    of `secrets` have to be in `secrets_folder`. Raises ValueError for an empty allow list, which Envoy would
    take for "everybody".
    """
    listener: Json = {
        "name": "inbound",
        "address": _address(listen),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "access_log": connection_log(),
    }
    tcp = _chain(TCP_CHAIN, _tcp_filter(), _tls(alpn_offer(http.protocol), secrets_folder, policy))
    # Who comes in here is asked for each request.
    web = _chain(HTTP_CHAIN, http_filter(policy, http), _tls(http_offer(http.protocol), secrets_folder))
    if http.protocol == "tcp":
        listener["filter_chains"] = [tcp]
    elif http.protocol == "auto":
        inspector = f"{TYPES}.filters.listener.tls_inspector.v3.TlsInspector"
        listener["listener_filters"] = [
            {"name": "envoy.filters.listener.tls_inspector", "typed_config": {"@type": inspector}}
        ]
        listener["listener_filters_timeout"] = f"{HANDSHAKE_TIMEOUT_S}s"
        web["filter_chain_match"] = {"application_protocols": list(HTTP_NAMES)}
        listener["filter_chains"] = [web]
        listener["default_filter_chain"] = tcp
    else:
        listener["filter_chains"] = [web]
    return {
        "node": {"id": "krun", "cluster": "krun"},  # secret discovery asks for it, nobody is told
        "admin": {"address": {"pipe": {"path": str(secrets_folder / ADMIN_SOCKET), "mode": 0o600}}},
        "static_resources": {
            "listeners": [listener],
            "clusters": [_cluster(app, connect_timeout_s, http)],
        },
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{TYPES}.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        "max_active_downstream_connections": MAX_CONNECTIONS,
                    },
                }
            ]
        },
    }


def secrets(certificates: Path) -> dict[str, Json]:
    """The secret discovery files by file name: they point Envoy at the files in the folder `certificates`
    and have it watch that folder, where files are renamed into place or links are turned (Envoy, "Secret
    discovery service", certificate rotation)."""
    files = certificate_folder.find(certificates)
    watched = {"watched_directory": {"path": str(certificates)}}
    own = {
        "tls_certificate": {
            "certificate_chain": {"filename": str(files.certificates)},
            "private_key": {"filename": str(files.private_key)},
            **watched,
        }
    }
    roots = {"validation_context": {"trusted_ca": {"filename": str(files.roots)}, **watched}}
    kind = f"{TYPES}.transport_sockets.tls.v3.Secret"
    return {
        f"{name}.json": {"resources": [{"@type": kind, "name": name, **secret}]}
        for name, secret in ((OWN_SECRET, own), (ROOTS_SECRET, roots))
    }


def _chain(name: str, network_filter: Json, tls: Json) -> Json:
    return {
        "name": name,
        "filters": [network_filter],
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
        "transport_socket_connect_timeout": f"{HANDSHAKE_TIMEOUT_S}s",
    }


def _tcp_filter() -> Json:
    proxy = {
        "@type": f"{TYPES}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "inbound",
        "cluster": "app",
        # A peer that is refused must not reach the app, not even with an empty connection. Before Envoy 1.38
        # the second setting was optional; what comes before the app has accepted waits within it.
        "upstream_connect_mode": "ON_DOWNSTREAM_TLS_HANDSHAKE",
        "max_early_data_bytes": BUFFER_BYTES,
        # The tunnel's own limits end it; an hour of silence is no reason to.
        "idle_timeout": "0s",
    }
    return {"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}


def _tls(alpn: Sequence[str], secrets_folder: Path, policy: PeerPolicy | None = None) -> Json:
    """`alpn` is what a client may be told it speaks, the first that it offers; without any in common Envoy
    goes on without ALPN. With a `policy` the handshake of others fails."""

    def secret(name: str) -> Json:
        path = str(secrets_folder / f"{name}.json")
        source = {"resource_api_version": "V3", "path_config_source": {"path": path}}
        return {"name": name, "sds_config": source}

    matchers = {} if policy is None else {"match_typed_subject_alt_names": name_matchers(policy)}
    return {
        "@type": f"{TYPES}.transport_sockets.tls.v3.DownstreamTlsContext",
        "require_client_certificate": True,
        # Every connection proves its certificate anew, as at the built-in end.
        "disable_stateless_session_resumption": True,
        "disable_stateful_session_resumption": True,
        "common_tls_context": {
            "tls_params": {
                "tls_minimum_protocol_version": "TLSv1_2",
                "tls_maximum_protocol_version": "TLSv1_3",
            },
            "alpn_protocols": list(alpn),
            "tls_certificate_sds_secret_configs": [secret(OWN_SECRET)],
            "combined_validation_context": {
                "default_validation_context": matchers,
                "validation_context_sds_secret_config": secret(ROOTS_SECRET),
            },
        },
    }


def _cluster(app: Address, connect_timeout_s: float, http: HttpSettings) -> Json:
    spoken = {}
    if http.protocol != "tcp":
        spoken["typed_extension_protocol_options"] = app_protocol_options(http.protocol)
    return {
        **spoken,
        "name": "app",
        "type": "STATIC" if _is_ip(app.host) else "STRICT_DNS",
        # Of `localhost` this takes the address that apps commonly listen on.
        "dns_lookup_family": "V4_PREFERRED",
        "connect_timeout": f"{connect_timeout_s:.3f}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": MAX_CONNECTIONS,
                    "max_pending_requests": MAX_CONNECTIONS,
                    "max_requests": MAX_CONNECTIONS,
                }
            ]
        },
        "load_assignment": {
            "cluster_name": "app",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(app)}}]}],
        },
    }


def _address(address: Address) -> Json:
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
