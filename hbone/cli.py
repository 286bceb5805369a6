"""What `hbone` can be asked. The parts of each command are imported when it is asked: ssh users wait."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from shared.command_line import help_format
from shared.errors import EXIT_OK, EXIT_SIGINT, EXIT_USAGE, HboneError, UsageError

_EXIT_CODES = (
    "Exit codes: 0 ended in order, 64 wrong flag, 69 the far side cannot be reached, broke off or no longer "
    "answers, "
    "77 refused or no token, 128+N ended by signal N (130: interrupted)."
)

_ARGPARSE_USAGE = 2
"""argparse's own exit code for a usage error."""

"""Of --help, whatever the terminal has."""


MAX_SECONDS = 86_400
"""Of a wait that is set: a day."""


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Does what `arguments` ask and returns the exit code (shared/errors.py)."""
    commands: dict[str, Callable[[Sequence[str]], int]]
    commands = {
        "demo": _demo,
        "cloudrun": _cloudrun,
        "token": partial(_token, environ=environ),
        "certs": _certs,
    }
    _hold_standard_descriptors()
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        if "--version" in arguments:
            return _version()
        return _tunnel(arguments, environ)
    except SystemExit as stop:
        return EXIT_USAGE if stop.code == _ARGPARSE_USAGE else int(stop.code or EXIT_OK)
    except HboneError as error:
        if sys.stderr is not None:  # else print would take standard output for it
            print(f"hbone: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGINT


def _hold_standard_descriptors() -> None:
    """Keeps 0, 1 and 2, where they are closed, from sockets of ours: their bytes are for others, and libuv
    aborts when it is to close one of them."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def _version() -> int:
    from shared import version

    print(version.describe("hbone"))
    return EXIT_OK


def _tunnel(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    options = _parser().parse_args(arguments)
    if sys.stdin is None or sys.stdout is None:
        raise UsageError("standard input or output is closed: both are the tunnel's, use /dev/null")

    from hbone import proxy_command, stdio, target, token_choice
    from shared import loop
    from shared.address import Address

    if options.no_token and (options.token_file is not None or options.audience is not None):
        raise UsageError("--no-token is not allowed with --token-file or --audience")
    where = target.parse(options.url)
    try:
        connect = Address.parse(options.connect) if options.connect else None
    except ValueError as error:
        raise UsageError(f"--connect {options.connect}: {error}") from error
    token = token_choice.for_tunnel(
        where,
        environ,
        connect=connect,
        token_file=options.token_file,
        audience=options.audience,
        none=options.no_token,
    )
    carrying = proxy_command.ProxyOptions(
        where, token, options.ca, connect, options.keepalive, stdio.take_input()
    )
    return loop.run(proxy_command.run(carrying))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hbone",
        formatter_class=help_format,
        usage="hbone [flags] URL|HOST:PORT\n       hbone token|certs|demo|cloudrun [--help]",
        description="Carries standard input and output through a tunnel, for ssh's ProxyCommand: "
        "ssh -o ProxyCommand='hbone https://HOST:443/_hbone/22' root@NAME",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("url", metavar="URL", help="https://HOST/_hbone/22, or HOST:22 for the same")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="send the token in FILE")
    parser.add_argument(
        "--audience",
        metavar="A",
        help="send an ID token for A (https://HOST of the URL); beside --token-file: whom its token is for",
    )
    parser.add_argument("--no-token", action="store_true", help="send no token")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="trust the certificates in FILE only")
    parser.add_argument("--connect", metavar="HOST:PORT", help="dial here instead of the URL's host")
    parser.add_argument(
        "--keepalive",
        type=_seconds,
        default=15.0,
        metavar="S",
        help="ask the far side for a sign of life after S seconds of silence, and end after as many more; "
        "0: never (15)",
    )
    parser.add_argument("--version", action="store_true", help="print the version, of Python and OpenSSL too")
    return parser


def _seconds(text: str) -> float:
    """Raises ArgumentTypeError if `text` is no number of seconds up to a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number in 0..{MAX_SECONDS}")
    return seconds


def _token(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    from hbone import token_command

    return token_command.run(arguments, environ)


def _cloudrun(arguments: Sequence[str]) -> int:
    from hbone.cloudrun import cli

    return cli.run(arguments)


def _certs(arguments: Sequence[str]) -> int:
    from hbone import certs

    return certs.run(arguments)


def _demo(arguments: Sequence[str]) -> int:
    from hbone.demo import cli

    return cli.run(arguments)
