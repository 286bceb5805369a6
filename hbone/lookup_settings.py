"""What looking services up can be told by environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shared.config.fields import Environment, setting
from shared.config.kinds import Choice
from shared.credentials.token_sources.token_settings import ENDPOINT

Kept = Literal["all", "services", "none"]


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """All of them."""

    kept: Kept = setting(
        Choice(get_args(Kept)),
        "all",
        "what is kept in the user's cache folder",
        "services: the URLs of services, for ten minutes. all: also ID tokens of slow sources, until five "
        "minutes before their end. Files there are the user's alone.",
        variable="HBONE_CACHE",
    )
    run_url: str = setting(
        ENDPOINT,
        "https://run.googleapis.com",
        "Cloud Run's Admin API",
        variable="HBONE_RUN_URL",
        secret=True,
    )


def from_env(environ: Mapping[str, str]) -> LookupSettings:
    """Raises UsageError if a variable is wrong."""
    return LookupSettings(**Environment(environ).given(LookupSettings))
