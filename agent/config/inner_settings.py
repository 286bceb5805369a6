"""Settings of krun about inner HBONE: the variables that begin with HBONE_INNER."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.address import MAX_PORT, check_host_name
from shared.config.fields import Environment, setting
from shared.config.kinds import Duration, List, Switch
from shared.errors import UsageError

MAX_NAMES = 64
"""Names, or ports, of one workload's services."""

PORTS = "HBONE_INNER_PORTS"


def _host(text: str) -> str:
    check_host_name(text.replace("*", "x"))
    return text.lower()


def _pair(text: str) -> tuple[int, int]:
    service, equals, app = text.partition("=")
    if not equals:
        raise ValueError("must be SERVICE_PORT=APP_PORT, such as 80=8080")
    return _port(service), _port(app)


def _port(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= MAX_PORT):
        raise ValueError(f"a port is in 1..{MAX_PORT}")
    return int(text)


class _Pairs(List[tuple[int, int]]):
    def show(self, value: object) -> str:
        return ",".join(f"{service}={app}" for service, app in value)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class InnerSettings:
    """All that HBONE_INNER* set."""

    is_on: bool = setting(
        Switch(),
        True,
        "whether krun serves inner HBONE at /_hbone/15008",
        "It does where it has the mesh's certificates, and HBONE_INBOUND is envoy or builtin.",
        variable="HBONE_INNER",
    )
    hosts: tuple[str, ...] = setting(
        List(_host, MAX_NAMES, "names, * for a label or a part of one"),
        (),
        "names of this workload's services, as clients of the mesh ask for them",
        unset="WORKLOAD_NAME.NAMESPACE.svc.cluster.local, with the namespace of the certificate",
        variable="HBONE_INNER_HOSTS",
    )
    pairs: tuple[tuple[int, int], ...] = setting(
        _Pairs(_pair, MAX_NAMES, "SERVICE_PORT=APP_PORT"),
        (),
        "ports of these services, each with the port that the app listens on",
        "A client of the mesh asks for the port of the Service. Whoever may come in reaches these ports of "
        "the host of HBONE_APP, and no others.",
        unset="80 and the app's port, both lead to the app",
        variable=PORTS,
    )
    idle_timeout_s: float = setting(
        Duration(),
        60.0,
        "time an inner connection without a tunnel is kept, 0 for ever",
        "ztunnel makes one for each tunnel. Each holds a request of Cloud Run.",
        variable="HBONE_INNER_IDLE_TIMEOUT",
    )

    def ports(self, app: int) -> Mapping[int, int]:
        """The app's port by the service's; `app` is the port of HBONE_APP."""
        return dict(self.pairs) if self.pairs else {80: app, app: app}


def read(read: Environment) -> InnerSettings:
    """The settings that `read` finds. Raises UsageError."""
    settings = InnerSettings(**read.given(InnerSettings))
    if len(dict(settings.pairs)) != len(settings.pairs):
        raise UsageError(
            f"invalid {PORTS}={read.text(PORTS)} (a service's port leads to one port of the app)"
        )
    return settings
