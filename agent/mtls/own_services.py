"""The services of this workload: which HOST:PORT a client of the mesh may ask for by inner HBONE, and which
port of the app that is. No I/O.

What is asked for is never dialled as it is written: it is looked up here, and leads to the app or nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shared import globs
from shared.address import Address
from shared.errors import DeniedError

SHOWN = 5
"""Names, or ports, that a refusal tells."""

CLUSTER_DOMAIN = "svc.cluster.local"


def default_host(workload: str, namespace: str) -> str:
    """The name of the Service that is called as its workload is."""
    return f"{workload.lower()}.{namespace}.{CLUSTER_DOMAIN}"


class OwnServices:
    """`hosts` are globs in which a star stays within a label, `ports` the app's port by the service's, and
    `app` is the app, of which the host counts."""

    def __init__(self, hosts: Sequence[str], ports: Mapping[int, int], app: Address) -> None:
        self._hosts = tuple(hosts)
        self._match = re.compile("|".join(globs.pattern(host, "[^.]+") for host in hosts))
        self._ports = dict(ports)
        self._app = app

    def address(self, target: Address) -> Address:
        """Where the app listens for `target`. Raises DeniedError if that is none of our services."""
        if not self._match.fullmatch(target.host.removesuffix(".")):
            raise DeniedError(f"{_foreign(target)}: HBONE_INNER_HOSTS of krun has {_some(self._hosts)}")
        port = self._ports.get(target.port)
        if port is None:
            ports = tuple(map(str, self._ports))
            raise DeniedError(f"{_foreign(target)}: HBONE_INNER_PORTS of krun has {_some(ports)}")
        return Address(self._app.host, port)


def _foreign(target: Address) -> str:
    return f"{target} is no service of this workload"


def _some(known: Sequence[str]) -> str:
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return f"{', '.join(known[:SHOWN])}{more}"
