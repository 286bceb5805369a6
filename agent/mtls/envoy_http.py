"""Envoy's configuration where the app speaks HTTP: its HTTP connection manager (Envoy, "HTTP connection
manager").

Who may come in is decided per request, by the SPIFFE name in the client's certificate: a peer that may not
gets 403, as by Istio's AuthorizationPolicy, and not a broken handshake, which its own proxy would try again.
The app learns who calls: Envoy replaces what the client wrote in X-Forwarded-Client-Cert.

Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.settings import AppProtocol, RequestLog
from agent.mtls.envoy_json import TYPES, Json
from agent.mtls.envoy_records import request_log
from shared.trust.peer_policy import PeerPolicy

HEADERS_TIMEOUT_S = 10
"""For the headers of a request, from their first byte."""

MAX_STREAMS = 1000
"""Of one HTTP/2 connection at once: what Cloud Run gives an instance at most."""

STREAM_WINDOW_BYTES = 4 << 20
"""What a client may send on a stream before the app takes it: 100 MB/s over 40 ms."""

CONNECTION_WINDOW_BYTES = 8 << 20

APP_IDLE_S = 1
"""How long a connection to the app is kept without requests: less than apps do, which close theirs after some
seconds, perhaps just when a request is on its way."""

RBAC_STATS = "inbound_policy"


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the connection manager is told by krun's settings."""

    protocol: AppProtocol
    """What the app speaks; `auto`: what the client speaks."""
    idle_timeout_s: float
    """Without a byte, of a connection and of a stream; 0: never."""
    log: RequestLog
    """Which requests have a record."""


def http_filter(policy: PeerPolicy, settings: HttpSettings) -> Json:
    """The network filter that serves HTTP to whom `policy` lets in, from the cluster `app`."""
    idle = f"{settings.idle_timeout_s:.3f}s"
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "app",
            "timeout": "0s",
            # Neither can have reached the app's code.
            "retry_policy": {"retry_on": "reset-before-request,refused-stream", "num_retries": 1},
        },
    }
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "inbound",
        "codec_type": "AUTO",
        "route_config": {
            "name": "inbound",
            "virtual_hosts": [{"name": "app", "domains": ["*"], "routes": [route]}],
            "validate_clusters": True,
        },
        "http_filters": [_rbac(policy), _router()],
        # The true name of the client, and nothing that it has written itself.
        "forward_client_cert_details": "SANITIZE_SET",
        "set_current_client_cert_details": {"subject": True, "uri": True, "dns": True},
        # The connection comes from krun: Envoy knows no client's address that it could add.
        "use_remote_address": False,
        "skip_xff_append": True,
        "server_header_transformation": "PASS_THROUGH",
        "preserve_external_request_id": True,
        "proxy_100_continue": True,
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "request_headers_timeout": f"{HEADERS_TIMEOUT_S}s",
        "stream_idle_timeout": idle,
        "common_http_protocol_options": {"idle_timeout": idle},
        "http_protocol_options": {
            "accept_http_10": True,
            "enable_trailers": True,
            "header_key_format": _SPELT_AS_THEY_CAME,
        },
        "http2_protocol_options": {
            "max_concurrent_streams": MAX_STREAMS,
            "initial_stream_window_size": STREAM_WINDOW_BYTES,
            "initial_connection_window_size": CONNECTION_WINDOW_BYTES,
            "allow_connect": True,  # WebSockets (RFC 8441)
        },
        "access_log": request_log(settings.log),
    }
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}


def app_protocol_options(protocol: AppProtocol) -> Json:
    """A cluster's `typed_extension_protocol_options`: in what the app is spoken to."""
    http1: Json = {"enable_trailers": True, "header_key_format": _SPELT_AS_THEY_CAME}
    http2: Json = {"allow_connect": True}
    spoken: Json
    if protocol == "http1":
        spoken = {"explicit_http_config": {"http_protocol_options": http1}}
    elif protocol == "h2c":
        spoken = {"explicit_http_config": {"http2_protocol_options": http2}}
    else:
        spoken = {
            "use_downstream_protocol_config": {
                "http_protocol_options": http1,
                "http2_protocol_options": http2,
            }
        }
    kind = f"{TYPES}.upstreams.http.v3.HttpProtocolOptions"
    idle = {"common_http_protocol_options": {"idle_timeout": f"{APP_IDLE_S}s"}}
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {"@type": kind, **spoken, **idle}}


_SPELT_AS_THEY_CAME: Json = {
    "stateful_formatter": {
        "name": "envoy.http.stateful_header_formatters.preserve_case",
        "typed_config": {
            "@type": f"{TYPES}.http.header_formatters.preserve_case.v3.PreserveCaseFormatterConfig"
        },
    }
}
"""HTTP/1.1's field names: some apps look at their capitals."""


def _rbac(policy: PeerPolicy) -> Json:
    names = [_named(regex) for regex in policy.allow.regexes()]
    who: Json = {"or_ids": {"ids": names}}
    if policy.deny:
        denied = {"or_ids": {"ids": [_named(regex) for regex in policy.deny.regexes()]}}
        who = {"and_ids": {"ids": [who, {"not_id": denied}]}}
    rules = {
        "action": "ALLOW",
        "policies": {"peers": {"permissions": [{"any": True}], "principals": [who]}},
    }
    kind = f"{TYPES}.filters.http.rbac.v3.RBAC"
    told = {"@type": kind, "rules": rules, "rules_stat_prefix": RBAC_STATS}
    return {"name": "envoy.filters.http.rbac", "typed_config": told}


def _named(regex: str) -> Json:
    return {"authenticated": {"principal_name": {"safe_regex": {"regex": regex}}}}


def _router() -> Json:
    kind = f"{TYPES}.filters.http.router.v3.Router"
    # The app has no use for x-envoy-*.
    return {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": kind, "suppress_envoy_headers": True},
    }
