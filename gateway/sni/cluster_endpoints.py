"""The endpoints of the cluster's Services, for connections that are passed to one of them as they are. The
process at the API server writes the list; here it is followed.
"""

from __future__ import annotations

import random
import socket

from gateway.config import cluster_files
from gateway.config.followed_list import FollowedList
from gateway.rules.cluster_rules import Endpoints
from shared.address import Address
from shared.errors import DialError
from shared.net.dial import dial_socket

MAX_TRIED = 3
"""Endpoints of one Service that a connection tries: one that has just gone is still in the list."""


class ClusterEndpoints(FollowedList[Endpoints]):
    """The endpoints as they were handed over last; none until `follow`."""

    def __init__(self) -> None:
        super().__init__(cluster_files.ENDPOINTS, cluster_files.read_endpoints, {})

    async def dial(self, service: Address, timeout_s: float) -> tuple[Address, socket.socket]:
        """Connects to an endpoint of `service`, a Service's name and port, chosen by chance: the next one is
        tried when one refuses. All attempts together take `timeout_s` seconds at most. Returns the endpoint
        and the bare socket, the caller's to close.

        Raises:
            DialError: no endpoint is ready, or none of those that were tried could be connected.
        """
        found = self.value.get(service.host, {}).get(str(service.port), ())
        if not found:
            raise DialError(
                f"connect to {service}: the cluster has no ready endpoint for this Service and port"
            )
        tried = [Address.parse(one) for one in random.sample(found, min(MAX_TRIED, len(found)))]
        errors = []
        for endpoint in tried:
            try:
                return endpoint, await dial_socket(endpoint, timeout_s / len(tried))
            except DialError as error:
                errors.append(str(error))
        raise DialError(f"{service}: {'; '.join(errors)}")
