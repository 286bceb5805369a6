"""The metrics of several workers as one gateway's."""

from __future__ import annotations

import json

import pytest

from gateway.workers.metric_sums import (
    Family,
    Sums,
    decode,
    encode,
)
from shared.errors import Flag
from shared.ops.families import CONFIG_SUCCESSFUL
from shared.ops.metrics import TunnelMetrics, render
from shared.ops.token_counts import TokenStatus
from shared.ops.token_metrics import TokenMetrics
from tests.support.wall_clock import START, Clock


def told(*, opened: int, closed: int, setup_s: float = 0.002) -> list[Family]:
    """What a worker with so many tunnels tells."""
    metrics = TunnelMetrics()
    for _ in range(opened):
        metrics.route("*.demo").opened()
        metrics.tunnel_setup(setup_s)
    for _ in range(closed):
        metrics.route("*.demo").closed()
    metrics.watch(CONFIG_SUCCESSFUL, lambda: 1.0 if closed else 0.0)
    return decode(encode(metrics.collect()))


def shown(sums: Sums) -> dict[str, float]:
    """The samples as a scrape has them."""
    _, body = render(sums, "")
    lines = [line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


OPENED = 'hbone_tunnels_opened_total{route="*.demo"}'
OPEN = 'hbone_tunnels_open{route="*.demo"}'
SETUPS = "hbone_tunnel_setup_seconds_count"


def test_one_worker_is_shown_as_it_is() -> None:
    metrics = TunnelMetrics()
    metrics.route("*.demo").opened()
    metrics.origin("https://hello.a.run.app").opened()
    metrics.refused(Flag.NO_ROUTE)
    metrics.tunnel_setup(0.3)
    sums = Sums()
    sums.update(1, 100, decode(encode(metrics.collect())))
    own = [line for line in metrics.render("")[1].splitlines() if b"process_" not in line]
    assert [line for line in render(sums, "")[1].splitlines() if b"process_" not in line] == own
    openmetrics = "application/openmetrics-text"
    assert render(sums, openmetrics)[0] == metrics.render(openmetrics)[0]
    assert render(sums, openmetrics)[1].endswith(b"# EOF\n")


def test_counters_gauges_and_histograms_are_summed() -> None:
    sums = Sums()
    sums.update(1, 100, told(opened=5, closed=2))
    sums.update(2, 200, told(opened=3, closed=3, setup_s=0.2))
    samples = shown(sums)
    assert (samples[OPENED], samples[OPEN], samples[SETUPS]) == (8, 3, 8)
    assert samples['hbone_tunnel_setup_seconds_bucket{le="0.0025"}'] == 5
    assert samples['hbone_tunnel_setup_seconds_bucket{le="0.25"}'] == 8
    assert samples["hbone_tunnel_setup_seconds_sum"] == pytest.approx(5 * 0.002 + 3 * 0.2)


def test_what_cannot_be_summed_is_the_least() -> None:
    sums = Sums()
    sums.update(1, 100, told(opened=1, closed=1))
    sums.update(2, 200, told(opened=1, closed=0))
    samples = shown(sums)
    assert samples["hbone_config_last_reload_successful"] == 0
    assert samples['istio_build{component="gateway",tag="0.1.0"}'] == 1


def test_a_worker_that_died_has_still_counted() -> None:
    sums = Sums()
    sums.update(1, 100, told(opened=5, closed=2))
    sums.update(2, 200, told(opened=1, closed=0))
    sums.no_response(1)
    samples = shown(sums)
    assert (samples[OPENED], samples[OPEN]) == (6, 1), "its tunnels are gone"
    sums.update(1, 101, told(opened=1, closed=0))
    samples = shown(sums)
    assert (samples[OPENED], samples[OPEN], samples[SETUPS]) == (7, 2, 7)
    assert sums.restarts == 1
    sums.update(1, 101, told(opened=2, closed=0))
    assert shown(sums)[OPENED] == 8
    assert sums.restarts == 1


@pytest.mark.parametrize("answer", ["", "{", "5", "[5]", "[[]]", '[["a", "b", "gauge", [["a", [], []]]]]'])
def test_an_answer_that_is_none(answer: str) -> None:
    with pytest.raises(ValueError):
        decode(answer.encode())


def test_an_answer_is_text() -> None:
    assert json.loads(encode(TunnelMetrics().collect()))


def test_of_tokens_the_oldest_and_the_first_to_end_count() -> None:
    def worker(minted_at_s: float) -> list[Family]:
        metrics = TokenMetrics(Clock())
        metrics.of("me", "a").refreshed()
        token = TokenStatus("me", "a", minted_at_s, minted_at_s + 3600, "", None)
        return decode(encode(metrics.families([token], kept=(1, 1000), new=(0, 500))))

    sums = Sums()
    sums.update(1, 100, worker(START - 300))
    sums.update(2, 200, worker(START - 100))
    samples = {
        sample.name.removeprefix("hbone_token_"): sample.value
        for metric in sums.collect()
        for sample in metric.samples
    }
    assert samples["age_seconds"] == 300
    assert samples["expiry_timestamp_seconds"] == START + 3300
    assert samples["entries"] == 2
    assert samples["entries_limit"] == 2000
