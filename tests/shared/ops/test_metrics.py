"""What is counted comes out of a scrape, under the names that others rely on, and with bounded labels."""

from __future__ import annotations

from importlib.metadata import version

import prometheus_client
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from shared.errors import Flag, NoRouteError, StreamResetError
from shared.ops.families import BUFFERED_BYTES
from shared.ops.metrics import MAX_LABELS, Scrape, TunnelMetrics, render
from shared.ops.pool_counts import REASONS

ROUTE = "*.demo.svc.cluster.local"
ORIGIN = "https://hello.a.run.app:443"


def scrape(metrics: TunnelMetrics) -> dict[tuple[str, ...], float]:
    """Each sample as (name, label values in order of their names)."""
    _, body = metrics.render("")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def test_a_tunnels_life() -> None:
    metrics = TunnelMetrics()
    route = metrics.route(ROUTE)
    route.opened()
    route.opened()
    route.sent_bytes += 100
    route.received_bytes += 7
    route.closed(StreamResetError.flag)
    metrics.tunnel_setup(0.004)

    samples = scrape(metrics)
    assert samples["hbone_tunnels_opened_total", ROUTE] == 2
    assert samples["hbone_tunnels_closed_total", "UPSTREAM_RESET", ROUTE] == 1
    assert samples["hbone_tunnels_closed_total", "-", ROUTE] == 0
    assert samples["hbone_tunnels_open", ROUTE] == 1
    assert samples["hbone_sent_bytes_total", ROUTE] == 100
    assert samples["hbone_received_bytes_total", ROUTE] == 7
    assert samples["hbone_tunnel_setup_seconds_bucket", "0.0025"] == 0
    assert samples["hbone_tunnel_setup_seconds_bucket", "0.005"] == 1

    route.closed()
    assert scrape(metrics)["hbone_tunnels_open", ROUTE] == 0


def test_istios_names_sum_over_routes() -> None:
    metrics, reporter = TunnelMetrics(), "source"
    for host in ("a", "b"):
        route = metrics.route(host)
        route.opened()
        route.opened()
        route.closed()
        route.closed(Flag.CONNECT)
        route.sent_bytes += 100
        route.received_bytes += 7
    samples = scrape(metrics)
    assert samples["istio_tcp_connections_opened_total", reporter, "-"] == 4
    assert samples["istio_tcp_connections_closed_total", reporter, "-"] == 2
    assert samples["istio_tcp_connections_closed_total", reporter, "CONNECT"] == 2
    # Istio's sent bytes are those of the response.
    assert samples["istio_tcp_sent_bytes_total", reporter, "-"] == 14
    assert samples["istio_tcp_received_bytes_total", reporter, "-"] == 200
    assert samples["istio_build", "gateway", version("hbone")] == 1


def test_connections_to_an_origin() -> None:
    metrics = TunnelMetrics()
    origin = metrics.origin(ORIGIN)
    for _ in range(3):
        origin.opened()
    origin.closed()
    origin.closed("age")
    with pytest.raises(KeyError):
        origin.closed("tired")
    origin.draining += 1
    origin.dials_failed_total += 3
    origin.waiting += 4
    origin.refused_total += 5
    samples = scrape(metrics)
    assert samples["hbone_upstream_connections", ORIGIN] == 1
    assert samples["hbone_upstream_connections_opened_total", ORIGIN] == 3
    name = "hbone_upstream_connections_closed_total"
    closed = {key[2]: value for key, value in samples.items() if key[0] == name}
    assert closed == dict.fromkeys(REASONS, 0) | {"lost": 1, "age": 1}
    assert samples["hbone_upstream_connections_draining", ORIGIN] == 1
    assert samples["hbone_upstream_dials_failed_total", ORIGIN] == 3
    assert samples["hbone_upstream_waiting", ORIGIN] == 4
    assert samples["hbone_upstream_waiting_refused_total", ORIGIN] == 5


def test_refusals_are_there_before_the_first() -> None:
    metrics = TunnelMetrics()
    metrics.refused(NoRouteError.flag)
    samples = scrape(metrics)
    refusals = {
        key[1]: value for key, value in samples.items() if key[0] == "hbone_connections_refused_total"
    }
    assert refusals.keys() == set(Flag) - {"-"}
    assert refusals.pop("NO_ROUTE") == 1
    assert set(refusals.values()) == {0}


