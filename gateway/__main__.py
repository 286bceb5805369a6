"""hgate's command line."""

from __future__ import annotations

import sys


def main() -> None:
    """The `hgate` command."""
    from gateway.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
