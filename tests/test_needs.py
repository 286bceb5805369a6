"""Each target of the Makefile looks for what it needs before it begins, with any Python that is about."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.needs import EXIT_OK, EXIT_UNAVAILABLE, TARGETS, main

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()

OLDER_PYTHONS = ("python3.7", "python3.8", "python3.9", "python3.10")


def rules() -> dict[str, list[str]]:
    """The Makefile's targets with their prerequisites."""
    return {name: before.split() for name, before in re.findall(r"^([a-z-]+):(.*)$", MAKEFILE, re.MULTILINE)}


def asked(*arguments: str, path: str = "/nonexistent", python: str = sys.executable) -> tuple[int, str, str]:
    """What the module says, with nothing on PATH."""
    ran = subprocess.run(
        [python, "-m", "tests.needs", *arguments],
        cwd=ROOT,
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_every_target_that_runs_something_looks_first() -> None:
    runs = {name for name in rules() if name in TARGETS}
    assert runs == set(TARGETS)
    assert [name for name in runs if rules()[name][0] != f"needs-{name}"] == []


def test_every_target_that_installs_is_one_that_looks() -> None:
    installs = {name for name, before in rules().items() if any("/.installed" in word for word in before)}
    elsewhere = {"test-install", "test-compiled"}  # in folders of their own
    assert installs - {"bench-compare"} == set(TARGETS) - elsewhere


def test_the_bench_without_a_compiler_does_not_begin() -> None:
    code, out, err = asked("bench")
    assert (code, out) == (EXIT_UNAVAILABLE, "")
    assert "make bench: a C compiler is missing (Debian: apt-get install gcc libc6-dev)\n" in err


def test_the_tests_begin_and_say_what_is_left_out() -> None:
    code, out, err = asked("test")
    assert (code, out) == (EXIT_OK, "")
    assert (
        "make test: without curl the tests that talk to it are left out (Debian: apt-get install curl)\n"
        in err
    )


def test_the_packages_for_ci() -> None:
    code, out, err = asked("--packages", "test", "bench")
    assert (code, err) == (EXIT_OK, "")
    assert {"curl", "openssh-client", "nghttp2-client", "gcc", "libc6-dev"} <= set(out.split())
    assert len(out.split()) == len(set(out.split()))


def test_nothing_is_said_where_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "missing", lambda _: ())
    assert main([*TARGETS]) == EXIT_OK
    assert main(["--packages", *TARGETS]) == EXIT_OK
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("python", OLDER_PYTHONS)
def test_an_older_python_is_told_so(python: str) -> None:
    program = shutil.which(python)
    if program is None or subprocess.run([program, "-V"], capture_output=True).returncode:
        pytest.skip(f"no {python}")
    code, _, err = asked("demo", python=program, path="/usr/bin:/bin")
    assert code == EXIT_UNAVAILABLE
    assert re.search(r"^make demo: Python 3\.11 or newer is missing \(this is 3\.\d+\.\d+", err, re.MULTILINE)
