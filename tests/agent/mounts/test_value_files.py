"""Files for single values."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from agent.mounts.value_files import ValueFiles
from shared.errors import UnavailableError


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_a_temporary_file_is_its_owner_s_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    files = ValueFiles()
    path = files.temporary(b"\0value", ".pem")
    assert path.parent == tmp_path / "tmp" and path.suffix == ".pem"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"\0value", 0o600)
    files.close()
    assert not path.exists()
    files.close()


def test_a_file_that_is_named_is_replaced_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "password"
    files = ValueFiles()
    files.at(path, b"one")
    path.chmod(0o644)
    files.at(path, b"two")
    files.close()
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"two", 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_are_given_away(tmp_path: Path) -> None:
    files = ValueFiles((1234, 1235))
    for path in (files.temporary(b"", ""), files.at(tmp_path / "a", b"")):
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)


def test_one_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"^cannot write a temporary file: File name too long$"):
        ValueFiles().temporary(b"", "." + "a" * 300)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"^cannot write its destination: "):
        ValueFiles().at(tmp_path / "file" / "a", b"")
