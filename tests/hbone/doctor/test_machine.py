"""What is told of a machine alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hbone.doctor import machine
from shared.doctor.failures import Failure
from shared.doctor.walk import Report, Result, Verdict


def row(report: Report, name: str) -> Result:
    return next(result for result in report.results if result.name == name)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of a machine that has ssh."""
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    return {"PATH": str(tmp_path), "HOME": str(tmp_path)}


def test_a_machine_with_little(environ: dict[str, str], tmp_path: Path) -> None:
    report = machine.look(environ)
    assert report.failed is None
    assert row(report, "ssh").detail == str(tmp_path / "ssh")
    missing = ("gcloud", "kubectl", "kubeconfig", "proxy")
    assert {row(report, name).verdict for name in missing} == {Verdict.SKIP}
    assert row(report, "hbone").detail.startswith("hbone ")


def test_a_machine_with_more(environ: dict[str, str], tmp_path: Path) -> None:
    config, credentials = tmp_path / "config", tmp_path / "adc.json"
    config.write_text("")
    credentials.write_text('{"private_key": "-----BEGIN PRIVATE KEY-----"}')
    report = machine.look(
        environ
        | {
            "KUBECONFIG": str(config),
            "GOOGLE_APPLICATION_CREDENTIALS": str(credentials),
            "HTTPS_PROXY": "http://me:secret@proxy.example:3128",
            "NO_PROXY": ".internal",
        }
    )
    assert report.failed is None
    assert row(report, "kubeconfig").detail == str(config)
    assert row(report, "credentials").detail == str(credentials)
    proxies = row(report, "proxy").detail
    assert proxies == "HTTPS_PROXY=http://proxy.example:3128, NO_PROXY=.internal", "without the password"


@pytest.mark.parametrize(
    ("more", "name", "failure"),
    [
        ({"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/adc.json"}, "credentials", Failure.TOKEN_FILE),
        ({"HBONE_TOKENS": "magic"}, "tokens", Failure.NO_TOKEN),
    ],
)
def test_what_is_wrong(environ: dict[str, str], more: dict[str, str], name: str, failure: Failure) -> None:
    report = machine.look(environ | more)
    assert row(report, name).failure is failure
    assert report.exit_code == failure.hop.exit_code
    assert len(report.results) == len(machine.look(environ).results), "the rest is told all the same"
