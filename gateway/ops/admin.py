"""The responses of the admin port: configuration, open tunnels, connections to services, tokens.

They name token files and audiences, and have no secrets: no token and no key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gateway.config.config import GatewayConfig
from gateway.ops.overview import source_of
from gateway.rules.routes import Route
from gateway.rules.templates import Template
from shared.address import Address
from shared.config.fields import table_of
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.net.pool.pool import Pool
from shared.ops.http_server import Response
from shared.ops.log import redact
from shared.ops.token_counts import TokenStatus
from shared.trust.token_claims import at_utc

HIDDEN = "(set)"
"""Instead of a value that may be a secret."""


def config(running: GatewayConfig) -> Response:
    """The configuration in effect, as the file has it."""
    return Response.json(_plain(running))


def config_dump(
    running: GatewayConfig, file: Path, *, routes: Iterable[Route], tokens: TokenSettings
) -> Response:
    """All that is in effect, defaults included: the configuration from `file`, with the `routes` of the file
    and the cluster, each with its source, and `tokens`, in which variables of the environment count, too."""
    from shared import version

    shown = _plain(running)
    shown["routes"] = [{**_plain(route), "source": source_of(route, file)} for route in routes]
    shown["tokens"] = _plain(tokens)
    return Response.json({"version": version.describe("hgate"), "file": str(file), "config": shown})


def connections(pool: Pool, now: float, registered: Iterable[Mapping[str, Any]] = ()) -> Response:
    """The HTTP/2 connections to services at the loop's time `now`, with the reason for those that get no new
    streams; and the rows of workloads that have `registered`."""
    return Response.json(
        [
            {
                "origin": str(origin.origin),
                "peer": member.connection.peer_name,
                "state": f"draining: {member.reason}" if member.reason else "open",
                "age_s": round(now - member.born, 3),
                "streams": member.connection.open_streams,
                "room": 0 if member.reason else max(0, member.room),
            }
            for origin in pool.origins.values()
            for member in (*origin.members, *origin.draining)
        ]
        + [dict(row) for row in registered]
    )


def tokens(statuses: Iterable[TokenStatus], now: float) -> Response:
    """Each token without the token itself, at `now`, in seconds since 1970."""
    return Response.json(
        [
            {
                "identity": token.identity,
                "audience": token.audience,
                "accepted": token.accepted,
                "age_s": None if token.minted_at_s is None else round(now - token.minted_at_s, 3),
                "expires": None if token.expires_at_s is None else at_utc(token.expires_at_s),
                "expires_in_s": None if token.expires_at_s is None else round(token.expires_at_s - now, 3),
                "last_failure": token.failure or None,
                "failed_s_ago": None if token.failed_at_s is None else round(now - token.failed_at_s, 3),
            }
            for token in statuses
        ]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Template):
        return redact(value.text)
    if isinstance(value, Address | Path):
        return redact(str(value))
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        secret = {
            name
            for name, one in table_of(value).items()
            if one.secret and getattr(value, name) != one.default
        }
        return {
            field.name: HIDDEN if field.name in secret else _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    return redact(value) if isinstance(value, str) else value
