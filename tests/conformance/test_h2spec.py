"""krun passes h2spec whole, and a run that did not pass would say so.

h2spec is not downloaded for the tests' sake: where `make conformance` has not built it, the first test is
skipped; CI builds it where Go is there.
"""

from __future__ import annotations

import os
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.conformance.run import CASES, Run, build, read_cases, report, run_all

ROOT = Path(__file__).parents[2]

# As h2spec writes it: the wanted answers and the last seen one, in an <error> for want of a better one.
REPORT = """\
<testsuites>
  <testsuite name="5.1. Stream States" package="http2/5.1" tests="3" skipped="1" failures="0" errors="1">
    <testcase package="http2/5.1" classname="idle: Sends a DATA frame" time="0.0004"></testcase>
    <testcase package="http2/5.1" classname="idle: Sends a RST_STREAM frame" time="2.0011">
      <error>GOAWAY Frame (Error Code: PROTOCOL_ERROR)
Connection closed
Timeout</error>
    </testcase>
    <testcase package="http2/5.1" classname="idle: Sends a WINDOW_UPDATE frame" time="0.0002">
      <skipped></skipped>
    </testcase>
  </testsuite>
</testsuites>
"""


def test_h2spec_passes_whole() -> None:
    can_build = os.environ.get("CI") == "true" and shutil.which("go") is not None
    if not can_build and not (ROOT / ".venv/bin/h2spec").exists():
        pytest.skip("h2spec is not built: make conformance does it, with Go")
    runs = run_all(build())
    assert all(run.passed for run in runs), report(runs)


def test_what_did_not_pass_is_named() -> None:
    run = Run("/", False, tuple(read_cases(ET.fromstring(REPORT))), 2.0)
    assert not run.passed
    assert report([run]).splitlines()[1:] == [
        "/             no           1  146   2.00 s",
        "",
        "http2/5.1/2 with /: idle: Sends a RST_STREAM frame",
        "    wanted | got: GOAWAY Frame (Error Code: PROTOCOL_ERROR) | Connection closed | Timeout",
        "",
        "http2/5.1/3 with /: idle: Sends a WINDOW_UPDATE frame",
        "    wanted | got: skipped",
    ]


def test_a_run_of_fewer_cases_does_not_pass() -> None:
    (passed, *_) = read_cases(ET.fromstring(REPORT))
    assert Run("/", False, (passed,) * CASES[False], 1.0).passed
    assert not Run("/", False, (passed,) * (CASES[False] - 1), 1.0).passed
