"""The addresses that the cluster has given its Services (cluster IPs), for those that a route takes by name.
No I/O.

A client may ask the HBONE port for such an address in place of the name. Only what the API server has
assigned counts: nobody chooses the address of somebody else's Service.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gateway.config.cluster_files import MAX_ADDRESSES

NO_ADDRESS = "None"
"""The cluster IP of a headless Service."""


def cluster_ips(found: Mapping[str, Any]) -> list[str]:
    """Those of a Service as the API server has it."""
    spec = found.get("spec") or {}
    given = spec.get("clusterIPs") or [spec.get("clusterIP")]
    return [str(one) for one in given if one and one != NO_ADDRESS]


def addresses_of(
    services: Iterable[Mapping[str, Any]], domain: str, takes: Callable[[str], bool]
) -> tuple[dict[str, str], int]:
    """The name of each address of `services`, as `cluster_ips` has kept them, whose name `takes` is true
    for; and how many have no room (MAX_ADDRESSES)."""
    found: dict[str, str] = {}
    left_out = 0
    for each in services:
        about = each["metadata"]
        name = f"{about['name']}.{about['namespace']}.svc.{domain}"
        if not each["clusterIPs"] or not takes(name):
            continue
        for text in each["clusterIPs"]:
            try:
                address = str(ipaddress.ip_address(text))
            except ValueError:
                continue  # nothing that a client could ask for
            if len(found) < MAX_ADDRESSES:
                found[address] = name
            else:
                left_out += 1
    return found, left_out
