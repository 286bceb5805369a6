"""What `krun` does with its arguments and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from shared.errors import EXIT_OK, HboneError, UsageError

_HELP = """usage: krun [--] [COMMAND [ARG ...]]
       krun --help | --version

Ends the mesh's tunnels in a container: starts COMMAND with PORT set, waits for its port, then takes
tunnels. Without a COMMAND it serves as a sidecar. Set by environment variables:

{variables}

Exit codes: COMMAND's own, 128+N if signal N ended it, 126 and 127 if it cannot be started; 0 after
SIGTERM without a COMMAND; 64 wrong setting, 69 a port, program or file cannot be had, 77 no token or
certificate, 78 wrong file, 130 and 143 SIGINT and SIGTERM before COMMAND was started."""


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Does what krun is there for and returns the exit code."""
    from agent.config.settings import from_env

    try:
        flag, arguments = _own_flag(arguments)
        if flag:
            print(_version() if flag == "--version" else _help())
            return EXIT_OK
        settings = from_env(environ)
        from agent.app import Agent
        from shared import loop
        from shared.ops import log
        from shared.ops.access_log import AccessLog

        if os.getpid() == 1:
            from agent.launch.launcher import become_init, reset_signals

            reset_signals(os.getpid())
            if arguments:
                become_init(os.getpid())
        log.setup(settings.log_format, settings.log_level, component="krun")

        async def serve() -> int:
            # Standard output is the app's.
            access_log = AccessLog(sys.stderr, settings.log_format, "krun")
            return await Agent(settings, arguments, environ, access_log).run()

        return loop.run(serve())
    except HboneError as error:
        print(f"krun: {error}", file=sys.stderr)
        return error.exit_code


def _own_flag(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """krun's own flag, empty if there is none, and the app's command line behind it.

    Raises:
        UsageError: there is no such flag.
    """
    first = arguments[0] if arguments else ""
    if first == "--":
        return "", arguments[1:]
    if not first.startswith("-"):
        return "", arguments
    if first not in ("-h", "--help", "--version"):
        raise UsageError(
            f"{first}: no such flag; settings are environment variables (--help), and a COMMAND that begins "
            "with - goes behind --"
        )
    return first, arguments[1:]


def _help() -> str:
    from agent.config.settings import ENVIRONMENT

    width = max(map(len, ENVIRONMENT))
    return _HELP.format(
        variables="\n".join(f"  {name:{width}}  {text}" for name, text in ENVIRONMENT.items())
    )


def _version() -> str:
    from shared import version

    return version.describe("krun")
