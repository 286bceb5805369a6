"""What counts as a change of a file."""

from __future__ import annotations

import os
from pathlib import Path

from shared.watched_file import WatchedFiles, stamp


def test_a_change_is_found_once_it_was_noted(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    watched = WatchedFiles([file, other])
    assert watched.changed()
    watched.note()
    assert not watched.changed()  # both are missing
    other.write_text("here")
    assert watched.changed()
    watched.note()
    assert not watched.changed()
    watched.forget()
    assert watched.changed()


def test_a_replaced_file_of_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("one")
    link.symlink_to(file)
    before = stamp(link)
    new = tmp_path / "new"
    new.write_text("two")
    status = os.stat(file)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(file)
    assert stamp(link) != before
    file.unlink()
    assert stamp(link) is None
