"""What images, CI and make install is what pyproject.toml allows, with a hash for every file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUNTIME = SETTINGS["project"]["dependencies"]
EXTRAS = SETTINGS["project"]["optional-dependencies"]
WANTED = {
    "build": SETTINGS["build-system"]["requires"],
    "cluster": [*RUNTIME, *EXTRAS["cluster"]],
    "compile": re.findall(r'^MYPYC = "(.+)"', (ROOT / "setup.py").read_text(), re.MULTILINE),
    "dev": [*RUNTIME, *EXTRAS["dev"], *EXTRAS["otel"], *EXTRAS["ssh"]],
    "envoy": [*RUNTIME, *EXTRAS["envoy"]],
    "otel": [*RUNTIME, *EXTRAS["otel"]],
    "runtime": RUNTIME,
    "ssh": [*RUNTIME, *EXTRAS["ssh"]],
}

every_lock = pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)


def pinned(lock: Path) -> dict[str, str]:
    """The versions in a lock by package. Raises ValueError for an entry that is none, or has no hash."""
    found = {}
    for entry in re.split(r"\n(?=\S)", lock.read_text().strip()):
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+)( ;[^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry)
        if match is None:
            raise ValueError(f"{lock.name}: {entry[:80]}")
        found[match[1]] = match[2]
    return found


def test_there_is_a_lock_for_each_use() -> None:
    assert [lock.stem for lock in LOCKS] == sorted(WANTED)


@every_lock
def test_it_has_what_pyproject_wants(lock: Path) -> None:
    versions = pinned(lock)
    for wanted in map(Requirement, WANTED[lock.stem]):
        version = versions.get(canonicalize_name(wanted.name), "none")
        assert wanted.specifier.contains(version), f"{wanted}, and {lock.name} has {version}: make lock"


def test_all_have_the_same_version_of_a_package() -> None:
    versions: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, version in pinned(lock).items():
            versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}
