"""krun's command line: all of it is the app's, but for a first flag; settings come from the environment."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """The `krun` command."""
    gc.disable()  # until the event loop runs (shared/loop.py)
    from shared import core_dumps

    core_dumps.forbid(os.environ)
    from agent.cli import run

    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
