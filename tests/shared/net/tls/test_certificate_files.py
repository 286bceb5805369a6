"""Certificate files that change, and what was made of them."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest

from shared.errors import ConfigError, UnavailableError
from shared.net.tls.certificate_files import (
    LOOK_EVERY_S,
    READINGS,
    CertificateFiles,
    in_use,
)

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


def test_what_could_not_be_read_is_read_again_without_a_change(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """Every descriptor was taken at the moment; the new certificate must not wait for the one after it."""
    caplog.set_level(logging.WARNING, "hbone.test")
    short = [OSError(24, "Too many open files")] * 3

    def make() -> str:
        if short:
            raise UnavailableError(f"{reader.file}: {short.pop().strerror}")
        return reader.file.read_text()

    reader.files._make = make
    replace(reader.file, "second")
    assert [reader.files.current(now) for now in (10.0, 20.0, 30.0, 40.0)] == ["first"] * 3 + ["second"]
    assert caplog.messages == [f"test: keeping the certificate in use: {reader.file}: Too many open files"]


def test_the_first_reading_has_to_succeed(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="No such file"):
        Reader(tmp_path / "missing").files.read()


def test_files_that_are_replaced_while_they_are_read_are_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first reading meets an old certificate beside a new key, as `..data` turns in between."""
    chain, key = tmp_path / "certificates.pem", tmp_path / "private_key.pem"
    chain.write_text("1")
    key.write_text("1")
    turns = ["2"]

    def make() -> str:
        first = chain.read_text()
        if turns:
            for file in (chain, key):
                replace(file, turns[0])
            turns.pop()
        if key.read_text() != first:
            raise ConfigError(str(chain), None, "", "not the key of the certificate")
        return first

    files = CertificateFiles((chain, key), make, log=log, purpose="test")
    files.read()
    assert files.current(0.0) == "2"
    assert caplog.messages == []


def test_files_that_are_replaced_all_the_time_are_not_read_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "file"
    readings: list[int] = []

    def make() -> str:
        readings.append(1)
        replace(file, "x" * len(readings))
        raise ConfigError(str(file), None, "", "no good")

    with pytest.raises(ConfigError):
        CertificateFiles((file,), make, log=log, purpose="test").read()
    assert len(readings) == READINGS


def test_what_is_in_use_is_known(reader: Reader) -> None:
    assert reader.files in in_use()
    assert (reader.files.chain_pem, reader.files.purpose) == (b"first", "test")
    assert reader.files.chain_file == reader.files.roots_file == reader.file
    replace(reader.file, "bad")
    reader.files.current(10.0)
    assert reader.files.chain_pem == b"first", "what is in use, not what lies in the folder"


def test_whom_we_trust_is_nothing_to_show(reader: Reader) -> None:
    """The system's roots are 200 KB, and 140 certificates that a scrape would look through."""
    trusted = CertificateFiles((reader.file,), reader.make, log=log, purpose="trusted", own=False)
    trusted.read()
    assert trusted.current(0.0) == "first"
    assert trusted not in in_use()
    assert trusted.chain_pem == trusted.roots_pem == b""


def test_what_was_never_read_or_is_held_by_nobody_is_not_in_use(reader: Reader) -> None:
    reader.files = CertificateFiles((reader.file,), reader.make, log=log, purpose="unread")
    gc.collect()
    assert [files.purpose for files in in_use() if files.chain_file == reader.file] == []
