"""`hgate doctor`: walks the path of each route as hgate would dial it, with hgate's own credentials.

It is a process of its own beside the gateway and has the same file and environment; it shares nothing with
it, so no tunnel of a client is touched. Where only a client's name says where a route leads, that name has to
be given: the one in its ClientHello (--sni), or the authority of its CONNECT (--authority).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gateway.config.reload import ConfigFile
from gateway.doctor.inner_path import InnerPath
from gateway.rules.routes import Route, RouteTable, Target, connect_name
from gateway.sni.token_sources import TokenSources
from shared.address import Address
from shared.credentials.token_sources.minters import minter_from_env
from shared.doctor import report as reports
from shared.doctor.failures import Failed, Failure
from shared.doctor.hops import Hop
from shared.doctor.network_hops import addresses_of, connected, peer_of, shown
from shared.doctor.service_path import Deadlines, ServicePath, Way
from shared.doctor.walk import Check, Report, Verdict, walk
from shared.errors import EXIT_OK, NoRouteError, TokenError
from shared.net.dial import Origin
from shared.net.names.endpoint import Endpoint
from shared.tasks import spawn

AT_ONCE = 8
"""Routes walked at once: each is a connection, a token and perhaps an instance that starts."""

DEPENDS = "only a client's name says where it leads: give one with --sni or --authority"
REVERSE = "workloads dial in: /connections on hgate's admin port shows them"


@dataclass(frozen=True, slots=True)
class RouteReport:
    """What became of one route, or of one name."""

    place: str
    """The route, as hgate's errors name it."""

    name: str
    """The route's host, or the name that was given."""

    leads_to: str
    report: Report | None
    """None: it was not walked."""

    reason: str = ""
    """Why it was not."""

    @property
    def verdict(self) -> Verdict:
        """The worst of its hops."""
        if self.report is None:
            return Verdict.SKIP
        return Verdict.PASS if self.report.failed is None else Verdict.FAIL


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """What became of all of them."""

    file: str
    routes: tuple[RouteReport, ...]
    awaits_cluster: bool = False
    """The cluster's routes are wanted, and are not known yet."""

    @property
    def exit_code(self) -> int:
        """0, or the code of the failed hop that is nearest to the gateway."""
        codes = [one.report.exit_code for one in self.routes if one.report is not None]
        return min((code for code in codes if code != EXIT_OK), default=EXIT_OK)


async def examine(
    file: Path,
    names: Sequence[str],
    environ: Mapping[str, str],
    deadlines: Deadlines,
    *,
    authorities: Sequence[Address] = (),
) -> GatewayReport:
    """Walks all routes of `file`, or those of `names` in ClientHellos and of the `authorities` of CONNECTs.

    Raises:
        ConfigError: the file is wrong.
        UsageError: a variable of `environ` is wrong.
    """
    config = ConfigFile(file).read()
    tokens = TokenSources(
        minter_from_env(environ, config.tokens),
        of_account=lambda account: minter_from_env(environ, config.tokens, account),
    )
    table = RouteTable(config.routes)
    places = asyncio.Semaphore(AT_ONCE)

    async def examined(place: str, name: str, route: Route | None, target: Target | None) -> RouteReport:
        async with places:
            return await _examined(place, name, route, target, tokens, deadlines)

    named = [
        *(_found(table, name, table.find, name.removesuffix(".")) for name in names),
        *(_found(table, str(one), table.find_connect, connect_name(one)) for one in authorities),
    ]
    found = named if names or authorities else _all(table)
    try:
        tasks = [spawn(examined(*one), name=f"examine {one[1]}") for one in found]
        reports_ = await asyncio.gather(*tasks)
        return GatewayReport(str(file), tuple(reports_), config.awaits_cluster)
    finally:
        tokens.close()


T = TypeVar("T")

_Found = tuple[str, str, Route | None, Target | None]


def _all(table: RouteTable) -> Iterable[_Found]:
    for route, target in table.leads():
        yield table.place(route), route.host, route, target


def _found(table: RouteTable, name: str, find: Callable[[T], Target], asked: T) -> _Found:
    """The route that takes `name`, which `find` looks for as `asked`."""
    try:
        target = find(asked)
    except NoRouteError:
        return "no route", name, None, None
    route = table.routes[target.route]
    return table.place(route), name, route, target


