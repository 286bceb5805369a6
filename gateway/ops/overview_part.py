"""What one process knows for the admin port's page.

Counting the bytes of all tunnels, and finding those that have carried most, takes longer with more of them;
all else is bounded. Requests within KEPT_S get the same part, so a second page costs nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from gateway.hbone.hbone_port import HboneListener
from gateway.hbone.hbone_tunnel import ROUTE as HBONE
from gateway.hbone.hbone_tunnel import HboneTunnel
from gateway.ops.overview import ROWS, TOTALS, Part, Row, cut, life, source_of
from gateway.ports.admission import Admission
from gateway.ports.recent_refusals import MINUTES
from gateway.reverse.registrations import ROUTE as REVERSE
from gateway.reverse.registry import Registration
from gateway.reverse.reverse_port import ReverseListener
from gateway.rules.routes import Route
from gateway.rules.templates import DEFAULT_PORTS, TunnelUrl
from gateway.sni.tunnel import Tunnel, Tunnels
from shared.errors import Flag
from shared.net.dial import Origin
from shared.net.pool.dial_backoff import DialBackoff
from shared.net.pool.origin_pool import OriginPool
from shared.net.pool.pool import Pool
from shared.ops.access_log import NO_FAILURES
from shared.ops.http_server import Request, Response
from shared.ops.log import one_line
from shared.ops.metrics import RouteCounts, TunnelMetrics
from shared.ops.readiness import Readiness
from shared.ops.token_counts import TokenStatus
from shared.tunnel.tunnel_record import TunnelRecord

KEPT_S = 0.5
"""Seconds for which a part counts as new; the page asks every two seconds."""

FAILING_ROWS = ROWS // 2
"""Of the origins. Clients may choose their names, so they do not push out all others."""

NOBODYS = NO_FAILURES | {Flag.NONE}
"""How tunnels end that have not failed."""

_NOTHING = dict.fromkeys(("connections", "draining", "streams", "room", "waiting"), 0)


class OverviewPart:
    """Makes this process's part."""

    def __init__(
        self,
        tunnels: Tunnels,
        hbone: HboneListener | None,
        reverse: ReverseListener | None,
        *,
        readiness: Readiness,
        pool: Pool,
        admission: Admission,
        metrics: TunnelMetrics,
        file: Path,
        tokens: Callable[[], Iterable[TokenStatus]],
        connections: Callable[[], int],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`file` is the configuration; `tokens` and `connections` give what there is now. Tokens and
        certificates end by `wall_clock`, in seconds since 1970."""
        self._tunnels = tunnels
        self._hbone = hbone
        self._reverse = reverse
        self._readiness = readiness
        self._pool = pool
        self._admission = admission
        self._metrics = metrics
        self._file = file
        self._tokens = tokens
        self._connections = connections
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._part: Part = {}
        self._found = ""
        self._made_at = -KEPT_S

    def response(self, request: Request) -> Response:
        """The part, for who puts it together with those of the other workers."""
        return Response.json(self.part(request.query.get("find", "")))

    def part(self, find: str = "") -> Part:
        """What there is now, or was KEPT_S ago. With `find` the lists of routes, origins, tunnels and tokens
        have only what has this text in it, in capitals or not."""
        now, find = self._loop.time(), find.lower()
        if now - self._made_at >= KEPT_S or find != self._found:
            self._part = self._make(now, find)
            self._made_at, self._found = now, find
        return self._part

    def _make(self, now: float, find: str) -> Part:
        self._tunnels.count_bytes()
        if self._hbone is not None:
            self._hbone.count_bytes()
        return {
            "now": round(self._wall_clock(), 3),
            "up_s": round(now - self._started),
            "readiness": self._readiness.text,
            "connections": self._connections(),
            "connections_limit": self._admission.most_connections,
            "totals": self._totals(),
            "routes": self._route_rows(find),
            "origins": self._origin_rows(now, find),
            "tunnels": self._tunnel_rows(find),
            "tokens": self._token_rows(find),
            "certificates": cut(sorted(_certificate_rows(self._wall_clock()), key=life)),
            "refusals": self._admission.refusals.recent.rows(),
        }

    def _totals(self) -> Row:
        numbers = [_numbers(counts) for counts in self._metrics.routes.values()]
        return {field: sum(row[field] for row in numbers) for field in TOTALS}

    def _route_rows(self, find: str) -> Row:
        routes = self._tunnels.routes.routes
        of_hbone = [self._hbone_row(self._hbone)] if self._hbone is not None else []
        every = itertools.chain(of_hbone, map(self._route_row, routes))
        if not find:
            return {"of": len(of_hbone) + len(routes), "rows": list(itertools.islice(every, ROWS))}
        return cut([row for row in every if find in f"{row['host']} {row['to']} {row['source']}".lower()])

    def _route_row(self, route: Route) -> Row:
        return {
            "host": route.name,
            "source": source_of(route, self._file),
            **_kind_and_goal(route),
            "token": _token(route),
            "connections": self._admission.routes[route.name],
            **self._numbers(route.name),
        }

    def _hbone_row(self, port: HboneListener) -> Row:
        return {
            "host": HBONE,
            "source": f"{self._file}: hbone",
            "kind": "HBONE port",
            "to": "what its rules allow",
            "token": "",
            "connections": port.open_connections,
            **self._numbers(HBONE),
        }

    def _numbers(self, host: str) -> Row:
        return _numbers(self._metrics.routes.get(host) or RouteCounts())

    def _origin_rows(self, now: float, find: str) -> Row:
        """Those that could not be reached lately, the last ones first, then those with most streams."""
        connected = self._pool.origins
        pools = [pool for origin, pool in connected.items() if not find or find in str(origin).lower()]
        failing = [
            (origin, backoff)
            for origin, backoff in self._pool.failing.items()
            if origin not in connected
            and backoff.age_s(now) < MINUTES * 60
            and (not find or find in str(origin).lower())
        ]
        of = len(failing) + len(pools)
        rows = [_failing_row(origin, backoff, now) for origin, backoff in failing[: -FAILING_ROWS - 1 : -1]]
        shown = heapq.nlargest(ROWS - len(rows), pools, key=_streams)
        rows += [_pool_row(pool, now) for pool in shown]
        if self._reverse is not None:
            known = self._reverse.names
            names = [name for name in known if find in f"{REVERSE}://{name}"]
            of += len(names)
            rows += [workloads_row(name, known[name]) for name in names[: ROWS - len(rows)]]
        return {"of": of, "rows": rows}

    def _tunnel_rows(self, find: str) -> Row:
        every: list[Tunnel | HboneTunnel] = [*self._tunnels.open]
        if self._hbone is not None:
            every += self._hbone.tunnels.open
        if find:
            every = [tunnel for tunnel in every if find in _told(tunnel.record)]
        shown = heapq.nlargest(ROWS, every, key=_carried)
        return {"of": len(every), "rows": [_tunnel_row(tunnel) for tunnel in shown]}

    def _token_rows(self, find: str) -> Row:
        """Those without a token first, then those that expire first."""
        every = [one for one in self._tokens() if find in f"{one.identity} {one.audience}".lower()]
        now = self._wall_clock()
        return {
            "of": len(every),
            "rows": [
                {
                    "identity": token.identity,
                    "audience": one_line(token.audience),
                    "accepted": token.accepted,
                    "left_s": None if token.expires_at_s is None else round(token.expires_at_s - now),
                    "failure": one_line(token.failure),
                }
                for token in heapq.nsmallest(ROWS, every, key=lambda token: token.expires_at_s or 0.0)
            ],
        }


# Rows of one process.


def _numbers(counts: RouteCounts) -> Row:
    failed = sum(n for flag, n in counts.closed_by_flag.items() if flag not in NOBODYS)
    return {
        "tunnels": counts.open,
        "opened": counts.opened_total,
        "failed": failed,
        "bytes_sent": counts.sent_bytes,
        "bytes_recv": counts.received_bytes,
    }


def _kind_and_goal(route: Route) -> Row:
    if route.forward is not None:
        return {"kind": "forward", "to": str(route.forward)}
    if route.reverse is not None:
        return {"kind": "reverse", "to": f"{route.reverse.host.text}{route.reverse.path.text}"}
    if route.to_service:
        return {"kind": "forward", "to": "an endpoint of the Service that the name says"}
    if route.tunnel is None:
        return {"kind": "none", "to": ""}
    dialled = f" at {route.connect}" if route.connect else ""
    return {"kind": f"tunnel, {route.method}", "to": f"{_url(route.tunnel)}{dialled}"}


def _url(url: TunnelUrl) -> str:
    host = f"[{url.host.text}]" if ":" in url.host.text else url.host.text
    port = "" if url.port.text == str(DEFAULT_PORTS[url.scheme]) else f":{url.port.text}"
    return f"{url.scheme}://{host}{port}{url.path.text}"


def _token(route: Route) -> str:
    if route.token.file is not None:
        return f"file {route.token.file}"
    return "" if route.token.audience is None else f"audience {route.token.audience.text}"


def _streams(pool: OriginPool) -> int:
    return sum(one.connection.open_streams for one in (*pool.members, *pool.draining))


def _pool_row(pool: OriginPool, now: float) -> Row:
    return {
        "origin": str(pool.origin),
        "connections": len(pool.members),
        "draining": len(pool.draining),
        "streams": _streams(pool),
        "room": sum(max(0, one.room) for one in pool.members),
        "waiting": pool.waiting,
        **_failure(pool.backoff, now),
    }


def _failing_row(origin: Origin, backoff: DialBackoff, now: float) -> Row:
    return {"origin": str(origin), **_NOTHING, **_failure(backoff, now)}


def _failure(backoff: DialBackoff, now: float) -> Row:
    return {
        "failure": one_line(backoff.reason),
        "failed_s_ago": round(backoff.age_s(now)),
        "next_dial_s": round(backoff.left(now), 1),
    }


def workloads_row(name: str, registered: list[Registration]) -> Row:
    """The origin of a `reverse:` route: the workloads that have registered a name."""
    return {
        "origin": f"{REVERSE}://{name}",
        **_NOTHING,
        "connections": len(registered),
        "streams": sum(it.connection.open_streams for it in registered),
        "room": sum(it.connection.room for it in registered),
        **{"failure": "", "failed_s_ago": 0, "next_dial_s": 0.0},
    }


def _carried(tunnel: Tunnel | HboneTunnel) -> int:
    relay = tunnel.relay
    return 0 if relay is None else relay.sent_bytes + relay.received_bytes


def _told(record: TunnelRecord) -> str:
    fields = record.peer, record.sni, record.name, record.identity, record.route, record.target
    return " ".join(str(field) for field in fields if field).lower()


def _tunnel_row(tunnel: Tunnel | HboneTunnel) -> Row:
    row = tunnel.row()
    is_one_of_many = isinstance(tunnel, HboneTunnel)  # on a connection
    return {
        "id": f"{row['src.addr']} {row['stream']}" if is_one_of_many else row["src.addr"],
        "from": row["src.addr"],
        "name": one_line(row.get("sni") or row.get("tunnel.target") or ""),
        "identity": row.get("identity", ""),
        "route": row["route"],
        "to": row["dst.addr"],
        "stream": row["stream"],
        "state": "opening" if tunnel.relay is None else "open",
        "age_s": row["age_s"],
        "bytes_sent": row["bytes_sent"],
        "bytes_recv": row["bytes_recv"],
    }


def _certificate_rows(now: float) -> Iterator[Row]:
    from shared.net.tls.certificate_files import in_use

    for files in in_use():
        identity, end, roots_end = _ends(files.chain_pem, files.roots_pem)
        yield {
            "certificate": files.purpose,
            "path": str(files.chain_file),
            "identity": identity,
            "left_s": None if end is None else round(end - now),
            "roots_left_s": None if roots_end is None else round(roots_end - now),
        }


@lru_cache(maxsize=64)  # reading them takes a millisecond, and the page asks every two seconds
def _ends(chain_pem: bytes, roots_pem: bytes) -> tuple[str, float | None, float | None]:
    """Whose certificate it is, and when the first of its chain and the first of its roots end, in seconds
    since 1970; None if that cannot be read."""
    from cryptography.hazmat.primitives.serialization import Encoding

    from shared.trust import roots
    from shared.trust.spiffe import ids_of

    def end(pem: bytes) -> float | None:
        try:
            return min(one.not_valid_after_utc.timestamp() for one in roots.parse(pem))
        except ValueError:
            return None

    try:
        identity = ", ".join(map(str, ids_of(roots.parse(chain_pem)[0].public_bytes(Encoding.DER))))
    except ValueError:
        identity = ""
    return one_line(identity), end(chain_pem), end(roots_pem)
