"""Builds a kube-apiserver from the Go module proxy: some minutes and 1 GB of disk the first time.

Kubernetes' own module replaces its parts by folders beside it, which the proxy does not have; so they are
replaced once more here, by their releases of the same day.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from shared.errors import EXIT_UNAVAILABLE
from tests.needs import cache

VERSION = "1.34.4"

STAGING = (
    *("api", "apiextensions-apiserver", "apimachinery", "apiserver", "cli-runtime", "client-go"),
    *("cloud-provider", "cluster-bootstrap", "code-generator", "component-base", "component-helpers"),
    *("controller-manager", "cri-api", "cri-client", "csi-translation-lib", "dynamic-resource-allocation"),
    *("endpointslice", "externaljwt", "kms", "kube-aggregator", "kube-controller-manager", "kube-proxy"),
    *("kube-scheduler", "kubectl", "kubelet", "metrics", "mount-utils", "pod-security-admission"),
    "sample-apiserver",
)
"""Parts of Kubernetes that are released as modules v0.x of their own."""

_VERSION_PACKAGE = "k8s.io/component-base/version"


def folder() -> Path:
    """Of the API server."""
    return cache() / "kube-apiserver"


def built(folder: Path) -> Path:
    """The program, built in `folder` if it is not there yet. Ends the process when it cannot be built, as
    `unavailable` does."""
    program = folder / f"kube-apiserver-{VERSION}"
    if program.exists():
        return program
    if shutil.which("go") is None:
        unavailable("no go on PATH, which has to build kube-apiserver")
    folder.mkdir(parents=True, exist_ok=True)
    replaced = "".join(f"replace k8s.io/{part} => k8s.io/{part} v0{VERSION[1:]}\n" for part in STAGING)
    (folder / "go.mod").write_text(
        f"module test\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v{VERSION}\n{replaced}"
    )
    (folder / "tools.go").write_text('package test\n\nimport _ "k8s.io/kubernetes/cmd/kube-apiserver"\n')
    major, minor, _ = VERSION.split(".")
    told = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X {_VERSION_PACKAGE}.{name}={value}" for name, value in told.items())])
    print(f"building kube-apiserver {VERSION}, which takes some minutes", flush=True)
    ran = subprocess.run(
        [
            "go",
            "build",
            "-mod=mod",
            "-trimpath",
            "-ldflags",
            flags,
            "-o",
            program,
            "k8s.io/kubernetes/cmd/kube-apiserver",
        ],
        cwd=folder,
        env={**os.environ, "GOTOOLCHAIN": "local"},
    )
    if ran.returncode != 0:
        unavailable(f"kube-apiserver cannot be built: go build ended with {ran.returncode}")
    return program


def unavailable(reason: str) -> NoReturn:
    """Ends the process with a code that is no failed test's: it is the machine that lacks something."""
    print(f"make: {reason}", file=sys.stderr)
    sys.exit(EXIT_UNAVAILABLE)
