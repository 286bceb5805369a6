"""What `hbone doctor --probe` measures follows what the front end is set to, and fits into hgate's file."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hyperframe.frame import GoAwayFrame
from hypothesis import given
from hypothesis import strategies as st

from agent.config.settings import Settings
from gateway.config import config
from hbone import arguments
from hbone.cloudrun.limits import FrontEndLimits
from hbone.doctor import container_path, probe_report, probes
from hbone.doctor.probes import Measured, _filled, measure
from shared.address import Address
from shared.credentials.tokens.tokens import FileToken, NoToken
from shared.doctor.failures import Failure
from shared.doctor.hops import Hop
from shared.doctor.service_path import Way
from shared.errors import EXIT_OK, EXIT_USAGE
from shared.http2 import frames
from shared.http2.header_rules import list_bytes
from shared.net.dial import Origin
from shared.tasks import spawn
from tests.hbone.cloudrun.world import HOST
from tests.hbone.commands import output_of
from tests.hbone.doctor.looking import PATIENT, Bench
from tests.support.http2_peer import Service
from tests.support.krun_port import KrunPort

PROBES = Settings(probes=True)


def measured_with(**told: Any) -> Measured:
    """A measurement of a minute that has found this."""
    return Measured(60.0, **told)


def way_to(bench: Bench, port: int) -> Way:
    origin = Origin("https", HOST, Address("127.0.0.1", port), bench.credentials.folder / "ca.pem")
    return Way(origin, HOST, "", FileToken(bench.token()))


@pytest.mark.parametrize(
    "limits",
    [
        FrontEndLimits(request_timeout_s=0.4, streams_per_connection=7, header_bytes=9_001),
        FrontEndLimits(request_timeout_s=0.8, streams_per_connection=100, header_bytes=30_000),
    ],
    ids=["small", "larger"],
)
async def test_figures_follow_the_stand_ins_settings(
    bench: Bench, limits: FrontEndLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "SETTLE_S", 0.2)  # shorter than the request timeout
    async with KrunPort.serving(PROBES) as krun, bench.credentials.front_end(krun.port, limits) as port:
        measured = await measure(way_to(bench, port), 1.6)
    assert measured.unknown == {}
    assert measured.max_streams == limits.streams_per_connection
    assert measured.header_bytes is not None
    assert limits.header_bytes - 16 <= measured.header_bytes <= limits.header_bytes
    assert f"the limit is {limits.header_bytes}" in measured.header_refusal
    assert measured.request_timeout_s is not None
    assert limits.request_timeout_s <= measured.request_timeout_s < limits.request_timeout_s + 0.4
    assert measured.stream_idle_s is None, "it ended when the busy one did"
    assert (measured.first_flight, measured.early_answer, measured.client_end) == (True, True, True)
    assert measured.server_end == "the request goes on"
    assert (measured.connect_answer, measured.extended_connect) == ("answered 405, by krun", False)
    assert measured.connection_age_s is None
    assert measured.ping_refused_s is None
    assert measured.stream_window_bytes == measured.connection_window_bytes // 16 == 1 << 20  # type: ignore[operator]


async def test_nothing_ends_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SETTLE_S", 0.2)
    async with KrunPort.serving(PROBES) as krun:
        origin = Origin("http", "127.0.0.1", Address("127.0.0.1", krun.port))
        measured = await measure(Way(origin, f"127.0.0.1:{krun.port}", "", NoToken()), 0.3)
    assert (measured.request_timeout_s, measured.stream_idle_s) == (None, None)
    assert measured.header_bytes is not None
    assert 65_520 <= measured.header_bytes <= 65_536, "krun's own limit"


async def test_a_server_that_finds_our_pings_too_many() -> None:
    """As gRPC's servers do, and Google's front ends."""
    async with Service.listening() as service:

        async def complain() -> None:
            stream = await service.request()
            stream.respond(200)
            await stream.peer.until(lambda: stream.peer.pings >= 2)
            calm = GoAwayFrame(last_stream_id=stream.number, error_code=frames.ENHANCE_YOUR_CALM)
            stream.peer._transport.write(calm.serialize())

        spawn(complain(), name="complain")
        origin = Origin("http", "127.0.0.1", Address("127.0.0.1", service.port))
        prober = probes._Prober(Way(origin, "a", "", NoToken()), 2.0)
        await prober._pings()
    assert prober.measured.ping_every_s == 0.2
    assert prober.measured.ping_refused_s is not None
    assert 0.1 < prober.measured.ping_refused_s < 1.9, "with the second"


async def test_a_probe_that_cannot_be_done_says_why(bench: Bench) -> None:
    """The others are measured all the same."""
    async with KrunPort.serving(Settings()) as krun:
        origin = Origin("http", "127.0.0.1", Address("127.0.0.1", krun.port))
        measured = await measure(Way(origin, f"127.0.0.1:{krun.port}", "", NoToken()), 0.2)
    assert measured.unknown["first_flight"] == "the probe was answered with 403"
    assert measured.max_streams == 250


async def test_without_probes_at_krun(bench: Bench) -> None:
    options = arguments.command_parser("doctor").parse_args(["--probe", "http://127.0.0.1:1"])
    async with KrunPort.serving(Settings()) as krun:
        url = f"http://127.0.0.1:{krun.port}"
        report, way = await container_path.walk_to_krun(url, options, {}, PATIENT)
    assert way is None
    assert report.failed is not None
    assert (report.failed.failure, report.failed.hop) == (Failure.NO_PROBES, Hop.KRUN)


# hgate's file.


def file_of(bench: Bench, measured: Measured) -> str:
    return probe_report.as_yaml(measured, way_to(bench, 8443))


@pytest.mark.parametrize(
    ("measured", "lines"),
    [
        (measured_with(), []),
        (
            measured_with(max_streams=100),
            ["  streams_per_connection: 90  # the front end allows 100"],
        ),
        (measured_with(max_streams=1), ["  streams_per_connection: 1  # the front end allows 1"]),
        (
            measured_with(request_timeout_s=300.0),
            ["    max_tunnel_lifetime: 270s  # request timeout: 300.0 s"],
        ),
        (
            measured_with(first_flight=False),
            ["    first_flight: after_answer  # something holds it until the answer"],
        ),
        (
            measured_with(connection_age_s=600.0, connection_idle_s=180.0, stream_idle_s=60.0),
            [
                "  max_connection_age: 540s  # GOAWAY after 600.0 s",
                "  upstream_idle_timeout: 162s  # without requests GOAWAY after 180.0 s",
                "  idle_timeout: 54s  # without a byte ended after 60.0 s",
            ],
        ),
        (
            measured_with(ping_refused_s=30.0, ping_every_s=10.0),
            ["  ping_interval: 60s  # every 10 s was too often"],
        ),
        (measured_with(request_timeout_s=0.5), ["    max_tunnel_lifetime: 1s  # request timeout: 0.5 s"]),
    ],
)
def test_what_was_measured_as_hgates_file(bench: Bench, measured: Measured, lines: list[str]) -> None:
    text = file_of(bench, measured)
    assert [line for line in text.splitlines() if "  # " in line] == lines
    checked = config.parse(text, str(bench.folder / "hgate.yaml"))
    assert len(checked.routes) == 1
    assert checked.warnings == ()


TIMES = st.none() | st.floats(0.01, 4000)


@given(st.none() | st.integers(0, 1 << 20), TIMES, TIMES, TIMES, TIMES, TIMES, st.booleans())
def test_hgate_accepts_whatever_was_measured(
    streams: int | None,
    timeout: float | None,
    idle: float | None,
    age: float | None,
    unused: float | None,
    pings: float | None,
    flight: bool,
) -> None:
    measured = measured_with(
        max_streams=streams,
        request_timeout_s=timeout,
        stream_idle_s=idle,
        connection_age_s=age,
        connection_idle_s=unused,
        ping_refused_s=pings,
        first_flight=flight,
    )
    origin = Origin("https", HOST, Address(HOST, 443))
    text = probe_report.as_yaml(measured, Way(origin, HOST, "", NoToken()))
    assert len(config.parse(text, "hgate.yaml").routes) == 1


@given(st.integers(0, 50_000))
def test_headers_are_filled_to_the_byte(size: int) -> None:
    plain = [(b":method", b"GET"), (b":path", b"/")]
    filled = list_bytes(_filled(plain, size))
    assert filled == max(size, list_bytes(plain)) or size - list_bytes(plain) < 44


# The command.


async def test_standard_output_is_the_file() -> None:
    async with KrunPort.serving(PROBES) as krun:
        flags = ("doctor", "--probe", "--probe-for", 0.2, f"http://127.0.0.1:{krun.port}")
        ended, as_json = await asyncio.gather(output_of(*flags), output_of(*flags, "--json"))
    assert (ended.code, as_json.code) == (EXIT_OK, EXIT_OK)
    assert "a far end for probes" in ended.stderr
    assert "measuring for 0.2 s" in ended.stderr
    assert config.parse(ended.stdout, "hgate.yaml").limits.streams_per_connection == 100
    assert as_json.stderr == ""
    told = json.loads(as_json.stdout)
    assert told["ok"] is True
    assert told["measured"]["max_streams"] == 250
    assert told["settings"]["route"]["first_flight"] == "with_request"


@pytest.mark.parametrize("flags", [["--probe"], ["--probe", "--gateway", "h:1", "--sni", "n"]])
def test_a_probe_needs_a_url(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from hbone import cli

    assert cli.run(["doctor", *flags], {}) == EXIT_USAGE
    assert "--probe needs a URL" in capsys.readouterr().err
