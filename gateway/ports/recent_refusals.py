"""Who was refused in the last minutes, and whose tunnel failed: for the admin port.

Clients choose what is refused, so it is bounded. Of each response flag the last MAX_EACH cases are kept; a
case is a name and the address that asked for it. So a flood of one flag pushes out nothing of another. Each
flag is counted by the minute as well, and that number is right whatever was pushed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.errors import Flag
from shared.ops.access_log import NO_FAILURES
from shared.ops.log import MAX_VALUE_CHARS, one_line, redact

if TYPE_CHECKING:
    from shared.tunnel.tunnel_record import TunnelRecord

MAX_EACH = 20
"""Cases that are kept of each flag: with all flags some 500, each of 3 KiB at most."""

MINUTES = 15
"""How long they are kept."""

MAX_TEXT_CHARS = 500
"""Of a message or a name that is shown."""

_LEFT_OUT = NO_FAILURES | {Flag.NONE, Flag.EMPTY}


@dataclass(slots=True)
class _Case:
    """One name from one address."""

    name: str
    source: str
    identity: str
    message: str
    """Of the last time."""
    opened: bool
    count: int
    last_s: float


class _OfFlag:
    """The cases of one flag."""

    __slots__ = ("by_minute", "cases")

    def __init__(self) -> None:
        self.cases: dict[tuple[str, str, bool], _Case] = {}
        """By name, source and whether the tunnel was open; the last one is the newest."""
        self.by_minute: dict[int, int] = {}

    def forget_before(self, minute: int) -> None:
        for old in [one for one in self.by_minute if one < minute]:
            del self.by_minute[old]
        for key in [key for key, case in self.cases.items() if case.last_s < minute * 60]:
            del self.cases[key]


class RecentRefusals:
    """The refusals and failures of the last MINUTES."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` has seconds; None: the loop's."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._flags: dict[Flag, _OfFlag] = {}

    def add(self, record: TunnelRecord) -> None:
        """A connection was refused, or a tunnel is over; nothing if that is nobody's failure."""
        flag = record.flag
        if flag in _LEFT_OUT:
            return
        now = self._clock()
        minute = int(now // 60)
        of_flag = self._flags.get(flag)
        if of_flag is None:
            of_flag = self._flags[flag] = _OfFlag()
        if minute not in of_flag.by_minute:
            of_flag.forget_before(minute - MINUTES + 1)
            of_flag.by_minute[minute] = 0
        of_flag.by_minute[minute] += 1
        source = record.peer.rpartition(":")[0] or record.peer
        key = (record.sni or record.name or "", source, record.opened)
        message = "" if record.error is None else str(record.error)[:MAX_VALUE_CHARS]
        cases = of_flag.cases
        case = cases.pop(key, None)
        if case is None:
            if len(cases) >= MAX_EACH:
                del cases[next(iter(cases))]
            case = _Case(key[0], source, record.identity, message, record.opened, 0, now)
        cases[key] = case
        case.count += 1
        case.last_s, case.message, case.identity = now, message, record.identity

    def rows(self) -> list[dict[str, Any]]:
        """For each flag its number and its cases, the newest first, without secrets; seconds."""
        now = self._clock()
        rows = []
        for flag, of_flag in self._flags.items():
            of_flag.forget_before(int(now // 60) - MINUTES + 1)
            if of_flag.by_minute:
                cases = [
                    {
                        "name": _shown(case.name),
                        "from": _shown(case.source),
                        "identity": _shown(case.identity),
                        "message": _shown(case.message),
                        "was_open": case.opened,
                        "count": case.count,
                        "last_s_ago": round(now - case.last_s, 1),
                    }
                    for case in reversed(of_flag.cases.values())
                ]
                rows.append({"flag": str(flag), "count": sum(of_flag.by_minute.values()), "cases": cases})
        return rows


def _shown(text: str) -> str:
    text = one_line(redact(text[:MAX_VALUE_CHARS]))
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."