async def _examined(
    place: str,
    name: str,
    route: Route | None,
    target: Target | None,
    tokens: TokenSources,
    deadlines: Deadlines,
) -> RouteReport:
    if route is None:
        return RouteReport(place, name, "nowhere", await walk(name, [_no_route(name)]))
    if target is None:
        return RouteReport(place, name, "", None, DEPENDS)
    if target.kind == "reverse":
        return RouteReport(place, name, f"reverse {target.host}", None, REVERSE)
    if target.is_service:
        return RouteReport(place, name, f"endpoints of {target.dial}", None, "Kubernetes tells the endpoints")
    if target.kind == "forward":
        return RouteReport(place, name, str(target.dial), await _forward(target, deadlines))
    leads_to = target.connect_target or target.url
    return RouteReport(place, name, leads_to, await _tunnel(target, tokens, deadlines))


def _no_route(name: str) -> Check:
    async def refuse() -> str:
        raise Failed(Failure.NO_ROUTE, f"none for {name}")

    return Check(Hop.SNI, refuse, 1.0, Failure.NO_ROUTE)


async def _forward(target: Target, deadlines: Deadlines) -> Report:
    """A connection as a forward has it, closed at once."""
    endpoints: list[Endpoint] = []
    socks: list[socket.socket] = []

    async def look_up() -> str:
        endpoints.extend(await addresses_of(target.dial))
        return shown(target.dial, endpoints)

    async def connect() -> str:
        socks.append(await connected(endpoints, target.dial.port))
        return peer_of(socks[0])

    try:
        return await walk(
            str(target.dial),
            [
                Check(Hop.DNS, look_up, deadlines.hop_s, Failure.DNS_SILENT),
                Check(Hop.TCP, connect, deadlines.hop_s, Failure.TCP_SILENT),
            ],
        )
    finally:
        for sock in socks:
            sock.close()


async def _tunnel(target: Target, tokens: TokenSources, deadlines: Deadlines) -> Report:
    path = ServicePath(deadlines)
    try:
        source = tokens.of(target.token)
    except TokenError as error:
        text = str(error)

        async def refuse() -> str:
            raise Failed(Failure.NO_TOKEN, text)

        return await walk(target.url, [Check(Hop.CREDENTIALS, refuse, 1.0, Failure.NO_TOKEN)])
    path.way = Way(
        Origin(target.scheme, target.host, target.dial, target.ca, target.identity, target.is_connect),
        target.authority,
        target.path,
        source,
        target.connect_target,
    )
    inside = InnerPath(target, path, deadlines)
    try:
        return await walk(target.url, [*path.checks(), *inside.checks()])
    finally:
        inside.close()
        await path.close()


# What it looks like.


def as_text(report: GatewayReport, *, colour: bool) -> str:
    """A table with a row for each route, and what to do about each failure."""
    lines = [f"{report.file}: {len(report.routes)} paths", ""]
    width = max((len(one.name) for one in report.routes), default=0)
    for one in report.routes:
        verdict = reports.painted(one.verdict, colour=colour)
        row = f"  {one.name:{width}}  {verdict}  {reports.taken(_took_s(one))}  {_detail(one)}"
        lines.append(row.rstrip())
    for one in report.routes:
        if one.report is not None and one.report.failed is not None:
            lines += ["", f"{one.place}, {one.name}:", *reports.summary(one.report, colour=colour)]
    return "\n".join(lines) + "\n"


def as_object(report: GatewayReport) -> dict[str, Any]:
    """The same for JSON; `report` of a route is what `hbone doctor --json` prints."""
    return {
        "file": report.file,
        "ok": report.exit_code == EXIT_OK,
        "exit_code": report.exit_code,
        "routes": [
            {
                "route": one.place,
                "name": one.name,
                "leads_to": one.leads_to,
                "verdict": str(one.verdict),
                "reason": one.reason,
                "report": None if one.report is None else reports.as_object(one.report),
            }
            for one in report.routes
        ],
    }


def _took_s(one: RouteReport) -> float | None:
    if one.report is None:
        return None
    return sum(result.took_s or 0.0 for result in one.report.results)


def _detail(one: RouteReport) -> str:
    if one.report is None:
        return f"{one.leads_to}: {one.reason}" if one.leads_to else one.reason
    failed = one.report.failed
    if failed is not None:
        return f"{one.leads_to}: {failed.name}: {failed.detail}"
    told = [result.detail for result in one.report.results if result.verdict is Verdict.PASS]
    return f"{one.leads_to}: {told[-1]}" if told else one.leads_to
