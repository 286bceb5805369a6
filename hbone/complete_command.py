"""`hbone complete services`: the names of services for completions of shells, one a line. It is theirs to
call, and no part of what people are shown.

Somebody waits with a finger on the key: it ends within a second or so, and whatever goes wrong it says
nothing. What it knew last counts for a day, if there is nothing newer in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping

from hbone.output import write
from shared import loop
from shared.errors import EXIT_OK, HboneError

TIMEOUT_S = 1.2
"""gcloud alone may take 0.7 s."""


def run(environ: Mapping[str, str]) -> int:
    """Prints the names; returns the exit code."""
    from hbone.services import named_service

    # A shell expands what it is given, and others have written it: only names that a service can have.
    with contextlib.suppress(HboneError):
        names = loop.run(_names(environ))
        write(sys.stdout, "".join(f"{name}\n" for name in names if named_service.read(name) is not None))
    return EXIT_OK


async def _names(environ: Mapping[str, str]) -> list[str]:
    from hbone.services.lookup import Lookup

    lookup = Lookup(environ)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            return await lookup.names()
    return lookup.names_of_before()
