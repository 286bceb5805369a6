"""The demo's processes, with small Python programs in their place."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from hbone.demo import processes
from hbone.demo.processes import KEPT_RECORDS, Process, Record
from shared.errors import UnavailableError
from tests.support.tcp_peer import PATIENCE_S

FOREVER = "import time; time.sleep(60)"


class Start(Protocol):
    def __call__(self, program: str, environ: Mapping[str, str] = ...) -> Process: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program, and ends it with the test."""
    with ExitStack() as running:

        def start(program: str, environ: Mapping[str, str] | None = None) -> Process:
            process = Process("program", ["-u", "-c", program], environ or {}, tmp_path)
            running.callback(process.stop)
            return process

        yield start


def text(wanted: str) -> Record:
    return {"text": wanted}


def test_lines_are_waited_for_whether_past_or_future(start: Start, tmp_path: Path) -> None:
    process = start(
        "import json, sys, time\n"
        "print('NAME=value')\n"
        "print(json.dumps({'message': 'listening', 'port': 1}), file=sys.stderr)\n"
        "print('[1, 2]')\n" + FOREVER
    )
    assert process.wait_for(lambda record: record.get("message") == "listening") == {
        "message": "listening",
        "port": 1,
    }
    assert process.wait_for(lambda record: record.get("text") == "NAME=value") == text("NAME=value")
    assert process.wait_for(lambda record: record.get("text") == "[1, 2]"), "JSON, but no record"
    process.stop()
    assert sorted((tmp_path / "program.log").read_text().splitlines()) == [
        "NAME=value",
        "[1, 2]",
        '{"message": "listening", "port": 1}',
    ]


def test_the_first_that_fits_is_taken(start: Start) -> None:
    process = start("print('a 1'); print('a 2')\n" + FOREVER)
    process.wait_for(lambda record: record["text"] == "a 2")
    assert process.wait_for(lambda record: record["text"].startswith("a")) == text("a 1")


def test_the_environment_is_ours_and_what_was_given(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "1")
    process = start("import os; print(os.environ['INHERITED'], os.environ['GIVEN'])", {"GIVEN": "2"})
    assert process.wait_for(lambda record: True) == text("1 2")


def test_any_bytes_are_taken(start: Start) -> None:
    process = start("import os; os.write(1, b'\\xff\\xfe caf\\xc3\\xa9\\nlast, without an end')\n")
    assert process.wait_for(lambda record: record["text"].endswith("caf\u00e9"))
    assert process.wait_for(lambda record: record["text"] == "last, without an end")


def test_a_process_that_ended(start: Start) -> None:
    process = start("import sys; print('working'); print('cannot: no way', file=sys.stderr); sys.exit(69)")
    with pytest.raises(UnavailableError) as caught:
        process.wait_for(lambda record: False)
    assert re.fullmatch(
        "program ended with exit code 69; its last line: (cannot: no way|working)", str(caught.value)
    )
    assert process.stop() == 69


def test_a_process_that_ended_without_a_word(start: Start) -> None:
    with pytest.raises(UnavailableError, match="program ended with exit code 0; its last line: none"):
        start("").wait_for(lambda record: False)


def test_a_process_that_says_something_else(start: Start) -> None:
    process = start("import json; print(json.dumps({'message': 'still busy'}))\n" + FOREVER)
    process.wait_for(lambda record: True)
    with pytest.raises(UnavailableError, match="program took too long; its last line: still busy"):
        process.wait_for(lambda record: False, timeout_s=0.05)


def test_stop(start: Start) -> None:
    process = start("print('up')\n" + FOREVER)
    process.wait_for(lambda record: True)
    assert process.stop() == -signal.SIGTERM
    assert process.stop() == -signal.SIGTERM, "once more does no harm"


def test_stop_waits_for_an_orderly_end(start: Start) -> None:
    process = start(
        "import signal, sys\n"
        "def stop(*_):\n    print('bye')\n    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, stop); print('up')\n" + FOREVER
    )
    process.wait_for(lambda record: True)
    assert process.stop() == 7
    assert process.wait_for(lambda record: record["text"] == "bye")


def test_stop_forces_it_if_it_must(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    process = start("import signal; signal.signal(15, signal.SIG_IGN); print('up')\n" + FOREVER)
    process.wait_for(lambda record: True)
    assert process.stop() == -signal.SIGKILL


def test_a_child_that_outlives_it_harms_nobody(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the pipe, and writes when the log is closed."""
    complaints: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)
    monkeypatch.setattr(processes, "LAST_LINES_TIMEOUT_S", 0.01)
    os.mkfifo(tmp_path / "go on")
    process = start(
        "import subprocess, sys\n"
        "child = 'import os; print(1); open(os.environ[\"GO_ON\"]).read(); print(2)'\n"
        "subprocess.Popen([sys.executable, '-u', '-c', child], start_new_session=True)\n" + FOREVER,
        {"GO_ON": str(tmp_path / "go on")},
    )
    process.wait_for(lambda record: record == text("1"))
    readers = [thread for thread in threading.enumerate() if thread.name == "program's output"]
    process.stop()
    (tmp_path / "go on").write_text("now")
    for reader in readers:
        reader.join(PATIENCE_S)
    assert process.wait_for(lambda record: record == text("2"))
    assert complaints == []
    assert (tmp_path / "program.log").read_text() == "1\n"


def test_what_is_kept_is_bounded(start: Start) -> None:
    process = start(f"for n in range({2 * KEPT_RECORDS}): print(n)\nprint('end')\n" + FOREVER)
    process.wait_for(lambda record: record["text"] == "end")
    oldest = process.wait_for(lambda record: True)
    assert oldest == text(str(KEPT_RECORDS + 1))


def test_what_its_records_say_of_failures(start: Start) -> None:
    lines = ('{"message": "up"}', '{"error": "denied: no rule", "flags": "DENY"}', '{"error": null}')
    process = start("; ".join(f"print({line!r}, flush=True)" for line in lines) + f"; {FOREVER}")
    process.wait_for(lambda record: "error" in record and record["error"] is None)
    assert process.faults() == [f"{process.name}: DENY: denied: no rule"]
