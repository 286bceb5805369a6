"""krun's command line: everything on it is the app's; settings come from the environment."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The `krun` command."""
    from agent.cli import run

    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
