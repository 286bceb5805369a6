from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from bench import openssl
from bench.openssl import OWN, interpreter


def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images have what nobody has yet, and there is nowhere to get it from."""
    monkeypatch.setattr(openssl, "WANTED", (99, 0))
    monkeypatch.setattr(openssl, "KEYRING", Path("/nowhere"))


def test_an_interpreter_that_has_it_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openssl, "WANTED", (1, 1))
    assert interpreter(tmp_path) is OWN
    assert OWN.command == (sys.executable,)


def test_where_it_cannot_be_had_the_results_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older(monkeypatch)
    found = interpreter(tmp_path)
    assert found.command == OWN.command
    assert found.openssl.startswith(f"{ssl.OPENSSL_VERSION}, older than in the images")


def test_what_was_unpacked_starts_the_same_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's own libraries in the place of Debian 13's."""
    older(monkeypatch)
    libraries = tmp_path / "usr" / "lib" / "here"
    libraries.mkdir(parents=True)
    for name in ("libcrypto.so.3", "libssl.so.3", "libc.so.6"):
        libraries.joinpath(name).symlink_to(_loaded(name))
    loader = libraries / "ld-linux-here.so.2"
    loader.symlink_to(_loaded("ld-linux"))
    found = interpreter(tmp_path)
    assert found.command[0] == str(loader)
    assert found.openssl.startswith(f"{ssl.OPENSSL_VERSION} as in the images")
    said = subprocess.check_output([*found.command, "-c", "import sys; print(sys.executable, sys.prefix)"])
    assert said.decode().split() == [sys.executable, sys.prefix]


def test_what_does_not_run_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older(monkeypatch)
    libraries = tmp_path / "usr" / "lib" / "here"
    libraries.mkdir(parents=True)
    for name in ("libcrypto.so.3", "ld-linux-here.so.2"):
        libraries.joinpath(name).write_bytes(b"no library")
    assert interpreter(tmp_path).command == OWN.command


def _loaded(name: str) -> str:
    """The path of a library of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            return path
    pytest.skip(f"this interpreter has no {name} of its own to load")
