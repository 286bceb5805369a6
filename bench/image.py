"""The environment of the images: the Python, OpenSSL and C library that hgate and krun are measured with.

Users run the images, python:3.13-slim-trixie. An older machine's own Python is up to a fifth slower, and its
OpenSSL half as fast at AES-GCM, which is most of what hgate does for a GiB. So where they are older, Debian
13's are fetched (its Python is another build of the same 3.13, with profiles and link-time optimization as
well): apt checks their signatures with the keyring that is here, they are unpacked into the bench's folder,
nothing is installed outside it and nobody has to be root. The project goes into a virtual environment of that
Python as in the Dockerfiles: built as a wheel, installed by pip, all of it compiled beforehand. The loader of
that C library starts the Python, with a command's file as its `#!` line would.

With HBONE_COMPILE=1 the wheel is the compiled one of the images, which a Python of that version has to build:
python3.13 on PATH or of pyenv, with its headers. Both kinds are kept.

The load generator, which is the same for all, and the bench itself have what the machine has.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.tools import BenchError

ROOT = Path(__file__).parent.parent
COMPILED = os.environ.get("HBONE_COMPILE") == "1"

FOLDER = ROOT / (".venv-bench-compiled" if COMPILED else ".venv-bench") / "image"
"""What was fetched stays there until `make clean`; the project in it is as new as its sources."""

WANTED_PYTHON = (3, 13)
WANTED_OPENSSL = (3, 5)
"""Of python:3.13-slim-trixie (deploy/hgate/Dockerfile)."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCE = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian trixie main\n"
PACKAGES = (
    *("python3.13-minimal", "libpython3.13-minimal", "libpython3.13-stdlib", "python3-pip-whl"),
    *("libc6", "libgcc-s1", "libssl3t64", "libzstd1", "zlib1g", "libexpat1"),
    *("libffi8", "libbz2-1.0", "liblzma5", "libuuid1"),
)
"""Python with pip, and the libraries that it, its modules and OpenSSL are linked to."""

PYTHON = Path("usr", "bin", "python3.13")
VENV = "venv"
FETCHED, INSTALLED = "fetched", "installed"
"""In that folder; the last two are files that say that all before them is there."""

SOURCES = (
    *("pyproject.toml", "setup.py", "requirements", "README.md", "LICENSE", "docs/troubleshoot.md"),
    *("agent", "gateway", "hbone", "shared"),
)
"""What the project is built from, as in the Dockerfiles."""

FETCH_S = 120.0
"""For each step that fetches: 10 MB of package lists, 13 MB of packages, as much from PyPI."""

BUILD_S = 900.0
"""For the wheel: mypyc and the C compiler take a minute or several."""

TRY_S = 20.0

_VERSIONS = """
import importlib.metadata, importlib.util, json, platform, ssl
found = {name: importlib.metadata.version(name) for name in ("hbone", "uvloop", "hpack")}
compiled = "compiled" if importlib.util.find_spec("hbone__mypyc") else "not compiled"
found["hbone"] += ", " + compiled
print(json.dumps({"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION, **found}))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where hgate, krun and hbone are installed, and how they are started."""

    scripts: Path = Path(sys.executable).parent

    python: tuple[str, ...] = ()
    """What starts the interpreter, if the scripts cannot say that themselves."""

    whose: str = "the distribution's" if sys.base_prefix == "/usr" else "another build"
    """The interpreter; for the results."""

    def command(self, name: str) -> list[str]:
        """The installed command `name`, as a user runs it."""
        return [*self.python, str(self.scripts / name)]

    def versions(self) -> dict[str, str]:
        """Of `python`, `openssl`, and the packages that matter. Raises BenchError if it does not run."""
        # -P: not those of the checkout, which is where this runs.
        said = _output([*(self.python or (str(self.scripts / "python"),)), "-P", "-c", _VERSIONS], TRY_S)
        if said is None:
            raise BenchError(f"nothing runs in {self.scripts.parent}")
        found: dict[str, str] = json.loads(said)
        return found


OWN = Environment()
"""The one that the bench itself is in, which `make bench` has installed."""


def environment(folder: Path = FOLDER) -> Environment:
    """The images', or `OWN` where that is no older; or where it must do, which it then says."""
    if sys.version_info[:2] >= WANTED_PYTHON and ssl.OPENSSL_VERSION_INFO[:2] >= WANTED_OPENSSL:
        return OWN
    if (_is_fetched(folder) or _fetch(folder)) and (_is_current(folder) or _install(folder)):
        scripts = folder / VENV / "bin"
        found = Environment(scripts, _start(folder, scripts / "python"), "Debian 13's, as in the images")
        with suppress(BenchError):
            found.versions()
            return found
    return Environment(whose=f"{OWN.whose}; the images' cannot be had here: with it all costs less")


