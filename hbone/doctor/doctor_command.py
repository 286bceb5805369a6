"""`hbone doctor`: chooses what is examined, and prints the report.

The exit code is that of the hop that failed (`shared.doctor.hops`). Nothing is asked of the terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from hbone.output import write
from shared import loop
from shared.doctor import report as reports
from shared.doctor.service_path import Deadlines
from shared.doctor.walk import Report, Result
from shared.errors import UsageError


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Does what `options` say; returns the exit code.

    Raises:
        UsageError: the flags do not go together.
        UnavailableError: the report cannot be written.
    """
    if options.probe:
        return _probe(options, environ)
    if options.gateway is not None:
        return _through_gateway(options, environ)
    if options.sni or options.cert or options.key or options.peer:
        raise UsageError("--sni, --cert, --key and --peer are for --gateway")
    from hbone.doctor import container_path, machine

    if options.url is None:
        looked = machine.look(environ)
        return _told(looked.target, options, environ, sys.stdout, lambda tell: _all(looked, tell))
    deadlines = deadlines_of(options)
    return _told(
        options.url,
        options,
        environ,
        sys.stdout,
        lambda tell: loop.run(container_path.examine(options.url, options, environ, deadlines, tell)),
    )


_Tell = Callable[[Result], None]


def _told(
    target: str,
    options: argparse.Namespace,
    environ: Mapping[str, str],
    stream: TextIO | None,
    walk: Callable[[_Tell], Report],
) -> int:
    """Prints a walk: each hop as it is done, or all as JSON in the end. Returns the exit code."""
    if options.json:
        report = walk(lambda _: None)
        write(stream, json.dumps(reports.as_object(report), indent=2) + "\n")
    else:
        colour = reports.wants_colour(stream, environ)
        table = reports.Table(target, lambda text: write(stream, text), colour=colour)
        report = walk(table.row)
        table.end(report)
    return report.exit_code


def _all(report: Report, tell: _Tell) -> Report:
    for result in report.results:
        tell(result)
    return report


def deadlines_of(options: argparse.Namespace) -> Deadlines:
    """Those of --timeout, or the default ones."""
    return Deadlines() if options.timeout is None else Deadlines(options.timeout, options.timeout)


def _probe(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Measures; standard output is hgate's file, and standard error has what people want to see."""
    if options.url is None or options.gateway is not None:
        raise UsageError("--probe needs a URL, and no --gateway")
    from hbone.doctor import container_path, probe_report
    from hbone.doctor.probes import Measured, measure
    from shared.doctor.service_path import Way

    found: list[tuple[Way, Measured]] = []

    def walk(tell: _Tell) -> Report:
        return loop.run(probed(tell))

    async def probed(tell: _Tell) -> Report:
        report, way = await container_path.walk_to_krun(
            options.url, options, environ, deadlines_of(options), tell
        )
        if way is not None:
            if not options.json:
                write(sys.stderr, f"\nmeasuring for {options.probe_for:g} s\n")
            found.append((way, await measure(way, options.probe_for)))
        return report

    if options.json:
        report = walk(lambda _: None)
        told = reports.as_object(report)
        told |= probe_report.as_object(found[0][1]) if found else {"measured": None, "settings": None}
        write(sys.stdout, json.dumps(told, indent=2) + "\n")
        return report.exit_code
    code = _told(options.url, options, environ, sys.stderr, walk)
    for way, measured in found:
        write(sys.stderr, "\n" + probe_report.as_text(measured) + "\n")
        write(sys.stdout, probe_report.as_yaml(measured, way))
    return code


def _through_gateway(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from hbone.doctor import gateway_path
    from shared.address import Address

    if options.url is not None:
        raise UsageError("URL is not allowed with --gateway: the gateway's routes say where --sni leads")
    if options.sni is None:
        raise UsageError("--gateway needs --sni, the server name that it routes by")
    if options.key is not None and options.cert is None:
        raise UsageError("--key needs --cert")
    try:
        gateway = Address.parse(options.gateway)
    except ValueError as error:
        raise UsageError(f"--gateway {options.gateway}: {error}") from error
    client = gateway_path.MeshClient(
        gateway, options.sni, options.cert, options.key, options.ca, options.peer
    )
    hop_s = deadlines_of(options).hop_s
    if options.peer is not None:
        from shared.trust.peer_policy import PeerPolicy

        try:
            PeerPolicy((options.peer,))
        except ValueError as error:
            raise UsageError(f"--peer {options.peer}: {error}") from error
    return _told(
        str(client),
        options,
        environ,
        sys.stdout,
        lambda tell: loop.run(gateway_path.examine(client, hop_s, tell)),
    )
