"""A file that others read while it is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shared.atomic_files import PRIVATE_MODE, PUBLIC_MODE, write_atomically


def test_the_new_content_has_its_mode_and_no_other_file_stays_behind(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    write_atomically(file, b"first", PUBLIC_MODE)
    write_atomically(file, b"second", PRIVATE_MODE)
    assert file.read_bytes() == b"second"
    assert stat.S_IMODE(file.stat().st_mode) == PRIVATE_MODE
    assert list(tmp_path.iterdir()) == [file]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_atomically(file, b"old", PUBLIC_MODE)
    with file.open("rb") as reader:
        write_atomically(file, b"new and longer", PUBLIC_MODE)
        assert reader.read() == b"old"


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"somebody else's")
    link.symlink_to(target)
    write_atomically(link, b"ours", PUBLIC_MODE)
    assert (link.read_bytes(), target.read_bytes(), link.is_symlink()) == (b"ours", b"somebody else's", False)


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path: Path) -> None:
    in_the_way = tmp_path / "folder"
    in_the_way.mkdir()
    with pytest.raises(OSError):
        write_atomically(in_the_way, b"content", PUBLIC_MODE)
    assert list(tmp_path.iterdir()) == [in_the_way]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_is_another_user(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_atomically(file, b"for the app", PRIVATE_MODE, owner=(1234, 5678))
    about = file.stat()
    assert (about.st_uid, about.st_gid) == (1234, 5678)
