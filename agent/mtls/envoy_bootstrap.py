"""Envoy's configuration as the mTLS end on port 15003: its bootstrap, its secrets' files, its access log.

Pure functions.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.mtls.envoy_names import name_matchers
from shared.address import Address
from shared.errors import (
    DeniedError,
    Flag,
    HboneError,
    RefusedError,
    RevokedError,
    StreamResetError,
    TlsFailureError,
)
from shared.http2.frames import CANCEL
from shared.net.tls import certificate_folder
from shared.trust.peer_policy import PeerPolicy
from shared.tunnel.tunnel_record import TunnelRecord

Json = dict[str, Any]

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
_TYPES = "type.googleapis.com/envoy.extensions"


def bootstrap(
    *,
    listen: Address,
    app: Address,
    policy: PeerPolicy,
    secrets_folder: Path,
    connect_timeout_s: float,
    alpn: Sequence[str],
) -> Json:
    """Envoy's configuration: mTLS on `listen`, its bytes to `app`, the admin interface on ADMIN_SOCKET in
    `secrets_folder`.

    `listen` has an IP address. `alpn` is what a client may be told it speaks, the first that it offers;
    without any in common Envoy goes on without ALPN. `connect_timeout_s` is what the app may take to accept,
    in seconds. The files of `secrets` have to be in `secrets_folder`. Raises ValueError for an empty allow
    list, which Envoy would take for "everybody".
    """
    return {
        "node": {"id": "krun", "cluster": "krun"},  # secret discovery asks for it, nobody is told
        "admin": {"address": {"pipe": {"path": str(secrets_folder / ADMIN_SOCKET), "mode": 0o600}}},
        "static_resources": {
            "listeners": [_listener(listen, _downstream_tls(policy, secrets_folder, alpn))],
            "clusters": [_cluster(app, connect_timeout_s)],
        },
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{_TYPES}.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        "max_active_downstream_connections": MAX_CONNECTIONS,
                    },
                }
            ]
        },
    }


def secrets(certificates: Path, revocation_lists: str = "") -> dict[str, Json]:
    """The secret discovery files by file name: they point Envoy at the files in the folder `certificates`
    and have it watch that folder, where files are renamed into place or links are turned (Envoy, "Secret
    discovery service", certificate rotation). `revocation_lists` in PEM are in them, for they may be in
    another folder, and Envoy watches one; without any nobody is revoked."""
    files = certificate_folder.find(certificates)
    watched = {"watched_directory": {"path": str(certificates)}}
    own = {
        "tls_certificate": {
            "certificate_chain": {"filename": str(files.certificates)},
            "private_key": {"filename": str(files.private_key)},
            **watched,
        }
    }
    roots: Json = {
        "validation_context": {"trusted_ca": {"filename": str(files.roots)}, **watched},
    }
    if revocation_lists:
        roots["validation_context"]["crl"] = {"inline_string": revocation_lists}
    kind = f"{_TYPES}.transport_sockets.tls.v3.Secret"
    return {
        f"{name}.json": {"resources": [{"@type": kind, "name": name, **secret}]}
        for name, secret in ((OWN_SECRET, own), (ROOTS_SECRET, roots))
    }


def _listener(listen: Address, tls: Json) -> Json:
    proxy = {
        "@type": f"{_TYPES}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "inbound",
        "cluster": "app",
        # A peer that is refused must not reach the app, not even with an empty connection. Before Envoy 1.38
        # the second setting was optional; what comes before the app has accepted waits within it.
        "upstream_connect_mode": "ON_DOWNSTREAM_TLS_HANDSHAKE",
        "max_early_data_bytes": BUFFER_BYTES,
        # The tunnel's own limits end it; an hour of silence is no reason to.
        "idle_timeout": "0s",
        "access_log": _access_log(),
    }
    return {
        "name": "inbound",
        "address": _address(listen),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [
            {
                "filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}],
                "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
                "transport_socket_connect_timeout": f"{HANDSHAKE_TIMEOUT_S}s",
            }
        ],
    }


def _downstream_tls(policy: PeerPolicy, secrets_folder: Path, alpn: Sequence[str]) -> Json:
    def secret(name: str) -> Json:
        path = str(secrets_folder / f"{name}.json")
        source = {"resource_api_version": "V3", "path_config_source": {"path": path}}
        return {"name": name, "sds_config": source}

    return {
        "@type": f"{_TYPES}.transport_sockets.tls.v3.DownstreamTlsContext",
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
                "default_validation_context": {"match_typed_subject_alt_names": name_matchers(policy)},
                "validation_context_sds_secret_config": secret(ROOTS_SECRET),
            },
        },
    }


def _cluster(app: Address, connect_timeout_s: float) -> Json:
    return {
        "name": "app",
        "type": "STATIC" if _is_ip(app.host) else "STRICT_DNS",
        # Of `localhost` this takes the address that apps commonly listen on.
        "dns_lookup_family": "V4_PREFERRED",
        "connect_timeout": f"{connect_timeout_s:.3f}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [{"max_connections": MAX_CONNECTIONS}]},
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


ACCESS_LOG_KEY = "krun_connection"
"""Marks the lines of Envoy's standard error that are connection records."""


_NAME_DENIED = re.compile(
    r"TLS_error:\|\d+:SSL_routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED:verify_cert_failed:_SAN_matcher\b"
)
"""How Envoy 1.40 says that the chain is good and no name in the certificate is allowed; of a bad chain it has
`_X509_verify_cert` there. Matched from the start, because the peer's own names come later in the text."""


_REVOKED = re.compile(
    r"TLS_error:\|\d+:SSL_routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED:verify_cert_failed:"
    r"_X509_verify_cert:_certificate_verification_error_at_depth_\d+:"
    r"_certificate_revocation_check_against_provided_CRLs_failed:_certificate_revoked\b"
)
"""How it says that the certificate, or one above it, is on a revocation list. Another word at the end: there
is no list, or an overdue one."""


def access_record(line: str) -> TunnelRecord | None:
    """The record in a line that Envoy wrote when a connection ended; None if the line is none."""
    if ACCESS_LOG_KEY not in line:
        return None
    try:
        fields = json.loads(line)[ACCESS_LOG_KEY]
        peer, app = str(fields["peer"] or ""), str(fields["app"] or "")
        flags, tls_error = str(fields["flags"] or "-"), str(fields["tls_error"] or "")
        if app or (flags != "-" and not tls_error):
            # The app is dialled after the handshake only, so this peer was let in.
            error = _broken(flags, tls_error)
        else:
            error = _refused(tls_error, peer)
        identity = "" if isinstance(error, RefusedError) else peer
        return TunnelRecord(
            peer=str(fields["client"]),
            target=app,
            identity=identity,
            sent_bytes=int(fields["received"]),
            received_bytes=int(fields["sent"]),
            duration_s=int(fields["duration_ms"]) / 1000,
            flag=Flag.NONE if error is None else error.flag,
            error=error,
            opened=bool(identity),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _broken(flags: str, tls_error: str) -> HboneError | None:
    """How an admitted peer's connection ended, None for in order (Envoy, "Access logging")."""
    if tls_error:
        return StreamResetError(f"connection of the peer lost: {tls_error}", CANCEL)
    if flags != "-":
        return StreamResetError(f"envoy's response flags {flags}", CANCEL)
    return None


def _refused(tls_error: str, peer: str) -> HboneError:
    who = f" of {peer}" if peer else ""
    if not tls_error:
        return TlsFailureError(f"TLS handshake{who} not finished")
    kind: type[RefusedError] = TlsFailureError
    if _NAME_DENIED.match(tls_error):
        kind = DeniedError
    elif _REVOKED.match(tls_error):
        kind = RevokedError
    return kind(f"TLS handshake{who} refused: {tls_error}")


def _access_log() -> list[Json]:
    record = {
        "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
        "app": "%UPSTREAM_REMOTE_ADDRESS%",
        "peer": "%DOWNSTREAM_PEER_URI_SAN%",
        "received": "%BYTES_RECEIVED%",
        "sent": "%BYTES_SENT%",
        "duration_ms": "%DURATION%",
        "flags": "%RESPONSE_FLAGS%",
        "tls_error": "%DOWNSTREAM_TRANSPORT_FAILURE_REASON%",
    }
    stderr = {
        "@type": f"{_TYPES}.access_loggers.stream.v3.StderrAccessLog",
        "log_format": {"json_format": {ACCESS_LOG_KEY: record}},
    }
    return [{"name": "envoy.access_loggers.stderr", "typed_config": stderr}]
