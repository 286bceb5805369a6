"""What each target of the Makefile needs, looked for before it begins: `python3 -m tests.needs TARGET...`.

Prints a line for each thing that is missing, with the package that has it. The exit code is 69 if a target
can do nothing without it; else the target goes on and leaves out what the line says. With --packages it
prints the Debian packages that are missing, and nothing else: for `.ci/run`.

With Python's own modules only, of any version that is still about: nothing is installed yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import sysconfig
from pathlib import Path

from bench import needs
from bench.needs import Need, go, missing, program
from bench.needs import cache as cache

ROOT = Path(__file__).resolve().parent.parent

EXIT_OK = 0
EXIT_UNAVAILABLE = 69

PYTHON = (3, 11)
"""pyproject.toml, requires-python."""

KUBERNETES_GO, ISTIO_GO = (1, 24), (1, 26)
"""For the releases in `tests/kube/build.py` and `tests/mesh/istio/go.mod`."""

H2SPEC = ROOT / ".venv" / "bin" / "h2spec"


def _builds(*names: str) -> bool:
    """Whether programs with such names are there already."""
    return all(any(cache().glob(f"*/{name}")) for name in names)


def _has_atheris() -> bool:
    version = sys.version_info[:2]
    return version < (3, 14) and sys.platform == "linux" and platform.machine() == "x86_64"


ALL = (
    Need("Linux", "the programs and tests take Linux", lambda: sys.platform == "linux", is_debian=False),
    Need(
        f"Python {'.'.join(map(str, PYTHON))} or newer",
        f"this is {platform.python_version()}; make PYTHON=python3.13 takes another",
        lambda: sys.version_info[:2] >= PYTHON,
        is_debian=False,
    ),
    Need(
        "Python's venv with pip",
        "python3-venv",
        lambda: (ROOT / ".venv").exists() or importlib.util.find_spec("ensurepip") is not None,
    ),
)
"""What every target needs."""

_TESTED = "the tests that talk to it are"

_LOAD = tuple(
    Need(need.what, need.where_from, need.is_there, "the tests of the load generator are")
    for need in (needs.COMPILER, needs.HEADERS)
)

_TESTS = (
    *(
        program(name, package, _TESTED)
        for name, package in (
            ("curl", "curl"),
            ("openssl", "openssl"),
            ("socat", "socat"),
            ("ssh", "openssh-client"),
            ("sshd", "openssh-server"),
            ("nghttp", "nghttp2-client"),
            ("nghttpx", "nghttp2-proxy"),
            ("nghttpd", "nghttp2-server"),
            ("haproxy", "haproxy"),
            ("tinyproxy", "tinyproxy"),
            ("zsh", "zsh"),
            ("fish", "fish"),
            ("man", "man-db"),
            ("mandoc", "mandoc"),
            ("promtool", "prometheus"),
            ("prometheus", "prometheus"),
            ("jq", "jq"),
        )
    ),
    *(
        program(name, package, "the tests of captured traffic are")
        for name, package in (("iptables", "iptables"), ("ip", "iproute2"), ("unshare", "util-linux"))
    ),
    *_LOAD,
)

_COMPILING = (
    needs.COMPILER,
    Need("Python.h", "python3-dev", lambda: Path(sysconfig.get_path("include"), "Python.h").exists()),
)

_KUBE = (
    program("etcd", "etcd-server"),
    Need(
        f"Go {'.'.join(map(str, KUBERNETES_GO))} or newer",
        "Debian 13: golang; or https://go.dev/dl",
        lambda: _builds("kube-apiserver-*", "kubectl-*", "kustomize-*") or go() >= KUBERNETES_GO,
        is_debian=False,
    ),
)

TARGETS: dict[str, tuple[Need, ...]] = {
    "demo": (),
    "lint": (),
    "types": (),
    "pages": (),
    "reference": (),
    "monitoring": (),
    "lock": (),
    "test": _TESTS,
    "test-compiled": (*_TESTS, program("git", "git"), *_COMPILING),
    "wheels": _COMPILING,
    "coverage": _TESTS,
    "test-odd": (
        program("unshare", "util-linux", "odd networks, clocks and a full /tmp are"),
        program("setpriv", "util-linux", "user nobody is"),
        program("script", "bsdutils", "the terminal is"),
        program("localedef", "locales", "odd locales are"),
        program("ip", "iproute2", "the network without IPv6 is"),
        program("git", "git", "user nobody is"),
    ),
    "test-install": (program("git", "git"),),
    "test-slow": (
        *(
            program(name, package, _TESTED)
            for name, package in (
                ("curl", "curl"),
                ("ssh", "openssh-client"),
                ("sshd", "openssh-server"),
                ("tmux", "tmux"),
                ("rsync", "rsync"),
                ("h2load", "nghttp2-client"),
                ("nghttpx", "nghttp2-proxy"),
                ("haproxy", "haproxy"),
                ("chromium", "chromium"),
            )
        ),
        program("ip", "iproute2", "the tests of slow name servers are"),
        program("unshare", "util-linux", "the tests of slow name servers are"),
        *_LOAD,
    ),
    "conformance": (Need("Go", "golang", lambda: H2SPEC.exists() or bool(go())),),
    "test-kube": _KUBE,
    "scale": _KUBE,
    "mesh": (
        program("etcd", "etcd-server"),
        program("ip", "iproute2"),
        program("curl", "curl"),
        program("iptables", "iptables"),
        Need(
            f"Go {'.'.join(map(str, ISTIO_GO))} or newer",
            "https://go.dev/dl",
            lambda: _builds("kube-apiserver-*", "pilot-agent") or go() >= ISTIO_GO,
            is_debian=False,
        ),
        Need("root", "network namespaces take it", lambda: os.geteuid() == 0, is_debian=False),
    ),
    "fuzz": (
        Need(
            "atheris",
            "it is there for CPython 3.11 to 3.13 on x86-64 Linux",
            _has_atheris,
            "the guidance by coverage is",
            is_debian=False,
        ),
    ),
    "stress": (needs.open_files("the 10,000 idle tunnels (idle) are"),),
    "bench": needs.NEEDS,
}
"""Beside `ALL`. Envoy is no Debian package: pip brings it, where it is made for the machine."""


def main(arguments: list[str] | None = None) -> int:
    """Looks for what the targets on the command line need."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.needs", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--packages", action="store_true", help="print missing Debian packages only")
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS), metavar="TARGET")
    given = parser.parse_args(arguments)
    code = EXIT_OK
    packages: list[str] = []
    for target in given.targets:
        for need in missing((*ALL, *TARGETS[target])):
            if need.is_debian:
                packages += need.where_from.split()
            if not given.packages:
                print(f"make {target}: {need.message()}", file=sys.stderr)
            if not need.left_out:
                code = EXIT_UNAVAILABLE
    if given.packages:
        for package in dict.fromkeys(packages):
            print(package)
        return EXIT_OK
    return code


if __name__ == "__main__":
    sys.exit(main())
