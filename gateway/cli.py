"""What `hgate` can be asked: to run, to check its file, to explain where a name would go."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import EXIT_DENIED, EXIT_OK, EXIT_USAGE, ConfigError, HboneError

if TYPE_CHECKING:
    from gateway.workers.worker_link import Crew
    from shared.ops.access_log import AccessLog

DEFAULT_CONFIG = Path("/etc/hgate/hgate.yaml")

MAX_TOLD = 100
"""Mistakes of one file that are printed: more have one cause."""

MAX_WORKERS = 256
"""A slip of the finger beyond: a machine with more CPUs has other things to do as well."""


def run(arguments: Sequence[str]) -> int:
    """Does what `arguments` ask and returns the exit code (shared/errors.py)."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse's own code for a usage error is 2
        return EXIT_USAGE if stop.code else EXIT_OK
    if options.version:
        from shared import version

        print(version.describe("hgate"))
        return EXIT_OK
    try:
        if options.command == "explain":
            return _explain(options.config, options.sni)
        if options.check:
            return _check(options.config)
        return _serve(options)
    except ConfigError as error:
        for one in error.all[:MAX_TOLD]:
            print(f"hgate: {one}", file=sys.stderr)
        if more := len(error.all[MAX_TOLD:]):
            print(f"hgate: {more} more mistakes", file=sys.stderr)
        return error.exit_code
    except HboneError as error:
        print(f"hgate: {error}", file=sys.stderr)
        return error.exit_code


def _serve(options: argparse.Namespace) -> int:
    from gateway.app import Gateway
    from shared import loop, open_files
    from shared.ops import log
    from shared.ops.access_log import AccessLog

    log.setup(options.log_format, options.log_level, component="hgate")
    open_files.allow_many()

    async def serve(access_log: AccessLog, crew: Crew | None = None) -> int:
        return await Gateway(options.config, os.environ, access_log, crew).run()

    if options.workers > 1:
        from gateway.workers.parent import Workers

        return Workers(options.config, os.environ, options.workers, options.log_format, serve).run()
    return loop.run(serve(AccessLog(sys.stdout, options.log_format, "hgate")))


def _check(config: Path) -> int:
    from gateway.config.config import load

    checked = load(config)
    routes, warnings = len(checked.routes), len(checked.warnings)
    for warning in checked.warnings:
        print(f"hgate: warning: {warning}", file=sys.stderr)
    told = f", {warnings} warning{'' if warnings == 1 else 's'}" if warnings else ""
    print(f"{config}: good, {routes} route{'' if routes == 1 else 's'}{told}")
    return EXIT_OK


def _explain(config: Path, sni: str) -> int:
    from gateway.config.config import load
    from gateway.rules.routes import RouteTable
    from shared.errors import NoRouteError
    from shared.tls import istio_sni

    table = RouteTable(load(config).routes)
    sni = sni.removesuffix(".")  # as the hello's reader does
    print(table.explain(sni))
    try:
        table.match(istio_sni.parse(sni))
    except NoRouteError:
        return EXIT_DENIED
    return EXIT_OK


def workers(text: str) -> int:
    """The number of workers that `text` says. Raises ArgumentTypeError if it is none."""
    if text == "auto":
        return len(os.sched_getaffinity(0))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_WORKERS):
        raise argparse.ArgumentTypeError(f"must be auto or a number in 1..{MAX_WORKERS}, not {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hgate",
        description="Carries the mesh's mTLS connections to services that only take HTTP/2.",
        epilog="Exit codes: 0 ended in order, 64 wrong flag, 69 port in use, 77 explain: no route takes it, "
        "78 mistake in the file.",
    )
    commands = parser.add_subparsers(dest="command", metavar="explain")
    explain = commands.add_parser("explain", help="say which route takes a name and where it goes")
    explain.add_argument("--sni", required=True, metavar="NAME", help="the name in the ClientHello")
    # Wherever it stands; a default of the command's own would replace what was said before the command.
    for options, default in ((parser, DEFAULT_CONFIG), (explain, argparse.SUPPRESS)):
        options.add_argument(
            "--config",
            type=Path,
            default=default,
            metavar="FILE",
            help=f"the gateway's file ({DEFAULT_CONFIG})",
        )
    parser.add_argument(
        "--check", action="store_true", help="only check the file: all its mistakes, and warnings"
    )
    parser.add_argument(
        "--workers",
        type=workers,
        default=1,
        metavar="N",
        help="processes that share the ports; auto: one for each CPU (1)",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument(
        "--log-format", choices=("json", "text"), help="default: text on a terminal, else json"
    )
    parser.add_argument("--version", action="store_true", help="print the version, of Python and OpenSSL too")
    return parser
