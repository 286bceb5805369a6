"""Certificates by all their customary names."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.net.tls import certificate_folder
from shared.net.tls.certificate_folder import (
    FOLDERS,
    NAMES,
    customary_folder,
    find,
)


@pytest.mark.parametrize("names", NAMES)
def test_each_set_of_names_is_found(tmp_path: Path, names: tuple[str, str, str]) -> None:
    for name in names:
        (tmp_path / name).write_text(name)
    paths = find(tmp_path)
    assert paths.complete
    assert tuple(file.read_text() for file in paths.all) == names
    assert paths.all == (paths.certificates, paths.private_key, paths.roots)


def test_an_empty_folder_has_the_first_names() -> None:
    paths = find(Path("/nonexistent"))
    assert [file.name for file in paths.all] == ["certificates.pem", "private_key.pem", "ca_certificates.pem"]
    assert (paths.count, paths.complete) == (0, False)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_an_incomplete_set_is_named_by_its_own_names(tmp_path: Path, missing: int) -> None:
    """So that the error is about tls.key, not about a private_key.pem that nobody has heard of."""
    names = NAMES[2]
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / names[missing]).unlink()
    paths = find(tmp_path)
    assert [file.name for file in paths.all] == list(names)
    assert (paths.count, paths.complete) == (2, False)


def test_of_several_complete_sets_the_first_counts(tmp_path: Path) -> None:
    for name in NAMES[0] + NAMES[1]:
        (tmp_path / name).write_text("")
    assert find(tmp_path).certificates.name == "certificates.pem"


def test_the_complete_set_counts_beside_a_part_of_another(tmp_path: Path) -> None:
    for name in (*NAMES[1], NAMES[0][0]):
        (tmp_path / name).write_text("")
    assert find(tmp_path).certificates.name == "cert-chain.pem"


def test_links_count_as_files(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    for name in NAMES[2]:
        (tmp_path / "..data" / name).write_text("")
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert find(tmp_path).complete


def test_the_first_customary_folder_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(certificate_folder, "FOLDERS", folders)
    assert customary_folder() == folders[0], "none has: the first, for the error text"
    folders[1].mkdir()
    for name in NAMES[1]:
        (folders[1] / name).write_text("")
    assert customary_folder() == folders[1]


def test_where_platforms_mount_them() -> None:
    assert [str(folder) for folder in FOLDERS] == [
        "/var/run/secrets/workload-spiffe-credentials",
        "/etc/certs",
        "/var/run/secrets/spiffe.io",
    ]
