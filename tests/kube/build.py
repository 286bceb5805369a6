"""Builds a kube-apiserver, kubectl and kustomize from the Go module proxy, and takes custom resources from
there: some minutes and 1 GB of disk the first time.

Kubernetes' own module replaces its parts by folders beside it, which the proxy does not have; so they are
replaced once more here, by their releases of the same day.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from shared.errors import EXIT_UNAVAILABLE
from tests.needs import cache

VERSION = "1.34.4"

KUSTOMIZE = "5.8.1"

PROMETHEUS_OPERATOR = "0.85.0"

GATEWAY_API = "1.6.0"

KNATIVE = "0.51.0"
"""Whose Service Cloud Run's is."""

ISTIO_MODULE = Path(__file__).parent.parent / "mesh" / "istio" / "go.mod"
"""Says which Istio `make mesh` has."""

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
    """The API server, built in `folder` if it is not there yet. Ends the process when it cannot be built, as
    `unavailable` does."""
    return _of_kubernetes("kube-apiserver", folder)


def kubectl() -> Path:
    """The program, built if it is not there yet. Ends the process when it cannot be built."""
    return _of_kubernetes("kubectl", cache() / "kubectl")


def _of_kubernetes(name: str, folder: Path) -> Path:
    program = folder / f"{name}-{VERSION}"
    if program.exists():
        return program
    if shutil.which("go") is None:
        unavailable(f"no go on PATH, which has to build {name}")
    folder.mkdir(parents=True, exist_ok=True)
    replaced = "".join(f"replace k8s.io/{part} => k8s.io/{part} v0{VERSION[1:]}\n" for part in STAGING)
    (folder / "go.mod").write_text(
        f"module test\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v{VERSION}\n{replaced}"
    )
    package = f"k8s.io/kubernetes/cmd/{name}"
    (folder / "tools.go").write_text(f'package test\n\nimport _ "{package}"\n')
    major, minor, _ = VERSION.split(".")
    told = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X {_VERSION_PACKAGE}.{field}={value}" for field, value in told.items())])
    print(f"building {name} {VERSION}, which takes some minutes", flush=True)
    ran = subprocess.run(
        ["go", "build", "-mod=mod", "-trimpath", "-ldflags", flags, "-o", program, package],
        cwd=folder,
        env={**os.environ, "GOTOOLCHAIN": "local"},
    )
    if ran.returncode != 0:
        unavailable(f"{name} cannot be built: go build ended with {ran.returncode}")
    return program


def kustomize() -> Path:
    """The program, built if it is not there yet. Ends the process when it cannot be built."""
    where = cache() / "kustomize"
    program = where / f"kustomize-{KUSTOMIZE}"
    if program.exists():
        return program
    if shutil.which("go") is None:
        unavailable("no go on PATH, which has to build kustomize")
    where.mkdir(parents=True, exist_ok=True)
    package = "sigs.k8s.io/kustomize/kustomize/v5"
    (where / "go.mod").write_text(f"module test\n\ngo 1.24.0\n\nrequire {package} v{KUSTOMIZE}\n")
    (where / "tools.go").write_text(f'package test\n\nimport _ "{package}"\n')
    print(f"building kustomize {KUSTOMIZE}", flush=True)
    ran = subprocess.run(
        ["go", "build", "-mod=mod", "-trimpath", "-ldflags", "-s -w", "-o", program, package],
        cwd=where,
        env={**os.environ, "GOTOOLCHAIN": "local"},
    )
    if ran.returncode != 0:
        unavailable(f"kustomize cannot be built: go build ended with {ran.returncode}")
    return program


def custom_resources() -> list[Path]:
    """Files with the CustomResourceDefinitions of Istio, of Prometheus' operator, of the Gateway API and of
    Knative's Service. Ends the process when they cannot be had."""
    found = re.search(r"istio\.io/istio (v\S+)", ISTIO_MODULE.read_text())
    assert found, ISTIO_MODULE
    sources = (
        ("istio.io/istio", found[1], "manifests/charts/base/files/crd-all.gen.yaml"),
        (
            "github.com/prometheus-operator/prometheus-operator",
            f"v{PROMETHEUS_OPERATOR}",
            "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        ),
        (
            "sigs.k8s.io/gateway-api",
            f"v{GATEWAY_API}",
            "config/crd/standard/gateway.networking.k8s.io_gateways.yaml",
        ),
        ("knative.dev/serving", f"v{KNATIVE}", "config/core/300-resources/service.yaml"),
    )
    return [_file_of(*source) for source in sources]


def _file_of(module: str, version: str, path: str) -> Path:
    """A file of a module, kept in the cache."""
    kept = cache() / "custom-resources" / f"{version}-{Path(path).name}"
    if kept.exists():
        return kept
    if shutil.which("go") is None:
        unavailable(f"no go on PATH, which has to fetch {module}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    command = ["go", "mod", "download", "-json", f"{module}@{version}"]
    ran = subprocess.run(command, cwd=kept.parent, stdout=subprocess.PIPE, text=True)
    if ran.returncode != 0:
        unavailable(f"{' '.join(command)} ended with {ran.returncode}")
    shutil.copyfile(Path(json.loads(ran.stdout)["Dir"], path), kept)
    return kept


def unavailable(reason: str) -> NoReturn:
    """Ends the process with a code that is no failed test's: it is the machine that lacks something."""
    print(f"make: {reason}", file=sys.stderr)
    sys.exit(EXIT_UNAVAILABLE)
