"""Double HBONE beside the other ways through hgate: what a tunnel costs hgate and krun.

python -m bench.double_hbone [--turns N]

    double    HBONE in HBONE to hgate, its route to krun, which ends the inner one
    single    HBONE to hgate, which connects the app
    sidecar   mTLS to hgate by SNI, its route to krun, which ends the mTLS
    plain     HBONE to hgate, its route to krun with mTLS of hgate's, which krun ends (inner: none)
    envoys    mTLS by SNI as `sidecar`, with an Envoy for hgate and one for krun, which ends no TLS

An Envoy stands in for the client of the mesh; HAProxy is Cloud Run's front end. What counts is CPU time of
hgate and krun alone, the least of the turns; a ratio is that of `double` to that of the other way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import subjects, tools
from bench.subjects import Subject, World
from bench.tools import BenchError, client, serving
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId

TURNS = 3
GIB = 1 << 30
BULK_BYTES = 128 << 20
AT_ONCE = 16
HELD = 1_000

TRUST_DOMAIN = "bench.local"
NAME = subjects.NAMES[0]
HOST = subjects.in_cluster(NAME)
SERVICE_PORT = 8080
AUTHORITY = f"{HOST}:{SERVICE_PORT}"
PLAIN_HOST = f"plain-{HOST}"
PLAIN_AUTHORITY = f"{PLAIN_HOST}:{SERVICE_PORT}"

GATEWAY = SpiffeId.of_workload(TRUST_DOMAIN, "istio-system", "hgate")
CALLER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "client")
WORKLOAD = SpiffeId.of_workload(TRUST_DOMAIN, "demo", NAME)

Json = dict[str, Any]
_TYPES = "type.googleapis.com/envoy.extensions"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to the app, and who is on it."""

    name: str
    entry: str
    """Where it begins, HOST:PORT."""
    gateway: Subject
    agent: Subject | None
    hellos: tuple[Path, ...] = ()
    """What tunnels begin with: `bench.tools.client`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load."""

    name: str
    unit: str
    scenario: tuple[str, ...]
    per: float
    """Operations of the load generator in one unit."""


