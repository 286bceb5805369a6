"""OpenTelemetry's variables say whether there are traces; a wrong one ends the start with one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.traces.trace_settings import from_env
from shared.errors import EXIT_USAGE, UsageError
from tests.support.running_gateway import write_config

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HERE = {ENDPOINT: "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {ENDPOINT: ""},
        {ENDPOINT: "  "},
        {"OTEL_SERVICE_NAME": "hgate", "OTEL_TRACES_SAMPLER": "nonsense"},
        HERE | {"OTEL_SDK_DISABLED": "true"},
        HERE | {"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_SAMPLER": "nonsense"},
        HERE | {"OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=str,
)
def test_no_traces(environ: dict[str, str]) -> None:
    assert from_env(environ) is None


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        (HERE, "http://127.0.0.1:4318"),
        (HERE | {"OTEL_SDK_DISABLED": "false"}, "http://127.0.0.1:4318"),
        (HERE | {"OTEL_SDK_DISABLED": "1"}, "http://127.0.0.1:4318"),  # only "true" is true
        (HERE | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c.example/v1/traces"}, "https://c.example"),
        ({ENDPOINT: "https://me:secret@c.example:4318/"}, "https://c.example:4318"),
        (HERE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://127.0.0.1:4318"),
    ],
)
def test_where_they_go(environ: dict[str, str], endpoint: str) -> None:
    settings = from_env(environ)
    assert settings is not None
    assert settings.endpoint == endpoint


def test_all_are_sampled_unless_the_variables_say_otherwise() -> None:
    settings = from_env(HERE)
    assert settings is not None
    assert (settings.sampler.bound, settings.sampler.by_parent) == (1 << 64, True)
    some = from_env(HERE | {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"})
    assert some is not None
    assert (some.sampler.bound, some.sampler.by_parent) == (1 << 62, False)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {ENDPOINT: "127.0.0.1:4318"},
            f"invalid {ENDPOINT}: not of the form http://HOST:4318 or https://HOST",
        ),
        ({ENDPOINT: "http://"}, f"invalid {ENDPOINT}: not of the form"),
        ({ENDPOINT: "http://c:99999"}, f"invalid {ENDPOINT}: Port out of range"),
        (
            HERE | {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER='zipkin': choose otlp or none",
        ),
        (
            HERE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "hgate speaks http/protobuf, to port 4318 ",
        ),
        (
            HERE | {"OTEL_TRACES_SAMPLER": "some"},
            "OTEL_TRACES_SAMPLER='some': choose one of always_on, ",
        ),
        (
            HERE | {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "invalid OTEL_TRACES_SAMPLER_ARG='2': must be a number from 0 to 1",
        ),
    ],
)
def test_mistakes(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_env(environ)
    assert message in str(caught.value)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_without_the_extra_the_start_ends_with_one_line(tmp_path: Path, workers: str) -> None:
    """A package of the same name stands in front of OpenTelemetry's here."""
    (tmp_path / "shadow" / "opentelemetry").mkdir(parents=True)
    (tmp_path / "shadow" / "opentelemetry" / "__init__.py").touch()
    write_config(tmp_path / "hgate.yaml", [])
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "gateway", "--log-format", "text", "--workers", workers),
            *("--config", str(tmp_path / "hgate.yaml")),
        ],
        env={**os.environ, **HERE, "PYTHONPATH": str(tmp_path / "shadow")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == EXIT_USAGE
    assert (
        ran.stderr == f"hgate: {ENDPOINT} is set, and traces need the extra otel: pip install 'hbone[otel]'\n"
    )
    assert ran.stdout == ""
