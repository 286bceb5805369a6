"""Writes what is generated here: `python -m deploy.monitoring.write_monitoring`, or `make monitoring`.

`prometheusrule.yaml` is alerts.yaml as an object for the Prometheus operator; `dashboard.json`, for Grafana,
is made from the table below. A test compares both with PAGES.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

RULE_HEAD = """\
# Written by `make monitoring` from alerts.yaml, for the Prometheus operator. Do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: hgate
  labels:
    app.kubernetes.io/name: hgate
    # What your Prometheus selects rules by (its ruleSelector), if it wants more than that:
    # release: kube-prometheus-stack
spec:
"""

CHOSEN = 'job=~"$job", instance=~"$instance"'
"""The matchers for what a reader of the dashboard has chosen: `@` in an expression."""

RATE = "[$__rate_interval]"
"""`~` in an expression."""

WIDTH = 24
"""Of a row, in Grafana's units."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture. `queries` are expressions, each with the legend of its lines."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False


def _stat(title: str, unit: str, query: str, description: str = "") -> Panel:
    return Panel(title, unit, ((query, ""),), description, kind="stat", width=4, height=4)


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Now": (
        _stat(
            "Ready",
            "short",
            "sum(hbone_ready{@})",
            "Of the gateways chosen above: those that accept connections.",
        ),
        _stat("Open tunnels", "short", "sum(hbone_tunnels_open{@})"),
        _stat("New tunnels", "cps", "sum(rate(hbone_tunnels_opened_total{@}~))"),
        _stat(
            "Refused connections",
            "cps",
            'sum(rate(hbone_connections_refused_total{@, flags!~"EMPTY|DOWNSTREAM_RESET"}~))',
            "Without health checks, and clients that broke off themselves.",
        ),
        _stat(
            "Setup, 99th percentile",
            "s",
            "histogram_quantile(0.99, sum by (le) (rate(hbone_tunnel_setup_seconds_bucket{@}~)))",
        ),
        _stat(
            "Carried",
            "Bps",
            "sum(rate(hbone_sent_bytes_total{@}~)) + sum(rate(hbone_received_bytes_total{@}~))",
        ),
    ),
    "Tunnels": (
        Panel(
            "New tunnels by route",
            "cps",
            (("sum by (route) (rate(hbone_tunnels_opened_total{@}~))", "{{route}}"),),
        ),
        Panel("Open tunnels by route", "short", (("sum by (route) (hbone_tunnels_open{@})", "{{route}}"),)),
        Panel(
            "Setup",
            "s",
            tuple(
                (
                    f"histogram_quantile({share}, "
                    "sum by (le) (rate(hbone_tunnel_setup_seconds_bucket{@}~)))",
                    f"{share}",
                )
                for share in (0.5, 0.9, 0.99)
            ),
            "From the client's first byte to the open tunnel.",
        ),
        Panel(
            "Bytes towards services",
            "Bps",
            (("sum by (route) (rate(hbone_sent_bytes_total{@}~))", "{{route}}"),),
        ),
        Panel(
            "Bytes from services",
            "Bps",
            (("sum by (route) (rate(hbone_received_bytes_total{@}~))", "{{route}}"),),
        ),
        Panel(
            "Connections",
            "short",
            (
                ("hbone_connections_open{@}", "{{instance}}"),
                ("max(hbone_connections_limit{@})", "limit of each"),
            ),
            "From accept to end.",
        ),
    ),
    "What goes wrong": (
        Panel(
            "Refused by flag",
            "cps",
            (
                (
                    'sum by (flags) (rate(hbone_connections_refused_total{@, flags!="EMPTY"}~)) > 0',
                    "{{flags}}",
                ),
            ),
            "docs/runbook.md has a section for each flag.",
            stacked=True,
        ),
        Panel(
            "Ended other than in order, by flag",
            "cps",
            (('sum by (flags) (rate(hbone_tunnels_closed_total{@, flags!="-"}~)) > 0', "{{flags}}"),),
            "docs/runbook.md has a section for each flag.",
            stacked=True,
        ),
        Panel(
            "Refused by a limit",
            "cps",
            (("sum by (limit) (rate(hbone_limit_refusals_total{@}~)) > 0", "{{limit}}"),),
            stacked=True,
        ),
        Panel(
            "Requests sent again",
            "cps",
            (
                ("sum by (reason) (rate(hbone_upstream_retries_total{@}~))", "{{reason}}"),
                ("sum(rate(hbone_upstream_retries_over_budget_total{@}~))", "not sent: over budget"),
            ),
        ),
        Panel(
            "Look-ups of names that failed",
            "cps",
            (
                (
                    'sum by (result) (rate(hbone_dns_lookups_total{@, result!~"found|abandoned"}~))',
                    "{{result}}",
                ),
            ),
        ),
        Panel(
            "Tokens that could not be had",
            "cps",
            (("sum by (reason) (rate(hbone_token_failures_total{@}~)) > 0", "{{reason}}"),),
        ),
    ),
    "Services": (
        Panel(
            "HTTP/2 connections",
            "short",
            (("sum by (origin) (hbone_upstream_connections{@})", "{{origin}}"),),
        ),
        Panel(
            "Tunnels that wait for a stream",
            "short",
            (
                ("sum by (origin) (hbone_upstream_waiting{@})", "{{origin}}"),
                ("max(hbone_upstream_waiting_limit{@})", "limit of each origin"),
            ),
        ),
        Panel(
            "Connections that could not be made",
            "cps",
            (("sum by (origin) (rate(hbone_upstream_dials_failed_total{@}~)) > 0", "{{origin}}"),),
        ),
        Panel(
            "New connections",
            "cps",
            (("sum by (origin) (rate(hbone_upstream_connections_opened_total{@}~))", "{{origin}}"),),
        ),
        Panel(
            "Connections ended, by reason",
            "cps",
            (("sum by (reason) (rate(hbone_upstream_connections_closed_total{@}~))", "{{reason}}"),),
        ),
        Panel(
            "A look-up of a name, on average",
            "s",
            (
                (
                    "sum by (instance) (rate(hbone_dns_lookup_seconds_total{@}~)) "
                    "/ sum by (instance) (rate(hbone_dns_lookups_total{@}~))",
                    "{{instance}}",
                ),
            ),
        ),
    ),
    "Credentials": (
        Panel(
            "Tokens end in",
            "s",
            (("min by (audience) (hbone_token_expiry_timestamp_seconds{@}) - time()", "{{audience}}"),),
        ),
        Panel(
            "Certificates end in",
            "s",
            (
                (
                    "min by (certificate) (hbone_certificate_expiration_timestamp_seconds{@}) - time()",
                    "{{certificate}}",
                ),
            ),
        ),
        Panel(
            "Revocation lists are overdue in",
            "s",
            (("min by (place) (hbone_crl_next_update_timestamp_seconds{@}) - time()", "{{place}}"),),
        ),
    ),
    "HBONE and reverse ports": (
        Panel(
            "HBONE port",
            "short",
            (
                ("sum(hbone_listener_connections_open{@})", "connections"),
                ("sum(hbone_listener_tunnels_open{@})", "tunnels"),
            ),
        ),
        Panel(
            "Registered workloads",
            "short",
            (("sum(hbone_reverse_workloads{@})", "connections"), ("sum(hbone_reverse_names{@})", "names")),
        ),
        Panel(
            "Tokens of callers",
            "cps",
            (("sum by (result) (rate(hbone_jwt_checks_total{@}~)) > 0", "{{result}}"),),
        ),
    ),
    "Cluster": (
        Panel(
            "Routes and refused objects",
            "short",
            (
                ("max(hbone_cluster_routes)", "routes"),
                ("max(hbone_cluster_refused)", "refused"),
                ("max(hbone_cluster_services)", "services with endpoints"),
            ),
            "Of hgate cluster, whose job is another one than hgate's.",
        ),
        Panel(
            "Changes and failures",
            "cps",
            (
                ("sum by (kind) (rate(hbone_cluster_events_total~))", "{{kind}}"),
                ("sum by (status) (rate(hbone_cluster_failures_total~))", "failed: {{status}}"),
            ),
        ),
        Panel(
            "Objects written",
            "cps",
            (("sum by (what, result) (rate(hbone_cluster_writes_total~))", "{{what}}: {{result}}"),),
        ),
    ),
    "Processes": (
        Panel("CPU", "short", (("rate(process_cpu_seconds_total{@}~)", "{{instance}}"),), "In cores."),
        Panel("Memory", "bytes", (("process_resident_memory_bytes{@}", "{{instance}}"),)),
        Panel(
            "Event loop is late by",
            "s",
            (
                (
                    "histogram_quantile(0.99, sum by (le, instance) "
                    "(rate(hbone_event_loop_lag_seconds_bucket{@}~)))",
                    "{{instance}}, 99th percentile",
                ),
            ),
            "All that a process serves is as late.",
        ),
        Panel(
            "Bytes held for slow readers",
            "bytes",
            (
                ("hbone_buffered_bytes{@}", "{{instance}}"),
                ("max(hbone_buffered_bytes_limit{@})", "limit of each"),
            ),
        ),
        Panel(
            "Open files",
            "short",
            (("process_open_fds{@}", "{{instance}}"), ("min(process_max_fds{@})", "limit of each")),
        ),
        Panel(
            "Reloads",
            "short",
            (
                ("sum by (result) (increase(hbone_config_reloads_total{@}~))", "{{result}}"),
                ("sum(increase(hbone_worker_restarts_total{@}~))", "workers restarted"),
            ),
        ),
    ),
}


