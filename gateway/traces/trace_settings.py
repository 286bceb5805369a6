"""Whether and how traces are made: OpenTelemetry's own environment variables.

Read here is what hgate itself goes by; the exporting process reads the others (headers, timeout, compression,
certificates, attributes of the resource). Names, defaults and empty values follow the specification
(opentelemetry.io, "Environment Variable Specification"). Where it asks to warn of a wrong value and go on, we
refuse it: whoever sets it should not find out from missing traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from gateway.traces.samplers import SAMPLERS, Sampler, sampler
from shared.errors import UsageError

SERVICE_NAME = "hgate"
"""In the traces, unless OTEL_SERVICE_NAME says otherwise."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The first that is set counts; without any there are no traces."""

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

PROTOCOL = "http/protobuf"

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Modules of the extra."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Traces are made."""

    endpoint: str
    """Where they go, for texts; credentials in it are left out."""
    sampler: Sampler
    """Of which tunnels."""


def from_env(environ: Mapping[str, str]) -> TraceSettings | None:
    """What `environ` says; None: no traces. Raises UsageError if a variable is wrong, or if the extra `otel`
    is not installed."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    name, endpoint = _first(environ, ENDPOINTS)
    if not endpoint:
        return None
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter == "none":
        return None
    if exporter != "otlp":
        raise UsageError(f"invalid OTEL_TRACES_EXPORTER={exporter!r}: choose otlp or none")
    variable, protocol = _first(environ, PROTOCOLS)
    if protocol not in ("", PROTOCOL):
        raise UsageError(f"invalid {variable}={protocol!r}: hgate speaks {PROTOCOL}, to port 4318 as a rule")
    settings = TraceSettings(_shown(name, endpoint), _sampler(environ))
    _demand_extra(name)
    return settings


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """The first of the variables that is set and not empty."""
    for name in names:
        if value := environ.get(name, "").strip():
            return name, value
    return names[-1], ""


def _shown(name: str, endpoint: str) -> str:
    try:
        url = urlsplit(endpoint)
        port = f":{url.port}" if url.port else ""
    except ValueError as error:
        raise UsageError(f"invalid {name}: {error}") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(f"invalid {name}: not of the form http://HOST:4318 or https://HOST")
    return f"{url.scheme}://{url.hostname}{port}"


def _sampler(environ: Mapping[str, str]) -> Sampler:
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip() or "parentbased_always_on"
    argument = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1"
    if name not in SAMPLERS:
        raise UsageError(f"invalid OTEL_TRACES_SAMPLER={name!r}: choose one of {', '.join(SAMPLERS)}")
    try:
        return sampler(name, argument)
    except ValueError as error:
        raise UsageError(f"invalid OTEL_TRACES_SAMPLER_ARG={argument!r}: {error}") from error


def _demand_extra(name: str) -> None:
    for module in NEEDED:
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise UsageError(f"{name} is set, and traces need the extra otel: pip install 'hbone[otel]'")
