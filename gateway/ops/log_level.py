"""/logging on the admin port: GET shows the level of hgate's own log, POST changes it until a restart."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shared.errors import UsageError
from shared.ops import log as logs
from shared.ops.http_server import Handler, Request, Response

log = logging.getLogger("hbone.gateway")

PATH = "/logging"

HOW = f"send POST {PATH}?level=LEVEL, where LEVEL is one of {', '.join(logs.LEVELS)}"


def shown(request: Request, levels: Mapping[int, str]) -> Response:
    """The levels of the processes, by their numbers: one word if all have the same. A GET changes
    nothing: 400 if it names a level."""
    if "level" in request.query:
        return Response.text(400, f"GET changes nothing; {HOW}")
    if len(set(levels.values())) == 1:
        return Response.text(200, next(iter(levels.values())))
    return Response.text(200, "\n".join(f"worker {number}: {level}" for number, level in levels.items()))


def asked(request: Request) -> str:
    """The level that a POST asks for. Raises UsageError if that is none."""
    level = request.query.get("level", "").lower()
    if not level:
        raise UsageError(f"no level is named; {HOW}")
    if level not in logs.LEVELS:
        raise UsageError(f"there is no level {logs.one_line(level)!r}; {HOW}")
    return level


def use(level: str) -> Response:
    """Has this process log at `level`, and says so there."""
    before = logs.level()
    logs.set_level(level)
    if level != before:
        log.warning("the log level is %s now, by POST %s; it was %s", level, PATH, before)
    return Response.text(200, level)


def of_worker() -> dict[str, Handler]:
    """What one of several workers answers to the ops process, by path: its level, or to use another one."""
    shows: dict[str, Handler] = {PATH: lambda _: Response.text(200, logs.level())}
    return shows | {f"{PATH}/{level}": lambda _, level=level: use(level) for level in logs.LEVELS}


def changed(request: Request) -> Response:
    """Has this process log at the level that a POST asks for; 400 if that is none."""
    try:
        return use(asked(request))
    except UsageError as error:
        return Response.text(400, str(error))
