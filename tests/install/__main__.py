"""`make test-install`, or `python -m tests.install`: what a new user does, from a checkout to a command.

Builds the sdist and the wheel of the files that git knows, installs the wheel with pipx for a user whose home
is empty, and runs the three commands from there. Takes PyPI, or a mirror that pip is set to, and a minute.
With HBONE_COMPILE=1 it is the compiled wheel, which takes a C compiler and minutes more.

Exit code: 0, or 1 if something is not as it should be.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from shared.command_pages import MANUAL, SHELLS
from tests.support import checkout
from tests.support.checkout import ROOT

COMPILED = os.environ.get("HBONE_COMPILE") == "1"

COMMANDS = {"hgate": "gateway", "krun": "agent", "hbone": "hbone"}
"""With their packages."""

STEP_S = 600
"""For one step; those that fetch depend on the network."""

LAST_CHARS = 2000
"""Of what a command said that failed."""

SNI = "outbound_.8080_._.hello.demo.svc.cluster.local"


class FaultError(Exception):
    """Something is not as it should be; the text says what, in one line or with what a program said."""


def main() -> int:
    """Prints a line for each thing that a user does."""
    with tempfile.TemporaryDirectory(prefix="install-") as name:
        folder = Path(name)
        try:
            sdist, wheel = _built(folder)
            _look_into(sdist, wheel)
            _use(_installed(folder, wheel))
        except (FaultError, subprocess.CalledProcessError) as fault:
            print(f"test-install: {fault}", file=sys.stderr)
            return 1
    return 0


def _built(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel, built of a copy."""
    copy = folder / "checkout"
    checkout.copy_to(copy)
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    python = tools / "bin" / "python"
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "build", "pipx"])
    _run([python, "-m", "build", copy])
    (sdist,), (wheel,) = (copy / "dist").glob("*.tar.gz"), (copy / "dist").glob("*.whl")
    _demand(wheel.name.endswith("-py3-none-any.whl") is not COMPILED, f"the wheel is called {wheel.name}")
    print(f"built      {sdist.name}, {wheel.name}", flush=True)
    return sdist, wheel


def _look_into(sdist: Path, wheel: Path) -> None:
    """Both have the license, the types' marks and all modules, and nothing of tests."""
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    modules = {
        str(path.relative_to(ROOT)) for name in COMMANDS.values() for path in (ROOT / name).rglob("*.py")
    } | {str(path.relative_to(ROOT)) for path in (ROOT / "shared").rglob("*.py")}
    shown = {str(path.relative_to(ROOT)) for path in (ROOT / "gateway" / "ops" / "page").iterdir()}
    for names, what in ((in_sdist, "the sdist"), (in_wheel, "the wheel")):
        missing = sorted((modules | shown) - names)
        _demand(not missing, f"{what} lacks {missing[:3]}")
        _demand(any(name.endswith("LICENSE") for name in names), f"{what} has no LICENSE")
        _demand(not any(name.startswith("tests") for name in names), f"{what} has tests in it")
        marks = {f"{package}/py.typed" for package in (*COMMANDS.values(), "shared")}
        _demand(marks <= names, f"{what} lacks a py.typed")
    pages = {name.partition(".data/data/")[2] for name in in_wheel}
    for name in (MANUAL, *SHELLS.values()):
        for command in COMMANDS:
            _demand(name.format(command) in pages, f"the wheel lacks {name.format(command)}")
    document = "share/doc/hbone/troubleshoot.md"
    _demand(document in pages, f"the wheel lacks {document}")
    print(f"looked at  {len(modules)} modules, the license, the marks of types, the manual", flush=True)


def _installed(folder: Path, wheel: Path) -> Path:
    """Where pipx has put the commands, for a user with nothing in the home and little in the environment."""
    home = folder / "home"
    home.mkdir()
    _run([folder / "tools" / "bin" / "pipx", "install", wheel], environ=_environ(home), cwd=home)
    commands = home / ".local" / "bin"
    there = {path.name for path in commands.iterdir()}
    _demand(there == set(COMMANDS), f"pipx has put {sorted(there)} into {commands}")
    manual = home / ".local" / MANUAL.format("hgate")
    _demand(manual.exists(), f"pipx has put no manual page into {manual.parent}")
    print(f"installed  {', '.join(sorted(there))}, with manual pages", flush=True)
    return commands


def _environ(home: Path) -> dict[str, str]:
    """Of a new user; what pip is told about its index stays."""
    told = {name: value for name, value in os.environ.items() if re.match(r"(?i)PIP_|\w+_PROXY", name)}
    return {**told, "HOME": str(home), "PATH": "/usr/bin:/bin"}


def _use(commands: Path) -> None:
    home = commands.parent.parent

    # krun's port may be taken on this machine.
    environ = {**_environ(home), "HBONE_LISTEN": "127.0.0.1:0"}

    def said(name: str, *arguments: str) -> str:
        return _run([commands / name, *arguments], environ=environ, cwd=home)

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in COMMANDS:
        first = said(name, "--version")
        kind = "compiled" if COMPILED else "not compiled"
        _demand(first.startswith(f"{name} {version} ({kind}, Python "), f"{name} --version says {first!r}")
        _demand("usage: " in said(name, "--help"), f"{name} --help tells no usage")
    page = (ROOT / "docs" / "gateway.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (home / "hgate.yaml").write_text(blocks[0])
    said("hgate", "check", "--config", "hgate.yaml")
    for told, wanted in (
        (said("hgate", "explain", "--config", "hgate.yaml", "--sni", SNI), "https://hello-"),
        (said("krun", "echo", "of the app"), "of the app\n"),
        (said("hbone", "demo"), "everything arrived as it should"),
    ):
        _demand(wanted in told, f"no {wanted!r} in {told!r}")
    print("used       hgate check and explain, krun COMMAND, hbone demo", flush=True)


def _demand(holds: bool, fault: str) -> None:
    if not holds:
        raise FaultError(fault)


def _run(
    command: Sequence[str | Path], *, environ: dict[str, str] | None = None, cwd: Path | None = None
) -> str:
    """A command's standard output. Raises FaultError if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        env=environ,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=STEP_S,
    )
    if done.returncode:
        raise FaultError(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-LAST_CHARS:]}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
