"""`hbone doctor URL`: the walk from here to a port in a container, an SSH server's greeting included."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

from hbone import destination
from hbone.destination import Destination
from hbone.doctor.ssh_server import Greeting, SshError
from shared.doctor.failures import Failed, Failure
from shared.doctor.far_text import one_line, without_secrets
from shared.doctor.hops import Hop
from shared.doctor.service_path import Deadlines, ServicePath, Way
from shared.doctor.stream_bytes import StreamBytes
from shared.doctor.walk import Check, Report, Result, Skipped, walk
from shared.errors import HboneError
from shared.net.legs.stream import Stream
from shared.tunnel.tunnel_request import TUNNEL_PREFIX, target_name

SSH_TARGET = "22"
"""The target behind which an SSH server is expected."""

GREETING_BYTES = 64 << 10
"""An SSH server's greeting and key have about 2 KiB."""


async def examine(
    text: str,
    options: argparse.Namespace,
    environ: Mapping[str, str],
    deadlines: Deadlines,
    tell: Callable[[Result], None] = lambda _: None,
) -> Report:
    """Walks to `text`, an argument as `hbone.destination` understands it. One without a path leads to
    krun and no further. `tell` gets each hop as it is done."""
    path = ServicePath(deadlines)

    async def find() -> str:
        found = await found_destination(text, options, environ)
        path.way = way_to(found)
        return described(found, path.way)

    async def greet() -> str:
        if path.stream is None or target_name(path.way.path.encode()) != SSH_TARGET:
            raise Skipped(f"only for {TUNNEL_PREFIX}{SSH_TARGET}")
        return await ssh_greeting(path.stream)

    try:
        return await walk(
            text,
            [
                Check(Hop.DESTINATION, find, deadlines.hop_s, Failure.NO_DESTINATION),
                *path.checks(),
                Check(Hop.SSH, greet, deadlines.hop_s, Failure.SSH_SILENT),
            ],
            tell,
        )
    finally:
        await path.close()


async def walk_to_krun(
    text: str,
    options: argparse.Namespace,
    environ: Mapping[str, str],
    deadlines: Deadlines,
    tell: Callable[[Result], None] = lambda _: None,
) -> tuple[Report, Way | None]:
    """Walks to a krun that is to be a far end for probes, and the way there; None if a hop failed."""
    path = ServicePath(deadlines)

    async def find() -> str:
        found = await found_destination(text, options, environ)
        path.way = replace(way_to(found), path="")
        return described(found, path.way)

    find_check = Check(Hop.DESTINATION, find, deadlines.hop_s, Failure.NO_DESTINATION)
    *before, krun, _ = path.checks()

    async def meet() -> str:
        told = await krun.run()
        if path.about.get("probes") is not True:
            raise Failed(Failure.NO_PROBES, told)
        return f"{told}, a far end for probes"

    try:
        report = await walk(text, [find_check, *before, replace(krun, run=meet)], tell)
    finally:
        await path.close()
    return report, path.way if report.failed is None else None


async def found_destination(
    text: str, options: argparse.Namespace, environ: Mapping[str, str]
) -> Destination:
    """Where `text` leads. Raises Failed."""
    try:
        return await destination.find(text, options, environ, default_port="")
    except HboneError as error:
        raise Failed(Failure.NO_DESTINATION, without_secrets(str(error))) from error


def way_to(found: Destination) -> Way:
    """The way to a destination."""
    target = found.target
    path = "" if target.path == TUNNEL_PREFIX else target.path
    return Way(found.origin, target.authority, path, found.token)


def described(found: Destination, way: Way) -> str:
    """Where an argument leads, and who said so."""
    url = f"{found.target.scheme}://{found.target.authority}{way.path}"
    return f"{url}, by {found.found_by}" if found.found_by else url


async def ssh_greeting(stream: Stream) -> str:
    """What the SSH server at the end of `stream` says. Raises Failed."""
    greeting = Greeting()
    reader = StreamBytes(stream, GREETING_BYTES)
    read = 0
    while not greeting.done:
        if greeting.to_send:
            stream.write(bytes(greeting.to_send))
            greeting.to_send.clear()
        await reader.more()
        data = bytes(reader.data[read:])
        read += len(data)
        try:
            greeting.feed(data)
        except SshError as error:
            if not greeting.version:
                raise Failed(Failure.NOT_SSH, f"{error}: {one_line(bytes(reader.data[:80]))}") from error
            break
        if reader.over and not greeting.done:
            if greeting.version:
                break
            if reader.data:
                raise Failed(Failure.NOT_SSH, one_line(bytes(reader.data[:80])))
            raise Failed(Failure.SSH_CLOSED, "the connection ended")
    key = greeting.host_key
    return f"{greeting.version}, " + ("host key not told" if key is None else f"{key.kind} {key.fingerprint}")
