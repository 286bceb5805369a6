"""Settings of krun about the app's outbound traffic: how it gets into the mesh.

OUTBOUND_* are the original's names, and mean what Istio's annotations traffic.sidecar.istio.io/* mean.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from agent.config.certificate_settings import CertificateSettings
from agent.config.variables import loopback
from shared import ports
from shared.address import Address
from shared.config.fields import Environment, Setting, setting, table_of
from shared.config.kinds import NONE, Choice, List, OrNone, Parsed
from shared.credentials.token_sources.token_settings import DEFAULT_METADATA_HOST, TokenSettings
from shared.errors import UsageError

CaptureMode = Literal["auto", "iptables", "proxy", "none"]
"""How outbound traffic gets into the mesh: see `CaptureSettings.mode`."""

MODES: tuple[CaptureMode, ...] = get_args(CaptureMode)

ALL = "*"
EVERYWHERE = ("0.0.0.0/0", "::/0")
"""What ALL means among ranges."""

MAX_RANGES = 100
MAX_PORTS = 100
"""Each is a rule that the kernel goes through for a new connection."""

DNS_CAPTURE = "ISTIO_META_DNS_CAPTURE"
"""Istio's variable: pilot-agent answers DNS, by what it knows of the mesh."""


def _range(text: str) -> str:
    """A network, as the kernel writes it, or ALL. Raises ValueError."""
    if text == ALL:
        return text
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no range such as 10.0.0.0/8, nor {ALL}") from None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise ValueError(f"{text[:40]!r} is no port")
    return int(text)


RANGES = List(_range, MAX_RANGES, f"ranges such as 10.0.0.0/8, or {ALL}")
PORTS = List(_port, MAX_PORTS, "ports")


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """All about outbound traffic."""

    mode: CaptureMode = setting(
        Choice(MODES),
        "auto",
        "how the app's connections get into the mesh: auto, iptables, proxy or none",
        "iptables captures them for Envoy under pilot-agent. It takes root, NET_ADMIN and the programs "
        "iptables-save and iptables-restore. proxy sets HTTP_PROXY for the app, which leads to the same "
        "Envoy. auto takes iptables where that can be, else proxy, and none without pilot-agent.",
        variable="HBONE_CAPTURE",
    )
    included_ranges: tuple[str, ...] | None = setting(
        OrNone(RANGES),
        ("10.0.0.0/8",),
        f"addresses whose connections are captured, {ALL} for all, {NONE} for none",
        variable="OUTBOUND_IP_RANGES_INCLUDE",
    )
    excluded_ranges: tuple[str, ...] = setting(
        RANGES,
        (),
        "addresses among them whose connections are not captured",
        "Those of the metadata server and of loopback never are.",
        unset="none",
        variable="OUTBOUND_IP_RANGES_EXCLUDE",
    )
    included_ports: tuple[int, ...] = setting(
        PORTS,
        (),
        "ports that are captured at other addresses, too",
        unset="none",
        variable="OUTBOUND_PORTS_INCLUDE",
    )
    excluded_ports: tuple[int, ...] | None = setting(
        OrNone(PORTS),
        (15008, 15009),
        f"ports that are never captured, {NONE} for none",
        variable="OUTBOUND_PORTS_EXCLUDE",
    )
    services: Address | None = setting(
        OrNone(Parsed(loopback("it adds the service's token to requests"), "loopback HOST:PORT")),
        None,
        f"loopback address of a proxy to Cloud Run services, for example 127.0.0.1:{ports.SERVICES}",
        "The app reaches a service of its project as http://SERVICE or http://SERVICE.REGION, with an ID "
        "token that krun adds. HTTP_PROXY of the app leads there.",
        unset=NONE,
        variable="HBONE_SERVICES",
    )
    captures_dns: bool = False
    """Whether pilot-agent answers DNS (ISTIO_META_DNS_CAPTURE)."""

    project_number: str = ""
    """PROJECT_NUMBER, for the URLs of services; empty: the metadata server tells it."""

    metadata_host: str = DEFAULT_METADATA_HOST
    """GCE_METADATA_HOST."""


SETTINGS: tuple[Setting[Any], ...] = tuple(table_of(CaptureSettings).values())


def read(read: Environment, proxy_config: Mapping[str, Any] | None) -> CaptureSettings:
    """The settings that `read` finds; `proxy_config` is Istio's, in which DNS_CAPTURE may be, too. Raises
    UsageError."""
    given = read.given(CaptureSettings)
    if given.get("mode") == "proxy" and given.get("services") is not None:
        raise UsageError(
            "HBONE_CAPTURE=proxy, and HBONE_SERVICES is set: the app has one HTTP_PROXY, so leave one out"
        )
    metadata = (proxy_config or {}).get("proxyMetadata")
    told = metadata.get(DNS_CAPTURE) if isinstance(metadata, Mapping) else None
    text = read.text(DNS_CAPTURE) or str(told or "")
    return CaptureSettings(
        captures_dns=text.lower() == "true",
        project_number=read(table_of(TokenSettings)["project_number"]),
        metadata_host=read(table_of(CertificateSettings)["metadata_host"]),
        **given,
    )
