"""Alerts speak when they have to; they and the dashboard ask for metrics that there are; the runbook has all.

promtool reads the rules, runs their tests, and parses the dashboard's queries, made into rules.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring import write_monitoring
from gateway.app import Gateway
from shared.errors import Flag
from shared.ops.access_log import _KEYS, LOGGER, AccessLog
from shared.ops.families import FAMILIES, Kind
from tests.support.running_gateway import running
from tests.support.world import find_program
from tests.test_documents import anchors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
CASES = Path(__file__).parent / "alerts_test.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"

RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule["alert"] for rule in RULES]

OF_THE_PROCESS = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
)
"""Of prometheus_client's own collector."""

OF_THE_SCRAPE = {"job", "instance"}
"""Labels that Prometheus sets."""


def known() -> dict[str, set[str]]:
    """Each name that a query may have, with its labels."""
    found = {name: set[str]() for name in OF_THE_PROCESS}
    for family in FAMILIES:
        if family.kind is Kind.HISTOGRAM:
            found |= {f"{family.name}_{part}": set(family.labels) for part in ("count", "sum")}
            found[f"{family.name}_bucket"] = {*family.labels, "le"}
        else:
            found[family.shown_name] = set(family.labels)
    return found


def promtool(*arguments: str | Path) -> str:
    """What it prints; it has to succeed."""
    command = [find_program("promtool"), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


_STRING = re.compile(r'"[^"]*"')
_MATCHERS = re.compile(r"([a-z_:]+)?\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]|\boffset \d+[smhd]|\b\d+[smhd]\b")
_WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left"}


def asked(expression: str) -> tuple[set[str], set[str], set[str]]:
    """The metrics, the functions, and the labels in an expression that promtool takes."""
    text = _STRING.sub('""', expression)
    labels = {
        label
        for _, matchers in _MATCHERS.findall(text)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
    } | {label for group in _GROUPING.findall(text) for label in re.findall(r"\w+", group)}
    rest = _RANGE.sub("", _GROUPING.sub("", re.sub(r"\{[^}]*\}", "", text)))
    functions = set(re.findall(r"\b([a-z_0-9]+)\s*\(", rest)) - _WORDS
    names = set(re.findall(r"\b[a-z_][a-z_0-9]*\b", rest)) - functions - _WORDS
    return names, functions, labels


def parts() -> list[tuple[str, str]]:
    """Each expression of a rule or a panel, with where it is."""
    of_panels = [
        (panel["title"], target["expr"]) for panel in panels() for target in panel.get("targets", ())
    ]
    return [(rule["alert"], rule["expr"]) for rule in RULES] + of_panels


def panels() -> list[Any]:
    return json.loads((FOLDER / "dashboard.json").read_text())["panels"]


# Rules.

LISTS = {"config", "config_dump", "tunnels", "connections", "certs", "tokens", "overview"}
"""What the admin port has, by its paths."""


def test_promtool_takes_the_rules() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", FOLDER / "alerts.yaml")


def test_alerts_speak_when_they_have_to_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", CASES)


def test_every_alert_has_a_case_in_which_it_speaks_and_one_in_which_it_does_not() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    for spoken in (True, False):
        tried = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is spoken}
        assert sorted(tried) == sorted(ALERTS)


def test_cases_have_series_that_hgate_could_have() -> None:
    names = known() | {"up": set()}
    for test in yaml.safe_load(CASES.read_text())["tests"]:
        for series in test["input_series"]:
            name, _, labels = series["series"].partition("{")
            assert set(re.findall(r"(\w+)=", labels)) - OF_THE_SCRAPE == names[name], series["series"]


def test_the_operator_s_form_has_the_same_rules() -> None:
    rule = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text())
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((FOLDER / "alerts.yaml").read_text())


@pytest.mark.parametrize("name", write_monitoring.PAGES)
def test_what_is_written_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == write_monitoring.PAGES[name](), "run: make monitoring"


def test_what_the_issue_of_every_operator_is_has_an_alert() -> None:
    asked_of = {name for rule in RULES for name in asked(rule["expr"])[0]}
    assert asked_of >= {
        "hbone_certificate_expiration_timestamp_seconds",
        "hbone_token_expiry_timestamp_seconds",
        "hbone_connections_refused_total",
        "hbone_upstream_retries_over_budget_total",
        "hbone_event_loop_lag_seconds_bucket",
        "hbone_buffered_bytes",
        "hbone_upstream_waiting_refused_total",
        "hbone_config_last_reload_successful",
        "hbone_ready",
    }


async def test_a_running_hgate_serves_what_alerts_ask_for(tmp_path: Path) -> None:
    async with running(tmp_path / "hgate.yaml", []) as gateway:
        scrape = (await gateway.get("metrics", "/metrics")).body.decode()
    served = set(re.findall(r"^# TYPE (\S+)", scrape, re.MULTILINE))
    of_alerts = {re.sub("_bucket$", "", name) for rule in RULES for name in asked(rule["expr"])[0]}
    only_with_workers = {"hbone_worker_restarts_total"}
    only_with_traces = {"hbone_trace_spans_total", "hbone_trace_spans_dropped_total"}
    only_with_cluster = {name for name in of_alerts if name.startswith("hbone_cluster_")}
    assert of_alerts - served == only_with_workers | only_with_traces | only_with_cluster


# Queries.


@pytest.mark.parametrize(("where", "expression"), parts(), ids=lambda text: text.partition("\n")[0][:60])
def test_queries_name_metrics_and_labels_that_exist(where: str, expression: str) -> None:
    names, _, labels = asked(expression)
    assert names and names <= known().keys(), where
    possible = set().union(*(known()[name] for name in names)) | OF_THE_SCRAPE
    assert labels <= possible, where