def cases(tunnels: int, seconds: float, size: int) -> tuple[Case, ...]:
    """The loads: `tunnels` are opened, round trips take `seconds`, and bulk is `size` bytes."""
    at_once = ("--tunnels", str(AT_ONCE))
    each = str(size // AT_ONCE)
    return (
        Case("a new tunnel", "µs", ("open", *at_once, "--count", str(tunnels), "--warm-up", "10"), 1),
        Case(
            "a round trip of 64 bytes", "µs", ("rr", *at_once, "--size", "64", "--seconds", str(seconds)), 1
        ),
        Case("a GiB up", "s", ("bulk", *at_once, "--up", each, "--down", "0"), GIB),
        Case("a GiB down", "s", ("bulk", *at_once, "--up", "0", "--down", each), GIB),
    )


# Who is on the way.


@contextmanager
def _krun(world: World, app: str, mesh: Path) -> Iterator[Subject]:
    """krun with both its ends of mTLS."""
    port = subjects.free_port()
    told = {
        **subjects.krun_environment(f"127.0.0.1:{port}", f"127.0.0.1:{subjects.free_port()}"),
        "HBONE_INBOUND": "builtin",
        "HBONE_CERTS": str(mesh / NAME),
        "HBONE_ALLOW": f"{CALLER},{GATEWAY}",
        "HBONE_APP": app,
        "HBONE_APP_PROTOCOL": "tcp",
        "HBONE_INNER_HOSTS": HOST,
        "HBONE_INNER_PORTS": f"{SERVICE_PORT}={Address.parse(app).port}",
    }
    with subjects.running("krun", world.environment.command("krun"), told, world, port) as subject:
        yield subject


@dataclass(frozen=True, slots=True)
class _Hgate:
    subject: Subject
    """Its address is where it takes clients by SNI."""
    hbone: str


@contextmanager
def _hgate(world: World, front_end: str, app: str, mesh: Path) -> Iterator[_Hgate]:
    """hgate for clients of all three kinds."""
    port, hbone = subjects.free_port(), f"127.0.0.1:{subjects.free_port()}"
    to = {"connect": front_end, "ca": str(world.ca), "token": {"file": str(world.token)}, "host": HOST}
    service = f"https://{NAME}.{subjects.DOMAIN}"
    configuration = {
        "listen": [f"127.0.0.1:{port}"],
        "admin": "off",
        "metrics": "off",
        "health": "off",
        "limits": {"max_connections": 20_000},
        "hbone": {
            "listen": [hbone],
            "certificates": str(mesh / "gateway"),
            "rules": [{"from": [str(CALLER)], "to": [AUTHORITY, PLAIN_AUTHORITY, app]}],
            "max_tunnels": 20_000,
        },
        "routes": [
            {**to, "tunnel": f"{service}/_hbone/15008", "inner": "hbone"},
            {**to, "tunnel": f"{service}/_hbone/15003"},
            {
                **to,
                "host": PLAIN_HOST,
                "tunnel": f"{service}/_hbone/15003",
                "inner": "none",
                "peer": [str(WORKLOAD)],
            },
        ],
    }
    file = world.folder / f"hgate-{port}.yaml"
    file.write_text(json.dumps(configuration))
    command = [*world.environment.command("hgate"), "--config", str(file), "--log-format", "json"]
    with subjects.running("hgate", command, {}, world, port) as subject:
        yield _Hgate(subject, hbone)


@contextmanager
def _clients(world: World, hgate: _Hgate, app: str, mesh: Path) -> Iterator[dict[str, str]]:
    """An Envoy that turns plain TCP into what clients of the mesh send; where it takes TCP, by the way."""
    ports = {name: subjects.free_port() for name in ("double", "single", "sidecar", "plain")}
    where = {name: {"address": _address(f"127.0.0.1:{port}")} for name, port in ports.items()}
    listeners = [
        {**where["double"], **_chain("inner", AUTHORITY)},
        {"name": "carrier", "internal_listener": {}, **_chain("outer", AUTHORITY)},
        {**where["single"], **_chain("outer", app)},
        {**where["sidecar"], **_chain("sidecar")},
        {**where["plain"], **_chain("outer", PLAIN_AUTHORITY)},
    ]
    tls, once = _tls(mesh, "h2"), {"common_http_protocol_options": {"max_requests_per_connection": 1}}
    carrier = {"envoy_internal_address": {"server_listener_name": "carrier"}}
    istio = _tls(mesh, "istio", subjects.sni(NAME))
    clusters = [
        _cluster("inner", carrier, tls, **_http2(**once)),
        _cluster("outer", _address(hgate.hbone), tls, **_http2()),
        _cluster("sidecar", _address(hgate.subject.address), istio),
    ]
    internal = f"{_TYPES.removesuffix('.extensions')}.extensions.bootstrap.internal_listener.v3"
    configuration = {
        "static_resources": {"listeners": listeners, "clusters": clusters},
        "bootstrap_extensions": [
            {
                "name": "envoy.bootstrap.internal_listener",
                "typed_config": {"@type": f"{internal}.InternalListener"},
            }
        ],
    }
    file = world.folder / "clients.json"
    file.write_text(json.dumps(configuration))
    command = [str(subjects.find_envoy()), "-c", str(file), "--disable-hot-restart", "-l", "error"]
    with subjects.running("envoy", [*command, "--concurrency", "1"], {}, world, ports["double"]):
        yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}


def _chain(cluster: str, tunnel_to: str = "") -> Json:
    proxy: Json = {
        "@type": f"{_TYPES}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": cluster,
        "cluster": cluster,
    }
    if tunnel_to:
        proxy["tunneling_config"] = {"hostname": tunnel_to}
    filters = [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}]
    return {"filter_chains": [{"filters": filters}]}


def _cluster(name: str, address: Json, tls: Json, **more: Json) -> Json:
    most = {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": endpoints},
        "circuit_breakers": {"thresholds": [most]},
        "transport_socket": tls,
        **more,
    }


def _http2(**more: Json) -> dict[str, Json]:
    options = {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
        **more,
    }
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {"typed_extension_protocol_options": {name: options}}


def _tls(mesh: Path, alpn: str, sni: str = "") -> Json:
    chain, key, roots = (str(file) for file in certificate_folder.find(mesh / "client").all)
    common = {
        "alpn_protocols": [alpn],
        "tls_params": {"tls_maximum_protocol_version": "TLSv1_3"},
        "tls_certificates": [{"certificate_chain": {"filename": chain}, "private_key": {"filename": key}}],
        "validation_context": {"trusted_ca": {"filename": roots}},
    }
    tls = {
        "@type": f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": common,
        **({"sni": sni} if sni else {}),
    }
    return {"name": "envoy.transport_sockets.tls", "typed_config": tls}


def _address(address: str) -> Json:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _mesh(folder: Path) -> Path:
    authority = Authority.create(TRUST_DOMAIN)
    for name, identity in (("gateway", GATEWAY), ("client", CALLER), (NAME, WORKLOAD)):
        authority.write(folder / name, authority.issue(identity))
    return folder


