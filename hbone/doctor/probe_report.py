"""What was measured, as settings for hgate's file, as lines for people, and as JSON.

The file is whole: `hgate check` accepts it. What was measured stands beside each setting as a comment, and
what there is no setting for above them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from hbone.doctor.probes import Measured
from shared.doctor.service_path import Way
from shared.net.pool.pool_limits import PoolLimits
from shared.tunnel.tunnel_request import TUNNEL_PREFIX

INBOUND = "15003"
"""The target of a mesh's tunnels."""

PART = 0.9
"""Of what was measured: before the front end ends something itself we do it in order, some clocks and round
trips earlier."""

CALM_S = 60.0
"""PING interval where more often was too often."""

LEAST_S = 1.0
"""The shortest time that hgate's file accepts for these settings."""


def facts(measured: Measured) -> Iterator[tuple[str, str]]:
    """What was measured, each with its value in words."""
    for name, value in (
        ("streams on a connection", _count(measured.max_streams, "no limit")),
        ("window of a stream", _count(measured.stream_window_bytes, "not told", "bytes")),
        ("window of a connection", _count(measured.connection_window_bytes, "not told", "bytes")),
        ("header list announced", _count(measured.announced_header_bytes, "no limit", "bytes")),
        ("header list accepted", _count(measured.header_bytes, "not measured", "bytes")),
        ("a larger one", measured.header_refusal or "was not tried"),
        ("first flight reaches krun before the answer", _yes(measured.first_flight)),
        ("answer comes before the request's end", _yes(measured.early_answer)),
        ("request's end reaches krun, answer goes on", _yes(measured.client_end)),
        ("after an answer that ends first", measured.server_end or "not measured"),
        ("CONNECT", measured.connect_answer or "not measured"),
        ("extended CONNECT (WebSockets) is offered", _yes(measured.extended_connect)),
        ("request timeout", _after(measured.request_timeout_s, measured)),
        ("request without a byte is ended", _after(measured.stream_idle_s, measured)),
        ("connection in use is told to end", _after(measured.connection_age_s, measured)),
        ("connection without requests is told to end", _after(measured.connection_idle_s, measured)),
        (f"PING every {measured.ping_every_s:g} s is too often", _after(measured.ping_refused_s, measured)),
    ):
        yield name, value
    for name, reason in sorted(measured.unknown.items()):
        yield f"not measured: {name}", reason


def settings(measured: Measured) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Settings of `limits` and of a route, each with its value and the measured one."""
    limits: list[tuple[str, str, str]] = []
    route: list[tuple[str, str, str]] = []
    if measured.max_streams is not None:
        usual = PoolLimits().streams_per_connection
        # A tenth stays free: streams that have just ended may count there still.
        value = min(usual, max(1, math.floor(measured.max_streams * PART)))
        limits.append(("streams_per_connection", str(value), f"the front end allows {measured.max_streams}"))
    for name, seconds, told in (
        ("max_connection_age", measured.connection_age_s, "GOAWAY after"),
        ("upstream_idle_timeout", measured.connection_idle_s, "without requests GOAWAY after"),
        ("idle_timeout", measured.stream_idle_s, "without a byte ended after"),
    ):
        if seconds is not None:
            limits.append((name, _part(seconds), f"{told} {seconds:.1f} s"))
    if measured.ping_refused_s is not None:
        told = f"every {measured.ping_every_s:g} s was too often"
        limits.append(("ping_interval", _seconds(max(CALM_S, measured.ping_every_s * 6)), told))
    if measured.request_timeout_s is not None:
        told = f"request timeout: {measured.request_timeout_s:.1f} s"
        route.append(("max_tunnel_lifetime", _part(measured.request_timeout_s), told))
    if measured.first_flight is not None:
        if measured.first_flight:
            route.append(("first_flight", "with_request", "it reaches krun before the answer"))
        else:
            route.append(("first_flight", "after_answer", "something holds it until the answer"))
    return limits, route


def as_yaml(measured: Measured, way: Way) -> str:
    """hgate's file with these settings, and a route to where it was measured."""
    limits, route = settings(measured)
    origin = way.origin
    url = f"{origin.scheme}://{way.authority}"
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"# measured by hbone doctor --probe at {url}", f"# {when}, for {measured.probe_s:g} s", "#"]
    lines += [f"# {name}: {value}" for name, value in facts(measured)]
    if limits:
        lines += ["limits:", *(f"  {name}: {value}  # {told}" for name, value, told in limits)]
    lines += ["routes:", f'  - host: "{origin.host}"', f'    tunnel: "{url}{TUNNEL_PREFIX}{INBOUND}"']
    if origin.address.host.removesuffix(".") != origin.host:
        lines.append(f'    connect: "{origin.address}"')
    if origin.ca is not None:
        lines.append(f'    ca: "{origin.ca.absolute()}"')
    lines += [f"    {name}: {value}  # {told}" for name, value, told in route]
    return "\n".join(lines) + "\n"


def as_text(measured: Measured) -> str:
    """A table of what was measured."""
    rows = list(facts(measured))
    width = max(len(name) for name, _ in rows)
    return "".join(f"  {name:{width}}  {value}\n" for name, value in rows)


def as_object(measured: Measured) -> dict[str, Any]:
    """For JSON: what was measured, null where it is not known, and the settings."""
    limits, route = settings(measured)
    told = {name: getattr(measured, name) for name in Measured.__dataclass_fields__}
    return {
        "measured": told,
        "settings": {
            "limits": {name: value for name, value, _ in limits},
            "route": {name: value for name, value, _ in route},
        },
    }


def _part(seconds: float) -> str:
    return _seconds(max(LEAST_S, seconds * PART))


def _seconds(seconds: float) -> str:
    """A duration as hgate's file has it, not longer than it was."""
    return f"{math.floor(seconds * 10) / 10:g}s"


def _count(value: int | None, none: str, unit: str = "") -> str:
    return none if value is None else f"{value} {unit}".rstrip()


def _yes(value: bool | None) -> str:
    return "not measured" if value is None else "yes" if value else "no"


def _after(seconds: float | None, measured: Measured) -> str:
    return f"not within {measured.probe_s:g} s" if seconds is None else f"after {seconds:.1f} s"
