"""What is kept between two runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hbone.kept import MAX_FILES, Kept, cache_folder, state_of
from tests.support.wall_clock import Clock

QUESTION = ["service", "hello", None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hbone"


def test_an_answer_is_kept_until_its_end(folder: Path, clock: Clock) -> None:
    kept = Kept(folder, clock)
    assert kept.get(QUESTION) is None
    assert not folder.exists(), "looking makes nothing"
    kept.put(QUESTION, {"url": "https://h"}, clock() + 10)
    assert Kept(folder, clock).get(QUESTION) == {"url": "https://h"}
    assert kept.get(["service", "other", None]) is None
    clock.now += 10
    assert kept.get(QUESTION) is None
    clock.now -= 11
    assert kept.get(QUESTION) is None, "a clock that was set back"


def test_only_its_user_can_read_it(folder: Path, clock: Clock) -> None:
    Kept(folder, clock).put(QUESTION, "a", clock() + 10)
    (file,) = folder.iterdir()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, file)] == [0o700, 0o600]
    assert "hello" not in file.read_text(), "the question is nobody's business"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"ends": 1}', b"\xff", b"[" * 100_000])
def test_a_corrupt_file_is_ignored_and_replaced(folder: Path, clock: Clock, content: bytes) -> None:
    kept = Kept(folder, clock)
    kept.put(QUESTION, "a", clock() + 10)
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert kept.get(QUESTION) is None
    kept.put(QUESTION, "b", clock() + 10)
    assert kept.get(QUESTION) == "b"


def test_what_others_could_change_counts_for_nothing(folder: Path, clock: Clock) -> None:
    kept = Kept(folder, clock)
    kept.put(QUESTION, "a", clock() + 10)
    (file,) = folder.iterdir()
    file.chmod(0o644)
    assert kept.get(QUESTION) is None
    file.chmod(0o600)
    folder.chmod(0o777)
    assert kept.get(QUESTION) is None
    assert kept.trouble == ""
    kept.put(["more"], "b", clock() + 10)
    assert list(folder.iterdir()) == [file], "and nothing is written there"
    assert kept.trouble.startswith(f"{folder} may be written by others than ")


def test_a_pipe_in_its_place_is_not_waited_for(folder: Path, clock: Clock) -> None:
    kept = Kept(folder, clock)
    kept.put(QUESTION, "a", clock() + 10)
    (file,) = folder.iterdir()
    file.unlink()
    os.mkfifo(file, 0o600)
    assert kept.get(QUESTION) is None


def test_dropped(folder: Path, clock: Clock) -> None:
    kept = Kept(folder, clock)
    kept.drop(QUESTION)
    kept.put(QUESTION, "a", clock() + 10)
    kept.drop(QUESTION)
    assert kept.get(QUESTION) is None


def test_the_oldest_make_room(folder: Path, clock: Clock) -> None:
    kept = Kept(folder, clock)
    for number in range(MAX_FILES):
        kept.put(number, number, clock() + 10)
    for age, file in enumerate(sorted(folder.iterdir())):
        os.utime(file, (age, age))
    first = min(folder.iterdir())
    kept.put("one more", 1, clock() + 10)
    assert len(list(folder.iterdir())) == MAX_FILES
    assert not first.exists()


def test_without_a_folder_nothing_is_kept(clock: Clock) -> None:
    kept = Kept(None, clock)
    kept.put(QUESTION, "a", clock() + 10)
    kept.drop(QUESTION)
    assert kept.get(QUESTION) is None


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    home = {"HOME": "/home/me"}
    assert cache_folder(home) == Path("/home/me/.cache/hbone")
    assert cache_folder(home | {"XDG_CACHE_HOME": "/c"}) == Path("/c/hbone")
    assert cache_folder(home | {"XDG_CACHE_HOME": "c"}) == Path("/home/me/.cache/hbone")
    assert cache_folder({}) is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder(home) == Path("/home/me/Library/Caches/hbone")


def test_the_state_of_files(tmp_path: Path) -> None:
    file = tmp_path / "config"
    before = state_of([file])
    file.write_text("a")
    assert before == [None] != state_of([file])
