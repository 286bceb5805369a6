from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from bench import image
from bench.image import FETCHED, INSTALLED, OWN, VENV, environment
from bench.tools import BenchError
from tests.deploy.test_manifests import DOCKERFILES, instructions


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images have what nobody has yet, and there is nowhere to get it from."""
    monkeypatch.setattr(image, "WANTED_OPENSSL", (99, 0))
    monkeypatch.setattr(image, "KEYRING", Path("/nowhere"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    """A folder in which this interpreter and its libraries are in the place of Debian 13's."""
    libraries = tmp_path / "usr" / "lib" / "here"
    libraries.mkdir(parents=True)
    libraries.joinpath("libc.so.6").symlink_to(_loaded("libc.so.6"))
    libraries.joinpath("ld-linux-here.so.2").symlink_to(_loaded("ld-linux"))
    python = tmp_path / image.PYTHON
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    subprocess.check_call([python, "-m", "venv", "--without-pip", tmp_path / VENV])
    for name in ("hbone", "uvloop", "hpack"):
        about = tmp_path.joinpath(VENV, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
        about = about / "site-packages" / f"{name}-1.2.3.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
    (tmp_path / VENV / INSTALLED).touch()
    (tmp_path / FETCHED).touch()
    return tmp_path


def test_a_python_that_is_no_older_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "WANTED_PYTHON", (3, 11))
    monkeypatch.setattr(image, "WANTED_OPENSSL", (1, 1))
    assert environment(tmp_path) is OWN
    assert OWN.versions()["openssl"] == ssl.OPENSSL_VERSION
    assert b"hgate" in subprocess.check_output([*OWN.command("hgate"), "--help"])


@pytest.mark.usefixtures("older")
def test_where_it_cannot_be_had_the_results_say_so(tmp_path: Path) -> None:
    found = environment(tmp_path)
    assert (found.scripts, found.python) == (OWN.scripts, OWN.python)
    assert found.whose.startswith(f"{OWN.whose}; the images' cannot be had here")


@pytest.mark.usefixtures("older")
def test_a_command_runs_in_what_was_fetched(fetched: Path) -> None:
    found = environment(fetched)
    assert found.whose == "Debian 13's, as in the images"
    assert found.versions()["hbone"] == "1.2.3, not compiled"
    script = fetched / VENV / "bin" / "hgate"
    script.write_text("#!/nowhere\nimport sys; print(sys.executable, sys.prefix, sys.path[0], *sys.argv)")
    said = subprocess.check_output([*found.command("hgate"), "--check"], text=True)
    bin_folder = fetched / VENV / "bin"
    expected = [bin_folder / "python", fetched / VENV, bin_folder, script, "--check"]
    assert said.split() == list(map(str, expected))


@pytest.mark.usefixtures("older")
def test_what_is_older_than_its_sources_is_not_taken(fetched: Path) -> None:
    os.utime(fetched / VENV / INSTALLED, (0, 0))
    assert environment(fetched).scripts == OWN.scripts
    assert not (fetched / VENV / INSTALLED).exists()


@pytest.mark.usefixtures("older")
def test_what_was_not_fetched_to_its_end_is_not_taken(fetched: Path) -> None:
    (fetched / FETCHED).unlink()
    assert environment(fetched).scripts == OWN.scripts


@pytest.mark.usefixtures("older")
def test_what_does_not_run_is_not_taken(fetched: Path) -> None:
    (fetched / image.PYTHON).unlink()
    (fetched / image.PYTHON).write_bytes(b"no program")
    assert environment(fetched).scripts == OWN.scripts


def test_an_environment_without_a_python_has_no_versions(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nothing runs in"):
        image.Environment(tmp_path / "bin").versions()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_it_is_what_the_images_have(path: Path) -> None:
    words = instructions(path)
    version = ".".join(map(str, image.WANTED_PYTHON))
    base = next(word for name, word, *_ in words if name == "ARG" and word.startswith("PYTHON_IMAGE="))
    assert base.startswith(f"PYTHON_IMAGE=python:{version}.") and base.endswith("-slim-trixie")
    assert image.PYTHON.name == f"python{version}" and " trixie " in image.SOURCE
    copied = {source for name, *rest in words if name == "COPY" for source in rest[:-1] if "=" not in source}
    assert copied - {"/opt/hbone"} == set(image.SOURCES)


def _loaded(name: str) -> str:
    """The path of a library of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            return path
    pytest.skip(f"this interpreter has no {name} of its own to load")
