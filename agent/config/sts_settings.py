"""Settings of krun about its token exchange: where it listens, and what is behind it at Google."""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.variables import loopback
from shared import ports
from shared.address import Address
from shared.config.fields import Environment, Setting, table_of
from shared.config.kinds import OrNone, Parsed
from shared.credentials.token_sources import token_settings
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import UsageError

DEFAULT_LISTEN = Address("127.0.0.1", ports.STS)

LISTEN: Setting[Address | None] = Setting(
    OrNone(Parsed(loopback("tokens are answered in the clear"), "loopback HOST:PORT")),
    None,
    "loopback address of the token exchange, - for none",
    f"On GKE, where PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION are set, it is {DEFAULT_LISTEN}.",
    unset=f"{DEFAULT_LISTEN} on GKE",
    variable="HBONE_STS_LISTEN",
)

GOOGLE = tuple(
    table_of(TokenSettings)[field]
    for field in (
        "project_id",
        "project_number",
        "cluster_name",
        "cluster_location",
        "service_account",
        "step_timeout_s",
        "sts_audience",
        "sts_url",
        "iam_url",
    )
)
"""The exchange's account and services; sources of krun's own tokens have no part in it."""

SETTINGS = (LISTEN, *GOOGLE)


@dataclass(frozen=True, slots=True)
class StsSettings:
    """The token exchange of krun."""

    listen: Address
    """A loopback address, for answers have tokens in them and are not encrypted."""

    google: TokenSettings
    """Where the exchange leads."""


def read(read: Environment) -> StsSettings | None:
    """The settings that `read` finds; None for no exchange, which is so unless HBONE_STS_LISTEN asks for one,
    or PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION are set: programs that the original was made for then
    expect it. Raises UsageError."""
    chosen = {one.variable: text for one in GOOGLE if (text := read.text(one.variable))}
    google = token_settings.from_env(chosen)
    in_gke = bool(google.project_id and google.cluster_name and google.cluster_location)
    listen = read(LISTEN)
    if listen is None and in_gke and not read.text(LISTEN.variable):
        listen = DEFAULT_LISTEN
    if listen is None:
        return None
    if not google.exchange_audience:
        raise UsageError(
            "HBONE_STS_LISTEN is set, but not whom the exchange is for: "
            "set PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION, or HBONE_STS_AUDIENCE"
        )
    return StsSettings(listen, google)
