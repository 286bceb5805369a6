"""istiod and pilot-agent, built from the Go module proxy: ten minutes and 6 GB of disk the first time.

What is built stays in the user's cache, by the hash of what it was built from, so that a new checkout builds
nothing anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.kube import build as kube
from tests.kube.build import unavailable
from tests.needs import cache

MODULE = Path(__file__).parent / "istio"

ISTIO = "istio.io/istio"

PROGRAMS = ("pilot-discovery", "pilot-agent")

CRDS = Path("manifests", "charts", "base", "files", "crd-all.gen.yaml")
BOOTSTRAP = Path("tools", "packaging", "common", "envoy_bootstrap.json")
"""In Istio's module: what its charts install, and the template of Envoy's configuration in its images."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Files that the mesh consists of."""

    api_server: Path
    istiod: Path
    pilot_agent: Path
    crds: Path
    bootstrap: Path


def built() -> Programs:
    """Builds what is not there yet. Ends the process where that cannot be done, as `unavailable` does."""
    folder = cache() / f"istio-{_hash()}"
    if not (folder / "complete").exists():
        _build(folder)
    return Programs(
        api_server=kube.built(kube.folder()),
        istiod=folder / "pilot-discovery",
        pilot_agent=folder / "pilot-agent",
        crds=folder / CRDS.name,
        bootstrap=folder / BOOTSTRAP.name,
    )


def _hash() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in _sources())).hexdigest()[:16]


def _sources() -> list[Path]:
    return sorted(path for path in MODULE.iterdir() if path.suffix in (".mod", ".sum", ".go"))


def _build(folder: Path) -> None:
    if shutil.which("go") is None:
        unavailable("no go on PATH, which has to build istiod")
    folder.mkdir(parents=True, exist_ok=True)
    for path in _sources():
        shutil.copy(path, folder)
    print(f"building istiod and pilot-agent into {folder}, which takes some minutes", flush=True)
    environ = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    asked = ["go", "list", "-m", "-f", "{{.Dir}} {{.Version}}", ISTIO]
    # Downloaded first: the module's folder is empty until somebody needs it.
    for command in (["go", "mod", "download", ISTIO], asked):
        ran = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
        if ran.returncode:
            unavailable(f"{' '.join(command)} ended with {ran.returncode}")
    sources, version = ran.stdout.split()
    told = f"-s -w -X istio.io/istio/pkg/version.buildVersion={version}"
    for name in PROGRAMS:
        build = ["go", "build", "-trimpath", "-ldflags", told, "-o", str(folder / name)]
        code = subprocess.run([*build, f"{ISTIO}/pilot/cmd/{name}"], cwd=folder, env=environ).returncode
        if code:
            unavailable(f"{name} cannot be built: go build ended with {code}")
    for path in (CRDS, BOOTSTRAP):
        shutil.copyfile(Path(sources, path), folder / path.name)
    (folder / "complete").touch()
