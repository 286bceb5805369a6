"""krun's command line."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """The `krun` command."""
    gc.disable()  # until the event loop runs
    from shared import core_dumps

    core_dumps.forbid(os.environ)
    from agent.cli import run

    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
