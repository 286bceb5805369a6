"""A walk: one hop after the other, each timed and with a deadline, until the first that fails.

The rules:

1. A check returns what it saw, or raises `Skipped` or `Failed`.
2. After a failure nothing more is checked: the hops behind it are skipped.
3. A check may find that a hop behind its own has failed, as a TLS alert may be about ALPN. Then its own has
   passed, and those between are skipped. A failure of a hop that is not behind it is its own.
4. A check that is not done at its deadline, or ends with another error of ours, has failed as `otherwise`
   says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shared.doctor.failures import Failed, Failure
from shared.doctor.far_text import without_secrets
from shared.doctor.hops import Hop
from shared.errors import EXIT_OK, HboneError


class Verdict(StrEnum):
    """What became of a hop."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Skipped(Exception):
    """A hop is not on this path; `str` says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """How a hop is checked."""

    hop: Hop
    run: Callable[[], Awaitable[str]]
    """Returns what it saw, one line without secrets."""

    timeout_s: float
    otherwise: Failure


@dataclass(frozen=True, slots=True)
class Result:
    """A hop that was walked, or left out."""

    hop: Hop
    verdict: Verdict
    took_s: float | None
    """None: it was not begun."""

    detail: str
    failure: Failure | None = None
    title: str = ""
    """Another name than the hop's, where a hop has several rows."""

    @property
    def name(self) -> str:
        """What the row is called."""
        return self.title or self.hop.word


@dataclass(frozen=True, slots=True)
class Report:
    """All hops of a walk."""

    target: str
    """What was examined, as text."""

    results: tuple[Result, ...]

    @property
    def failed(self) -> Result | None:
        """The hop that failed, if one did."""
        return next((one for one in self.results if one.verdict is Verdict.FAIL), None)

    @property
    def exit_code(self) -> int:
        """0, or that of the hop that failed."""
        failed = self.failed
        if failed is None:
            return EXIT_OK
        return (failed.hop if failed.failure is None else failed.failure.hop).exit_code


NOT_REACHED = "not reached"
NOT_SEEN = "not looked at"
"""Between a hop that passed and one that was found to have failed by it."""


async def walk(
    target: str, checks: Sequence[Check], tell: Callable[[Result], None] = lambda _: None
) -> Report:
    """Walks `checks` in order; `tell` gets each result as it comes."""
    loop = asyncio.get_running_loop()
    results = _Results(tell)
    failed: Failed | None = None
    behind = NOT_REACHED
    for at, check in enumerate(checks):
        if failed is not None:
            if failed.failure.hop is check.hop:
                results.append(Result(check.hop, Verdict.FAIL, None, str(failed), failed.failure))
                behind = NOT_REACHED
            else:
                results.append(Result(check.hop, Verdict.SKIP, None, behind))
            continue
        began = loop.time()
        try:
            detail, verdict = await _checked(check), Verdict.PASS
        except Skipped as reason:
            detail, verdict = str(reason), Verdict.SKIP
        except Failed as failure:
            failed = failure
            is_here = failure.failure.hop not in [later.hop for later in checks[at + 1 :]]
            behind = NOT_REACHED if is_here else NOT_SEEN
            detail, verdict = (str(failure), Verdict.FAIL) if is_here else ("", Verdict.PASS)
        took_s = None if verdict is Verdict.SKIP else loop.time() - began
        shown = failed.failure if failed is not None and verdict is Verdict.FAIL else None
        results.append(Result(check.hop, verdict, took_s, detail, shown))
    return Report(target, tuple(results))


class _Results(list[Result]):
    """Results, of which somebody is told."""

    def __init__(self, tell: Callable[[Result], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, result: Result) -> None:
        super().append(result)
        self._tell(result)


async def _checked(check: Check) -> str:
    try:
        async with asyncio.timeout(check.timeout_s):
            return await check.run()
    except HboneError as error:
        raise Failed(check.otherwise, without_secrets(str(error))) from error
    except TimeoutError:
        raise Failed(check.otherwise, f"nothing within {check.timeout_s:g} s") from None
