"""The files of a folder, replaced all at once; test_certificate_writer.py has more, of three certain ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shared.atomic_folders import Content, current_version, write


def names(folder: Path) -> set[str]:
    """Those that a reader sees, without what holds them."""
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith("..")}


def test_files_have_their_modes(tmp_path: Path) -> None:
    write(tmp_path / "a", {"public": Content(b"1"), "private": Content(b"2", 0o600)})
    files = [tmp_path / "a" / name for name in ("public", "private")]
    assert [file.read_bytes() for file in files] == [b"1", b"2"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o644, 0o600]
    assert os.readlink(files[0]) == "..data/public"


def test_files_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("somebody's")
    (tmp_path / "link").symlink_to("other")
    write(tmp_path, {"a": Content(b"1"), "b": Content(b"1")})
    write(tmp_path, {"b": Content(b"2"), "c": Content(b"2")})
    assert names(tmp_path) == {"b", "c", "other", "link"}
    write(tmp_path, {})
    assert names(tmp_path) == {"other", "link"}
    assert (tmp_path / current_version(tmp_path)).is_dir()


def test_a_name_that_is_taken_by_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match=r"a"):
        write(tmp_path, {"a": Content(b"1")})


def test_a_content_does_not_show_itself() -> None:
    assert "hunter2" not in repr(Content(b"hunter2"))
