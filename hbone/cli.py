"""hbone's command line: runs the command that its first argument names, or `connect`.

What a command needs is imported when it is run, because ssh users wait for `hbone URL`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from hbone import arguments as command_lines
from shared import command_line
from shared.command_errors import exit_code
from shared.errors import UsageError

DEFAULT_COMMAND = "connect"

SSH_PORT = "22"
"""Where `hbone connect HOST` leads: it is what ssh runs. Without the command's name a word alone may be a
mistyped command."""


def parser() -> command_line.Parser:
    """The whole command line, for manual pages and completions."""
    return command_lines.parser()


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Does what `arguments` say and returns the exit code (`shared.errors`)."""
    _open_standard_descriptors()
    return exit_code("hbone", lambda: _run(arguments, environ))


def _run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        parser().parse_args(arguments)  # prints what they ask for, and raises SystemExit
        raise UsageError("no URL and no command; see hbone --help")
    if list(arguments) == ["complete", "services"]:
        from hbone import complete_command

        return complete_command.run(environ)
    is_named = arguments[0] in command_lines.COMMANDS
    if is_named:
        name, *arguments = arguments
    else:
        name = DEFAULT_COMMAND
        if len(arguments) > 1 and arguments[0].isalpha() and not arguments[1].startswith("-"):
            raise UsageError(f"{arguments[0]!a} is no command; see hbone --help")
    if name == "ssh":
        from hbone import ssh_command

        return ssh_command.run(arguments)
    options = command_lines.command_parser(name).parse_args(arguments)
    match name:
        case "ssh-config":
            from hbone import ssh_config_command

            return ssh_config_command.run(options)
        case "forward":
            from hbone.forward import cli as forward

            return forward.run(options, environ)
        case "token":
            from hbone import token_command

            return token_command.run(options, environ)
        case "certs":
            from hbone import certs

            return certs.run(options)
        case "register":
            from hbone import register_command

            return register_command.run(options, environ)
        case "doctor":
            from hbone.doctor import doctor_command

            return doctor_command.run(options, environ)
        case "demo":
            from hbone.demo import cli as demo

            return demo.run(options)
        case "cloudrun":
            from hbone.cloudrun import cli as cloudrun

            return cloudrun.run(options)
        case "version":
            return command_line.print_version("hbone", as_json=options.json)
        case _:
            options.default_port = SSH_PORT if is_named else None
            return _connect(options, environ)


def _open_standard_descriptors() -> None:
    """Opens /dev/null in place of 0, 1 and 2 where they are closed. Else a socket of ours would get the
    number, and the bytes meant for standard output; and libuv aborts when it is to close one of the three."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def _connect(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if sys.stdin is None or sys.stdout is None:
        raise UsageError("standard input or output is closed, and the tunnel needs both: use /dev/null")

    if options.ca is None and not options.url.startswith("http://"):
        from shared.net.tls import contexts

        contexts.load_ahead()

    from hbone import proxy_command, stdio
    from shared import loop

    input_fd = stdio.own_input()
    return loop.run(proxy_command.run(options, environ, input_fd))
