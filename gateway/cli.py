"""hgate's command line: to run the gateway, to check its file, to explain where a name would go."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared import command_line
from shared.command_errors import exit_code
from shared.command_line import Parser
from shared.errors import EXIT_DENIED, EXIT_OK

if TYPE_CHECKING:
    from gateway.workers.worker_link import Worker
    from shared.address import Address
    from shared.ops.access_log import AccessLog

NO_CLUSTER = "the cluster's routes are not known yet: is hgate cluster running?"

MAX_TIMEOUT_S = 3600.0

DEFAULT_CONFIG = Path("/etc/hgate/hgate.yaml")


def parser() -> Parser:
    """hgate's command line. The flags have no defaults: those of `run` may stand before the command or behind
    it, and the default of one place would replace the value of the other."""
    top = Parser(
        "hgate",
        usage="hgate [run] [flags]\n       hgate check|explain|doctor|cluster|version [flags]",
        description="Carries a service mesh's mTLS connections to services that take only HTTP/2, such as\n"
        "Cloud Run's. Without a command it runs the gateway.",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="hgate")
    running = commands.add_parser("run", help="run the gateway", description="Runs the gateway.")
    check = commands.add_parser(
        "check",
        help="check the gateway's file",
        description="Prints all mistakes in the gateway's file, as FILE:LINE: FIELD: REASON, and warnings.",
    )
    explain = commands.add_parser(
        "explain",
        help="say which route a server name, or a CONNECT, matches",
        description="Says which route a server name, or the authority of a CONNECT on the HBONE port,\n"
        "matches, and where its connections go.",
    )
    cluster = commands.add_parser(
        "cluster",
        help="hand the routes of a cluster's objects to the gateway",
        description="Follows a Kubernetes cluster and hands the routes that its objects ask for to the\n"
        "gateway, as the section cluster of the gateway's file allows. It runs beside the gateway, in a\n"
        "container of its own.",
    )
    doctor = commands.add_parser(
        "doctor",
        help="walk the path of each route, hop by hop",
        description="Walks the path of each route as the gateway dials it, with the gateway's credentials,\n"
        "and says what is wrong with the first hop that fails. Run it where the gateway runs.",
    )
    command_line.add_version_flags(
        commands.add_parser("version", help="print the version", description="Prints the version.")
    )
    for command in (top, running, check, explain, cluster, doctor):
        command.add_argument(
            "--config",
            type=Path,
            default=argparse.SUPPRESS,
            metavar="FILE",
            help=f"the gateway's file (default: {DEFAULT_CONFIG})",
        )
    for command in (top, running):
        command.add_argument(
            "--workers",
            type=workers,
            default=argparse.SUPPRESS,
            metavar="N",
            help="processes that share the ports; auto: one for each CPU (default: 1)",
        )
    for command in (top, running, cluster):
        command.add_log_flags()
    top.add_argument("--check", action="store_true", help="the same as the command check")
    asked = explain.add_mutually_exclusive_group(required=True)
    asked.add_argument("--sni", metavar="NAME", help="server name of a ClientHello")
    asked.add_argument("--authority", metavar="HOST:PORT", help="authority of a CONNECT on the HBONE port")
    doctor.add_argument(
        "--sni",
        action="append",
        default=[],
        metavar="NAME",
        help="walk the path of this server name only; several are allowed",
    )
    doctor.add_argument(
        "--authority",
        action="append",
        type=authority,
        default=[],
        metavar="HOST:PORT",
        help="walk the path of CONNECTs with this authority (routes with inner); several are allowed",
    )
    doctor.add_argument(
        "--timeout",
        type=timeout,
        metavar="SECONDS",
        help="time for each hop (default: 10, and 60 for a service's first answer)",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    top.add_table(
        "exit codes",
        {
            "0": "success; run: stopped by a signal, after the drain",
            "64": "a flag or an environment variable is wrong",
            "69": "a port is in use, or a file cannot be had",
            "77": "explain: the name matches no route",
            "78": "the gateway's file has a mistake",
            "80 to 98": "doctor: the hop that failed (docs/reference/doctor.md)",
            "130, 143": "run: a second SIGINT or SIGTERM cut the drain short",
        },
    )
    return top


def run(arguments: Sequence[str]) -> int:
    """Does what `arguments` say and returns the exit code (`shared.errors`)."""
    return exit_code("hgate", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    defaults = argparse.Namespace(config=DEFAULT_CONFIG, workers=1, log_level="info", log_format=None)
    options = parser().parse_args(arguments, defaults)
    match options.command or ("check" if options.check else "run"):
        case "version":
            return command_line.print_version("hgate", as_json=options.json)
        case "explain":
            if options.authority is not None:
                return _explain_connect(options.config, options.authority)
            return _explain(options.config, options.sni)
        case "check":
            return _check(options.config)
        case "doctor":
            return _examine(options)
        case "cluster":
            return _follow_cluster(options)
        case _:
            return _serve(options)


def _serve(options: argparse.Namespace) -> int:
    from gateway.app import Gateway
    from shared import loop, open_files
    from shared.ops import log
    from shared.ops.access_log import AccessLog

    log.setup(options.log_format, options.log_level, component="hgate")
    open_files.allow_many()

    async def serve(access_log: AccessLog, worker: Worker | None = None) -> int:
        return await Gateway(options.config, os.environ, access_log, worker).run()

    if options.workers > 1:
        from gateway.workers.parent import Workers

        return Workers(options.config, os.environ, options.workers, options.log_format, serve).run()
    return loop.run(serve(AccessLog(sys.stdout, options.log_format, "hgate")))


def _follow_cluster(options: argparse.Namespace) -> int:
    from gateway.cluster.cluster_app import ClusterProcess
    from shared import loop
    from shared.ops import log

    log.setup(options.log_format, options.log_level, component="hgate-cluster")

    async def follow() -> int:
        return await ClusterProcess(options.config, os.environ).run()

    return loop.run(follow())


def _check(config: Path) -> int:
    from gateway.config.config import load

    checked = load(config)
    routes, warnings = len(checked.routes), len(checked.warnings)
    for warning in checked.warnings:
        print(f"hgate: warning: {warning}", file=sys.stderr)
    waiting = sum(route.cold_start_s > 0 for route in checked.routes)
    waits = f", {waiting} with cold_start" if waiting else ""
    counted = f", {warnings} warning{'' if warnings == 1 else 's'}" if warnings else ""
    print(f"{config}: good, {routes} route{'' if routes == 1 else 's'}{waits}{counted}")
    return EXIT_OK


def _explain(config: Path, sni: str) -> int:
    from gateway.config.reload import ConfigFile
    from gateway.rules.routes import RouteTable
    from shared.errors import NoRouteError
    from shared.tls import istio_sni

    read = ConfigFile(config).read()
    if read.awaits_cluster:
        print(NO_CLUSTER, file=sys.stderr)
    table = RouteTable(read.routes)
    sni = sni.removesuffix(".")  # as for a ClientHello
    print(table.explain(sni))
    try:
        table.match(istio_sni.parse(sni))
    except NoRouteError:
        return EXIT_DENIED
    return EXIT_OK


def _explain_connect(config: Path, authority: str) -> int:
    from gateway.config import cluster_files
    from gateway.config.reload import ConfigFile
    from gateway.rules.routes import RouteTable, connect_name
    from shared.address import Address
    from shared.errors import BadRequestError, NoRouteError
    from shared.tunnel.connect_target import read_authority

    read = ConfigFile(config).read()
    if read.awaits_cluster:
        print(NO_CLUSTER, file=sys.stderr)
    if read.hbone is None:
        print("refused    hgate's file has no section hbone, so there is no port for CONNECTs")
        return EXIT_DENIED
    try:
        target = connect_name(read_authority(authority.encode()))
    except BadRequestError as error:
        print(f"refused    {error}")
        return EXIT_DENIED
    if target.is_ip and read.cluster is not None:
        name = cluster_files.read_addresses(read.cluster.folder).get(target.host)
        if name is not None:
            print(f"address    {target.host} is {name}")
            target = Address(name, target.port)
    table = RouteTable(read.routes)
    print(table.explain_connect(target))
    try:
        if table.takes_connect(target.host):
            table.find_connect(target)
    except NoRouteError:
        return EXIT_DENIED
    return EXIT_OK


def _examine(options: argparse.Namespace) -> int:
    import json

    from gateway.doctor import route_doctor
    from shared import loop
    from shared.doctor.report import wants_colour
    from shared.doctor.service_path import Deadlines

    told: float | None = options.timeout
    deadlines = Deadlines() if told is None else Deadlines(told, told)
    report = loop.run(
        route_doctor.examine(
            options.config, options.sni, os.environ, deadlines, authorities=options.authority
        )
    )
    if report.awaits_cluster:
        print(NO_CLUSTER, file=sys.stderr)
    if options.json:
        print(json.dumps(route_doctor.as_object(report), indent=2))
    else:
        print(route_doctor.as_text(report, colour=wants_colour(sys.stdout, os.environ)), end="")
    return report.exit_code


def authority(text: str) -> Address:
    """A CONNECT's authority. Raises ArgumentTypeError if `text` is none."""
    from shared.errors import BadRequestError
    from shared.tunnel.connect_target import read_authority

    try:
        return read_authority(text.encode())
    except BadRequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def timeout(text: str) -> float:
    """Seconds above 0 and up to an hour. Raises ArgumentTypeError if `text` says something else."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds up to {MAX_TIMEOUT_S:g}")
    return seconds


def workers(text: str) -> int:
    """The number of workers that `text` says. Raises ArgumentTypeError if it is none."""
    if text == "auto":
        return len(os.sched_getaffinity(0))
    from shared.tunnel.registration import MAX_WORKERS

    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_WORKERS):
        raise argparse.ArgumentTypeError(f"must be auto or a number in 1..{MAX_WORKERS}, not {text!r}")
    return int(text)