# Debian's packages.


def _is_fetched(folder: Path) -> bool:
    return (folder / FETCHED).exists()


def _start(folder: Path, name: Path) -> tuple[str, ...]:
    """What starts the fetched interpreter with its own libraries, as if it had been called `name`."""
    loader = min(folder.glob("usr/lib/*/ld-linux*.so.*"), default=Path("ld-linux.so"))
    told = ("--library-path", str(loader.parent), "--argv0", str(name))
    return (str(loader), *told, str(folder / PYTHON))


def _fetch(folder: Path) -> bool:
    """Fetches the packages, unpacks them into `folder` and compiles the modules; whether that worked."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None or not KEYRING.exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "apt"
    for part in ("lists/partial", "archives/partial"):
        (work / part).mkdir(parents=True, exist_ok=True)
    (work / "status").touch()
    (work / "sources.list").write_text(SOURCE)
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": work,
        "Dir::State::status": work / "status",
        "Dir::Cache": work,
        "Acquire::Languages": "none",
        "Acquire::http::Timeout": 20,
        "APT::Sandbox::User": "",
    }
    told = [apt, "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    try:
        if not (_does([*told, "update"]) and _does([*told, "download", *PACKAGES], cwd=work)):
            return False
        if not all([_does([dpkg, "-x", str(package), str(folder)]) for package in work.glob("*.deb")]):
            return False
    finally:
        shutil.rmtree(work)
    # As in the images, whose user could not write what it compiled: no start that is measured compiles.
    python = _start(folder, folder / PYTHON)
    if not _does([*python, "-m", "compileall", "-q", str(folder / "usr" / "lib" / "python3.13")]):
        return False
    (folder / FETCHED).touch()
    return True


# The project.


def _is_current(folder: Path) -> bool:
    """Whether what is installed is as new as its sources."""
    installed = folder / VENV / INSTALLED
    files = [path for name in SOURCES for path in (ROOT / name, *(ROOT / name).rglob("*.py"))]
    return installed.exists() and installed.stat().st_mtime >= max(path.stat().st_mtime for path in files)


def _install(folder: Path) -> bool:
    """Builds the project, installs it with what it needs in a new environment; whether that worked."""
    shutil.rmtree(folder / VENV, ignore_errors=True)
    python = _start(folder, folder / PYTHON)
    python_within = _start(folder, folder / VENV / "bin" / "python")
    pip_itself = {"PYTHONPATH": os.pathsep.join(map(str, folder.glob("usr/share/python-wheels/pip-*.whl")))}
    quiet = ("--quiet", "--disable-pip-version-check")
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            Path(work, name).parent.mkdir(exist_ok=True)
            copy(ROOT / name, Path(work, name))
        # Built by a Python of this machine: pip starts others for that, which the fetched one cannot.
        builder = _builder()
        if builder is None:
            return False
        wheel = [builder, "-m", "pip", "wheel", *quiet, "--no-deps", "--wheel-dir", work, work]
        if _output(wheel, BUILD_S) is None:
            return False
        wheels = [str(path) for path in Path(work).glob("*.whl")]
        install = (*python_within, "-m", "pip", "install", *quiet, "--only-binary=:all:")
        locked = ("--require-hashes", "-r", str(Path(work, "requirements", "runtime.txt")))
        if not (
            _does([*python, "-m", "venv", "--without-pip", str(folder / VENV)])
            and _does([*install, *locked], environ=pip_itself)
            and _does([*install, "--no-deps", *wheels], environ=pip_itself)
        ):
            return False
    installed = folder / VENV / INSTALLED
    installed.touch()
    os.utime(installed, (began, began))
    return True


def _builder() -> str | None:
    """The Python that builds the wheel; None if there is none that can."""
    if not COMPILED:
        return sys.executable
    name = "python{}.{}".format(*WANTED_PYTHON)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = (shutil.which(name), *map(str, sorted(pyenv.glob(f"*/bin/{name}"))))
    headers = 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
    return next((path for path in found if path and _does([path, "-c", headers])), None)


# Programs.


def _does(
    command: Sequence[str], *, cwd: Path | None = None, environ: Mapping[str, str] | None = None
) -> bool:
    return _output(command, FETCH_S, cwd=cwd, environ=environ) is not None


def _output(
    command: Sequence[str],
    timeout_s: float,
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> str | None:
    """What a command says; None if it fails or takes longer than `timeout_s` seconds."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