@contextmanager
def standing(world: World, *, with_envoys: bool = True) -> Iterator[list[Way]]:
    """Everything, with the app behind it."""
    mesh = _mesh(world.folder / "mesh")
    with ExitStack() as block:
        app = block.enter_context(serving("tcp"))
        krun = block.enter_context(_krun(world, app, mesh))
        front_end = block.enter_context(subjects.front_end(world, krun.address)).address
        hgate = block.enter_context(_hgate(world, front_end, app, mesh))
        entries = block.enter_context(_clients(world, hgate, app, mesh))
        ways = [
            Way("double", entries["double"], hgate.subject, krun),
            Way("single", entries["single"], hgate.subject, None),
            Way("sidecar", entries["sidecar"], hgate.subject, krun),
            Way("plain", entries["plain"], hgate.subject, krun),
        ]
        if with_envoys:
            agent = block.enter_context(subjects.envoy_agent(world, app))
            behind = block.enter_context(subjects.front_end(world, agent.address)).address
            gateway = block.enter_context(subjects.envoy_gateway(world, behind))
            ways.append(Way("envoys", gateway.address, gateway, agent, world.hellos[:1]))
        yield ways


# The runs.


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds for one unit."""

    gateway: float
    agent: float

    @property
    def both(self) -> float:
        """Of the two together."""
        return self.gateway + self.agent


def _run(way: Way, case: Case) -> Spent:
    def spent() -> tuple[float, float]:
        return way.gateway.cpu_seconds(), 0.0 if way.agent is None else way.agent.cpu_seconds()

    with client(way.entry, case.scenario, hellos=way.hellos) as load:
        before = spent()
        units = load.run().operations / case.per
        gateway, agent = (after - b for after, b in zip(spent(), before, strict=True))
    return Spent(gateway / units, agent / units)


def compare(ways: Sequence[Way], cases: Sequence[Case], turns: int) -> Iterator[str]:
    """The table, line by line: CPU time of the gateway and of the agent, and the ratio of the first way's
    to each other's, for the gateway and for both. Raises BenchError if a tunnel broke."""
    yield f"{'':26}" + "".join(f"{way.name:>26}" for way in ways)
    for case in cases:
        found: dict[str, list[Spent]] = {way.name: [] for way in ways}
        for turn in range(turns):
            for way in ways if turn % 2 else reversed(ways):
                found[way.name].append(_run(way, case))
        least = {name: min(spent, key=lambda one: one.both) for name, spent in found.items()}
        scale = 1e6 if case.unit == "µs" else 1.0
        yield f"{case.name:26}" + "".join(_cell(least[way.name], scale, case.unit) for way in ways)
        first = least[ways[0].name]
        ratios = ((first.gateway / one.gateway, first.both / one.both) for one in least.values())
        yield f"{'  ratio: gateway, both':26}" + "".join(f"{a:.2f}, {b:.2f}".rjust(26) for a, b in ratios)


def _cell(spent: Spent, scale: float, unit: str) -> str:
    digits = 0 if scale > 1 and spent.both * scale >= 100 else 2
    return f"{spent.gateway * scale:.{digits}f} + {spent.agent * scale:.{digits}f} {unit}".rjust(26)


def memory(ways: Sequence[Way], count: int) -> Iterator[str]:
    """Lines about what each of `count` idle tunnels of the ways that have an agent adds to the two's RSS."""
    for way in ways:
        if way.agent is None:
            continue
        both = (way.gateway, way.agent)
        before = [one.resident_bytes() for one in both]
        with client(way.entry, ("hold", "--tunnels", str(count)), hellos=way.hellos):
            each = [
                (one.resident_bytes() - old) / count / 1024 for one, old in zip(both, before, strict=True)
            ]
        yield f"{way.name:10} an idle tunnel of {count:,}: {each[0]:.1f} + {each[1]:.1f} KiB"


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="how often each case runs (%(default)s)")
    arguments = parser.parse_args()
    try:
        tools.build()
        # Memory first, of processes that have done nothing: what they have freed would be used again.
        for name in ("double", "sidecar", "plain"):
            with _world() as world, standing(world, with_envoys=False) as ways:
                for line in memory([way for way in ways if way.name == name], HELD):
                    print(line, flush=True)
        with _world() as world, standing(world) as ways:
            for line in compare(ways, cases(600, 1.0, BULK_BYTES), arguments.turns):
                print(line, flush=True)
    except (BenchError, OSError) as error:
        print(f"double_hbone: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="double-hbone-") as folder:
        yield World.create(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
