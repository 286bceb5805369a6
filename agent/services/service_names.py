"""Names of Cloud Run services as an app writes them, and the URLs that they mean.

    http://SERVICE                          in our own region
    http://SERVICE.REGION
    http://SERVICE.REGION.run.internal      the same

The URL is the deterministic one, https://SERVICE-PROJECTNUMBER.REGION.run.app (Cloud Run, "URLs"). The
project is always our own: no name leads to anybody else, so nobody else is shown a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.address import MAX_LABEL_CHARS
from shared.errors import NoRouteError
from shared.ports import HTTPS

ZONE = ".run.internal"
DOMAIN = "run.app"

NOT_SERVICES = ("localhost", "metadata")
"""Names without a dot that are something else."""

SHOWN_CHARS = 60

_SERVICE = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_REGION = re.compile(r"[a-z]{2,20}(?:-[a-z]{2,20}){1,2}[0-9]{1,2}")
"""us-central1, northamerica-northeast2."""


@dataclass(frozen=True, slots=True)
class ServiceName:
    """A service of our project."""

    service: str
    region: str
    """Empty: ours."""

    def host(self, project_number: str, own_region: str) -> str:
        """The host of its URL. Raises NoRouteError if Cloud Run gives such a name no such URL."""
        label = f"{self.service}-{project_number}"
        if len(label) > MAX_LABEL_CHARS:
            raise NoRouteError(f"{label} has more than {MAX_LABEL_CHARS} characters: use its own URL")
        return f"{label}.{self.region or own_region}.{DOMAIN}"


def parse(authority: str) -> ServiceName:
    """The service that HOST or HOST:80 means. Raises NoRouteError."""
    host, _, port = authority.lower().partition(":")
    name, _, region = host.removesuffix(".").removesuffix(ZONE).partition(".")
    is_service = bool(_SERVICE.fullmatch(name)) and name not in NOT_SERVICES
    if not is_service or (region and not _REGION.fullmatch(region)):
        hint = "with its name in NO_PROXY it is reached directly"
        raise NoRouteError(f"{_shown(authority)} is no SERVICE or SERVICE.REGION: {hint}")
    if port not in ("", "80"):
        hint = "https needs no help" if port == str(HTTPS) else "leave the port out"
        raise NoRouteError(f"{_shown(authority)}: services are reached on port 80 here: {hint}")
    return ServiceName(name, region)


def _shown(text: str) -> str:
    cut = text[:SHOWN_CHARS]
    return cut if cut.isprintable() and cut else ascii(cut)


def region_of(text: str) -> str:
    """A region, as the metadata server tells it. Raises ValueError."""
    if not _REGION.fullmatch(text):
        raise ValueError(f"{_shown(text)} is no region")
    return text


def project_number_of(text: str) -> str:
    """A project's number. Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ValueError(f"{_shown(text)} is no project number")
    return text
