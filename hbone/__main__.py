"""hbone's command line."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The `hbone` command."""
    from hbone.cli import run

    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