# Labels.


def test_labels_are_bounded() -> None:
    metrics = TunnelMetrics()
    for number in range(MAX_LABELS + 50):
        metrics.origin(f"https://{number}.test:443").opened()
        metrics.route(f"{number}.test").opened()
    samples = scrape(metrics)
    for name in ("hbone_upstream_connections", "hbone_tunnels_opened_total"):
        assert samples[name, "other"] == 50
        assert sum(key[0] == name for key in samples) == MAX_LABELS + 1
    assert metrics.route("0.test").opened_total == 1
    assert metrics.origin("https://0.test:443").opened_total == 1


def test_label_values_are_escaped() -> None:
    metrics = TunnelMetrics()
    metrics.route('a"b\\c\nd').opened()
    assert scrape(metrics)["hbone_tunnels_opened_total", 'a"b\\c\nd'] == 1


# The scrape.


def test_the_public_names() -> None:
    metrics = TunnelMetrics()
    _, body = metrics.render("")
    names = {line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE ")}
    assert {name for name in names if not name.startswith("process_")} == {
        "hbone_connections_refused_total",
        "hbone_received_bytes_total",
        "hbone_sent_bytes_total",
        "hbone_tunnel_setup_seconds",
        "hbone_tunnel_setup_seconds_created",
        "hbone_tunnels_closed_total",
        "hbone_tunnels_open",
        "hbone_tunnels_opened_total",
        "hbone_upstream_connections",
        "hbone_upstream_connections_closed_total",
        "hbone_upstream_connections_draining",
        "hbone_upstream_connections_opened_total",
        "hbone_upstream_dials_failed_total",
        "hbone_upstream_waiting",
        "hbone_upstream_waiting_refused_total",
        "hbone_upstream_retries_over_budget_total",
        "hbone_upstream_retries_total",
        "istio_build",
        "istio_tcp_connections_closed_total",
        "istio_tcp_connections_opened_total",
        "istio_tcp_received_bytes_total",
        "istio_tcp_sent_bytes_total",
    }
    assert names >= {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"}
    assert not [name for name in names if "gc" in name]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/html,*/*;q=0.8", "text/plain; version=0.0.4; charset=utf-8"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
        (
            "Application/OpenMetrics-Text;version=x\ty",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ],
)
def test_the_format_follows_accept(accept: str, content_type: str) -> None:
    metrics = TunnelMetrics()
    metrics.route(ROUTE).opened()
    metrics.tunnel_setup(1)
    offered, body = metrics.render(accept)
    assert offered == content_type
    families = (parse_openmetrics if "openmetrics" in offered else parse_text)(body.decode())
    assert "hbone_tunnels_opened" in {family.name for family in families}


def test_watched_numbers_are_read_at_the_scrape() -> None:
    metrics = TunnelMetrics()
    held = [0]
    metrics.watch(BUFFERED_BYTES, lambda: held[0])
    held[0] = 5
    assert scrape(metrics)["hbone_buffered_bytes",] == 5
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.watch(BUFFERED_BYTES, lambda: 0)


def test_numbers_of_others_are_asked_for_at_the_scrape() -> None:
    metrics = TunnelMetrics()
    count = [0]
    metrics.add(lambda: iter([GaugeMetricFamily("hbone_test", "For the test.", value=count[0])]))
    count[0] = 3
    assert scrape(metrics)["hbone_test",] == 3
    assert [family.samples[0].value for family in metrics.collect() if family.name == "hbone_test"] == [3]


def test_any_collector_can_be_rendered() -> None:
    made = Scrape(lambda: iter([GaugeMetricFamily("hbone_test", "For the test.", value=3)]))
    assert render(made, "")[1].endswith(b"\nhbone_test 3.0\n")
    assert render(made, "application/openmetrics-text")[1].endswith(b"\nhbone_test 3.0\n# EOF\n")


def test_the_registry_is_our_own() -> None:
    one, other = TunnelMetrics(), TunnelMetrics()
    one.route(ROUTE).opened()
    assert ("hbone_tunnels_opened_total", ROUTE) not in scrape(other)
    assert b"hbone_" not in prometheus_client.generate_latest()
