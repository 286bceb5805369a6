"""`hbone demo --mesh`: the demo in a real Istio mesh, which only hbone's repository has."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shared.errors import UnavailableError

CHECKOUT = Path(__file__).parents[2]

MODULE = "tests.mesh.demo"


def run(options: argparse.Namespace) -> int:
    """Becomes the repository's own demo. Raises UnavailableError where there is none."""
    if not CHECKOUT.joinpath(*MODULE.split(".")).with_suffix(".py").exists():
        raise UnavailableError(
            "demo --mesh: Istio and the network around it are in hbone's repository only: run it from a "
            "checkout that `make demo` has run in, as .venv/bin/hbone demo --mesh"
        )
    sys.stdout.flush()
    keep = ["--keep"] if options.keep else []
    try:
        os.chdir(CHECKOUT)
        os.execv(sys.executable, [sys.executable, "-m", MODULE, "--inbound", options.inbound, *keep])
    except OSError as error:
        raise UnavailableError(f"demo --mesh: {CHECKOUT}: {error.strerror}") from error