def test_an_unknown_name_would_be_noticed() -> None:
    names, functions, labels = asked(
        'sum by (rout) (rate(hbone_tunnels_opend_total{flag!="x"}[5m])) > 0 and up'
    )
    assert names == {"hbone_tunnels_opend_total", "up"}
    assert (functions, labels) == ({"sum", "rate"}, {"rout", "flag"})


def test_closed_sets_of_labels_have_the_values_that_queries_match() -> None:
    """Those that no metric has match nothing for ever."""
    for where, expression in parts():
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', expression):
            if label == "flags":
                assert set(value.split("|")) <= {str(flag) for flag in Flag}, where
            elif label in ("result", "reason") and operator:
                values = {one for family in FAMILIES for one in family.labels.get(label, ())}
                assert set(value.split("|")) <= values, where


def test_promtool_takes_the_dashboard_s_queries(tmp_path: Path) -> None:
    queries = [
        re.sub(r"\$__rate_interval", "5m", query)
        for query in write_monitoring.expressions()
        if not query.startswith("label_values(")
    ]
    assert len(queries) > 40
    records = [{"record": f"query_{at}", "expr": query} for at, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", file)


def test_the_dashboard_s_panels_have_places_of_their_own() -> None:
    taken = set[tuple[int, int]]()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= write_monitoring.WIDTH
        taken |= cells
    numbers = [panel["id"] for panel in panels()]
    assert numbers == sorted(set(numbers))


def test_the_kustomization_takes_what_it_names() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (dashboard,) = kustomization["configMapGenerator"]
    assert [*kustomization["resources"], *dashboard["files"]] == list(write_monitoring.PAGES)


# The runbook.


def sections() -> dict[str, str]:
    """Those of alerts and flags, by heading."""
    text = RUNBOOK.read_text().partition("\n## Alerts\n")[2]
    return dict(re.findall(r"^### (.+)\n((?:.*\n)*?)(?=##|\Z)", text, re.MULTILINE))


def test_every_alert_and_every_flag_has_a_section() -> None:
    flags = [str(flag) for flag in Flag if flag is not Flag.NONE]
    assert list(sections()) == ALERTS + flags


@pytest.mark.parametrize("name", sections())
def test_a_section_says_what_it_means_what_to_look_at_and_what_to_do(name: str) -> None:
    said = re.findall(r"^\*\*([^*]+):\*\*", sections()[name], re.MULTILINE)
    assert said == ["Means", "Look at", "Do"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_its_section(rule: dict[str, Any]) -> None:
    place, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert place == "https://DOCS/runbook.md"
    assert anchor == rule["alert"].lower() and anchor in anchors(RUNBOOK)


COMMAND = re.compile(r"\b(flagged|counted|metric|admin) ([\w./]+)(?: ([\w.]+))?")


def commands() -> list[tuple[str, str, str]]:
    """Those of the sections that are code, with their arguments."""
    code = "\n".join(
        part
        for text in sections().values()
        for part in re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
        for part in part
    )
    return [(command, first, second) for command, first, second in COMMAND.findall(code)]


def test_the_commands_name_what_there_is() -> None:
    names, keys, flags = known(), {key for _, key in _KEYS}, {str(flag) for flag in Flag}
    lists = LISTS
    assert len(commands()) > 80
    for command, first, second in commands():
        if command == "metric":
            assert first in names, first
        elif command == "admin":
            assert first in lists, first
        else:
            assert first in flags, first
            assert command == "flagged" or second in keys, f"{command} {first} {second}"


def test_the_lists_are_those_of_the_admin_port() -> None:
    import inspect

    assert set(re.findall(r'"/(\w+)": (?:self\.|_show|lambda)', inspect.getsource(Gateway.__init__))) == LISTS


def test_other_metrics_in_the_text_exist() -> None:
    told = set(re.findall(r"`((?:hbone|istio|process)_[a-z_]+)", RUNBOOK.read_text()))
    assert told <= known().keys()


async def test_the_commands_do_what_they_say(tmp_path: Path) -> None:
    """With a kubectl that has the log that hgate writes."""
    bash, _ = find_program("bash"), find_program("jq")
    (tmp_path / "kubectl").write_text('#!/bin/sh\n[ "$3" = logs ] && exec cat "$LOG" || exec true\n')
    (tmp_path / "kubectl").chmod(0o755)
    log = tmp_path / "log"
    with log.open("w") as output:
        access_log = AccessLog(output, "json", "hgate")
        for sni in ("b", "a", "b"):
            access_log.refused(src_addr="10.0.0.1:5", sni=sni, flags=Flag.NO_ROUTE, error="no route")
        access_log.refused(src_addr="10.0.0.1:5", flags=Flag.NO_SNI)
        access_log.close()
    with log.open("a") as output:
        output.write('{"severity":"WARNING","message":"reload: no","logger":"hbone.gateway"}\nno JSON\n')
        output.write('{"severity":"INFO","message":"ready","logger":"hbone.gateway"}\n')
    assert LOGGER in log.read_text()
    (defined,) = re.findall(r"```sh\n(.*?)```", RUNBOOK.read_text().partition("## Alerts")[0], re.DOTALL)

    def said(command: str) -> list[str]:
        ran = subprocess.run(
            [bash, "-c", f"{defined}\n{command}"],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        return ran.stdout.splitlines()

    assert [json.loads(line)["sni"] for line in said("flagged NO_ROUTE")] == ["b", "a", "b"]
    assert [line.split() for line in said("counted NO_ROUTE sni")] == [["2", "b"], ["1", "a"]]
    assert [line.split() for line in said("counted NO_SNI sni")] == [["1", "-"]]
    assert said("warnings") == ["reload: no"]
