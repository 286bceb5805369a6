"""Who hgate talks HBONE with: Envoys at both ends, and hgate itself as a process with both.

Owned here: their configurations. What they carry is the tests'.

    plain TCP → Envoy as an HBONE client → hgate's HBONE port → app        (`envoy_client`)
    hello and bytes → hgate as an HBONE client → Envoy as its server → app (`envoy_server`)
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hbone.demo.processes import Process
from shared.address import Address
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId
from tests.path.programs import envoy
from tests.support.envoy_config import (
    HTTP2,
    LOOPBACK,
    TYPES,
    Json,
    bootstrap,
    cluster_of,
    http_chain,
    tcp_chain,
    tls_socket,
)
from tests.support.hbone_port import TRUST_DOMAIN
from tests.support.world import PATIENCE_S, word_after

ZTUNNEL = SpiffeId.of_workload(TRUST_DOMAIN, "istio-system", "ztunnel")


@dataclass(frozen=True, slots=True)
class Hgate:
    """hgate as a process."""

    process: Process
    file: Path
    """Its configuration."""
    gateway: Address
    """Where it accepts connections by their SNI."""
    hbone: Address | None
    """Its HBONE port, if it has one."""
    admin: Address

    def connect(self) -> socket.socket:
        """A client's connection."""
        return socket.create_connection((self.gateway.host, self.gateway.port), PATIENCE_S)


def configure(file: Path, routes: list[Json], hbone: Mapping[str, Any] | None) -> None:
    """Writes hgate's file. JSON is YAML, too."""
    everything: Json = {
        "listen": [str(LOOPBACK)],
        "admin": str(LOOPBACK),
        "metrics": "off",
        "health": "off",
        "routes": routes,
        "limits": {"drain_delay": 0},
    }
    if hbone is not None:
        everything["hbone"] = {"listen": [str(LOOPBACK)], **hbone}
    file.write_text(json.dumps(everything))


@contextmanager
def hgate(
    folder: Path,
    *,
    routes: list[Json] | None = None,
    hbone: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Hgate]:
    """hgate with these routes and this `hbone:`, which has to stop in order."""
    file = folder / "hgate.yaml"
    configure(file, routes or [], hbone)
    arguments = ["-m", "gateway", "--config", str(file), "--log-format", "json"]
    process = Process("hgate", arguments, dict(environ or {}), folder)
    try:
        yield Hgate(
            process,
            file,
            Address.parse(word_after(process, "listening on ")),
            Address.parse(word_after(process, "hbone on ")) if hbone is not None else None,
            Address.parse(word_after(process, "admin on ")),
        )
    finally:
        assert process.stop() == 0


@contextmanager
def envoy_client(
    folder: Path, own: Path, server: Address, target: str, *, server_id: SpiffeId
) -> Iterator[Address]:
    """An Envoy that carries plain TCP to `target`, by HBONE to `server`; where it accepts connections."""
    cluster = cluster_of(
        "server",
        server,
        typed_extension_protocol_options=HTTP2,
        transport_socket=_tls("Upstream", own, server_id),
    )
    chain = tcp_chain("server", tunneling_config={"hostname": target})
    with envoy("envoy-client", bootstrap(chain, cluster), folder) as address:
        yield address


@contextmanager
def envoy_server(
    folder: Path, own: Path, app: Address, *, client_id: SpiffeId, runtime: Json | None = None
) -> Iterator[Address]:
    """An Envoy that takes HBONE, as CONNECT and as POST, all of it to `app`; where it listens."""
    connect = {"upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {"allow_post": True}}]}
    matches: list[Json] = [{"connect_matcher": {}}, {"prefix": "/_hbone/"}]
    routes = [{"match": match, "route": {"cluster": "app", "timeout": "0s", **connect}} for match in matches]
    logged = {
        "@type": f"{TYPES}.access_loggers.stream.v3.StderrAccessLog",
        "log_format": {"json_format": _LOGGED},
    }
    chain = http_chain(
        "inbound",
        routes,
        codec_type="HTTP2",
        http2_protocol_options={"allow_connect": True},
        upgrade_configs=[{"upgrade_type": "CONNECT"}],
        access_log=[{"name": "envoy.access_loggers.stderr", "typed_config": logged}],
    )
    chain["transport_socket"] = _tls("Downstream", own, client_id, require_client_certificate=True)
    with envoy("envoy-server", bootstrap(chain, cluster_of("app", app), runtime=runtime), folder) as address:
        yield address


_LOGGED = {
    "method": "%REQ(:METHOD)%",
    "authority": "%REQ(:AUTHORITY)%",
    "protocol": "%REQ(:PROTOCOL)%",
    "baggage": "%REQ(BAGGAGE)%",
    "forwarded": "%REQ(FORWARDED)%",
    "traceparent": "%REQ(TRACEPARENT)%",
    "sni": "%REQUESTED_SERVER_NAME%",
    "peer": "%DOWNSTREAM_PEER_URI_SAN%",
    "status": "%RESPONSE_CODE%",
}
"""What the server tells of each tunnel when it is over."""


def _tls(end: str, own: Path, peer: SpiffeId, **more: Any) -> Json:
    secured = tls_socket(end, certificate_folder.find(own).all, "h2", peer, **more)
    # Envoy's clients stop at 1.2 unless they are told; Istio tells them.
    versions = {"tls_maximum_protocol_version": "TLSv1_3"}
    secured["typed_config"]["common_tls_context"]["tls_params"] = versions
    return secured
