"""What krun is told of its token exchange: where it listens, and what is behind it at Google's.

Owned here: which of the names of `token_settings` count here, and when there is an exchange at all. Reading a
variable is `settings.py`'s, what is done with it `sts_server.py`'s and `sts_exchange.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.variables import Variables, loopback, none_or
from shared import ports
from shared.address import Address
from shared.credentials.token_sources import token_settings
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import UsageError

GOOGLE = (
    "PROJECT_ID",
    "PROJECT_NUMBER",
    "CLUSTER_NAME",
    "CLUSTER_LOCATION",
    "HBONE_TOKEN_ACCOUNT",
    "HBONE_TOKEN_STEP_TIMEOUT",
    "HBONE_STS_AUDIENCE",
    "HBONE_STS_URL",
    "HBONE_IAM_URL",
)
"""What tells the exchange's account and places; sources of krun's own tokens have no part in it."""

ENVIRONMENT: dict[str, str] = {
    "HBONE_STS_LISTEN": "loopback address of the token exchange, - for none (127.0.0.1:15463 on GKE)",
    **{name: token_settings.ENVIRONMENT[name] for name in GOOGLE},
}

DEFAULT_LISTEN = Address("127.0.0.1", ports.STS)

_loopback = loopback("tokens are answered in the clear")


@dataclass(frozen=True, slots=True)
class StsSettings:
    """The token exchange of krun."""

    listen: Address
    """A loopback address, for what is answered has tokens in it and is not encrypted."""

    google: TokenSettings
    """Where the exchange leads."""


def read(read: Variables) -> StsSettings | None:
    """The settings that `read` finds; None for no exchange, which is so unless HBONE_STS_LISTEN asks for one,
    or PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION tell whom it would be for: programs that the original was
    made for then expect it. Raises UsageError."""
    chosen = {name: text for name in GOOGLE if (text := read(name, str, ""))}
    google = token_settings.from_env(chosen)
    in_gke = bool(google.project_id and google.cluster_name and google.cluster_location)
    listen = read("HBONE_STS_LISTEN", none_or(_loopback), DEFAULT_LISTEN if in_gke else None)
    if listen is None:
        return None
    if not google.exchange_audience:
        raise UsageError(
            "HBONE_STS_LISTEN is set, but not whom the exchange is for: "
            "set PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION, or HBONE_STS_AUDIENCE"
        )
    return StsSettings(listen, google)
