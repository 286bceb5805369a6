"""Three files replaced at once."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from shared import atomic_folders
from shared.atomic_folders import current_version
from shared.credentials.certificates.certificate_writer import Contents, write
from shared.net.tls.certificate_folder import find

NAMES = ["ca_certificates.pem", "certificates.pem", "private_key.pem"]


def contents(number: int) -> Contents:
    return Contents(b"chain %d" % number, b"key %d" % number, b"roots %d" % number)


def shown(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in find(folder).all]


def test_the_folder_is_made_with_links_to_a_version(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write(folder, contents(1))
    assert shown(folder) == [b"chain 1", b"key 1", b"roots 1"]
    assert [os.readlink(folder / name) for name in NAMES] == [f"..data/{name}" for name in NAMES]
    version = current_version(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == sorted([version, "..data", *NAMES])


def test_what_is_told_of_the_roots_comes_and_goes_with_them(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    write(folder, replace(contents(1), bundles_json=b"{}"))
    assert find(folder).bundles.read_bytes() == b"{}"
    assert os.readlink(folder / "trust_bundles.json") == "..data/trust_bundles.json"
    write(folder, contents(2))
    assert not os.path.lexists(folder / "trust_bundles.json")
    (folder / "trust_bundles.json").write_text("somebody else's")
    write(folder, contents(3))
    assert find(folder).bundles.read_text() == "somebody else's"


def test_only_the_owner_reads_the_key_whatever_the_umask_is(tmp_path: Path) -> None:
    for mask in (0o000, 0o077):
        before = os.umask(mask)
        try:
            write(tmp_path / "certs", contents(1))
        finally:
            os.umask(before)
        modes = [stat.S_IMODE(file.stat().st_mode) for file in find(tmp_path / "certs").all]
        assert modes == [0o644, 0o600, 0o644]
        assert stat.S_IMODE((tmp_path / "certs" / "..data").stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_are_given_away(tmp_path: Path) -> None:
    write(tmp_path, contents(1), owner=(1337, 1338))
    for file in find(tmp_path).all:
        assert (file.stat().st_uid, file.stat().st_gid) == (1337, 1338)


def test_the_links_stay_and_one_version_before_is_kept(tmp_path: Path) -> None:
    write(tmp_path, contents(1))
    first, links = current_version(tmp_path), {name: os.lstat(tmp_path / name).st_ino for name in NAMES}
    write(tmp_path, contents(2))
    second = current_version(tmp_path)
    assert shown(tmp_path) == [b"chain 2", b"key 2", b"roots 2"]
    assert (tmp_path / first / "private_key.pem").read_bytes() == b"key 1", "for who has followed the link"
    write(tmp_path, contents(3))
    assert not (tmp_path / first).exists()
    assert (tmp_path / second).exists()
    assert {name: os.lstat(tmp_path / name).st_ino for name in NAMES} == links


def test_a_hundred_leave_nothing_behind(tmp_path: Path) -> None:
    for number in range(100):
        write(tmp_path, contents(number))
    assert len(list(tmp_path.iterdir())) == 3 + 1 + 2


def test_files_of_others_are_replaced(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("somebody's")
    (tmp_path / "..notes").write_text("stays")
    write(tmp_path, contents(1))
    assert shown(tmp_path) == [b"chain 1", b"key 1", b"roots 1"]
    assert (tmp_path / "..notes").read_text() == "stays"


def test_what_a_crash_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "..data_tmp").symlink_to("nowhere")
    (tmp_path / "..123").mkdir()
    (tmp_path / "..123" / "private_key.pem").write_text("half")
    write(tmp_path, contents(1))
    assert shown(tmp_path) == [b"chain 1", b"key 1", b"roots 1"]
    assert not (tmp_path / "..123").exists()
    assert not (tmp_path / "..data_tmp").is_symlink()


def test_a_failure_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, contents(1))
    before = sorted(entry.name for entry in tmp_path.iterdir())

    def full(path: Path, *arguments: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(atomic_folders, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, contents(2))
    assert shown(tmp_path) == [b"chain 1", b"key 1", b"roots 1"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


def test_the_same_moment_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 7)
    write(tmp_path, contents(1))
    write(tmp_path, contents(2))
    assert (current_version(tmp_path), shown(tmp_path)[0]) == ("..8", b"chain 2")


def test_who_follows_the_link_once_never_sees_two_versions(tmp_path: Path) -> None:
    """A reader that opens all three in one version, while they are replaced without a pause."""
    write(tmp_path, contents(0))
    torn: list[set[bytes]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            try:
                version = tmp_path / os.readlink(tmp_path / "..data")
            except FileNotFoundError:
                torn.append(set())  # there is a version at any time
                continue
            try:
                numbers = {file.read_bytes().split()[1] for file in find(version).all}
            except FileNotFoundError:
                continue  # two turns in one look
            if len(numbers) != 1:
                torn.append(numbers)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(1, 200):
        write(tmp_path, contents(number))
    stop.set()
    reader.join()
    assert torn == []


def test_contents_do_not_show_the_key() -> None:
    assert "key 1" not in repr(contents(1))