def expressions() -> Iterator[str]:
    """Every query of the dashboard, as it is in the file, those of its variables included."""
    made = dashboard()
    for panel in made["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in made["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def dashboard() -> dict[str, Any]:
    """The dashboard, in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(title, len(panels) + 1, y))
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        "title": "hgate",
        "uid": "hbone-hgate",
        "description": "The gateway of hbone: tunnels, refusals, services, credentials, processes.",
        "tags": ["hbone"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    several = {
        "multi": True,
        "includeAll": True,
        "refresh": 2,
        "sort": 1,
        "datasource": source,
        "type": "query",
    }
    everything: dict[str, Any] = {"current": {"text": ["All"], "value": ["$__all"]}}
    queries = {
        "job": "label_values(hbone_ready, job)",
        "instance": 'label_values(hbone_ready{job=~"$job"}, instance)',
    }
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
        },
        *(
            {"name": name, "label": name.capitalize(), "query": {"query": query, "refId": name}}
            | several
            | everything
            for name, query in queries.items()
        ),
    ]


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    is_stat = panel.kind == "stat"
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "datasource": source,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} | ({} if is_stat else {"custom": custom}),
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
        if is_stat
        else {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": query.replace("@", CHOSEN).replace("~)", f"{RATE})"),
                "legendFormat": legend or "__auto",
                "editorMode": "code",
                "range": True,
            }
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def _rule() -> str:
    """The rules as an object, comments included."""
    text = (FOLDER / "alerts.yaml").read_text()
    groups = text[text.index("groups:\n") :].splitlines()
    return RULE_HEAD + "".join(f"  {line}\n" if line else "\n" for line in groups)


def _json() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {"prometheusrule.yaml": _rule, "dashboard.json": _json}
"""Each file that is written here."""


def write() -> None:
    """Writes all of them."""
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())


if __name__ == "__main__":
    write()
