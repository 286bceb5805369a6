"""What Google's metadata server tells of the place that krun runs in."""

from __future__ import annotations

from agent.identity.certificates import access_token
from agent.mesh.gke_clusters import region_of
from shared.credentials.token_sources.metadata import asked
from shared.errors import TokenError, UnavailableError

TIMEOUT_S = 5.0
MAX_BYTES = 4096

ACCOUNT_PREFIX = "k8s-"
"""Of a service account that is made for the workloads of one namespace: k8s-NAMESPACE@PROJECT..."""


class Platform:
    """One metadata server."""

    def __init__(self, host: str) -> None:
        """`host` is HOST or HOST:PORT."""
        self._host = host
        self.bearer = _Bearer(host)
        """Access tokens of the account that the machine, pod or service runs as."""

    async def project(self) -> str:
        """The project's name. Raises UnavailableError."""
        return await self._ask("project/project-id", "PROJECT_ID")

    async def project_number(self) -> str:
        """The project's number. Raises UnavailableError."""
        return await self._ask("project/numeric-project-id", "PROJECT_NUMBER")

    async def zone(self) -> str:
        """The zone; on Cloud Run it stands for the region. Raises UnavailableError."""
        return (await self._ask("instance/zone", "CLUSTER_LOCATION")).rpartition("/")[2]

    async def region(self) -> str:
        """The region (Cloud Run), or that of the zone (elsewhere)."""
        try:
            return (await self._ask("instance/region", "CLUSTER_LOCATION")).rpartition("/")[2]
        except UnavailableError:
            return region_of(await self.zone())

    async def namespace(self) -> str:
        """The namespace that the account is made for; empty if its name tells none."""
        account = await self._ask("instance/service-accounts/default/email", "WORKLOAD_NAMESPACE")
        name = account.partition("@")[0]
        return name.removeprefix(ACCOUNT_PREFIX) if name.startswith(ACCOUNT_PREFIX) else ""

    async def _ask(self, what: str, variable: str) -> str:
        url = f"http://{self._host}/computeMetadata/v1/{what}"
        try:
            answer = await asked(url, f"metadata server at {self._host}", TIMEOUT_S, MAX_BYTES)
            return answer.body.decode("ascii").strip()
        except (TokenError, ValueError) as error:
            raise UnavailableError(f"{error}: set {variable}") from error


class _Bearer:
    def __init__(self, host: str) -> None:
        self._token, self._drop = access_token(host)

    async def token(self) -> str:
        return await self._token()

    def invalidate(self, rejected: str | None = None) -> None:
        if rejected is not None:
            self._drop(rejected)
