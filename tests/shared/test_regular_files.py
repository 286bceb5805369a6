"""Files that a user has named: read if they are regular files of bounded size, else refused at once."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from shared import regular_files
from shared.errors import UnavailableError

MOST = 16


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_pipe_with_a_writer(path: Path) -> None:
    os.mkfifo(path)
    os.close(os.open(path, os.O_RDWR))


def a_directory(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nothing(path: Path) -> None:
    pass


def a_large_file(path: Path) -> None:
    path.write_bytes(bytes(MOST + 1))


def a_file_of_unknown_size(path: Path) -> None:
    path.symlink_to("/proc/self/maps")


FAULTS = [
    (a_pipe, "it is a named pipe, not a regular file"),
    (a_pipe_with_a_writer, "it is a named pipe, not a regular file"),
    (a_directory, "it is a directory, not a regular file"),
    (a_socket, "it is a socket, not a regular file"),
    (a_device, "it is a device, not a regular file"),
    (nothing, "No such file or directory"),
    (a_large_file, "it is longer than 16 bytes"),
]


@pytest.mark.parametrize(
    ("make", "reason"), [*FAULTS, (a_file_of_unknown_size, "it is longer than 16 bytes")]
)
def test_what_is_not_read(tmp_path: Path, make: Callable[[Path], None], reason: str) -> None:
    file = tmp_path / "file"
    make(file)
    with pytest.raises(OSError) as caught:
        regular_files.read(file, MOST)
    assert caught.value.strerror == reason
    assert caught.value.filename in (file, str(file))


@pytest.mark.parametrize(("make", "reason"), FAULTS)
def test_what_is_not_opened(tmp_path: Path, make: Callable[[Path], None], reason: str) -> None:
    file = tmp_path / "file"
    make(file)
    with pytest.raises(OSError) as caught, regular_files.opened(file, MOST):
        raise AssertionError("it was opened")
    assert caught.value.strerror == reason


def test_what_is_needed_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for what, place in (("", f"{file}"), ("root certificates", f"root certificates: {file}")):
        with pytest.raises(UnavailableError) as caught:
            regular_files.read_needed(file, MOST, what)
        assert str(caught.value) == f"{place}: No such file or directory"
        assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MOST))
    (tmp_path / "link").symlink_to("file")
    assert regular_files.read(tmp_path / "link", MOST) == bytes(MOST)
    content, status = regular_files.read_with_status(str(tmp_path / "link"), MOST)
    assert (len(content), status.st_ino) == (MOST, (tmp_path / "file").stat().st_ino)


def test_a_path_for_a_library_stays_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with regular_files.opened(file) as path:
        file.unlink()
        os.mkfifo(file)
        assert Path(path).read_bytes() == b"old"


def test_openssl_reads_by_such_a_path(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"no certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with regular_files.opened(tmp_path / "ca.pem") as path, pytest.raises(ssl.SSLError):
        context.load_verify_locations(cafile=path)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    regular_files.read(tmp_path / "file", MOST)
    with regular_files.opened(tmp_path / "file"):
        pass
    for name in ("pipe", "none"):
        with pytest.raises(OSError) as caught:
            regular_files.read(tmp_path / name, MOST)
        assert caught.value.errno in (errno.EINVAL, errno.ENOENT)
    assert os.listdir("/proc/self/fd") == before
