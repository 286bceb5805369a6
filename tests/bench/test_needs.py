"""What the bench needs is looked for before it begins; what it can do without, it leaves out and says so."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import needs
from bench.needs import missing
from bench.tools import BenchError

ROOT = Path(__file__).parent.parent.parent


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These are not there, all others are."""
    lacking = tuple(
        dataclasses.replace(need, is_there=partial(bool, need.what not in names)) for need in needs.NEEDS
    )
    assert {need.what for need in missing(lacking)} == set(names)
    monkeypatch.setattr(needs, "missing", lambda: missing(lacking))


def test_what_is_there_is_not_missing() -> None:
    assert missing([needs.program("python3", "python3"), needs.program("no-such-program", "x")])[0].what == (
        "no-such-program"
    )


def test_servers_are_found_though_their_folder_is_not_on_path() -> None:
    assert needs.PATH.endswith(":/usr/sbin:/sbin")


def test_a_peer_that_is_missing_leaves_its_places_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "haproxy")
    assert bench._left_out(set(bench.PLACES)) == {"path": "haproxy", "https": "haproxy"}
    assert capsys.readouterr().err == (
        "bench: without haproxy the whole path (path, https) is left out (Debian: apt-get install haproxy)\n"
    )


@pytest.mark.parametrize("name", ["a C compiler", "OpenSSL's openssl/ssl.h"])
def test_nothing_goes_without_the_load_generator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    without(monkeypatch, name)
    with pytest.raises(BenchError, match="nothing can be measured"):
        bench._left_out({"hgate"})


def test_what_was_asked_for_and_is_left_out_altogether_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "h2load")
    with pytest.raises(BenchError, match="https: left out, so there is nothing to measure"):
        bench._left_out({"https"})
    assert bench._left_out({"hgate"}) == {}


def test_every_place_that_may_be_left_out_is_one() -> None:
    assert {place for need in needs.NEEDS for place in need.places} <= set(bench.PLACES)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="takes root and unshare")
def test_without_haproxy_it_says_so_at_once() -> None:
    """Not after the seven minutes of the other places."""
    if lacking := needs.missing((needs.COMPILER, needs.HEADERS)):
        pytest.skip(lacking[0].message())
    there = shutil.which("haproxy", path=needs.PATH)
    hide = f"mount --bind /dev/null {there}; " if there else ""
    command = [sys.executable, "-m", "bench", "--only", "path,https"]
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{hide}exec "$@"', "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, last = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (bench.EXIT_FAILED, "")
    assert first.startswith("bench: without haproxy the whole path (path, https) is left out (Debian: ")
    assert last == "bench: https, path: left out, so there is nothing to measure"
