"""Certificate files that change, and what was made of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shared.errors import ConfigError, UnavailableError
from shared.net.certificate_files import LOOK_EVERY_S, CertificateFiles

log = logging.getLogger("hbone.test")


class Reader:
    """Makes the file's text; `bad` is what cannot be used."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.times = 0
        self.files = CertificateFiles((file,), self.make, log=log, purpose="test")

    def make(self) -> str:
        self.times += 1
        try:
            text = self.file.read_text()
        except OSError as error:
            raise UnavailableError(f"{self.file}: {error.strerror}") from error
        if text == "bad":
            raise ConfigError(str(self.file), None, "", "no certificate")
        return text


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    file = tmp_path / "certificates.pem"
    file.write_text("first")
    reader = Reader(file)
    reader.files.read()
    return reader


def replace(file: Path, text: str) -> None:
    other = file.with_suffix(".new")
    other.write_text(text)
    other.rename(file)


def test_what_has_not_changed_is_not_made_again(reader: Reader) -> None:
    assert [reader.files.current(now) for now in (0.0, 10.0, 20.0)] == ["first"] * 3
    assert reader.times == 1


def test_a_change_is_seen_at_the_next_look(reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hbone.test")
    assert reader.files.current(10.0) == "first"
    replace(reader.file, "second")
    assert reader.files.current(10.0 + LOOK_EVERY_S / 2) == "first", "looked again too soon"
    assert reader.files.current(10.0 + LOOK_EVERY_S) == "second"
    assert caplog.messages == ["test: certificate files read again"]


def test_a_link_that_moves_on_is_a_change(tmp_path: Path) -> None:
    """Kubernetes turns the link `..data` to a new folder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    data = tmp_path / "..data"
    data.symlink_to(tmp_path / "one")
    reader = Reader(data / "file")
    reader.files.read()
    turned = tmp_path / "turned"
    turned.symlink_to(tmp_path / "two")
    turned.rename(data)
    assert reader.files.current(10.0) == "two"


def test_what_cannot_be_used_changes_nothing_and_is_said_once(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    replace(reader.file, "bad")
    assert [reader.files.current(now) for now in (10.0, 20.0, 30.0)] == ["first"] * 3
    assert caplog.messages == [f"test: keeping the certificate in use: {reader.file}: no certificate"]
    reader.file.unlink()
    assert reader.files.current(40.0) == "first"
    replace(reader.file, "third")
    assert reader.files.current(50.0) == "third"


def test_the_first_reading_has_to_succeed(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="No such file"):
        Reader(tmp_path / "missing").files.read()
